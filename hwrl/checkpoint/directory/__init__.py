"""The checkpoint directory on the disk: its single writer, the writer's lock, and durable writes."""
