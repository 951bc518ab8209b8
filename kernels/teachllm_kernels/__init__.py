"""One file per operation: Triton kernel, launcher, reference in PyTorch, and cost in bytes and FLOPs."""
