"""The model runner of a GPU: the batch on the device, CUDA graphs, sampling, memory."""
