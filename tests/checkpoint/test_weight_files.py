"""Which of a folder's files hold the model, and by which names its tensors go."""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm import LLM, SamplingParams
from teachllm.errors import ModelError
from tests.checkpoints import build_model, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPT = {"prompt_token_ids": list(range(5, 25))}


def answer(folder: Path, **settings: str) -> list[int]:
    with closing(LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=16, **settings)) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def random_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return other weights of the same shapes."""
    return random_like(load_file(folder / "model.safetensors"))


def random_like(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(each) for name, each in weights.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_checkpoint("llama3", tmp_path / "model"))


@pytest.mark.parametrize(
    "name",
    [
        *("model_backup.safetensors", "zzz.safetensors", "optimizer.safetensors", "consolidated.safetensors"),
        *("adapter_model.safetensors", "model-00002-of-00002.safetensors"),
    ],
)
def test_what_lies_beside_the_model_changes_nothing(folder: Path, name: str) -> None:
    expected = answer(folder)
    save_file(random_weights(folder), folder / name, metadata={"format": "pt"})
    assert answer(folder) == expected


def test_a_pickle_beside_the_pickled_model_changes_nothing(folder: Path) -> None:
    expected = answer(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    torch.save(random_weights(folder), folder / "pytorch_model_backup.bin")
    (folder / "model.safetensors").unlink()
    assert answer(folder, load_format="pt") == expected


def test_an_index_names_the_files_and_a_stray_shard_is_not_read(tmp_path: Path) -> None:
    whole, folder = Path(make_checkpoint("llama3", tmp_path / "whole")), tmp_path / "shards"
    build_model("llama3").save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    save_file(random_weights(whole), folder / "model-99999-of-99999.safetensors", metadata={"format": "pt"})
    assert answer(folder) == answer(whole)


def test_several_files_and_nothing_that_says_which_of_them_holds_the_model_are_refused(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    expected = answer(folder)  # the only one there
    save_file({"x": torch.ones(1)}, folder / "b.safetensors")
    with pytest.raises(ModelError, match=r"several files with weights \(a.safetensors, b.safetensors\)"):
        answer(folder)
    (folder / "b.safetensors").unlink()
    assert answer(folder) == expected


def test_a_missing_shard_is_named_by_how_many_there_are(tmp_path: Path) -> None:
    build_model("llama3").save_pretrained(tmp_path, max_shard_size="200KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"has {len(shards) - 1} of {len(shards)} shards"):
        answer(tmp_path)


@pytest.mark.parametrize("name", ["._model.safetensors", "consolidated-0001-of-0002.safetensors"])
def test_a_file_that_is_no_models_is_not_looked_at(folder: Path, name: str) -> None:
    expected = answer(folder)
    shutil.move(folder / "model.safetensors", folder / "weights.safetensors")
    (folder / name).write_bytes(b"no tensors")
    assert answer(folder) == expected


def test_weights_in_mistrals_own_format_are_told_from_none(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "consolidated.safetensors")
    with pytest.raises(ModelError, match="only as consolidated files, in Mistral's own format"):
        answer(folder)


def test_a_stray_file_does_not_stand_for_the_pickled_model(folder: Path) -> None:
    expected, weights = answer(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    for name in ("training.safetensors", "model.fp16.safetensors", "model_ema.safetensors"):
        save_file(random_like(weights), folder / name, metadata={"format": "pt"})
        with pytest.raises(ModelError, match="only as pickles"):
            answer(folder)
        for model_impl in ("teachllm", "transformers"):
            assert answer(folder, load_format="pt", model_impl=model_impl) == expected
        (folder / name).unlink()


def test_a_stray_file_does_not_stand_for_pickled_shards(folder: Path) -> None:
    expected, weights = answer(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = dict[str, str]()
    for i, (name, tensor) in enumerate(weights.items(), 1):
        files[name] = f"pytorch_model-{i:05}-of-{len(weights):05}.bin"
        torch.save({name: tensor}, folder / files[name])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_file(random_like(weights), folder / "model_ema.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="only as pickles"):
        answer(folder)
    assert answer(folder, load_format="pt") == expected


def test_a_pickle_in_the_first_format_is_read_and_one_of_other_things_is_refused(folder: Path) -> None:
    expected, weights = answer(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert answer(folder, load_format="pt") == expected
    for other in ([1, 2], {"step": 3, **weights}, {0: torch.ones(1), **weights}):
        torch.save(other, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match="holds something else than tensors by name"):
            answer(folder, load_format="pt")


def test_a_tensor_in_two_shards_is_refused_unless_both_are_the_same(tmp_path: Path) -> None:
    build_model("llama3").save_pretrained(tmp_path, max_shard_size="200KB")
    expected, (first, *_, last) = answer(tmp_path), sorted(tmp_path.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor}, last, metadata={"format": "pt"})
    assert answer(tmp_path) == expected
    save_file(load_file(last) | {name: tensor + 1}, last, metadata={"format": "pt"})
    for model_impl in ("teachllm", "transformers"):
        with pytest.raises(ModelError, match=rf"{first.name} and {last.name} hold different tensors {name}"):
            answer(tmp_path, model_impl=model_impl)


def test_weights_of_float64_are_read(folder: Path) -> None:
    expected, weights = answer(folder), load_file(folder / "model.safetensors")
    save_file({name: each.double() for name, each in weights.items()}, folder / "model.safetensors")
    assert answer(folder) == expected


# -- heads and names ---------------------------------------------------------------------------------------


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint whose output head is its embedding, stored once."""
    folder = Path(make_checkpoint("qwen3", tmp_path / "tied"))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_a_head_that_is_not_the_embedding_is_used_and_said_though_config_ties_them(
    tied: Path, load_format: str
) -> None:
    from transformers import AutoModelForCausalLM

    before, weights = answer(tied), load_file(tied / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    if load_format == "pt":
        torch.save(weights, tied / "pytorch_model.bin")
        (tied / "model.safetensors").unlink()
    else:
        save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"the stored lm_head.weight is not the embedding"):
        found = answer(tied, load_format=load_format)
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    ids = list(PROMPT["prompt_token_ids"])
    for _ in found:
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert found == ids[len(PROMPT["prompt_token_ids"]) :] != before


@pytest.mark.parametrize(
    "how", ["twice", "under the head's name", "without a prefix", "without, under the head's name"]
)
def test_a_tied_pair_is_found_under_any_of_its_names(tied: Path, how: str) -> None:
    expected, weights = answer(tied), load_file(tied / "model.safetensors")
    if how == "twice":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if "head" in how:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    if "without" in how:
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(tied) == expected


def test_a_model_saved_without_its_head_is_a_language_model(tmp_path: Path) -> None:
    model, expected = build_model("qwen3"), answer(Path(make_checkpoint("qwen3", tmp_path / "whole")))
    folder = tmp_path / "without"
    model.model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    for model_impl in ("teachllm", "transformers"):
        assert answer(folder, model_impl=model_impl) == expected
