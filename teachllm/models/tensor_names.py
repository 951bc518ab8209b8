"""What a checkpoint calls its tensors, and what they are called here.

A language model's tensors begin with "model.", but for the output head: `lm_head.weight`. A file that was written from
the model without its head has no "model." in front. A tied pair is stored once, under the embedding's name or, as
`safetensors.torch.save_model` keeps the other one, under the head's. Some files hold both, and then the two may differ:
the model was trained with a head of its own, and config.json still says that they are tied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from teachllm.checkpoint.files import StoredTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TABLE = "rotary_emb.inv_freq"  # old checkpoints carry it, and it is computed here


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


def is_derived(name: str, is_tied: bool) -> bool:
    """Return whether a stored tensor is not read, as another one says the same."""
    return name.endswith(_TABLE) or (is_tied and name == HEAD)


def has_own_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a checkpoint holds an output head that is not its embedding."""
    rename = renaming(stored, is_tied=False)
    renamed = {rename(name): tensor for name, tensor in stored.items()}
    return {EMBEDDING, HEAD} <= renamed.keys() and not renamed[HEAD].is_copy_of(renamed[EMBEDDING])
