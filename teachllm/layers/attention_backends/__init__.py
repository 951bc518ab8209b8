"""The attention implementations: one small interface (`base.py`), a file for each way, and how one is chosen.

reference   PyTorch on a CPU: plans rectangles once per step, computes them as batches of matrices
triton      this project's kernels: split decode for requests with one token, tiles for the others
sdpa        the same, but long prompts by PyTorch's attention, which takes cuDNN's kernel
flash_attn  the flash-attn package, version 3 or 2
flashinfer  the flashinfer package
invariant   this project's prefill kernel for every token: what `batch_invariant=True` computes with
"""
