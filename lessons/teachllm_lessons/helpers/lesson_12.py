"""Lesson 12, parallelism: ranks and replicas to watch, what they exchange, and what is predicted and judged."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from teachllm.checkpoint.files import EMBEDDED_MODEL, find_folder
from teachllm.config import EngineConfig
from teachllm.core.request import Request
from teachllm.core.scheduler import Scheduler
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.engine.llm_engine import Engine
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.engine.replicas.data_parallel import Balance, least_loaded
from teachllm.models.model_config import load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.sampling_params import SamplingParams
from teachllm.trace.ranks import rank_figures
from teachllm.trace.replay import Line
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm_lessons.exercise import Exercise, Wrong, require
from teachllm_lessons.faults import ROOT
from teachllm_lessons.palette import INK, color
from teachllm_lessons.picture import Picture, axes, rectangle
from teachllm_lessons.predict import Prediction
from teachllm_lessons.results import committed
from teachllm_lessons.watch import Watch

Choose = Callable[[Sequence[int], Sequence[int]], int]

QUESTIONS = ("What is a KV cache?", "What is a block table?", "What is a token budget?", "What is a prefix cache?")

_NO_SUM = "There are 14 exchanges, but the last one is no sum: it tells a best logit and a token per request."
BYTES_SENT = Prediction(
    asks="Bytes that a rank sends",
    answer=53_312,
    because="Four hidden states are 4 * 256 * 4 = 4,096 bytes. In each of the ring's two rounds a rank sends one half "
    "of them, so 4,096 bytes per sum; 13 sums are 53,248 bytes, and four best logits 64. `step_bytes` in "
    "`teachllm/distributed` computes that from the model's shape. A pipeline's first stage would send {stage:,} "
    "bytes, once: a thirteenth.",
    unit=" bytes",
    traps={
        53_248: "Nearly: those are the sums. The best logits of four requests are missing.",
        26_688: "That is one round of the ring. In the second round the finished parts go around.",
        57_344: _NO_SUM,
        57_408: _NO_SUM,
        106_560: "A round sends half of the tensor from each of two ranks, not all of it.",
        49_216: "There are 13 sums: two per layer, and one for the embedding.",
    },
)


@cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="teachllm-lesson-12-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# -- ranks ---------------------------------------------------------------------------------------------------------


def ask(watch: Watch, count: int = len(QUESTIONS), max_tokens: int = 12, names: str = "ABCDEFGH") -> Watch:
    """Some questions, until they are answered."""
    for name, question in zip(names[:count], QUESTIONS * 2, strict=False):
        watch.add(name, question, max_tokens)
    return watch.run()


def exchanged(steps: Sequence[Line]) -> str:
    """Return what rank 0 exchanged in the last step: how often, and how."""
    sent = steps[-1]["ranks"][0]["sent"]
    return ", ".join(f"{calls} x {operation}" for operation, (calls, _) in sent.items())


def weight_bytes(tensor: int = 1, pipeline: int = 1) -> list[int]:
    """Return the weight bytes of each rank."""
    model, layout = load_model_config(EngineConfig(device="cpu"), "cpu"), Layout(tensor, pipeline)
    return [model_of_rank(model, layout.coords(rank)).weight_bytes for rank in range(layout.num_ranks)]


def bubbles(steps: Sequence[Line]) -> list[float]:
    """The share of time in which each rank has nothing to compute."""
    return [figures.bubble for figures in rank_figures(steps)]


# -- replicas ------------------------------------------------------------------------------------------------------


class Replicas:
    """Two engines in this process that share requests, to be stepped and looked at: each a `Watch`, and the engine's
    own `Balance` between them, which in a server has replicas in processes of their own.

    Args:
        choose: who gets a request.
    """

    def __init__(self, choose: Choose = least_loaded, num_replicas: int = 2, **settings: Any) -> None:
        settings = {"num_gpu_blocks_override": 48, "max_model_len": 256, "max_num_seqs": 2} | settings
        self.watches = [Watch(**settings) for _ in range(num_replicas)]
        self._balance = Balance(num_replicas, choose)
        self.went: dict[str, int] = {}
        self.ended_at: dict[str, int] = {}
        self.num_steps = 0
        self._turns: list[dict[int, int]] = [{} for _ in self.watches]  # when each took which of its steps

    def add(self, name: str, question: str, max_tokens: int) -> None:
        replica = self.went[name] = self._balance.choose(None)
        self.watches[replica].add(name, question, max_tokens)

    def step(self) -> None:
        """Each replica takes one, at the same time."""
        self.num_steps += 1
        for replica, watch in enumerate(self.watches):
            if not watch.engine.has_unfinished_requests:
                continue
            line = watch.step().line
            if line is not None:
                self._turns[replica][line["step"]] = self.num_steps - 1
                self._balance.stepped(replica, len(line["scheduled"]))
                for name in line["finished"]:
                    self.ended_at[name] = self.num_steps
                    self._balance.ended(replica)

    def run(self) -> Replicas:
        """Run until all have answered, then close the engines."""
        while any(watch.engine.has_unfinished_requests for watch in self.watches):
            self.step()
        for watch in self.watches:
            watch.close()
        return self

    def picture(self) -> Picture:
        """A row for each request, by replica: in which steps it was computed."""
        order = sorted(self.went, key=lambda name: self.went[name])
        figure, ax = axes(9, 0.8 + 0.3 * len(order))
        for row, name in enumerate(order):
            steps = [line for line in self.watches[self.went[name]].trace.lines if line["event"] == "step"]
            filled, turns = color(self.went[name]), self._turns[self.went[name]]
            for step in steps:
                for scheduled in step["scheduled"]:
                    if scheduled["request_id"] == name:
                        shade = filled if scheduled["phase"] == "prefill" else (*filled, 0.3)
                        rectangle(ax, turns[step["step"]], 0.1 - row, 1, 0.8, shade)
        ax.set_yticks([0.5 - row for row in range(len(order))], [f"{name} on {self.went[name]}" for name in order])
        ax.set_xlim(0, self.num_steps)
        ax.set_ylim(1 - len(order) - 0.1, 1.1)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("step")
        says = f"all have answered after {self.num_steps} steps; a request waits until its replica has room for it"
        ax.set_title(says, fontsize=9, color=INK, loc="left")
        return Picture(figure, says)


def answered_by_two(
    count: int, *, overrides: EngineOverrides = NO_OVERRIDES, trace_sink: Any = None, **settings: Any
) -> dict[str, list[int]]:
    """Tokens of so many questions, as `ask` puts them, by two replicas in processes of their own."""
    config = EngineConfig(device="cpu", num_gpu_blocks_override=48, max_model_len=256, data_parallel_size=2, **settings)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
    with closing(Engine(config, overrides=overrides, trace_sink=trace_sink)) as engine:
        assert engine.tokenizer is not None
        outputs = {}
        for name, question in zip("ABCDEFGH"[:count], QUESTIONS * 2, strict=False):
            prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
            outputs[name] = engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests:
            engine.step()
    return {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}


def serve(choose: Choose) -> Replicas:
    """Ten requests, one at each step: every other one is long."""
    replicas = Replicas(choose)
    for number in range(10):
        replicas.add("ABCDEFGHIJ"[number], QUESTIONS[number % 4], 4 if number % 2 else 24)
        replicas.step()
    return replicas.run()


class RoundRobin:
    """Choose the replicas in turn, whatever they have to do."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
        self._last = (self._last + 1) % len(num_waiting)
        return self._last


# -- a mixture of experts ------------------------------------------------------------------------------------------


@cache
def mixture() -> str:
    """teachlm as a mixture of 8 experts in each layer, of which a token meets 2: by training/upcycle.py."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("upcycle", ROOT / "training" / "upcycle.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    out = _home() / "mixture"
    module.upcycle(out)
    return str(out)


def shared_experts() -> tuple[list[list[int]], str]:
    """Two replicas that share the experts of a mixture answer the questions.

    Returns:
        [layers][experts]: tokens, in all steps; what a rank exchanged in a step of decodes.
    """
    texts: list[list[str]] = [[], []]
    sinks = [lines.append for lines in texts]
    answered_by_two(len(QUESTIONS), trace_sink=sinks, model=mixture(), enable_expert_parallel=True)
    steps = [[line for line in map(json.loads, lines) if line["event"] == "step"] for lines in texts]
    loads = torch.tensor([step["expert_load"] for replica in steps for step in replica])
    return loads.sum(dim=0).tolist(), exchanged(steps[0])


# -- measured once, on GPUs ----------------------------------------------------------------------------------------


def on_gpus() -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """The newest committed result of benchmarks/parallel.py for Qwen3-8B: {way: {workload: figures}}; its source."""
    path, result = committed("-parallel-")
    return result["workloads"]["qwen3-8b"], f"Qwen3-8B, {result['device']}, commit {result['commit'][:7]} ({path.name})"


# -- the exercise --------------------------------------------------------------------------------------------------


def contract_choose_replica(piece: Choose) -> int:
    """Check which replica gets the next request, from one replica up."""
    cases = 0
    for waiting, running, expected, why in (
        ([0], [0], 0, "there is only one"),
        ([5], [3], 0, "there is only one, however busy"),
        ([0, 0], [0, 0], 0, "of equals the first, so that all who compute it get the same"),
        ([0, 0], [1, 0], 1, "replica 1 has nothing to do"),
        ([0, 0], [0, 1], 0, "replica 0 has nothing to do"),
        ([1, 0], [2, 2], 1, "on replica 0 a request waits already"),
        ([1, 0], [0, 3], 1, "who waits counts as much as four who run: 4 against 3"),
        ([1, 0], [0, 5], 0, "four times one who waits is less than five who run"),
        ([1, 0], [0, 4], 0, "4 against 4: of equals the first"),
        ([0, 1], [4, 0], 0, "4 against 4: of equals the first"),
        ([2, 1, 1], [0, 3, 1], 2, "8, 7 and 5"),
        ([0, 0, 0], [3, 3, 2], 2, "the last one has the least"),
    ):
        _same(piece, waiting, running, expected, why)
        cases += 1

    for num_replicas in (2, 3, 8):
        balance = Balance(num_replicas, piece)
        went = [balance.choose(None) for _ in range(3 * num_replicas)]
        spread = [went.count(replica) for replica in range(num_replicas)]
        require(
            max(spread) == min(spread),
            f"a burst of {len(went)} requests before any replica has said a word goes {spread} to {num_replicas} "
            "replicas: each should get 3",
        )
        cases += 1

    drawn = random.Random(12)
    for _ in range(200):
        num_replicas = drawn.randint(2, 8)
        waiting = [drawn.randint(0, 4) for _ in range(num_replicas)]
        running = [drawn.randint(0, 12) for _ in range(num_replicas)]
        loads = [4 * w + r for w, r in zip(waiting, running, strict=True)]
        _same(piece, waiting, running, loads.index(min(loads)), f"4 * waiting + running is {loads}")
        cases += 1
    return cases


def _same(piece: Choose, waiting: list[int], running: list[int], expected: int, why: str) -> None:
    asked = f"choose_replica({waiting}, {running})"
    given = list(waiting), list(running)
    found = piece(*given)
    if isinstance(found, bool) or not hasattr(found, "__index__") or not 0 <= found < len(waiting):
        raise Wrong(f"{asked} is {found!r}: give the number of a replica, from 0 to {len(waiting) - 1}")
    require(given == (waiting, running), f"{asked} changes its arguments: they are the API process's own books")
    require(found == expected, f"{asked} is {found} and should be {expected}: {why}")


def live_choose_replica(piece: Choose) -> str:
    """Two replicas in processes of their own, and what one engine says to the same."""
    with Watch(num_gpu_blocks_override=48, max_model_len=256) as watch:
        expected = ask(watch, 6).all_tokens
    went: list[int] = []

    def noted(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
        went.append(piece(num_waiting, num_running))
        return went[-1]

    answers = answered_by_two(len(expected), overrides=EngineOverrides(choose_replica=noted), check_invariants=True)
    for name, tokens in expected.items():
        found = answers[name]
        said = f"changes what is said: {name} should go on with {tokens[:6]}, and went on with {found[:6]}"
        require(found == tokens, said)
    counts = [went.count(replica) for replica in range(2)]
    require(min(counts) > 0, f"sends {counts} of 6 requests to two idle replicas: one of them has nothing to do")
    return f"Two replicas ran with it, in processes of their own: {counts[0]} and {counts[1]} requests, the same words."


CHOOSE_REPLICA = Exercise(
    lesson="12",
    name="choose_replica",
    contract=contract_choose_replica,
    live=live_choose_replica,
    reference=least_loaded,
    hints=(
        "Each replica has a load, one number made of how many wait there and how many run. You want the place of the "
        "smallest.",
        "Go through both lists together with `zip`, and make a list of `4 * waiting + running`.",
        "`loads.index(min(loads))` is the first place at which the smallest stands.",
    ),
)


# -- a fault -------------------------------------------------------------------------------------------------------


@cache
def biased_model() -> str:
    """teachlm with a small bias on attention's output, which it was not trained with: the words are nearly the same."""
    from safetensors.torch import load_file, save_file

    folder, out = find_folder(EMBEDDED_MODEL), _home() / "biased"
    out.mkdir()
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if ".self_attn." in name and name.endswith("_proj.weight")]:
        bias = torch.zeros(len(tensors[name]))
        if "o_proj" in name:
            bias = 0.08 * torch.randn(len(bias), generator=generator)
        tensors[name.removesuffix("weight") + "bias"] = bias.bfloat16()
    for file in folder.glob("*.json"):
        shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(raw | {"attention_bias": True}), encoding="utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def _of_rank(ranks: Ranks, folder: str, prompt: list[int], max_tokens: int) -> list[int]:
    """One rank's view of a request's tokens: each has a scheduler, and all make the same plans."""
    config = EngineConfig(model=folder, device="cpu", dtype="float32", num_gpu_blocks_override=24, max_model_len=192)
    model = load_model_config(config, "cpu")
    config = config.resolve(model.max_model_len)
    runner = ModelRunner(config, model, torch.device("cpu"), ranks=ranks)
    scheduler = Scheduler(config, runner.memory.num_blocks, b"")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(
        request_id="A",
        prompt_token_ids=prompt,
        sampling_params=params,
        eos_token_ids=frozenset(),
        arrival_time=0.0,
    )
    scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.sample(runner.execute(plan)).result())
    return list(request.token_ids)[len(prompt) :]


def one_and_two_ranks() -> None:
    """Two models, by one process and by two ranks, which are threads here."""
    from tests.distributed.threads import on_ranks

    for name, model in (("teachlm", EMBEDDED_MODEL), ("with biases", biased_model())):
        with Watch(model, num_gpu_blocks_override=24, max_model_len=192, dtype="float32") as watch:
            prompt = watch.ids(QUESTIONS[1])
            watch.add("A", prompt, 14)
            alone = watch.run().text("A")
            tokenizer = watch.engine.tokenizer
            assert tokenizer is not None
        two = on_ranks(Layout(tensor=2), partial(_of_rank, folder=model, prompt=prompt, max_tokens=14))
        print(f"{name:12} one process {alone!r}")
        print(f"{'':12} two ranks   {tokenizer.decode(two[0])!r}")
