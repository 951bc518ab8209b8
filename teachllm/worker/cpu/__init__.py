"""The model runner of a CPU."""
