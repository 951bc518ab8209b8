"""Read what a checkpoint on disk holds and says of itself, before a weight is read."""
