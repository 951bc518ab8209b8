"""The reference for greedy tokens: what transformers computes in float64, one request at a time, from golden files.

A token may differ from the reference's choice only where the reference's two best logits are closer than `MAX_GAP`;
there the comparison of that request ends. Log-probabilities must agree up to that point.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from teachllm.outputs import RequestOutput
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PROMPTS = GOLDEN / "prompts.json"
NUM_GREEDY = 64  # tokens of each greedy continuation
FORWARD_LENGTHS = [70, 33, 5, 48]
_DRAW = random.Random(1)
FORWARD_SEQUENCES = [[_DRAW.randrange(VOCAB_SIZE) for _ in range(length)] for length in FORWARD_LENGTHS]
FORWARD_COLUMNS = [*range(0, VOCAB_SIZE, VOCAB_SIZE // 16)]
MAX_GAP = 1e-4
MAX_LOGPROB_ERROR = 2e-3
_RECORDS = os.environ.get("TEACHLLM_RECORD_GOLDEN") == "1"


class Reference:
    """One checkpoint, written to `path`, and what transformers computes with it.

    Attributes:
        path: Folder of the checkpoint, to load it from.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path

    @cached_property
    def golden(self) -> dict[str, Any]:
        """All arrays of the golden file; see tests/golden/README.md."""
        with np.load(GOLDEN / f"{self.name}.npz") as arrays:
            return {key: arrays[key] for key in arrays.files}

    @cached_property
    def model(self) -> Any:
        """transformers' model itself in float64, for tests that need more of it than the golden files hold."""
        from tests.golden.make import load

        return load(self.path, torch.float64)

    @cached_property
    def _rows(self) -> dict[tuple[int, ...], int]:
        """The row of each prompt in the arrays of greedy continuations."""
        ends = np.cumsum(self.golden["prompt_lens"].astype(int))
        pieces = np.split(self.golden["prompt_ids"], ends[:-1])
        return {tuple(piece.tolist()): row for row, piece in enumerate(pieces)}

    def _greedy(self, prompt: Sequence[int]) -> tuple[list[int], Any, Any]:
        """Return ids, log-probabilities and gaps of a prompt's greedy continuation."""
        if (row := self._rows.get(tuple(prompt))) is not None:
            arrays = (self.golden[f"greedy_{key}"][row] for key in ("ids", "logprobs", "gaps"))
            ids, logprobs, gaps = arrays
            return ids.tolist(), logprobs, gaps
        if not _RECORDS:
            raise LookupError(f"no golden continuation of this prompt of {self.name}: see tests/golden/README.md")
        from tests.golden.make import greedy

        _record(self.name, "greedy", list(prompt))
        with torch.inference_mode():
            made = greedy(self.model, [list(prompt)])
        return made["greedy_ids"][0].tolist(), made["greedy_logprobs"][0], made["greedy_gaps"][0]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the first tokens of the reference's own greedy continuation."""
        assert num_tokens <= NUM_GREEDY
        return self._greedy(prompt)[0][:num_tokens]

    def logits(self, prompt: list[int], output_ids: list[int]) -> torch.Tensor:
        """Return [len(output_ids), vocab_size] float32: what each token of a sequence was drawn from."""
        begin, position = 0, 0
        for prompt_len, output_len in self.golden.get("forced_lens", np.empty((0, 2))).tolist():
            ids = self.golden["forced_ids"][position : position + prompt_len + output_len].tolist()
            if ids == prompt + output_ids and prompt_len == len(prompt):
                return torch.from_numpy(self.golden["forced_logits"][begin : begin + output_len])
            begin, position = begin + output_len, position + prompt_len + output_len
        if not _RECORDS:
            raise LookupError(f"no golden logits of this sequence of {self.name}: see tests/golden/README.md")
        _record(self.name, "forced", [prompt, output_ids])
        with torch.inference_mode():
            return self.model(torch.tensor([prompt + output_ids])).logits[0, len(prompt) - 1 : -1].float()

    def judge(self, prompt: list[int], output_ids: list[int], logprobs: list[float] | None = None) -> None:
        """Fail unless the output is the reference's, up to the first permitted difference or `NUM_GREEDY` tokens."""
        expected, expected_logprobs, gaps = self._greedy(prompt)
        for i, token_id in enumerate(output_ids[:NUM_GREEDY]):
            if token_id != expected[i]:
                assert gaps[i] < MAX_GAP, (
                    f"output {i}: {token_id}, the reference has {expected[i]}, {gaps[i]:.2e} better"
                )
                return
            if logprobs is not None:
                error = abs(logprobs[i] - float(expected_logprobs[i]))
                assert error < MAX_LOGPROB_ERROR, f"output {i}: log-probability differs by {error:.2e}"

    def judge_outputs(self, outputs: list[RequestOutput], least_distinct: int = 0) -> None:
        """Judge every completion of every request."""
        for output in outputs:
            for completion in output.outputs:
                values = None
                if completion.logprobs is not None:
                    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
                    values = [entries[token_id].logprob for entries, token_id in pairs]
                self.judge(output.prompt_token_ids, completion.token_ids, values)
                assert len(set(completion.token_ids)) >= least_distinct, "too monotonous to notice a broken cache"


def _record(name: str, kind: str, entry: list[Any]) -> None:
    """Add a prompt, or a forced sequence, to those that the golden files hold after the next `tests.golden.make`."""
    known = json.loads(PROMPTS.read_text()) if PROMPTS.exists() else {}
    entries = known.setdefault(name, {}).setdefault(kind, [])
    if entry not in entries:
        entries.append(entry)
        lines = [
            f"{json.dumps(family)}: {{"
            + ", ".join(
                f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"
                for key, value in sorted(kinds.items())
            )
            + "}"
            for family, kinds in sorted(known.items())
        ]
        PROMPTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="teachllm-checkpoints-"))


@cache
def reference(name: str) -> Reference:
    """Return the reference for a checkpoint of `tests/checkpoints.py`, written once per process."""
    return Reference(name, make_checkpoint(name, _folder() / name))
