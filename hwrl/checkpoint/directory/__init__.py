"""The directory of checkpoints on the disk: durable writes, the lock, and its one writer."""
