"""The files of a checkpoint: tensors, layout, extra state and manifest."""
