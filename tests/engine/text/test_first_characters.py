"""The text of an answer begins with the answer: no character of the prompt's end is in it, whole or in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from teachllm.engine.text.detokenizer import IncrementalDetokenizer
from teachllm.engine.text.tokenizer import Tokenizer, _TokenizersBackend
from teachllm.sampling_params import SamplingParams


def byte_fallback() -> Tokenizer:
    """A tokenizer as Llama 2, Mistral 7B and Gemma have: what is no word is bytes."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁t",
        "an",
    ]
    merges = [("▁", "t"), ("a", "n")]
    vocab = {word: i for i, word in enumerate(words)}
    rust = RustTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip: Any = decoders.Strip(" ", 1, 0)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    rust.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(_TokenizersBackend(rust), {"eos_token": "</s>"}, {})


TOKENIZER = byte_fallback()
ENDS = [
    "great",
    "🎉🎉",
    "字👍",
    "🇩🇪",
    "日本",
    "👨‍👩‍👧‍👦",
    "é",
    "🏳️‍🌈🏳️‍🌈",
    "\N{REPLACEMENT CHARACTER}",
    "🎉\N{REPLACEMENT CHARACTER}🎉",
]


def streamed(prompt: list[int], output: list[int], **params: Any) -> str:
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt, SamplingParams(max_tokens=None, **params))
    for token_id in output:
        detokenizer.append([token_id])
    detokenizer.finish()
    return detokenizer.text


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("answer", [" thanks", "an", "🎉", "字字"])
def test_an_answer_after_characters_of_several_tokens_begins_with_itself(end: str, answer: str) -> None:
    prompt = TOKENIZER.encode(f"so {end}")
    output = TOKENIZER.encode(f"x{answer}")[2:]
    whole = TOKENIZER.decode(prompt + output)
    assert streamed(prompt, output) == whole[len(TOKENIZER.decode(prompt)) :]


@given(
    prompt=st.text(st.sampled_from("ab té字🎉🇩🇪\N{REPLACEMENT CHARACTER}"), max_size=12),
    answer=st.text(st.sampled_from("ab té字🎉🇩🇪\N{REPLACEMENT CHARACTER}"), min_size=1, max_size=12),
)
def test_after_whole_characters_text_is_what_all_ids_at_once_give(prompt: str, answer: str) -> None:
    output = TOKENIZER.encode(f"x{answer}")[2:]
    prompt_ids = TOKENIZER.encode(f"so {prompt}")
    before, whole = (TOKENIZER.decode(ids) for ids in (prompt_ids, prompt_ids + output))
    assert streamed(prompt_ids, output) == whole[len(before) :]
