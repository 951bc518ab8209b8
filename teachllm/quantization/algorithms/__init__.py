"""How quantized checkpoints are made: GPTQ, AWQ, AutoRound, SmoothQuant."""
