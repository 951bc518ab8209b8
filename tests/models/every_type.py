"""Try every causal model type that transformers knows, tiny and random: its tokens are equal here, or it is refused.

    python -m tests.models.every_type [TYPE ...]

prints one row per type and exits with 1 if a row is neither "equal" nor a refusal for one of REASONS.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a type with code of its own would be looked up
import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from teachllm import LLM, SamplingParams

# What each size becomes, of those that a type has.
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "ffn_dim": 96,
    "n_inner": 96,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "num_kv_heads": 2,
}
NO_TOKEN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# What a type needs besides, or instead; `...`: it keeps its own value.
_KEEPS_TOKENS = dict.fromkeys(NO_TOKEN, ...)
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "ctrl": {"tie_word_embeddings": False},
    "cwm": _KEEPS_TOKENS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 64},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": ..., "new_decoder_architecture": True},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30}
    },
    "gpt_neo": {"num_layers": 4, "num_hidden_layers": ..., "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "prophetnet": {"num_hidden_layers": ..., "num_decoder_layers": 3},
    "xlnet": {"max_position_embeddings": ..., "d_head": 16},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * 3},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2},
    },
    "modernbert-decoder": {**_KEEPS_TOKENS, "pad_token_id": 0},
}
# Why a type may be refused: what it has and paged attention lacks, or what it is instead of a language model.
REASONS = (
    "latent attention",
    "a recurrent state",
    "recurrent layers",
    "a hybrid of attention and",
    "sparse attention",
    "attention sinks",
    "ALiBi",
    "no plain language-model head",
    "an encoder besides its decoder",
    "layers of type",
    "attention to later tokens",
    "a language model inside of a larger one",
    "its configuration has no single",
    "it does not use transformers' attention interface",
    "it needs one causal self-attention per layer",
    "passes s_aux to attention",
    "passes K of",
    "calls attention twice in layer",
    "where config.json means",
)
# Of embeddings; smaller where a model multiplies them, or a token would be followed by itself for ever.
EMBEDDING_GAIN = {"ctrl": 0.1}
PROMPTS = ([5 + 7 * i % 500 for i in range(45)], [3 + 11 * i % 490 for i in range(20)])
NUM_TOKENS = 16
TIE = 1e-4  # between the two best logits of transformers: either may come first


class Row(NamedTuple):
    """Describe what came of a type.

    Attributes:
        kind: as in config.json's model_type.
        verdict: "equal", "refused" or "WRONG".
        why: number of distinct tokens, the reason, or what is wrong.
    """

    kind: str
    verdict: str
    why: str


def config_of(kind: str) -> Any:
    """Return a tiny configuration of a type, or the default one of a type that has none as small."""
    make, overrides = CONFIG_MAPPING[kind], OVERRIDES.get(kind, {})
    default = make(**(overrides if "text_config" in overrides else {}))
    sizes = {name: size for name, size in SIZES.items() if _has(default, name)}
    given = {name: value for name, value in (sizes | NO_TOKEN | overrides).items() if value is not ...}
    config = make(**given)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    return config


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # layers differ in it
        return False


def make_checkpoint(folder: Path) -> None:
    """Fill a folder that has a configuration with random weights, by which greedy decoding wanders."""
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            values = torch.randn(p.shape, generator=noise)
            if p.dim() == 1:
                p.add_(values, alpha=0.2)
            else:
                is_embedding = p is model.get_input_embeddings().weight
                gain = EMBEDDING_GAIN.get(config.model_type, 0.2) if is_embedding else 2.0
                p.copy_(values * gain * p.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def ours(folder: Path, **settings: Any) -> list[list[int]]:
    """Return this engine's greedy tokens, prompt by prompt; prompts are cut and batched.

    Raises:
        ValueError: the checkpoint is refused.
    """
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False, ignore_eos=True)
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]
    finally:
        llm.close()


@torch.inference_mode()
def first_difference(folder: Path, tokens: list[list[int]]) -> str | None:
    """Return where tokens are not what transformers computes from those before them; None: nowhere."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        for i, token in enumerate(answer):
            ids = torch.tensor([[*prompt, *answer[:i]]])
            logits = model(ids, use_cache=False).logits[0, -1]
            if float(logits.max() - logits[token]) > TIE:
                return f"token {i} after {len(prompt)} is {token}, not {int(logits.argmax())}"
    return None


def row_of(kind: str, folder: Path) -> Row:
    """Try a type."""
    config = config_of(kind)
    config.save_pretrained(folder)
    try:
        ours(folder, load_format="dummy")
    except ValueError as error:
        return _refusal(kind, error)
    make_checkpoint(folder)
    try:
        tokens = ours(folder)
    except ValueError as error:
        return _refusal(kind, error)
    difference = first_difference(folder, tokens)
    if difference is not None:
        return Row(kind, "WRONG", difference)
    num_distinct = len({token for answer in tokens for token in answer})
    return Row(kind, "equal" if num_distinct >= 6 else "WRONG", f"{num_distinct} distinct tokens")


def _refusal(kind: str, error: ValueError) -> Row:
    why = str(error)
    is_known = "\n" not in why and any(reason in why for reason in REASONS)
    return Row(kind, "refused" if is_known else "WRONG", re.sub(r"; supported are .*", "", why))


def rows(kinds: list[str]) -> Iterator[Row]:
    """Try types one after the other; whatever is raised makes a row, too."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield row_of(kind, Path(folder))
            except Exception as error:
                yield Row(kind, "WRONG", f"{type(error).__name__}: {error}".splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="TYPE")
    kinds = parser.parse_args().kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    counts: dict[str, int] = {}
    for kind, verdict, why in rows(kinds):
        print(f"{kind:26}{verdict:9}{why}", flush=True)
        counts[verdict] = counts.get(verdict, 0) + 1
    print(json.dumps(counts))
    sys.exit("WRONG" in counts)


if __name__ == "__main__":
    main()
