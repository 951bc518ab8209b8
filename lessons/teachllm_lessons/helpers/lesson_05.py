"""Lesson 05, prefix caching: what is judged, and what a planted fault looks like."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from teachllm.core.prefix_cache import HashBlock, hash_block
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm_lessons.exercise import Exercise, Wrong, require, run_with
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

PROMPT_TOKENS = Prediction(
    asks="Prompt tokens to compute",
    answer=16,
    because="The prompt is six full blocks, and all six are cached. But the first token is sampled from the hidden "
    "state of the prompt's last token, and the cache keeps K and V, not hidden states. So at least the last token is "
    "computed, and as only whole blocks are shared, the sixth block is computed whole.",
    traps={
        0: "With nothing to compute there is no hidden state to sample the first token from.",
        1: "One token would be enough for its hidden state, but a block is shared whole or not at all.",
        14: "That is what A's prompt has after these 96 tokens. This prompt ends with them.",
        80: "80 tokens are *found*. The engine computes the others.",
        96: "That is the prompt without a cache: five of its six blocks are found.",
    },
)

ROOT_HASH = b"the model"

# Two blocks of token ids of teachlm, "<|im_start|>user\nWhat is a draft model?" and "... a KV cache?", each with seven
# words after it. The words were searched for (Pollard's rho, with a start of its own for each block) until Python's
# hash() of both tuples was the same, as it is in every CPython of 64 bits since 3.8: -1905215958459527657.
COLLIDING = (
    [1, 296, 201, 539, 336, 266, 1080, 379, 33, 1650, 894, 1306, 1422, 2342, 463, 318],
    [1, 296, 201, 539, 336, 266, 416, 419, 33, 1426, 2330, 2571, 442, 1581, 3925, 2484],
)
SAME_CRC32 = ([0, 0, 0, 0], [249, 1495, 145, 0])  # after any parent
SAME_ADLER32 = ([0, 2, 0], [1, 0, 1])
OWN_HIT_RATE = 0.44  # of `live_hash_block`, with the engine's own hash


def _block(*token_ids: int) -> array[int]:
    return array("q", token_ids)


def contract_hash_block(piece: HashBlock) -> int:
    """Check what a block's hash must do, from one token up."""
    cases = 0
    one, two = _block(1), _block(2)
    first = piece(ROOT_HASH, one)
    require(isinstance(first, bytes) and len(first) == 32, f"hash_block(root, [1]) is {first!r}: give 32 bytes")
    require(first == piece(ROOT_HASH, _block(1)), "hash_block(root, [1]) is not the same twice: no block is ever found")
    cases += 2

    different = (
        ("the tokens", (ROOT_HASH, two, ()), "[2] is taken for [1]"),
        ("the parent", (first, one, ()), "[1, 1] has two blocks with one hash, as if nothing stood before the second"),
        ("the root", (b"another model", one, ()), "another model's K and V are taken for this one's"),
        ("the extra keys", (ROOT_HASH, one, ("salt",)), "a tenant with a cache salt finds what others have asked"),
    )
    for what, other, so in different:
        same = f"hash_block{_shown(*other)} == hash_block{_shown(ROOT_HASH, one, ())}"
        require(piece(*other) != first, f"does not depend on {what}: {same}, so {so}.")
        cases += 1

    pairs: Sequence[tuple[tuple[bytes, array[int], tuple[str, ...]], tuple[bytes, array[int], tuple[str, ...]]]] = (
        ((ROOT_HASH, _block(1, 2), ()), (ROOT_HASH, _block(2, 1), ())),
        ((ROOT_HASH, _block(1, 23), ()), (ROOT_HASH, _block(12, 3), ())),
        ((ROOT_HASH, _block(256), ()), (ROOT_HASH, _block(1, 0), ())),
        ((ROOT_HASH, _block(1), ("ab", "c")), (ROOT_HASH, _block(1), ("a", "bc"))),
        ((ROOT_HASH, _block(1), ("a", "")), (ROOT_HASH, _block(1), ("", "a"))),
    )
    for one_case, other_case in pairs:
        if piece(*one_case) == piece(*other_case):
            raise Wrong(f"two contents, one hash: hash_block{_shown(*one_case)} == hash_block{_shown(*other_case)}.")
        cases += 1

    leak = "Whoever sends the second block is answered out of the first one's context."
    made_on_purpose = (
        (*COLLIDING, f"Python's hash() of these two tuples is one number: they were searched for, in seconds. {leak}"),
        (
            [0],
            [2**61 - 1],
            "Python's hash() of both numbers is 0. It is made for dictionaries, which compare keys, too",
        ),
        (*SAME_CRC32, f"a CRC is made to notice accidents, and such pairs are computed at once. {leak}"),
        (*SAME_ADLER32, f"sums are made to notice accidents, and such pairs are found by hand. {leak}"),
    )
    for one_ids, other_ids, why in made_on_purpose:
        block, other_block = (ROOT_HASH, array("q", one_ids), ()), (ROOT_HASH, array("q", other_ids), ())
        if piece(*block) == piece(*other_block):
            raise Wrong(
                f"two contents, one hash: hash_block{_shown(*block)} == hash_block{_shown(*other_block)}. {why}"
            )
        cases += 1

    seen: dict[bytes, tuple[int, ...]] = {}
    for number in range(4096):
        content = (number, number % 7, number // 7)
        found = piece(ROOT_HASH, _block(*content))
        require(found not in seen, f"two contents, one hash: {list(content)} and {list(seen.get(found, ()))}")
        seen[found] = content
        cases += 1
    bits = _bits_in(list(seen))
    require(
        bits > 250,
        f"gives 32 bytes that hold no more than {bits} bits, not 256: some are always the same, have few values, or "
        f"are copies of others. Of a hash of {bits} bits a collision takes about 2 ** {bits // 2} tries. Give all 32 "
        "bytes of a cryptographic hash",
    )
    return cases + 1


def _bits_in(hashes: Sequence[bytes]) -> int:
    """Return how many bits of these hashes can be of use: of each byte that is no copy of another, by its values."""
    columns = {bytes(column) for column in zip(*hashes, strict=True)}
    return round(sum(math.log2(len(set(column))) for column in columns))


def _shown(parent: bytes, token_ids: array[int], keys: tuple[str, ...]) -> str:
    name = {ROOT_HASH: "root", b"another model": "another root"}.get(parent, "the hash of [1]")
    return f"({name}, {token_ids.tolist()}{f', {keys}' if keys else ''})"


def live_hash_block(piece: HashBlock) -> str:
    watch = run_with(EngineOverrides(hash_block=piece), enable_prefix_caching=True)
    hits = watch.figures.prefix_hit_rate
    usual = f"with the engine's own {OWN_HIT_RATE:.0%}"
    require(hits > 0.3, f"finds too little: {hits:.0%} of prompt tokens come from the cache, {usual}")
    return f"The engine ran with it: the same words, and {hits:.0%} of all prompt tokens came from the cache."


HASH_BLOCK = Exercise(
    lesson="05",
    name="hash_block",
    contract=contract_hash_block,
    live=live_hash_block,
    reference=hash_block,
    hints=(
        "What decides the numbers in a block of K and V? Its own tokens, and every token before them. You have the "
        "first, and something that stands for the second.",
        "Put all of it into one `bytes` and hash that: `hashlib.sha256(...).digest()`. An `array` gives its bytes by "
        "`token_ids.tobytes()`. Mind that `('ab', 'c')` and `('a', 'bc')` are different keys.",
        "`content = parent + token_ids.tobytes()`, then for each key its length in 8 bytes and its encoded text, then "
        "`sha256(content).digest()`.",
    ),
)


# -- what is shown ---------------------------------------------------------------------------------------------


def num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens belong to a beginning that an earlier prompt has, too."""
    shared = 0
    for index, prompt in enumerate(prompts):
        beginnings = (
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other, strict=False)))
            for other in prompts[:index]
        )
        shared += max(beginnings, default=0)
    return shared


def by_pythons_hash(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """Hash a block as one must not: by Python's `hash()`."""
    return hash((parent, tuple(token_ids), extra_keys)).to_bytes(32, "big", signed=True)


def two_users(hash_block: HashBlock, name: str) -> None:
    """Print what two users are answered whose first blocks have one `hash()`, by an engine with this hash."""
    overrides = EngineOverrides(hash_block=hash_block)
    settings: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 64, "enable_prefix_caching": True}
    print(f"with {name}:")
    with Watch(overrides=overrides, **settings) as watch:
        tokenizer = watch.engine.tokenizer
        assert tokenizer is not None
        end = watch.ids("")[3:]  # the end of the question, and the beginning of the answer
        for user, block in zip(("user 1", "user 2"), COLLIDING, strict=True):
            watch.add(user, [*block, *tokenizer.encode(" Please answer in one sentence."), *end], 19)
            watch.run()
            cached = watch.state.requests[user].num_cached_tokens
            print(f"  {user}: {tokenizer.decode(block[3:])!r}, {cached:2} tokens found")
            print(f"          {watch.text(user)!r}")


def two_beginnings(overrides: EngineOverrides = NO_OVERRIDES) -> None:
    """The second block of A after the first block of B."""
    rest = " How does it work, what does it cost, and why would one use it at all in an engine that serves?"
    settings: dict[str, Any] = {"num_gpu_blocks_override": 48, "max_model_len": 128, "enable_prefix_caching": True}
    with Watch(overrides=overrides, **settings) as watch:
        a = watch.ids("What is chunked prefill?" + rest)
        b = watch.ids("What is a KV cache?" + rest)
        for name, prompt in (("A", a), ("B", b), ("C", b[:16] + a[16:])):
            watch.add(name, prompt, 14)
            watch.run()
            cached = watch.state.requests[name].num_cached_tokens
            print(f"{name}: {cached:2} prompt tokens were found; it answers {watch.text(name)!r}")
