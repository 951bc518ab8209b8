"""Lesson 12, parallelism: engines of several processes on this machine, their lanes, and who gets a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teachllm.config import EngineConfig
from teachllm.engine.data_parallel import least_loaded
from teachllm.engine.engine import Engine
from teachllm.engine.pieces import ITS_OWN, Pieces
from teachllm.sampling_params import SamplingParams
from teachllm.trace.ranks import BETWEEN_STAGES, Line, spans_of
from teachllm_lessons.exercise import Exercise, require
from teachllm_lessons.palette import INK, LINE, color
from teachllm_lessons.picture import Picture, axes, short

QUESTIONS = {
    "A": "What is a KV cache?",
    "B": "Why does batching pay?",
    "C": "What is a block table?",
    "D": "What is a draft?",
}
ROOM: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 32, "max_num_seqs": 4}

Choose = Callable[[Sequence[int], Sequence[int]], int]


@dataclass(frozen=True)
class Ran:
    """An engine of several processes, after its work.

    Attributes:
        tokens: of each request.
        lines: of each replica's trace, parsed.
    """

    tokens: dict[str, list[int]]
    lines: list[list[Line]]

    @property
    def steps(self) -> list[Line]:
        """Of the first replica, those that tell of ranks."""
        return [line for line in self.lines[0] if line["event"] == "step" and line.get("ranks")]

    def sent(self, step: int = -1) -> list[Mapping[str, Sequence[int]]]:
        """What each rank sent in a step: {operation: (calls, bytes)}."""
        return [told["sent"] for told in self.steps[step]["ranks"]]

    def served(self) -> list[list[str]]:
        """The requests that each replica computed something for."""
        return [
            sorted({share["request_id"] for line in lines if line["event"] == "step" for share in line["scheduled"]})
            for lines in self.lines
        ]


def run(num_tokens: int = 12, pieces: Pieces = ITS_OWN, **ways: int) -> Ran:
    """Four questions to teachlm, shared in the way that is asked for. The processes have ended."""
    config = EngineConfig(device="cpu", **(ROOM | ways))
    texts: list[list[str]] = [[] for _ in range(config.data_parallel_size)]
    engine = Engine(config, pieces=pieces, trace_sink=[lines.append for lines in texts])
    try:
        tokenizer, outputs = engine.tokenizer, {}
        assert tokenizer is not None
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for name, question in QUESTIONS.items():
            ids = tokenizer.apply_chat_template([{"role": "user", "content": question}])
            outputs[name] = engine.add_request(name, {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests:
            engine.step()
    finally:
        engine.close()
    tokens = {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}
    return Ran(tokens, [[json.loads(text) for text in lines] for lines in texts])


def lanes(steps: Sequence[Line]) -> Picture:
    """What each rank does in some steps, on one clock: computing, in an exchange, waiting for another stage."""
    count, begin = len(steps[0]["ranks"]), min(told["begin"] for told in steps[0]["ranks"])
    figure, ax = axes(8.6, 0.8 + 0.5 * count)
    for number, step in enumerate(steps):
        for rank, told in enumerate(step["ranks"]):
            left, length = told["begin"] - begin, told["end"] - told["begin"]
            shade = 0.9 if number % 2 else 0.55
            ax.barh(-rank, 1e3 * length, left=1e3 * left, height=0.6, color=(*color(0), shade), edgecolor="none")
            for operation, start, end in spans_of(told):
                filled = LINE if operation in BETWEEN_STAGES else color(1)
                ax.barh(
                    -rank, 1e3 * (end - start), left=1e3 * (start - begin), height=0.6, color="white", edgecolor="none"
                )
                ax.barh(
                    -rank, 1e3 * (end - start), left=1e3 * (start - begin), height=0.6, color=filled, edgecolor="none"
                )
    ax.set_yticks([-rank for rank in range(count)], [f"rank {rank}" for rank in range(count)])
    ax.set_xlabel("ms")
    ax.set_title(
        "blue: computes; orange: adds up with others; grey: waits for another stage", fontsize=9, color=INK, loc="left"
    )
    return Picture(figure, f"what {count} ranks do in {len(steps)} steps")


def contract_choose_replica(piece: Choose) -> int:
    """An index, the least loaded, by 4 times waiting and once running, the first of equals."""
    cases = 0
    alone = piece([0], [0])
    require(isinstance(alone, int) and alone == 0, f"choose_replica([0], [0]) is {alone!r}: there is replica 0 only")
    for waiting, running in (
        ([0, 0], [0, 0]),
        ([0, 0], [1, 0]),
        ([0, 0], [0, 1]),
        ([1, 0], [0, 0]),
        ([0, 1], [0, 0]),
        ([1, 0], [0, 3]),
        ([1, 0], [0, 4]),
        ([1, 0], [0, 5]),
        ([0, 0, 0], [2, 2, 2]),
        ([2, 1, 3], [0, 4, 0]),
        ([0, 0, 0, 0], [5, 4, 3, 3]),
    ):
        given = list(waiting), list(running)
        found = piece(*given)
        call = f"choose_replica(waiting={waiting}, running={running})"
        require(given == (waiting, running), f"{call} changes the lists that it was given: they are not its own")
        require(isinstance(found, int) and 0 <= found < len(waiting), f"{call} is {found!r}: give a replica's number")
        loads = [4 * w + r for w, r in zip(waiting, running, strict=True)]
        best = loads.index(min(loads))
        why = "the first of those that are equal" if loads.count(min(loads)) > 1 else "the smallest"
        require(found == best, f"{call} is {found}: 4 x waiting + running are {loads}, {why} is replica {best}")
        cases += 1
    return cases + 1


def live_choose_replica(piece: Choose) -> str:
    ran = run(6, Pieces(choose_replica=piece), data_parallel_size=2)
    served = ran.served()
    sizes = [len(names) for names in served]
    require(min(sizes) == 2, f"gives the two replicas {sizes[0]} and {sizes[1]} of four requests that come at once")
    one, other = (", ".join(names) for names in served)
    return f"Two engines in two processes ran with it: one served {one}, the other {other}."


CHOOSE_REPLICA = Exercise(
    lesson="12",
    name="choose_replica",
    contract=contract_choose_replica,
    live=live_choose_replica,
    reference=least_loaded,
    hints=(
        "A running request shares its steps with others; a waiting one says that there is no room left. So one that "
        "waits should weigh more than one that runs.",
        "Make a list of `4 * waiting + running`, one number a replica, by `zip(num_waiting, num_running)`.",
        "`loads = [4 * w + r for w, r in zip(num_waiting, num_running)]`, then `return loads.index(min(loads))`.",
    ),
)


class _OneOfTwo:
    """What a layer asks of its group: its number, and a sum that somebody else makes here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: Any) -> Any:
        return tensor


def two_halves() -> None:
    """A layer whole, and as two ranks that have half of its inputs each, with and without a bias."""
    import torch

    from teachllm.distributed.slices import Slice
    from teachllm.layers.linear import Linear

    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 64), torch.randn(24, 64), torch.randn(24)
    for has_bias in (False, True):
        total = torch.zeros(3, 24)
        for rank in range(2):
            group: Any = _OneOfTwo(rank)
            layer = Linear(32, {"o_proj": 24}, has_bias, columns=Slice(rank, 2), group=group)
            half = slice(32 * rank, 32 * rank + 32)
            layer.weight.weight.data = weight[:, half].contiguous()  # type: ignore[attr-defined]
            if layer.bias is not None:
                layer.bias.data = bias
            with torch.inference_mode():
                total += layer(x[:, half].contiguous())
        expected = x @ weight.T + (bias if has_bias else 0)
        error = (total - expected).abs().max().item()
        print(f"{'with a bias' if has_bias else 'without'}: the sum of two halves is off by {error:.3f} at most")


WAYS = {"one": "one GPU", "tp2": "tensor parallel", "pp2": "pipeline parallel", "dp2": "data parallel"}


def gains(of_model: Mapping[str, Any]) -> Picture:
    """How many times as good as one GPU two are, by way and by kind of work.

    Args:
        of_model: `benchmarks/parallel.py`'s result for one model.
    """
    kinds = (("single", "tpot_ms", "one request, ms/token"), ("mixed", "tok_s", "many requests, tokens/s"))
    figure, both = axes(8.6, 1.9, ncols=2, sharey=True)
    said = []
    for ax, (work, key, label) in zip(both, kinds, strict=True):
        ran = {title: of_model[way][work][key] for way, title in WAYS.items() if work in of_model[way]}
        if len(ran) < len(WAYS):  # a replica serves one request as one GPU does
            ran["data parallel"] = ran["one GPU"]
        drawn = ax.barh(list(ran), list(ran.values()), color=[color(4)] + 3 * [color(0)])
        ax.bar_label(drawn, [short(value) for value in ran.values()], padding=4, color=INK, fontsize=9)
        ax.set_xlabel(label)
        ax.margins(x=0.2)
        said.append(f"{label}: " + ", ".join(f"{title} {short(value)}" for title, value in ran.items()))
    both[0].invert_yaxis()
    return Picture(figure, "; ".join(said))
