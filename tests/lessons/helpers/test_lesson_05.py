"""Lesson 05: the engine's own hash keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

import zlib
from array import array
from hashlib import md5, sha256

import pytest

from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.exercise import run_with
from teachllm_lessons.helpers.lesson_05 import (
    COLLIDING,
    HASH_BLOCK,
    OWN_HIT_RATE,
    by_pythons_hash,
    num_shared,
    two_beginnings,
    two_users,
)
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def without_parent(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(token_ids.tobytes() + "".join(extra_keys).encode()).digest()


def without_lengths(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(parent + token_ids.tobytes() + "".join(extra_keys).encode()).digest()


def of_digits(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(parent + "".join(map(str, token_ids)).encode() + repr(extra_keys).encode()).digest()


def of_the_numbers(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return hash((parent, *token_ids, extra_keys)).to_bytes(32, "big", signed=True)


def a_long_hash_of_a_short_one(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(str(hash((parent, tuple(token_ids), extra_keys))).encode()).digest()


def short(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return HASH_BLOCK.reference(parent, token_ids, extra_keys)[:8]


def padded(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return short(parent, token_ids, extra_keys) + bytes(24)


def repeated(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return short(parent, token_ids, extra_keys) * 4


def in_hexadecimal(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return md5(HASH_BLOCK.reference(parent, token_ids, extra_keys)).hexdigest().encode()


def by_crc32(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return zlib.crc32(parent + token_ids.tobytes() + repr(extra_keys).encode()).to_bytes(32, "big")


def by_adler32(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return zlib.adler32(parent + token_ids.tobytes() + repr(extra_keys).encode()).to_bytes(32, "big")


def by_xor(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    mixed = int.from_bytes(parent, "big")
    for token_id in token_ids:
        mixed ^= token_id
    return (mixed ^ len("".join(extra_keys))).to_bytes(32, "big")


def of_nothing(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> None:
    sha256(parent + token_ids.tobytes()).digest()


def test_the_engines_own_is_right() -> None:
    keeps_contract(HASH_BLOCK, "prompt tokens came from the cache")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (without_parent, r"does not depend on the parent: hash_block\(the hash of \[1\], \[1\]\) == hash_block\(root"),
        (without_lengths, r"two contents, one hash: .*\('ab', 'c'\).*\('a', 'bc'\)"),
        (of_digits, r"two contents, one hash: .*\[1, 23\].*\[12, 3\]"),
        (of_nothing, r"hash_block\(root, \[1\]\) is None: give 32 bytes"),
        (short, "give 32 bytes"),
        (
            by_pythons_hash,
            r"\[1, 296, .*, 318\]\) == .*\[1, 296, .*, 2484\]\). Python's hash.* answered out of the first",
        ),
        (a_long_hash_of_a_short_one, "Python's hash.. of these two tuples is one number: they were searched for"),
        (
            of_the_numbers,
            r"\[0\]\) == hash_block\(root, \[2305843009213693951\]\). Python's hash.. of both numbers is 0",
        ),
        (by_crc32, r"\[0, 0, 0, 0\].*\[249, 1495, 145, 0\].*a CRC is made to notice accidents"),
        (by_adler32, r"\[0, 2, 0\].*\[1, 0, 1\].*sums are made to notice accidents"),
        (by_xor, r"two contents, one hash: .*\[1, 2\].*\[2, 1\]"),
        (padded, r"no more than 64 bits, not 256.* about 2 \*\* 32 tries"),
        (repeated, r"no more than 64 bits, not 256"),
        (in_hexadecimal, r"no more than 128 bits, not 256"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(HASH_BLOCK, piece, words)


def test_two_blocks_have_one_hash_in_python_and_two_in_the_engine() -> None:
    one, other = (array("q", block) for block in COLLIDING)
    assert len(one) == len(other) == 16 and all(0 <= token_id < 4096 for token_id in [*one, *other])
    assert hash(tuple(one)) == hash(tuple(other))
    assert HASH_BLOCK.reference(b"", one) != HASH_BLOCK.reference(b"", other)


@only_thorough
def test_by_pythons_hash_one_user_gets_the_answer_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    for piece, found, is_leak in ((by_pythons_hash, 16, True), (HASH_BLOCK.reference, 0, False)):
        two_users(piece, "it")
        _, first, first_answer, second, second_answer = capsys.readouterr().out.splitlines()
        assert "What is a draft model?" in first and "What is a KV cache?" in second
        assert f"{found:2} tokens found" in second
        assert (second_answer == first_answer) is is_leak and ("draft model" in second_answer) is is_leak


@only_thorough
def test_the_hit_rate_that_the_contract_names_is_the_engines_own() -> None:
    assert run_with(EngineOverrides(), enable_prefix_caching=True).figures.prefix_hit_rate == pytest.approx(
        OWN_HIT_RATE, abs=0.005
    )


def test_shared_tokens_are_those_of_the_longest_beginning() -> None:
    assert num_shared([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 4, 9]]) == 2 + 1 + 3


@only_thorough
def test_without_a_parent_in_the_hash_the_third_answer_is_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for overrides in (EngineOverrides(), EngineOverrides(hash_block=without_parent)):
        two_beginnings(overrides)
        answers.append(capsys.readouterr().out.splitlines()[-1])
    assert "16 prompt tokens" in answers[0] and "32 prompt tokens" in answers[1]
    assert answers[0].partition("answers")[2] != answers[1].partition("answers")[2]


@only_thorough
def test_without_a_fault_only_what_is_the_same_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    two_beginnings()
    found = [line.split(":")[1].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert found == ["0", "0", "16"]
