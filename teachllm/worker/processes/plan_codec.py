"""Plans and outputs as bytes, for ranks that live in other processes.

    | how many ints, floats, bytes | ints, 8 bytes each | floats, 8 bytes each | JSON |

A plan is nearly all integers, column by column: one copy packs them, however many requests there are. What is rare or
is text (request ids, the parameters of a new request) is JSON. The standard library does it all, and nothing that is
read can run code, as it could with pickle. Numbers are in the machine's own order: both ends are of one kind.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain, repeat
from typing import Any, TypeAlias

from teachllm.core.scheduler_output import (
    ModelRunnerOutput,
    NewRow,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from teachllm.sampling_params import SamplingParams

_HEAD = struct.Struct("=3q")
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_NONE = -1  # in place of a number of entries


SampledTokens: TypeAlias = tuple[int, list[list[int]]]  # a step, and what each of its requests sampled


def encode_plan(plan: SchedulerOutput, sampled: Sequence[SampledTokens] = ()) -> bytes:
    """Encode a plan as bytes.

    Args:
        sampled: what goes with it, see `Worker.execute`.
    """
    scheduled = plan.scheduled
    ints = [plan.step, len(scheduled)]
    ints += [each.start for each in scheduled]
    ints += [each.num_tokens for each in scheduled]
    ints += [each.samples for each in scheduled]
    ints += [each.first_new_block for each in scheduled]
    ints += [each.num_next_drafts for each in scheduled]
    _put_lists(ints, [each.draft_token_ids for each in scheduled])
    _put_lists(ints, [each.new_block_ids for each in scheduled])
    rest: dict[str, Any] = {"ids": [each.request_id for each in scheduled]}
    rows: list[Any] = []
    for index, row in [(index, each.new_row) for index, each in enumerate(scheduled) if each.new_row is not None]:
        ints.append(len(row.token_ids))
        ints.extend(row.token_ids)
        words = (list(row.stop_token_ids), row.bad_word_token_ids)
        rows.append(
            [index, row.num_prompt_tokens, row.child_index, row.seed, *words, _plain_params(row.sampling_params)]
        )
    ints.append(len(sampled))
    for step, sampled_token_ids in sampled:
        ints += step, len(sampled_token_ids)
        _put_lists(ints, sampled_token_ids)
    whys = [each.why for each in scheduled]
    for name, value in (("rows", rows), ("dropped", plan.dropped), ("preempted", plan.preempted)):
        if value:
            rest[name] = value
    if whys.count(None) < len(whys):
        rest["why"] = whys
    return _pack(ints, [], json.dumps(rest).encode())


def decode_plan(data: bytes) -> tuple[SchedulerOutput, list[SampledTokens]]:
    """Return what `encode_plan` was given; of a request's parameters, what was neither list nor tuple is a list."""
    ints, _, text = _unpack(data)
    rest = json.loads(text)
    step, count = ints[:2]
    columns = [ints[start : start + count].tolist() for start in range(2, 2 + 5 * count, count)] if count else [[]] * 5
    starts, lengths, samples, first_blocks, nexts = columns
    at = 2 + 5 * count
    drafts, at = _get_lists(ints, at, count)
    blocks, at = _get_lists(ints, at, count)
    rows: list[NewRow | None] = [None] * count
    for index, num_prompt_tokens, child_index, seed, stop_ids, bad_words, params in rest.get("rows", ()):
        end = at + 1 + ints[at]
        rows[index] = NewRow(
            ints[at + 1 : end].tolist(),
            num_prompt_tokens,
            _params(params),
            child_index,
            seed,
            frozenset(stop_ids),
            tuple(map(tuple, bad_words)),
        )
        at = end
    sampled: list[SampledTokens] = []
    num_told, at = ints[at], at + 1
    for _ in range(num_told):
        number, length = ints[at : at + 2]
        sampled_token_ids, at = _get_lists(ints, at + 2, length)
        sampled.append((number, sampled_token_ids))
    whys = rest.get("why") or repeat(None)
    each = (
        rest["ids"],
        starts,
        lengths,
        drafts,
        [each != 0 for each in samples],
        first_blocks,
        blocks,
        rows,
        nexts,
        whys,
    )
    scheduled = list(map(ScheduledRequest, *each))
    plan = SchedulerOutput(step, scheduled, rest.get("dropped", []), rest.get("preempted", []))
    return plan, sampled


def encode_output(output: ModelRunnerOutput) -> bytes:
    """Encode a step's output as bytes."""
    mode, seconds = output.graph_mode, output.seconds
    ints = [len(output.sampled_token_ids), seconds is not None, mode is not None]
    floats = [] if seconds is None else [seconds]
    _put_lists(ints, output.sampled_token_ids)
    num_drafted = None if output.num_drafted is None else [output.num_drafted]
    for lists in (output.draft_token_ids, num_drafted, output.expert_load):
        ints.append(_NONE if lists is None else len(lists))
        _put_lists(ints, lists or [])
    for entries in (output.logprobs, output.prompt_logprobs):
        ints.append(_NONE if entries is None else len(entries))
        for each in entries or ():
            _put_logprobs(ints, floats, each)
    return _pack(ints, floats, (mode or "").encode())


def decode_output(data: bytes) -> ModelRunnerOutput:
    """Return what `encode_output` was given."""
    ints, floats, text = _unpack(data)
    count, is_timed, has_mode = ints[:3]
    sampled, at = _get_lists(ints, 3, count)
    found: list[list[list[int]] | None] = []
    for _ in range(3):
        length = ints[at]
        lists, at = _get_lists(ints, at + 1, max(length, 0))
        found.append(None if length == _NONE else lists)
    drafts, num_drafted, expert_load = found
    values = iter(floats[is_timed:])
    scores: list[list[list[TokenLogprobs] | None] | None] = []
    for _ in range(2):
        length, at = ints[at], at + 1
        entries: list[list[TokenLogprobs] | None] = []
        for _ in range(length):
            each, at = _get_logprobs(ints, at, values)
            entries.append(each)
        scores.append(None if length == _NONE else entries)
    return ModelRunnerOutput(
        sampled,
        scores[0],
        scores[1],
        num_drafted=None if num_drafted is None else num_drafted[0],
        draft_token_ids=drafts,
        seconds=floats[0] if is_timed else None,
        expert_load=expert_load,
        graph_mode=text.decode() if has_mode else None,
    )


def _pack(ints: list[int], floats: list[float], text: bytes) -> bytes:
    head = _HEAD.pack(len(ints), len(floats), len(text))
    return b"".join((head, array("q", ints).tobytes(), array("d", floats).tobytes(), text))


def _unpack(data: bytes) -> tuple[array[int], array[float], bytes]:
    num_ints, num_floats, num_bytes = _HEAD.unpack_from(data)
    first = _HEAD.size + 8 * num_ints
    end = first + 8 * num_floats
    ints, floats = array("q"), array("d")
    ints.frombytes(data[_HEAD.size : first])
    floats.frombytes(data[first:end])
    return ints, floats, data[end : end + num_bytes]


def _put_lists(ints: list[int], lists: Sequence[Sequence[int]]) -> None:
    """Append the length of each list, then all elements."""
    ints += map(len, lists)
    ints += chain.from_iterable(lists)


def _get_lists(ints: array[int], at: int, count: int) -> tuple[list[list[int]], int]:
    """Read `count` lists from `at` on, and return them and where they end."""
    lengths = ints[at : at + count].tolist()
    at += count
    if lengths.count(1) == count:  # as sampled ids mostly are
        return [[each] for each in ints[at : at + count]], at + count
    lists: list[list[int]] = [[] for _ in lengths]  # as most others are
    for index, length in enumerate(lengths):
        if length:
            lists[index] = ints[at : at + length].tolist()
            at += length
    return lists, at


def _put_logprobs(ints: list[int], floats: list[float], entries: list[TokenLogprobs] | None) -> None:
    ints.append(_NONE if entries is None else len(entries))
    for entry in entries or ():
        ints.extend((entry.token_id, entry.rank, len(entry.top_ids)))
        ints.extend(entry.top_ids)
        floats.append(entry.logprob)
        floats.extend(entry.top_logprobs)


def _get_logprobs(ints: array[int], at: int, values: Iterable[float]) -> tuple[list[TokenLogprobs] | None, int]:
    count, at = ints[at], at + 1
    if count == _NONE:
        return None, at
    take, entries = iter(values), []
    for _ in range(count):
        token_id, rank, num_top = ints[at : at + 3]
        at += 3 + num_top
        logprob = next(take)
        top = [next(take) for _ in range(num_top)]
        entries.append(TokenLogprobs(token_id, logprob, rank, ints[at - num_top : at].tolist(), top))
    return entries, at


def _plain_params(params: SamplingParams) -> dict[str, Any]:
    """Return what differs from the defaults. JSON has neither tuples nor numbers as keys: both are marked."""
    plain: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value is default:
            continue
        if isinstance(value, tuple):
            value = {"tuple": value}
        elif isinstance(value, dict):
            value = {"dict": list(value.items())}
        plain[name] = value
    return plain


def _params(plain: dict[str, Any]) -> SamplingParams:
    for name, value in plain.items():
        if isinstance(value, dict):
            plain[name] = tuple(value["tuple"]) if "tuple" in value else dict(value["dict"])
    return SamplingParams(**plain)
