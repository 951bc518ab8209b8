"""Lesson 05, prefix caching: what is judged, and what a planted fault looks like."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from teachllm.core.prefix_cache import HashBlock, hash_block
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.exercise import Exercise, Wrong, require, run_with
from teachllm_lessons.watch import Watch

ROOT_HASH = b"the model"


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

    seen: dict[bytes, tuple[int, ...]] = {}
    for number in range(4096):
        content = (number, number % 7, number // 7)
        found = piece(ROOT_HASH, _block(*content))
        require(found not in seen, f"two contents, one hash: {list(content)} and {list(seen.get(found, ()))}")
        seen[found] = content
        cases += 1
    return cases


def _shown(parent: bytes, token_ids: array[int], keys: tuple[str, ...]) -> str:
    name = {ROOT_HASH: "root", b"another model": "another root"}.get(parent, "the hash of [1]")
    return f"({name}, {token_ids.tolist()}{f', {keys}' if keys else ''})"


def live_hash_block(piece: HashBlock) -> str:
    watch = run_with(EngineOverrides(hash_block=piece), enable_prefix_caching=True)
    hits = watch.figures.prefix_hit_rate
    require(hits > 0.3, f"finds too little: {hits:.0%} of prompt tokens come from the cache, with the engine's own 59%")
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


def two_beginnings() -> None:
    """The second block of A behind the first block of B."""
    please = " Please tell me. Please do tell me, in one short sentence and in plain words."
    with Watch(num_gpu_blocks_override=48, max_model_len=128, enable_prefix_caching=True) as watch:
        a = watch.ids("What is a draft model?" + please)
        b = watch.ids("What is a logit?" + please)
        for name, prompt in (("A", a), ("B", b), ("C", b[:16] + a[16:])):
            watch.add(name, prompt, 14)
            watch.run()
            cached = watch.state.requests[name].num_cached_tokens
            print(f"{name}: {cached:2} prompt tokens were found; it answers {watch.text(name)!r}")
