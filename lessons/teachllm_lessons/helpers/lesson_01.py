"""Lesson 01, attention and the KV cache: a look at q, k and v, what is judged, and what a planted fault looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from teachllm.core.memory import KVCacheSpec
from teachllm.engine.overrides import EngineOverrides
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionSettings, KVCache
from teachllm.layers.attention_backends.reference import ReferenceBackend
from teachllm_kernels.attention.paged_attention import paged_attention_reference
from teachllm_lessons.exercise import Exercise, Wrong, require, run_with
from teachllm_lessons.helpers.lesson_00 import shade, shown
from teachllm_lessons.palette import BAR, INK, OTHER_BAR, ink_on
from teachllm_lessons.picture import Picture, axes, rectangle
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

AS_LARGE_AS_THE_MODEL = Prediction(
    asks="Tokens that weigh as much as the model",
    answer=2610,
    within=0.1,
    because="8.0 million numbers of 4 bytes are {weights:.1f} MiB. One token takes 2 x 6 x 4 x 64 x 4 bytes, "
    "{per_token} KiB. So the cache is as large as the model before *one* request has reached the model's full context "
    "of 4,096 tokens. From there on the KV cache is what fills the memory, here as on a large GPU, and most of the "
    "lessons that follow are about it.",
    traps={
        652: "8 million numbers are 32 million bytes.",
        1305: "That is with 8 heads of K and V. Two query heads share one, so 4 are kept.",
        5220: "That is K or V alone, or numbers of 2 bytes: both are kept, in float32.",
        15_660: "That is the cache of one layer: each of the 6 layers has keys and values of its own.",
    },
)

# -- a look at q, k and v ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCall:
    """Describe what one layer's attention was given in one step, and what came of it.

    Attributes:
        q: [num_tokens, num_heads, head_size].
        k, v: [num_tokens, num_kv_heads, head_size], of the step's own tokens.
        out: like q.
        scale: multiplies the dot products.
        kv_lens: of each request, how many keys its queries may look at.
        slots: [num_tokens], where the step's K and V are written.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    scale: float
    kv_lens: list[int]
    slots: torch.Tensor

    @property
    def group(self) -> int:
        """Query heads that share a head of K and V."""
        return self.q.shape[1] // self.k.shape[1]

    def weights(self, head: int) -> torch.Tensor:
        """[num_tokens, num_tokens], how much each token takes of each, in a step that computes a whole prompt."""
        scores = self.q[:, head] @ self.k[:, head // self.group].T * self.scale
        ahead = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)


class AttentionRecorder(ReferenceBackend):
    """The engine's attention, which keeps what it is given.

    Attributes:
        seen: of every call: the layers of a step one after the other.
    """

    def __init__(self) -> None:
        self.seen: list[AttentionCall] = []

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = super().attend(q, k, v, kv_cache, metadata, settings, out)
        slots = metadata.slot_mapping.clone()
        kv_lens = list(metadata.kv_lens)
        self.seen.append(AttentionCall(q.clone(), k.clone(), v.clone(), found.clone(), settings.scale, kv_lens, slots))
        return found


@dataclass(frozen=True)
class Uses:
    """Count the steps that use a token's query, and those that read its key and value."""

    of_q: int
    of_kv: int


def uses(calls: Sequence[AttentionCall]) -> list[Uses]:
    """Return how often each position of a request was used.

    Args:
        calls: one layer's, of steps that computed this request alone.
    """
    asked, read = (Counter[int]() for _ in range(2))
    for call in calls:
        (num_keys,) = call.kv_lens
        read.update(range(num_keys))
        asked.update(range(num_keys - len(call.q), num_keys))
    return [Uses(asked[position], read[position]) for position in range(len(read))]


def attention_picture(texts: Sequence[str], weights: Mapping[str, torch.Tensor]) -> Picture:
    """Draw how much each token (a row) takes of each (a column), for some heads; masked tokens are left out."""
    figure, all_axes = axes(4.9 * len(weights), 4.2, ncols=len(weights), squeeze=False)
    names, count = [shown(text) for text in texts], len(texts)
    for number, (ax, (name, each)) in enumerate(zip(all_axes.flat, weights.items(), strict=True)):
        for query in range(count):
            for key in range(query + 1):
                share = float(each[query, key])
                filled = shade(share)
                _cell(ax, key, -query, filled)
                if share >= 0.1:
                    text = f"{share:.1f}".lstrip("0")
                    ax.text(key + 0.5, 0.5 - query, text, ha="center", va="center", fontsize=7, color=ink_on(filled))
        ax.set_xlim(0, count)
        ax.set_ylim(1 - count, 1)
        ax.set_xticks([0.5 + key for key in range(count)], names, rotation=60, ha="right", rotation_mode="anchor")
        ax.set_yticks([0.5 - query for query in range(count)], names if number == 0 else [""] * count)
        ax.tick_params(length=0, labelsize=8)
        ax.spines[:].set_visible(False)
        ax.set_title(name, fontsize=9, color=INK)
    says = []
    for name, each in weights.items():
        last_row, before = each[-1], float(each.diagonal(-1).mean())
        last = f"the last token takes {float(last_row.max()):.2f} from {names[int(last_row.argmax())]}"
        says.append(f"{name}: {last}; on average a token takes {before:.2f} from the one before it")
    return Picture(figure, f"attention weights over the tokens {' '.join(names)}. {'. '.join(says)}")


def work_picture(watch: Watch, name: str) -> Picture:
    """Return which positions of a request each step computed: for the first time, or once more."""
    steps = [line for line in watch.trace.lines if line["event"] == "step"]
    scheduled_requests = [
        scheduled for step in steps for scheduled in step["scheduled"] if scheduled["request_id"] == name
    ]
    width = max(scheduled["start"] + scheduled["num_tokens"] for scheduled in scheduled_requests)
    cell = min(0.3, 9 / width)
    figure, ax = axes(1.2 + cell * width, 1.0 + 0.7 * cell * len(scheduled_requests))
    known = first = again = 0
    for row, scheduled in enumerate(scheduled_requests):
        for position in range(scheduled["start"], scheduled["start"] + scheduled["num_tokens"]):
            is_new = position >= known
            first, again = first + is_new, again + (not is_new)
            _cell(ax, position, -row, BAR if is_new else OTHER_BAR)
        known = scheduled["start"] + scheduled["num_tokens"]
    ax.set_xlim(0, width)
    ax.set_ylim(1 - len(scheduled_requests), 1)
    ax.set_yticks([0.5 - row for row in range(0, len(scheduled_requests), 4)], range(0, len(scheduled_requests), 4))
    ax.set_ylabel("step")
    ax.set_xlabel("position whose K and V are computed")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    says = f"blue: {first} for the first time; grey: {again} once more"
    ax.set_title(says, fontsize=9, color=INK, loc="left")
    return Picture(figure, f"positions that {name} computed in {len(scheduled_requests)} steps: {says}")


def _cell(ax: Any, x: float, y: float, filled: Any) -> None:
    rectangle(ax, x + 0.04, y + 0.06, 0.92, 0.88, filled)


# Layers, heads of K and V, and their size, as each model's config.json says; 2 bytes a number.
MODELS: dict[str, tuple[int, int, int]] = {
    "OPT-13B": (40, 40, 128),
    "Llama 2 7B": (32, 32, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Llama 3.1 70B": (80, 8, 128),
}


def kv_bytes(num_layers: int, num_kv_heads: int, head_size: int, dtype_bytes: int = 2) -> int:
    """Return what one token takes in the caches of all layers."""
    return num_layers * KVCacheSpec(num_kv_heads, head_size, dtype_bytes).bytes_per_token


# -- what is judged ----------------------------------------------------------------------------------------------


def attend_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The engine's definition, for a sequence that lies in one block."""
    table = torch.zeros((1, 1), dtype=torch.int32)
    return paged_attention_reference(q, k.unsqueeze(0), v.unsqueeze(0), table, [len(q)], [len(k)], scale)


class Attending(ReferenceBackend):
    """A backend for `EngineOverrides.attention`: it gives a reader's piece each sequence's K and V from its blocks."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tables = metadata.block_tables.long()
        parts = []
        for queries, table, kv_len in zip(q.split(metadata.query_lens), tables, metadata.kv_lens, strict=True):
            keys, values = (cache[table].flatten(0, 1)[:kv_len] for cache in kv_cache)
            parts.append(self._attend(queries, keys, values, settings.scale))
        result = torch.cat(parts)
        return result if out is None else out.copy_(result)


def _rows(*rows: float) -> torch.Tensor:
    """One head of size 1: [len(rows), 1, 1]."""
    return torch.tensor(rows, dtype=torch.float32).view(-1, 1, 1)


def contract_attend(piece: Attend) -> int:
    """From one token up; each case adds one thing to the one before."""
    sigmoid = [float(torch.tensor(x).sigmoid()) for x in (1.0, 2.0)]
    three = torch.tensor([0.0, 1.0, 2.0]).softmax(dim=-1) @ torch.tensor([3.0, 6.0, 9.0])
    cases = (
        ("one token", (_rows(2), _rows(3), _rows(7), 1.0), [7.0], "its only weight is 1, so it gets its own v"),
        (
            "one query, two keys with equal scores",
            (_rows(0), _rows(1, 2), _rows(4, 8), 1.0),
            [6.0],
            "it stands last and sees both, and equal scores are equal weights",
        ),
        (
            "one score is higher by 1",
            (_rows(1), _rows(0, 1), _rows(0, 1), 1.0),
            [sigmoid[0]],
            "weights are softmax(scores)",
        ),
        (
            "a scale of 0.5, and scores 0 and 4",
            (_rows(2), _rows(0, 2), _rows(0, 1), 0.5),
            [sigmoid[1]],
            "scores are multiplied by `scale`, once, before the softmax",
        ),
        (
            "two tokens of a prompt",
            (_rows(0, 0), _rows(1, 2), _rows(4, 8), 1.0),
            [4.0, 6.0],
            "the first token must not see the second: when it was predicted from, the second was not there",
        ),
        (
            "the newest of three tokens (a decode)",
            (_rows(1), _rows(0, 1, 2), _rows(3, 6, 9), 1.0),
            [float(three)],
            "the queries are those of the *last* tokens: this one stands at the end, and sees all three",
        ),
        (
            "the last two of three tokens (a chunk)",
            (_rows(0, 0), _rows(1, 2, 3), _rows(3, 6, 9), 1.0),
            [4.5, 6.0],
            "the queries are those of the *last* tokens: the first of these stands at place 1, and sees two",
        ),
        (
            "scores of 1000 and 2000",
            (_rows(1), _rows(1000, 2000), _rows(3, 5), 1.0),
            [5.0],
            "exp(1000) is more than a float holds: subtract the largest score first, or use `softmax`",
        ),
    )
    for what, given, expected, why in cases:
        _require_close(piece, what, given, torch.tensor(expected).view(-1, 1, 1), why)
    heads = torch.zeros(1, 4, 1), torch.zeros(1, 2, 1), torch.tensor([[[10.0], [20.0]]]), 1.0
    why = "of 4 query heads and 2 of K and V, heads 0 and 1 read head 0, heads 2 and 3 read head 1"
    _require_close(piece, "grouped heads", heads, torch.tensor([[[10.0], [10.0], [20.0], [20.0]]]), why)
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, 1, 1, 1, 8),
        (3, 3, 2, 2, 8),
        (2, 7, 4, 1, 8),
        (5, 9, 8, 4, 64),
        (1, 33, 8, 4, 64),
        (17, 17, 6, 2, 16),
    )
    for num_queries, num_keys, num_heads, num_kv_heads, size in shapes:
        q = torch.randn((num_queries, num_heads, size), generator=generator)
        k, v = torch.randn((2, num_keys, num_kv_heads, size), generator=generator)
        what = f"{num_queries} queries of {num_heads} heads, {num_keys} keys of {num_kv_heads}, of size {size}"
        given = (q, k, v, size**-0.5)
        _require_close(piece, what, given, attend_reference(*given), "it is not what the definition gives")
    return len(cases) + 1 + len(shapes)


def _require_close(
    piece: Attend,
    what: str,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float],
    expected: torch.Tensor,
    why: str,
) -> None:
    q, k, v, scale = given
    found = piece(q.clone(), k.clone(), v.clone(), scale)
    require(isinstance(found, torch.Tensor), f"{what}: {found!r} came back, and should be a tensor")
    shape, right = list(found.shape), list(expected.shape)
    require(shape == right, f"{what}: shape {shape} came back, and should be that of q, {right}")
    if torch.allclose(found.float(), expected, atol=1e-4, rtol=1e-4):
        return
    if expected.numel() > 8:
        raise Wrong(f"{what}: off by {float((found - expected).abs().max()):.2g}: {why}.")
    q_k_v = ", ".join(f"{name}={x.flatten().tolist()}" for name, x in zip("qkv", (q, k, v), strict=True))
    numbers = [[round(x, 3) for x in each.flatten().tolist()] for each in (found, expected)]
    raise Wrong(f"{what}: {q_k_v}, scale={scale} gives {numbers[0]}, and should give {numbers[1]}: {why}.")


def live_attend(piece: Attend) -> str:
    watch = run_with(EngineOverrides(attention=Attending(piece)))
    num_layers = watch.engine.model_config.num_layers
    return f"The engine ran with it in all {num_layers} layers, for prompts, chunks and decodes: the same words."


ATTEND = Exercise(
    lesson="01",
    name="attend",
    contract=contract_attend,
    live=live_attend,
    reference=attend_reference,
    hints=(
        "Four steps for each head: scores of every query with every key, times `scale`; minus infinity where the key "
        "stands after the query; softmax along the keys; weights times v. Which place does query i have, if the "
        "queries are the last ones of the sequence?",
        "Query i stands at `len(k) - len(q) + i`. For grouped heads repeat each head of k and v: "
        "`k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)`. `torch.einsum('qhd,khd->hqk', q, k)` gives the scores "
        "of all heads.",
        "`place = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)`, `ahead = torch.arange(len(k)) > place`, "
        "`weights = (scores * scale).masked_fill(ahead, float('-inf')).softmax(dim=-1)`, and at last "
        "`torch.einsum('hqk,khd->qhd', weights, v)` with the repeated v.",
    ),
)


# -- what a planted fault looks like -----------------------------------------------------------------------------


def how_likely_was_the_prompt() -> None:
    """A prompt computed whole, and token by token: how likely the model finds it, and what it answers."""
    for name, budget in (("whole", 64), ("one by one", 1)):
        settings: dict[str, Any] = {"max_num_batched_tokens": budget, "max_num_seqs": 1, "enable_prefix_caching": False}
        with Watch(num_gpu_blocks_override=8, max_model_len=64, **settings) as watch:
            watch.add("A", "Why are keys and values kept in a cache at all?", 9, prompt_logprobs=0)
            watch.run()
            scores = watch.outputs["A"].prompt_logprobs
            assert scores is not None
            each = [next(iter(entry.values())).logprob for entry in scores[1:] if entry]
            print(f"{name:10} log p of a prompt token {sum(each) / len(each):6.2f}; answers {watch.text('A')!r}")
