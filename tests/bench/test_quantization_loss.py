"""The table's figures, against what is known by other means."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from statistics import mean

import pytest

from teachllm.bench import quantization_loss
from teachllm.bench.quantization_loss import Compared, Decoding, Scores, divergences, mean_and_error
from teachllm.bench.quantization_loss_plot import write_plot
from teachllm.checkpoint.files import stored_tensors
from tests.thorough import only_thorough


def scores(*likeliest: dict[int, float]) -> Scores:
    """Of positions, by the probabilities of their likeliest tokens."""
    logs = [{token: math.log(p) for token, p in each.items()} for each in likeliest]
    return Scores([max(each.values()) for each in logs], logs, list(range(len(logs))))


def divergence(p: Scores, q: Scores) -> float:
    return mean(divergences(p, q))


def test_perplexity_is_one_over_the_geometric_mean_of_probabilities() -> None:
    assert scores({0: 0.5}, {3: 0.125}).perplexity == pytest.approx(4.0)


def test_the_standard_error_of_answers_of_one_token_is_that_of_a_mean() -> None:
    values = [0.1, 0.3, -0.1, 0.3]  # variance (.05^2 + .15^2 + .25^2 + .15^2) / 3
    assert mean_and_error(values, range(4)) == pytest.approx((0.15, math.sqrt(0.11 / 3 / 4)))
    assert mean_and_error([0.0, 0.0], [0, 1]) == (0.0, 0.0)


def test_the_standard_error_counts_answers_and_not_tokens() -> None:
    values, answers = [0.1, 0.3, -0.1, 0.3], [0, 1, 2, 3]
    once = mean_and_error(values, answers)
    assert mean_and_error(values * 5, answers * 5) == pytest.approx(once)  # the same said five times is no news
    # Sums of what is off from the mean, .15: .1 and -.1, so (.1^2 + .1^2) * 2/1, over 4 tokens.
    assert mean_and_error(values, [0, 0, 1, 1])[1] == pytest.approx(math.sqrt(2 * (0.1**2 + 0.1**2)) / 4)
    assert mean_and_error(values, [0, 0, 0, 0])[1] is None


def test_equal_distributions_do_not_diverge() -> None:
    same = scores({0: 0.7, 1: 0.2}, {5: 0.6})
    assert divergence(same, same) == pytest.approx(0.0, abs=1e-12)


def test_divergence_is_that_of_whole_distributions_where_they_are_known() -> None:
    p, q = scores({0: 0.7, 1: 0.3}, {0: 0.25, 1: 0.75}), scores({0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.75})
    expected = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    assert divergence(p, q) == pytest.approx(expected / 2, rel=1e-6)
    assert divergence(q, p) != pytest.approx(expected / 2, rel=1e-2)


def test_tokens_that_only_one_list_has_count_as_one_event() -> None:
    p, q = scores({0: 0.5, 1: 0.3}), scores({0: 0.4, 2: 0.3})
    assert divergence(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))


def test_a_model_compared_with_itself_loses_nothing(short: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The KV cache holds keys and values of every token, so that they are computed once. " * 3)
    first, second = quantization_loss.compare(
        [(quantization_loss.ORIGINAL, short), ("again", short)],
        quantization_loss.read(text, short, seq_len=24),
        decoding=Decoding(2, 4, 3),
        device="cpu",
    )
    assert (second.perplexity, second.num_bytes) == (first.perplexity, first.num_bytes)
    assert (second.kl_divergence, second.kl_standard_error) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert second.standard_error == 0.0
    assert first.num_bytes == (short / "model.safetensors").stat().st_size
    assert first.tokens_per_s > 0


def test_answers_of_the_same_tokens_are_one_whatever_was_asked(short: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    said = [("KV cache", "It holds keys."), ("kv CACHE", "It holds keys."), ("KV cache", "It holds values.")]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
        for asked, answer in said
    ]
    text.write_text("\n".join(lines))
    found, _ = quantization_loss.measure(short, quantization_loss.read(text, short), Decoding(1, 4, 2), device="cpu")
    assert list(dict.fromkeys(found.answers)) == [0, 1]
    assert found.answers.count(0) == 2 * found.answers.count(1)
    assert len(found.answers) == len(found.logprobs) == len(found.likeliest)


def test_a_file_that_no_tensor_is_read_from_does_not_count(short: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(short, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(stored_tensors(short), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    shutil.copy(short / "model.safetensors", folder / "consolidated.safetensors")
    text = tmp_path / "text.txt"
    text.write_text("Keys and values of a token are kept.")
    (found,) = quantization_loss.compare(
        [("a", folder)], quantization_loss.read(text, folder), Decoding(1, 4, 2), device="cpu"
    )
    assert found.num_bytes == (short / "model.safetensors").stat().st_size


@only_thorough
def test_the_picture_is_a_page_that_needs_no_network(tmp_path: Path) -> None:
    found = [
        Compared(name, 10**6, 2.0, 0.01, kl, 0.01, 100.0)
        for name, kl in (("original", 0.0), ("a<b", 0.1), ("int8", 0.0))
    ]
    write_plot(found, tmp_path / "plot.html", "<model>")
    page = (tmp_path / "plot.html").read_text()
    assert '"name":"int8"' in page and "&lt;model" in page
    assert 'src="http' not in page
    axes = re.findall(r'"yaxis2?":(\{"anchor"(?:[^{}]|\{[^{}]*\})*\})', page)
    assert len(axes) == 2 and all('"type":"log"' in axis for axis in axes)  # a method stands at one height in both
