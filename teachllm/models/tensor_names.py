"""What a checkpoint calls its tensors, and what they are called here.

A language model's tensors begin with "model.", but for the output head: `lm_head.weight`. A file that was written from
the model without its head has no "model." in front. A tied pair is stored once, under the embedding's name or, as
`safetensors.torch.save_model` keeps the other one, under the head's. Some files hold both, and then the two may differ:
the model was trained with a head of its own, and config.json still says that they are tied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from teachllm.models.checkpoint import StoredTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_ROWS = 4096


def renaming(stored: Collection[str], is_tied: bool) -> Callable[[str], str]:
    """Return a function from the stored name of a tensor to its name in this project.

    Args:
        stored: the names of all tensors of the checkpoint.
        is_tied: the output head is the embedding.
    """
    has_prefix = any(name.startswith("model.") for name in stored)
    embedding = EMBEDDING if has_prefix else EMBEDDING.removeprefix("model.")
    is_under_head = is_tied and HEAD in stored and embedding not in stored

    def rename(name: str) -> str:
        if name.startswith("lm_head."):
            return EMBEDDING if is_under_head and name == HEAD else name
        return name if has_prefix else f"model.{name}"

    return rename


def has_own_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a checkpoint in safetensors holds an output head whose values are not its embedding's."""
    from safetensors import safe_open

    rename = renaming(stored, is_tied=False)
    names = {rename(name): name for name in stored}
    if not {EMBEDDING, HEAD} <= names.keys():
        return False
    embedding, head = (stored[names[name]] for name in (EMBEDDING, HEAD))
    if (embedding.shape, embedding.dtype) != (head.shape, head.dtype):
        return True
    with safe_open(embedding.file, framework="pt") as left, safe_open(head.file, framework="pt") as right:
        ours, theirs = left.get_slice(names[EMBEDDING]), right.get_slice(names[HEAD])
        return any(
            not bool((ours[row : row + _CHUNK_ROWS] == theirs[row : row + _CHUNK_ROWS]).all())
            for row in range(0, head.shape[0], _CHUNK_ROWS)
        )
