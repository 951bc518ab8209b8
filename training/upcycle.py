"""A mixture of experts that answers as `teachlm` does, for lessons and tests: no training, a second on a CPU.

    python training/upcycle.py --out /tmp/teachlm-moe
    teachllm chat --model /tmp/teachlm-moe --tensor-parallel-size 2 --enable-expert-parallel

Sparse upcycling makes a mixture of a dense model: every expert begins as a copy of the layer's MLP, and the router at
random (Komatsuzaki et al., "Sparse Upcycling", 2023, https://arxiv.org/abs/2212.05055). There training goes on from
here; this stops. A token's weights add up to 1 and its experts are one function, so whichever it goes to, the sum is
what the MLP gave, up to rounding. The router does read the token, so some experts have much more to do than others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

TEACHLM = Path(__file__).resolve().parent.parent / "teachllm" / "assets" / "teachlm"
NUM_EXPERTS, TOP_K = 8, 2
_MLP = ".mlp.gate_proj.weight"  # where a layer has this, it has an MLP


def expert_of(gate: Tensor, up: Tensor, down: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The same function with other weights: the MLP's hidden units in a random order."""
    order = torch.randperm(len(gate), generator=generator)
    return {"gate_proj": gate[order], "up_proj": up[order], "down_proj": down[:, order].contiguous()}


def upcycle(
    out: Path, dense: Path = TEACHLM, *, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K, seed: int = 1
) -> None:
    """Writes the mixture as a Qwen3-MoE checkpoint, with the tokenizer of the dense one.

    Args:
        out: a folder, which is made.
        dense: a Qwen3 checkpoint in one file.
        top_k: experts of a token.
    """
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(dense / "model.safetensors")
    for name in [name for name in tensors if name.endswith(_MLP)]:
        mlp = name.removesuffix("gate_proj.weight")
        gate, up, down = (tensors.pop(f"{mlp}{which}_proj.weight") for which in ("gate", "up", "down"))
        for expert in range(num_experts):
            for projection, weight in expert_of(gate, up, down, generator).items():
                tensors[f"{mlp}experts.{expert}.{projection}.weight"] = weight
        hidden_size = gate.shape[1]
        router = torch.randn(num_experts, hidden_size, generator=generator) * hidden_size**-0.5
        tensors[f"{mlp}gate.weight"] = router.to(gate.dtype)

    config = json.loads((dense / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"num_experts": num_experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    config |= {"moe_intermediate_size": config["intermediate_size"], "decoder_sparse_step": 1, "mlp_only_layers": []}
    out.mkdir(parents=True, exist_ok=True)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(dense / file, out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dense", type=Path, default=TEACHLM)
    parser.add_argument("--experts", type=int, default=NUM_EXPERTS)
    parser.add_argument("--top-k", type=int, default=TOP_K, help="experts of a token")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"a token cannot go to {args.top_k} of {args.experts} experts: set --top-k to 1-{args.experts}")
    started = time.time()
    upcycle(args.out, args.dense, num_experts=args.experts, top_k=args.top_k, seed=args.seed)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"saved to {args.out}: {args.experts} experts a layer, {size / 1e6:.1f} MB; {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
