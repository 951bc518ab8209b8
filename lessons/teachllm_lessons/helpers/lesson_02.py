"""Lesson 02, paged blocks: waste that is counted, what is judged, and what a planted fault looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from teachllm.core.block_pool import Block, BlockPool
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.errors import counted
from teachllm_lessons.exercise import Exercise, require, run_with
from teachllm_lessons.palette import INK, LINE, PALE, color
from teachllm_lessons.picture import Picture, axes
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

MakePool = Callable[[int], BlockPool]

LONG_TEXT = "Explain paged attention, continuous batching, chunked prefill and block tables to me. " * 10

BLOCKS_HELD = Prediction(
    asks="Blocks after the first step",
    answer=4,
    because="64 tokens went through the model, and their K and V fill four blocks. The sampled token is only an id: it "
    "has no K and V until it goes through the model, in the next step, after which the table has {second} blocks. So "
    "the newest token of a sequence never has a place yet, and at most 15 places of a request are empty.",
    traps={
        5: "That is room for 65 tokens, but the newest one has not been through the model: it has no K and V yet.",
        8: "K and V of the same 16 tokens are one block: the cache keeps two arrays, and one id is for both.",
        24: "One table serves all six layers: a block id is the same place in each layer's cache.",
        64: "That is a block per token. A block holds 16.",
    },
)

# -- what is counted ---------------------------------------------------------------------------------------------


def reserved(lengths: Sequence[int], granule: int) -> int:
    """Tokens of memory that sequences of these lengths hold, if it comes in pieces of `granule` tokens."""
    return sum(-(-length // granule) * granule for length in lengths)


def memory_map(lengths: Sequence[int], slot: int, block_size: int) -> Picture:
    """Draw what each sequence holds and what it uses, in slots of the longest length and in blocks."""
    figure, both = axes(8, 0.9 + 0.55 * len(lengths), ncols=2, sharey=True)
    says = []
    for ax, granule, name in zip(both, (slot, block_size), ("slots", "blocks"), strict=True):
        for row, length in enumerate(lengths):
            held = reserved([length], granule)
            ax.barh(row, held, color=PALE, edgecolor=LINE, height=0.7)
            ax.barh(row, length, color=color(row), edgecolor=LINE, height=0.7)
            what = counted(held // granule, name[:-1])
            inside = held > 0.6 * slot
            ax.text(
                held - 30 if inside else held + 30,
                row,
                what,
                ha="right" if inside else "left",
                va="center",
                fontsize=8,
                color=INK,
            )
        total, used = reserved(lengths, granule), sum(lengths)
        text = f"{name} of {granule}: {used:,} of {total:,} used, {1 - used / total:.1%} wasted"
        says.append(text)
        ax.set_title(text, fontsize=9, color=INK, loc="left")
        ax.set_xlim(0, 1.02 * slot)
        ax.set_xlabel("tokens of memory")
    both[0].set_yticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    both[0].invert_yaxis()
    return Picture(figure, "; ".join(says))


@dataclass(frozen=True)
class MemoryUsage:
    """Describe how an engine's KV memory stands after a step.

    Attributes:
        lengths: tokens in the cache, of each running request.
        held: tokens of memory in the blocks of their tables.
    """

    lengths: tuple[int, ...]
    held: int

    @property
    def used(self) -> int:
        return sum(self.lengths)


def usage_of(watch: Watch) -> list[MemoryUsage]:
    """Runs what has been added to its end, and says of each step how the memory stood, until the last one ends."""
    found = []
    while watch.engine.has_unfinished_requests:
        watch.step()
        scheduler = watch.engine.core.scheduler
        lengths = tuple(request.num_computed_tokens for request in scheduler.running)
        found.append(MemoryUsage(lengths, scheduler.kv.num_used_blocks * scheduler.kv.block_size))
    return [each for each in found if each.lengths]


def add_a_dozen(watch: Watch) -> None:
    """Twelve requests, A to L, of many lengths: prompts of 18 to 62 tokens, outputs of 8 to 41."""
    words = watch.ids("Explain paged attention, continuous batching, chunked prefill and block tables to me. " * 4)
    for number, name in enumerate("ABCDEFGHIJKL"):
        watch.add(name, words[: 18 + 4 * number], max_tokens=8 + 3 * (number * 5 % 12))


def two_holes(overrides: EngineOverrides = NO_OVERRIDES) -> Watch:
    """Return an engine with 24 blocks in which A, B and C had six each, and B has ended."""
    watch = Watch(max_model_len=256, num_gpu_blocks_override=24, enable_prefix_caching=False, overrides=overrides)
    for name, max_tokens in (("A", 40), ("B", 2), ("C", 40)):
        watch.add(name, watch.ids(LONG_TEXT)[:90], max_tokens)
    return watch.run(steps=2)


# -- what is judged ----------------------------------------------------------------------------------------------


def contract_my_pool(piece: MakePool) -> int:
    """Check what a pool owes the engine, from one block up."""
    pool = piece(1)
    taken = pool.take(1)
    require(
        isinstance(taken, list) and len(taken) == 1, f"take(1) from a pool of 1 is {taken!r}: give a list of 1 block"
    )
    [block] = taken
    require(isinstance(block, Block), f"take(1) gives {block!r}: blocks are given, not their ids")
    _require_counts(pool, "pool of 1, after take(1)", free=[], users=[1])
    pool.release([block])
    _require_counts(pool, "pool of 1, after take(1) and release", free=[0], users=[0])
    again = pool.take(1)
    require(again == [block], "pool of 1: what was released cannot be taken again")
    _require_refusal(pool, 1, "pool of 1, whose block is taken")
    _require_counts(pool, "after a take that was refused", free=[], users=[1])

    pool = piece(3)
    require(pool.take(0) == [], "take(0) gives something: as for most decodes, nothing is wanted")
    _require_counts(pool, "pool of 3, after take(0)", free=[0, 1, 2], users=[0, 0, 0])
    first, second = pool.take(2)
    require(
        [first.block_id, second.block_id] == [0, 1], "the first blocks of the free list are to be taken, in its order"
    )
    _require_refusal(pool, 2, "pool of 3, of which 1 is free")
    _require_counts(pool, "after a take of 2 that was refused", free=[2], users=[1, 1, 0])
    pool.release([second, first])
    _require_counts(
        pool,
        "after release([block 1, block 0]); what is released goes to the end, in the order given",
        free=[2, 1, 0],
        users=[0, 0, 0],
    )

    pool = piece(2)
    [block] = pool.take(1)
    pool.share(block)  # a second request has the same prefix
    pool.release([block])
    _require_counts(
        pool, "a block of two users, after one release: the other one still reads it", free=[1], users=[1, 0]
    )
    pool.release([block])
    _require_counts(pool, "a block of two users, after two releases", free=[1, 0], users=[0, 0])
    pool.release(each for each in pool.take(2))
    _require_counts(pool, "after release(blocks) of a generator", free=[1, 0], users=[0, 0])

    pool = piece(2)
    [block] = pool.take(1)
    block.block_hash = b"content"
    pool.release([block])
    cached = pool.num_cached_blocks
    require(cached == 1, f"a block with a hash was released, and {cached} free blocks count as cached: should be 1")
    pool.take(2)
    cached = pool.num_cached_blocks
    require(cached == 0, f"all blocks are taken, and {cached} free blocks count as cached: should be 0")
    return 14 + _any_order_of_moves(piece)


def _any_order_of_moves(piece: MakePool) -> int:
    """A few hundred moves, against a plain list."""
    pool, plain, random = piece(7), list(range(7)), Random(0)
    for move in range(300):
        used = [block for block in pool.blocks if block.ref_count]
        if random.random() < 0.5 and used:
            block = random.choice(used)
            pool.release([block])
            plain += [block.block_id] if block.ref_count == 0 else []
            what = f"release([block {block.block_id}])"
        else:
            count = random.randint(0, len(plain))
            found = [block.block_id for block in pool.take(count)]
            require(found == plain[:count], f"move {move}, take({count}): {found}, and should be {plain[:count]}")
            del plain[:count]
            what = f"take({count})"
        found = [block.block_id for block in pool.free_blocks()]
        require(found == plain, f"move {move}, {what}: the free list is {found}, and should be {plain}")
    return 300


def _require_counts(pool: BlockPool, after: str, *, free: list[int], users: list[int]) -> None:
    found = [block.ref_count for block in pool.blocks]
    require(found == users, f"{after}: blocks have {found} users (ref_count), and should have {users}")
    listed = [block.block_id for _, block in zip(range(len(pool) + 1), pool.free_blocks(), strict=False)]
    require(listed == free, f"{after}: the free list is {listed}, and should be {free}")
    count = pool.num_free_blocks
    require(count == len(free), f"{after}: num_free_blocks is {count}, and should be {len(free)}")


def _require_refusal(pool: BlockPool, count: int, what: str) -> None:
    try:
        given = pool.take(count)
    except IndexError:
        return
    require(False, f"{what}: take({count}) gives {given}, and should raise IndexError")


def live_my_pool(piece: MakePool) -> str:
    watch = run_with(EngineOverrides(make_pool=piece), enable_prefix_caching=True)
    taken = sum(
        line["event"] == "step" and any(e[0] == "allocate" for e in line["block_events"]) for line in watch.trace.lines
    )
    return f"The engine ran with it: {taken} steps took blocks, all came back, and the words are the same."


MYPOOL = Exercise(
    lesson="02",
    name="MyPool",
    contract=contract_my_pool,
    live=live_my_pool,
    reference=BlockPool,
    hints=(
        "`take` looks at the count first: if too few are free, nothing may change. Then it goes from the head of "
        "`self.free_blocks()`. `release` has two cases: the last user has gone, or a request still reads the block.",
        "A request that takes a block is its one user: `ref_count = 1`. `self._unlink(block)` takes it off the free "
        "list and counts; so does `self._append(block)` at the end. Do not walk a list while you change it: make a "
        "list of the blocks first.",
        "`blocks = list(islice(self.free_blocks(), count))`, then for each `self._unlink(block)` and "
        "`block.ref_count = 1`. In `release`: `block.ref_count -= 1`, and `self._append(block)` if that is 0.",
    ),
)


# -- what a planted fault looks like -----------------------------------------------------------------------------


def short_and_long() -> None:
    """Answers to a prompt of less than a block, and of more."""
    with Watch(num_gpu_blocks_override=16, max_model_len=128) as watch:
        long = "What is a block table? Answer in one short sentence, please, and use plain words for it."
        for name, question in (("short", "What is a KV cache?"), ("long", long)):
            watch.add(name, question, 14)
            watch.run()
            print(f"prompt of {len(watch.ids(question))} tokens: {watch.text(name)!r}")


def blocks_of_prompts() -> None:
    """Print the lengths of some prompts' block tables."""
    with Watch(num_gpu_blocks_override=16, max_model_len=128) as watch:
        for num_tokens in (15, 16, 17, 32):
            watch.add(f"{num_tokens}", [9] * num_tokens, 2)
            watch.step()
            blocks = len(watch.state.requests[f"{num_tokens}"].table)
            print(f"a prompt of {num_tokens} tokens has {counted(blocks, 'block')}")
            watch.run()


def one_beginning_for_two() -> None:
    """A and B share the blocks of their prompt. A ends, C comes with a long prompt, and B goes on."""
    with Watch(num_gpu_blocks_override=9, max_model_len=128, check_invariants=False) as watch:
        question = "What is a block table? " + "Answer in one short sentence, please, and use plain words for it. " * 2
        watch.add("A", question, 2)
        watch.run(1)
        watch.add("B", question, 14)
        watch.run(1)
        watch.add("C", [9] * 126, 2)
        watch.run()
        print(f"B: {watch.text('B')!r}")
