"""What ranks disagree about is named, with who says what."""

from __future__ import annotations

import pytest

from teachllm import EngineConfig
from teachllm.worker.processes.agreement import check_agreement, facts_of


def test_equal_ranks_agree_whatever_their_device() -> None:
    check_agreement({rank: facts_of(EngineConfig(device=f"cuda:{rank}")) for rank in range(2)})


def test_the_first_difference_is_named_with_its_ranks() -> None:
    facts = {rank: facts_of(EngineConfig()) for rank in (2, 1, 0)}
    facts[1]["torch"] = "1.0"
    with pytest.raises(
        ValueError, match=r"disagree about torch: '.*' at ranks 0, 2; '1.0' at rank 1: install the same"
    ):
        check_agreement(facts)
    facts = {rank: facts_of(EngineConfig(block_size=size)) for rank, size in enumerate((16, 32))}
    with pytest.raises(ValueError, match="about block_size: 16 at rank 0; 32 at rank 1: start all ranks with the same"):
        check_agreement(facts)
