"""Read quantized checkpoints: one module per format."""
