"""`teachllm ladder` with one of h200.py's shapes, and random weights in a checkpoint that transformers reads as well.

PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/ladder.py [--models qwen3-0.6b] [--output FILE] [--plot FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "cli"), str(ROOT / "benchmarks")]

from h200 import add_models, provenance, script_parser, write_shape  # noqa: E402

from teachllm.config import EngineConfig  # noqa: E402
from teachllm.engine.observability.ceilings import device_name  # noqa: E402
from teachllm_cli.commands.ladder import climb  # noqa: E402


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write a checkpoint of some shapes, with random weights in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write_shape(name, folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add_models(parser, default=["qwen3-0.6b"])
    parser.add_argument("--plot", type=Path, help="a picture, .svg or .png")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = provenance("ladder.py", arguments, device_name("cuda"), options.commit)
    found["models"] = {}
    is_good = True
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(name, Path(folder))
            config = EngineConfig(model=str(path), device="cuda", skip_tokenizer_init=True)
            found["models"][name], all_same = climb(config, name, options.plot)
        is_good &= all_same
        if options.output:
            options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
