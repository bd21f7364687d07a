"""The files of a checkpoint: how they are written, found, verified and loaded."""
