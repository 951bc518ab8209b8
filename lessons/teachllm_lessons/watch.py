"""An engine that is watched: step it, and look at what it did.

watch = Watch(num_gpu_blocks_override=48)
watch.add("A", "What is a KV cache?", max_tokens=12)
watch.step()       # what the step computed, who waits and why
watch.pool()       # the block pool after it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from teachllm.config import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.errors import counted
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.spec_decode.drafter import Drafter
from teachllm.trace.figures import Figures, figures
from teachllm.trace.reader import Trace, parse_trace
from teachllm.trace.replay import Line, Replay
from teachllm_lessons import views
from teachllm_lessons.picture import Picture

MAX_STEPS = 5000


class NoProgress(RuntimeError):
    """Requests are left and nothing happens any more."""


@dataclass(frozen=True)
class StepView:
    """Describe what a turn of the loop did, in words: a table in a notebook.

    Attributes:
        line: of the trace, None if no tokens arrived.
    """

    line: Line | None

    @property
    def scheduled(self) -> dict[str, dict[str, Any]]:
        """Return what each request got, by its name: see `scheduled` in docs/trace.md."""
        return {} if self.line is None else {scheduled["request_id"]: scheduled for scheduled in self.line["scheduled"]}

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        if self.line is None:
            return
        for scheduled in self.line["scheduled"]:
            end = scheduled["start"] + scheduled["num_tokens"]
            which = (
                f"token {scheduled['start']}"
                if end == scheduled["start"] + 1
                else f"tokens {scheduled['start']} to {end - 1}"
            )
            said = "".join(scheduled.get("text", ()))
            yield scheduled["request_id"], f"{scheduled['phase']}: computes {which}", f"gives `{said}`" if said else ""
        for name, (_, words) in self.line["waiting"].items():
            yield name, "waits", words
        for name, reason in self.line["finished"].items():
            yield name, "ends", reason

    @property
    def _head(self) -> str:
        if self.line is None:
            return "no tokens have arrived yet"
        count, blocks = sum(scheduled["num_tokens"] for scheduled in self.line["scheduled"]), self.line["blocks"]
        held = f"{counted(blocks['used'], 'block')} used, {blocks['cached']} cached, {blocks['free']} free"
        return f"step {self.line['step']}: {counted(count, 'token')} in one pass; {held}"

    def _repr_markdown_(self) -> str:
        rows = "\n".join(f"| {who} | {what} | {more} |" for who, what, more in self._rows())
        return f"**{self._head}**\n\n| request | does | |\n|---|---|---|\n{rows}\n" if rows else f"**{self._head}**"

    def __repr__(self) -> str:
        return "\n".join([self._head, *(f"  {who:4} {what} {more}" for who, what, more in self._rows())])


class Watch:
    """Run an engine with its trace, on a CPU, so that all readers see the same.

    Args:
        overrides, drafter: as of `Engine`.
        settings: of `EngineConfig`; the books are checked after every step.
    """

    def __init__(
        self,
        model: str = "teachlm",
        *,
        overrides: EngineOverrides = NO_OVERRIDES,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> None:
        settings = {"device": "cpu", "check_invariants": True, **settings}
        self._lines: list[str] = []
        config = EngineConfig(model=model, **settings)
        self.engine = Engine(config, trace_sink=self._lines.append, overrides=overrides, drafter=drafter)
        self.outputs: dict[str, RequestOutput] = {}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self, name: str, prompt: str | Sequence[int], max_tokens: int = 16, *, priority: int = 0, **params: Any
    ) -> None:
        """Queues a request: greedy, and for as many tokens as it says, unless `params` say otherwise.

        Args:
            prompt: a text is a user's question, in the model's chat template; token ids are taken as they are.
            params: of `SamplingParams`.
        """
        token_ids = self.ids(prompt) if isinstance(prompt, str) else list(prompt)
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | params
        output = self.engine.add_request(
            name, {"prompt_token_ids": token_ids}, SamplingParams(**params), priority=priority
        )
        self.outputs[name] = output

    def ids(self, question: str) -> list[int]:
        """Token ids of a user's question, as the model is used to being asked."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "the model has no tokenizer: give token ids"
        return tokenizer.apply_chat_template([{"role": "user", "content": question}])

    def step(self) -> StepView:
        """One turn of the engine's loop."""
        before = len(self._lines)
        self.engine.step()
        lines = [json.loads(line) for line in self._lines[before:]]
        return StepView(next((line for line in lines if line["event"] == "step"), None))

    def run(self, steps: int | None = None) -> Watch:
        """Steps until nothing is left to do, or so many times.

        Raises:
            NoProgress: it would go on for ever.
        """
        idle = 0
        for turn in range(MAX_STEPS if steps is None else steps):
            if not self.engine.has_unfinished_requests:
                return self
            before = len(self._lines)
            self.engine.step()
            idle = 0 if len(self._lines) > before else idle + 1
            if idle > 16:
                left = ", ".join(self.engine.unfinished_ids)
                raise NoProgress(f"nothing is computed any more after turn {turn}, and {left} have not ended")
        if steps is None:
            raise NoProgress(f"{MAX_STEPS} steps, and {', '.join(self.engine.unfinished_ids)} have not ended")
        return self

    @property
    def trace(self) -> Trace:
        return parse_trace(self._lines)

    @property
    def state(self) -> Replay:
        """Return the current state."""
        return self.trace.replay

    @property
    def lines(self) -> Sequence[str]:
        return self._lines

    @property
    def figures(self) -> Figures:
        return figures(self._lines)

    def tokens(self, name: str) -> list[int]:
        """A request's output, as ids."""
        return list(self.outputs[name].outputs[0].token_ids)

    def text(self, name: str) -> str:
        return self.outputs[name].outputs[0].text

    @property
    def all_tokens(self) -> dict[str, list[int]]:
        return {name: self.tokens(name) for name in self.outputs}

    def pool(self, **more: Any) -> Picture:
        """Do the same as `views.pool`, now."""
        return views.pool(self.state, **more)

    def tables(self, *names: str) -> Picture:
        """Do the same as `views.tables`, now."""
        return views.tables(self.state, names)

    def timeline(self, **more: Any) -> Picture:
        """Do the same as `views.timeline`, so far."""
        return views.timeline(self.trace.lines, **more)

    def close(self) -> None:
        self.engine.close()
