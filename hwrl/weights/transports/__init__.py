"""The ways in which weights travel: over the device network, by shared device memory, through the host's memory."""
