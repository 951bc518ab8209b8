"""Matrix products of quantized weights with quantized activations: W8A8, int8 or fp8."""
