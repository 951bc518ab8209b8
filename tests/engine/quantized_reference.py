"""The judge of greedy tokens of a quantized engine: the same engine, one request at a time and every prompt whole.

K and V do, and what is multiplied with weights of 8 bits. It computes in float64. There no two ways to add up the same
values differ by enough to change how one of them is quantized; in float32 every now and then one does, and with it the
next digits of all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from teachllm import LLM, SamplingParams, config
from teachllm.models import model_config
from teachllm.outputs import CompletionOutput, RequestOutput
from teachllm.worker.kv_scales import _attentions
from teachllm_kernels.attention.kv_quantization import KVScales
from tests.engine.reference import reference

MAX_OUTPUT = 24
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def scales_of(llm: LLM) -> list[KVScales]:
    """Of each layer."""
    found = [each.settings.kv_scales for each in _attentions(runner_of(llm).model)]
    assert None not in found
    return found  # type: ignore[return-value]


def runner_of(llm: LLM) -> Any:
    return llm.engine.core.executor._runner  # type: ignore[attr-defined]


@contextmanager
def float64_allowed() -> Iterator[None]:
    """Inside, an engine on a CPU takes dtype="float64"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.CHOICES, "dtype", (*config.CHOICES["dtype"], "float64"))
        patch.setitem(model_config.DTYPE_BYTES, "float64", 8)
        yield


def logprobs_of(completion: CompletionOutput) -> list[float]:
    """Of each of its tokens."""
    assert completion.logprobs is not None
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return [entries[token].logprob for entries, token in pairs]


class QuantizedReference:
    """One checkpoint, as one engine has it.

    Args:
        settings: of the engine that decide what it computes, such as kv_cache_dtype.
        max_error: of log-probabilities, and by how much another token may be less likely than the right one. A request
            is compared up to its first such token.
    """

    def __init__(self, path: str, settings: dict[str, Any], max_error: float = 1e-9) -> None:
        self.path, self.settings, self.max_error = path, settings, max_error

    @cache  # noqa: B019 - a reference lives as long as the test run
    def alone(self, prompt: tuple[int, ...]) -> CompletionOutput:
        """What comes of a prompt, with log-probabilities."""
        params = SamplingParams(temperature=0, max_tokens=MAX_OUTPUT, ignore_eos=True, logprobs=0)
        return self._engine().generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0].outputs[0]

    @cache  # noqa: B019
    def _engine(self) -> LLM:
        with float64_allowed():
            return LLM(
                self.path,
                dtype="float64",
                device="cpu",
                skip_tokenizer_init=True,
                max_model_len=96,
                num_gpu_blocks_override=8,
                enable_chunked_prefill=False,
                enable_prefix_caching=False,
                **self.settings,
            )

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """The right continuation."""
        assert num_tokens <= MAX_OUTPUT
        return self.alone(prompt).token_ids[:num_tokens]

    def judge_outputs(self, outputs: list[RequestOutput]) -> None:
        """Judges every completion of every request."""
        for output in outputs:
            right = self.alone(tuple(output.prompt_token_ids))
            best = logprobs_of(right)
            for completion in output.outputs:
                for i, (token, logprob) in enumerate(zip(completion.token_ids, logprobs_of(completion), strict=True)):
                    what = f"output {i}: {token} at {logprob:.2e}, and should be {right.token_ids[i]} at {best[i]:.2e}"
                    assert abs(best[i] - logprob) <= self.max_error, what
                    if token != right.token_ids[i]:
                        forced = self._logprob(output.prompt_token_ids + completion.token_ids[: i + 1])
                        assert best[i] - forced <= self.max_error, what
                        break

    def _logprob(self, token_ids: list[int]) -> float:
        """Of the last one, given the others."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = self._engine().generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[-1] is not None
        return output.prompt_logprobs[-1][token_ids[-1]].logprob


@cache
def quantized_reference(name: str, kv_cache_dtype: str, max_error: float = 1e-9) -> QuantizedReference:
    """An unquantized checkpoint with a quantized KV cache, made once per test run."""
    return QuantizedReference(reference(name).path, {"kv_cache_dtype": kv_cache_dtype}, max_error)
