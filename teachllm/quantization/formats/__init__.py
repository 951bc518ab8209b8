"""How quantized checkpoints are stored: one file per format."""
