"""Make quantized checkpoints: GPTQ, AWQ, AutoRound, SmoothQuant."""
