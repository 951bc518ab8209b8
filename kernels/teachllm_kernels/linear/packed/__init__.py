"""Matrix products whose weights alone are quantized, packed by group: W4A16 and W8A16."""
