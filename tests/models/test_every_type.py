"""Models of transformers answer here as there, or are refused for a reason; the thorough half tries every type."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.every_type import rows
from tests.thorough import THOROUGH

EQUAL = {
    *("gemma2", "gemma3_text", "gpt2", "granitemoehybrid", "moshi", "nemotron", "olmo2", "opt"),
}
REFUSED = {"diffllama", "deepseek_v3", "gpt_oss", "mamba"}


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if THOROUGH else EQUAL | REFUSED))
def test_a_type_gives_the_tokens_of_transformers_or_is_refused_by_what_it_has(kind: str) -> None:
    [row] = rows([kind])
    assert row.verdict != "WRONG", row
    if kind in EQUAL | REFUSED:
        assert row.verdict == ("equal" if kind in EQUAL else "refused"), row
