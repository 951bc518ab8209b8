"""Lesson 05: the engine's own hash keeps the contract, and wrong ones are told why they are."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest

from teachllm_lessons.helpers.lesson_05 import HASH_BLOCK, two_beginnings
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def without_parent(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(token_ids.tobytes() + "".join(extra_keys).encode()).digest()


def without_lengths(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(parent + token_ids.tobytes() + "".join(extra_keys).encode()).digest()


def of_digits(parent: bytes, token_ids: array[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    return sha256(parent + "".join(map(str, token_ids)).encode() + repr(extra_keys).encode()).digest()


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
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(HASH_BLOCK, piece, words)


@only_thorough
def test_without_a_fault_only_what_is_the_same_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    two_beginnings()
    found = [line.split(":")[1].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert found == ["0", "0", "16"]
