"""A head whose tensors or files are not what its config.json means is refused in a line that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from teachllm.engine.llm_engine import Engine
from tests.spec_decode.heads import forms
from tests.spec_decode.refusals import edited, make, refusal, short

zeros = torch.zeros


@pytest.mark.parametrize(
    ("method", "make_head", "tensors", "says"),
    [
        (
            "eagle",
            forms.eagle_3,
            {"fc.weight": None},
            "{folder} lacks tensor fc.weight, which config.json means (1 missing in all)",
        ),
        ("eagle", forms.eagle_1, {"layers.0.mlp.up_proj.weight": None}, "lacks tensor layers.0.mlp.up_proj.weight"),
        (
            "eagle",
            lambda: forms.eagle_3(draft_vocab_size=200),
            {"d2t": None},
            "lacks tensor d2t, which config.json means (1 missing in all)",
        ),
        (
            "eagle",
            forms.eagle_3,
            {"midlayer.self_attn.sinks": zeros(16)},
            "{file} holds tensor midlayer.self_attn.sinks, which the model of its config.json does not have",
        ),
        (
            "eagle",
            forms.eagle_3,
            {"fc.weight": zeros(64, 128)},
            "{file}: tensor fc.weight has shape [64, 128], config.json means [64, 192]",
        ),
        (
            "eagle",
            lambda: forms.eagle_3(draft_vocab_size=200),
            {"lm_head.weight": zeros(201, 64)},
            "{file}: tensor lm_head.weight has shape [201, 64], config.json means [200, 64]",
        ),
        (
            "eagle",
            lambda: forms.eagle_3(has_embedding=True),
            {"embed_tokens.weight": zeros(100, 64)},
            "{file}: tensor embed_tokens.weight has shape [100, 64], config.json means [512, 64]",
        ),
        (
            "eagle",
            lambda: forms.eagle_3(draft_vocab_size=200),
            {"d2t": torch.full((200,), 400)},
            "{folder}: tensor d2t leads to ids from 400 to 599, outside the vocabulary of 512",
        ),
        (
            "medusa",
            forms.medusa,
            {"blocks.1.layers.0.weight": None, "blocks.2.layers.1.bias": None},
            "{folder} lacks tensor blocks.1.layers.0.weight, which config.json means (2 missing in all)",
        ),
        (
            "medusa",
            lambda: forms.medusa(shares_head=False),
            {"lm_heads.1.weight": None},
            "lacks tensor lm_heads.1.weight",
        ),
        (
            "medusa",
            lambda: edited(forms.medusa(shares_head=False), {f"lm_heads.{head}.weight": None for head in range(3)}),
            {},
            "lacks tensor lm_heads.0.weight",
        ),
        ("medusa", forms.medusa, {"blocks.0.layers.2.weight": zeros(64, 64)}, "holds tensor blocks.0.layers.2.weight"),
        (
            "medusa",
            forms.medusa,
            {"blocks.0.layers.0.weight": zeros(64, 32)},
            "{file}: tensor blocks.0.layers.0.weight has shape [64, 32], config.json means [64, 64]",
        ),
        ("medusa", forms.authors_medusa, {"2.2.weight": None}, "{folder} lacks tensor lm_heads.2.weight"),
    ],
    ids=short,
)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named_with_its_file(
    method: str,
    make_head: Callable[[], forms.Head],
    tensors: dict[str, torch.Tensor | None],
    says: str,
    tmp_path: Path,
) -> None:
    folder = forms.write(tmp_path, edited(make_head(), tensors))
    assert says.format(folder=folder, file=f"{folder}/model.safetensors") in refusal(method, folder)


def test_a_file_that_was_cut_off_is_named_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.eagle_3())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"{file} is truncated: tensor " in refusal("eagle", folder)


@pytest.mark.parametrize(
    ("method", "head", "file"),
    [("eagle", forms.eagle_1(), "pytorch_model.bin"), ("medusa", forms.authors_medusa(), "medusa_lm_head.pt")],
)
def test_pickles_are_read_only_where_they_are_asked_for_and_never_run(
    method: str, head: forms.Head, file: str, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, head, file)
    message = refusal(method, folder)
    assert "only as pickles" in message and "set load_format='pt' in speculative_config if you trust them" in message
    make(method, folder, load_format="pt").close()
    torch.save({"0.0.linear.weight": Engine}, tmp_path / file)
    assert f"{tmp_path / file} cannot be read as plain tensors" in refusal(method, folder, load_format="pt")


def test_a_folder_without_weights_says_what_can_be_done(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.eagle_3(), "elsewhere.bin")
    assert f"{folder} has no .safetensors file: set load_format='dummy'" in refusal("eagle", folder)
    assert f"{folder} has no pytorch_model.bin: set load_format='auto'" in refusal("eagle", folder, load_format="pt")
    (tmp_path / "config.json").unlink()
    for method in ("eagle", "medusa", "draft_model"):
        assert f"{folder} has no config.json" in refusal(method, folder)
