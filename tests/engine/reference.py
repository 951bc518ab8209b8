"""The judge of greedy tokens: transformers in float64, one request at a time.

A token may differ from the reference's choice only where the reference's two best logits are closer than
`MAX_GAP`; log-probabilities must agree everywhere. The reference is teacher-forced on the engine's own output, so
every token is judged, also those after a permitted difference.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from teachllm.outputs import RequestOutput
from tests.checkpoints import make_checkpoint

MAX_GAP = 1e-4
MAX_LOGPROB_ERROR = 2e-3


class Reference:
    """One checkpoint, ours to load from `path`, transformers' as `model`.

    Attributes:
        max_gap, max_logprob_error: what is permitted.
    """

    max_gap, max_logprob_error = MAX_GAP, MAX_LOGPROB_ERROR

    def __init__(self, path: str) -> None:
        self.path = path
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float64,
            attn_implementation="eager",  # the other ways leave a soft cap out
            experts_implementation="eager",  # the other ways have no float64
        ).eval()
        self._judged: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}  # prompt -> longest output, logits

    def logits(self, prompt: list[int], output_ids: list[int]) -> torch.Tensor:
        """[len(output_ids), vocab_size] float64: what each output token was chosen from."""
        judged, logits = self._judged.get(tuple(prompt), ([], torch.empty(0)))
        if not output_ids or judged[: len(output_ids)] != output_ids:
            with torch.inference_mode():
                logits = self.model(torch.tensor([prompt + output_ids])).logits[0, len(prompt) - 1 :]
            if len(output_ids) > len(judged):
                self._judged[tuple(prompt)] = output_ids, logits
        return logits[: len(output_ids)]

    @cache  # noqa: B019 - a reference lives as long as the test run
    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """The reference's own greedy continuation."""
        with torch.inference_mode():
            made = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return made[0, len(prompt) :].tolist()

    def judge(self, prompt: list[int], output_ids: list[int], logprobs: list[float] | None = None) -> None:
        """Fails unless every output token is the reference's choice, up to the permitted gap."""
        logits = self.logits(prompt, output_ids)
        best = logits.max(dim=-1)
        for i, token_id in enumerate(output_ids):
            gap = float(best.values[i] - logits[i, token_id])
            assert gap < self.max_gap, (
                f"output {i}: {token_id}, the reference has {int(best.indices[i])}, {gap:.2e} better"
            )
        if logprobs is not None:
            expected = logits.log_softmax(dim=-1)[torch.arange(len(output_ids)), torch.tensor(output_ids)]
            error = (expected - torch.tensor(logprobs, dtype=torch.float64)).abs().max()
            assert error < self.max_logprob_error, f"log-probabilities differ by {error:.2e}"

    def judge_outputs(self, outputs: list[RequestOutput], least_distinct: int = 0) -> None:
        """Judges every completion of every request."""
        for output in outputs:
            for completion in output.outputs:
                values = None
                if completion.logprobs is not None:
                    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
                    values = [entries[token_id].logprob for entries, token_id in pairs]
                self.judge(output.prompt_token_ids, completion.token_ids, values)
                assert len(set(completion.token_ids)) >= least_distinct, "too monotonous to notice a broken cache"


@cache
def _folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="teachllm-checkpoints-"))


@cache
def reference(name: str) -> Reference:
    """The reference for a checkpoint of `tests/checkpoints.py`, made once a test run."""
    return Reference(make_checkpoint(name, _folder() / name))
