"""Models: what a checkpoint's config.json says, what its layers compute, and what the engine must know of both.

Read them in this order:

    llama.py          what a layer computes; `llama_fast_paths.py`: in fewer launches; `moe.py`: with experts
    decoder.py        embedding, layers, norm and output head around it
    llama_config.py   what config.json says; `config_keys.py`: what it says of most models
    family.py         a family: `parse` and `build`; `registry.py` has a line for each
    spec.py           what follows from the code: tensors, sizes, bytes; `build.py` builds a model to see
    own_model.py      the description of a checkpoint, whole or a rank's part, as `ModelConfig` in `model_config.py`
    base.py           the interface that runners call; `via_transformers/` implements it with transformers' code

`sharding.py` and `stage.py` divide a model among ranks. `draft_heads/` guess tokens ahead for speculative decoding.
"""
