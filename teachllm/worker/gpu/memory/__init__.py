"""The memory ledger of a GPU: what an engine takes, and so how many tokens its KV cache has room for.

    budget = free bytes * gpu_memory_utilization          `worker/memory_plan.py`
           - weights        exact      each tensor's shape is known before it is read: `ModelConfig.weight_bytes`
           - activations    measured   what the largest step holds at its peak: `meta_runner.py`, `largest_step.py`
           - step buffers   exact      rows, block tables, attention's partial results: allocated by `meta_runner.py`
           - CUDA graphs    estimated  one pool, as large as its largest recording's forward pass, and bytes for each
                                       recorded kernel: `graph_needs.py`
           - libraries      estimated  cuBLAS's workspaces, and code that is loaded: `predicted.py`
           = KV cache       exact      blocks * bytes per block: `core/memory.py`

Activations have no formula. The step that will run on the GPU runs on meta tensors, which have shapes and no memory,
while `LiveBytes` counts what is alive as an allocator would. Three things make that possible:

    one step     `LargestStep` is the runner's own: embedding, layers, drafter, logits, and room to sample
    one card     a `dry_run` launches no kernel, and takes the code paths of the real card: what is alive depends on
                 them, for example whether gate and up of an MLP are ever written
    few layers   equal layers hold equal bytes one after the other, so two of each kind are enough: `meta_model.py`

So a new kind of layer is counted as soon as it runs. It takes tens of milliseconds (once in a process a second more,
in which PyTorch loads what it knows of meta tensors), and no GPU computes anything.

    who asks                   when                             what is answered
    `teachllm info`            never loads anything             `predict_needs`
    the runner                 before weights are read          `predict_needs`: refuse early, with the table
    the runner                 weights are there                `measure_needs`: the largest step on the GPU; it
                                                                replaces what was predicted, and `compare` warns of
                                                                differences

What no step on meta tensors can tell is a bound: sampling goes by what requests ask for (`sampling_needs.py`).

vLLM measures on the GPU alone (`profile_run`), so it learns of too little memory when the weights are loaded; SGLang
keeps room by a rule of thumb in megabytes per token of a chunk and per sequence of a graph.
"""
