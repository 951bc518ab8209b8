"""What rounding to nearest costs, by bits and group size: perplexity, and KL divergence to the unrounded model.

PYTHONPATH=.:kernels:cli python3 benchmarks/rounding.py --model teachlm --sizes 256,64,16 [--text FILE] [--output FILE]

All projections of all layers are rounded and dequantized again on a CPU, each group with a zero of its own, so any
number of bits can be tried. The text is the held-out one of `teachllm quantize --compare`, each answer once, or another
one in pieces of 256 tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "cli"), str(ROOT / "benchmarks")]

from h200 import provenance, script_parser  # noqa: E402

from teachllm.bench import quantization_loss  # noqa: E402
from teachllm.checkpoint.files import find_folder  # noqa: E402
from teachllm.quantization.formats import rounding  # noqa: E402

BITS = (8, 4, 3, 2)
WHOLE = 0  # in place of a group size: one scale and zero for the matrix


def write_rounded(folder: Path, out: Path, bits: int, group_size: int) -> None:
    """Copy a checkpoint of one file, with its layers' matrices rounded and dequantized."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2:
            rows = tensor.float().reshape(1, -1) if group_size == WHOLE else tensor.float()
            width = rows.shape[1] if group_size == WHOLE else group_size
            found = rounding.grouped(rows, bits, width, is_symmetric=False, scale_dtype=torch.float32)
            tensors[name] = found.dequantize(torch.float32).reshape(tensor.shape)
    for file in [*folder.glob("*.json"), *folder.glob("*.jinja")]:
        shutil.copyfile(file, out / file.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def measure(model: str, sizes: Sequence[int], text: Path | None) -> dict[str, Any]:
    """Return a model's perplexity, and what each rounding of it costs."""
    folder = find_folder(model)
    every = quantization_loss.read(text, folder, 256)
    documents = list({tuple(each.ids[each.first :]): each for each in every}.values())
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    decoding = quantization_loss.Decoding(1, 4, 2)
    original, _ = quantization_loss.measure(folder, documents, decoding, **settings)
    rows = []
    for bits, size in ((bits, size) for bits in BITS for size in (WHOLE, *sizes)):
        with tempfile.TemporaryDirectory() as out:
            write_rounded(folder, Path(out), bits, size)
            scores, _ = quantization_loss.measure(Path(out), documents, decoding, **settings)
        nats, error = quantization_loss.mean_and_error(quantization_loss.divergences(original, scores), scores.answers)
        rows.append({"bits": bits, "group_size": size, "perplexity": scores.perplexity, "nats": nats, "error": error})
        print(f"{model}: {bits} bits, groups of {size or 'all'}: {nats:.5f} nats, {scores.perplexity:.4g}", flush=True)
    return {
        "text": str(text or "held out"),
        "num_pieces": len(documents),
        "num_tokens": len(original.logprobs),
        "perplexity": original.perplexity,
        "rounded": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="teachlm", help="a folder or hub id of a checkpoint of one file")
    parser.add_argument("--text", type=Path, help="plain text to measure on")
    parser.add_argument("--sizes", default="256,64,16", help="inputs that share a scale, with commas")
    options = parser.parse_args(arguments)
    found = provenance("rounding.py", arguments, "CPU", options.commit) | {"variant": "float32"}
    sizes = [int(size) for size in options.sizes.split(",")]
    found |= {"model": Path(options.model).name, **measure(options.model, sizes, options.text)}
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
