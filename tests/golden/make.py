"""Compute the golden files: what transformers makes of the tests' checkpoints in float64. See README.md beside this.

Run it as `python -m tests.golden.make [--check] [FAMILY ...]` from the root of the project.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from tests.checkpoints import ALL, build_model, make_checkpoint
from tests.engine.reference import FORWARD_COLUMNS, FORWARD_SEQUENCES, GOLDEN, NUM_GREEDY, PROMPTS

Arrays = dict[str, Any]
NUM_HALF_PRECISION = 60  # tokens of a sequence: beyond, dynamic rope depends on how transformers is called
# The powers from which angles are made are of float32, and processors round them differently.
MAX_DIFFERENCE = {"forward_logits": 1e-6, "bfloat16_error": 0.05, "float16_error": 0.05}
EAGER: dict[str, Any] = {
    "attn_implementation": "eager",  # the other implementations ignore a soft cap
    "experts_implementation": "eager",  # the other implementations have no float64
}


class KeepFloat64(TorchFunctionMode):
    """transformers computes norms and softmax in float32 whatever the model's dtype; here they stay in float64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in (*args, *kwargs.values())):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def load(path: str, dtype: torch.dtype) -> Any:
    """Return transformers' model in eval mode, with its plain implementations."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **EAGER).eval()


def weights_digest(name: str) -> str:
    """Return the SHA-256 of a checkpoint's tensors, in the order of their names."""
    digest = hashlib.sha256()
    for key, tensor in sorted(build_model(name).state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def greedy(model: Any, prompts: Sequence[list[int]]) -> Arrays:
    """Continue each prompt greedily by itself, and keep what each token was chosen from."""
    ids, logprobs, gaps = [], [], []
    for prompt in prompts:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),  # or token 0 would be taken for padding
            max_new_tokens=NUM_GREEDY,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(made.logits).double()
        best = logits.topk(2, dim=-1)
        ids.append(best.indices[:, 0])
        assert made.sequences[0, len(prompt) :].tolist() == ids[-1].tolist()
        logprobs.append(logits.log_softmax(dim=-1).gather(1, best.indices[:, :1])[:, 0])
        gaps.append(best.values[:, 0] - best.values[:, 1])
    return {
        "prompt_ids": np.array([token for prompt in prompts for token in prompt], np.int16),
        "prompt_lens": np.array([len(prompt) for prompt in prompts], np.int16),
        "greedy_ids": torch.stack(ids).numpy().astype(np.int16),
        "greedy_logprobs": torch.stack(logprobs).numpy().astype(np.float32),
        "greedy_gaps": torch.stack(gaps).numpy().astype(np.float32),
    }


def forced(model: Any, sequences: Sequence[tuple[list[int], list[int]]]) -> Arrays:
    """Compute the logits before each output token of the given sequences."""
    if not sequences:
        return {}
    logits = [model(torch.tensor([p + o])).logits[0, len(p) - 1 : -1].float() for p, o in sequences]
    return {
        "forced_ids": np.array([token for p, o in sequences for token in p + o], np.int16),
        "forced_lens": np.array([(len(p), len(o)) for p, o in sequences], np.int16),
        "forced_logits": torch.cat(logits).numpy(),
    }


def forward(path: str, name: str) -> Arrays:
    """Compute one pass over the fixed sequences, in float64 throughout, and how far half precision is from it."""
    model = load(path, torch.float32)
    frequencies = {key: buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")}
    model.double()
    for key, buffer in frequencies.items():  # positions become angles in float32 in both engines
        owner, _, attribute = key.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    sequences = [torch.tensor(ids) for ids in FORWARD_SEQUENCES]
    with KeepFloat64():
        exact = [token_by_token(model, s) if "dynamic" in name else model(s[None]).logits[0] for s in sequences]
    arrays: Arrays = {"forward_logits": torch.cat(exact)[:, FORWARD_COLUMNS].numpy()}
    for dtype in (torch.bfloat16, torch.float16):
        half = load(path, dtype)
        errors = [
            (half(s[None, :NUM_HALF_PRECISION]).logits[0] - e[:NUM_HALF_PRECISION]).abs().max()
            for s, e in zip(sequences, exact, strict=True)
        ]
        arrays[f"{str(dtype).removeprefix('torch.')}_error"] = np.float64(max(map(float, errors)))
    return arrays


def token_by_token(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    """As `generate` does after a prompt of the trained length: dynamic rope depends on the length so far."""
    trained = model.config.max_position_embeddings
    output = model(sequence[None, :trained], use_cache=True)
    rows = [output.logits[0]]
    for token in sequence[trained:]:
        output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
        rows.append(output.logits[0])
    return torch.cat(rows)


def compute(name: str, wanted: dict[str, Any]) -> Arrays:
    """Return all arrays of one family's golden file."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = make_checkpoint(name, folder)
        model = load(path, torch.float64)
        return {
            "weights": np.array(weights_digest(name)),
            **greedy(model, wanted["greedy"]),
            **forced(model, wanted.get("forced", [])),
            **forward(path, name),
        }


def differences(name: str, found: Arrays) -> list[str]:
    """Return a line per array in which the file on disk is not what was computed now."""
    lines = []
    with np.load(GOLDEN / f"{name}.npz") as known:
        for key in sorted({*known.files, *found}):
            if key not in known.files or key not in found or known[key].shape != np.shape(found[key]):
                lines.append(f"{name}: {key} is missing or has another shape")
            elif known[key].dtype.kind in "US" or known[key].dtype == np.int16:
                if not np.array_equal(known[key], found[key]):
                    lines.append(f"{name}: {key} differs")
            elif (error := float(np.abs(known[key] - found[key]).max(initial=0.0))) > MAX_DIFFERENCE.get(key, 1e-4):
                lines.append(f"{name}: {key} differs by {error:.2e}")
    return lines


def wanted_of(name: str) -> dict[str, Any]:
    """Return the prompts and forced sequences that `prompts.json` lists for a family."""
    return json.loads(PROMPTS.read_text()).get(name, {}) if PROMPTS.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--check", action="store_true", help="compare with the files, and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong: list[str] = []
    for name in options.families or ALL:
        found = compute(name, wanted_of(name))
        if options.check:
            wrong += differences(name, found)
            continue
        np.savez_compressed(GOLDEN / f"{name}.npz", **found)
        print(f"{name}: {(GOLDEN / f'{name}.npz').stat().st_size / 1024:.0f} KiB")
    print("\n".join(wrong), end="")
    return bool(wrong)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
