"""Training: trajectories to weights. Advantages, losses, train engines, and the asynchronous trainer."""
