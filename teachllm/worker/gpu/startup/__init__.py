"""What is done before the first request: kernels are compiled for all steps that an engine may meet."""
