"""Predict and measure what an engine takes on a GPU, and so how many tokens its KV cache has room for.

    budget = free bytes * gpu_memory_utilization          `worker/memory_plan.py`
           - weights        exact      each tensor's shape is known before it is read: `ModelConfig.weight_bytes`
           - activations    measured   what the largest step holds at its peak: `meta_runner.py`, `largest_step.py`
           - step buffers   exact      rows, block tables, attention's partial results: allocated by `meta_runner.py`
           - CUDA graphs    estimated  one pool, as large as its largest recording's forward pass, and bytes for each
                                       recorded kernel: `graph_needs.py`
           - libraries      estimated  cuBLAS's workspaces, and code that is loaded: `predicted.py`
           = KV cache       exact      blocks * bytes per block: `core/memory.py`

Activations have no formula. The step that will run on the GPU runs on meta tensors, which have shapes and no memory,
while `LiveBytes` counts what is alive as an allocator would. Four things make that possible:

    one step      `LargestStep` is the runner's own: embedding, layers, drafter, logits, and room to sample
    one card      a `dry_run` launches no kernel, and takes the code paths of the real card: what is alive depends on
                  them, for example whether gate and up of an MLP are ever written
    few layers    equal layers hold equal bytes one after the other, so two of each kind are enough: `meta_model.py`
    one balance   where replicas share experts, every rank sends and receives equally many rows: `balanced_routing.py`

So a new kind of layer is counted as soon as it runs. A prediction takes 0.06 to 0.3 s for Qwen3-8B, and 0.2 to 0.5 s
for a model with a hundred layers, all of which are built once to tell their kinds. The first one in a process takes
about a second more, in which PyTorch loads what it knows of meta tensors. No GPU computes anything.

    who asks           when                           what it calls
    `teachllm info`    it loads no weights            `predict_needs`
    the runner         before weights are read        `predict_needs`, to refuse early, with the table
    the runner         after weights are read         `measure_needs`, which runs the largest step on the GPU; the
                                                      result replaces the prediction, and `compare` warns of differences

The largest step on the GPU does not show everything: a shorter one may hold more, and its tokens are padding, which a
router sends to few ranks. Activations are never less than what is predicted for these (`PredictedNeeds.unmeasured`).

What no step on meta tensors can tell is a bound: what requests ask for decides how they are sampled
(`sampling_needs.py`). A batch that is not balanced may need more than is predicted where replicas share experts.

vLLM measures on the GPU alone (`profile_run`), so it learns of too little memory when the weights are loaded; SGLang
keeps room by a rule of thumb in megabytes per token of a chunk and per sequence of a graph.
"""
