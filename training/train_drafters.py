"""Trains the three drafters for speculative decoding of the embedded model. A few minutes on one H200.

    python training/train_drafters.py                # writes teachlm-draft, -eagle and -medusa beside teachlm
    python training/train_drafters.py --device cpu --steps 2 --assets /tmp/assets      # a smoke test

All three learn side by side from the same batches, so that the target reads each batch once. What it says is
learned by heart, and so are the guesses: fresh conversations of the same kind, with no need of generated text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from dialogues.corpus import CorpusRows, make_corpus
from draft_model import TrainedDraftModel
from drafting import load_target, read
from eagle import TrainedEagle
from medusa import TrainedMedusa
from train import LONG, LONG_SHARE, SHORT, batches, learning_rate, make_optimizer

ASSETS = Path(__file__).resolve().parent.parent / "teachllm" / "assets"
DRAFTERS: dict[str, type[TrainedDraftModel] | type[TrainedEagle] | type[TrainedMedusa]] = {
    "teachlm-draft": TrainedDraftModel,
    "teachlm-eagle": TrainedEagle,
    "teachlm-medusa": TrainedMedusa,
}
PEAKS = {"teachlm-draft": 5e-3, "teachlm-eagle": 7e-3, "teachlm-medusa": 2e-2}


def train(
    drafters: dict[str, Any],
    peaks: dict[str, float],
    target: Any,
    short: CorpusRows,
    long: CorpusRows,
    args: argparse.Namespace,
) -> None:
    optimizers = {name: make_optimizer(drafter, args.device) for name, drafter in drafters.items()}
    started = time.time()
    for step, (ids, spoken) in enumerate(batches(short, long, args.tokens, args.steps, args.device)):
        losses = {}
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            batch = read(target, ids, spoken)
        for name, drafter in drafters.items():
            for group in optimizers[name].param_groups:
                group["lr"] = learning_rate(step, args.steps, peaks[name])
            with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
                losses[name] = drafter.loss(batch)
            losses[name].backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad(set_to_none=True)
        if step % 200 == 0 or step == args.steps - 1:
            shown = "  ".join(f"{name} {loss.item():.4f}" for name, loss in losses.items())
            print(f"step {step:5d}  loss {shown}  {ids.shape[1]:4d}  {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=ASSETS, help="where the drafters go")
    parser.add_argument("--target", type=Path, default=ASSETS / "teachlm")
    parser.add_argument("--only", choices=DRAFTERS, nargs="+", default=list(DRAFTERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=0, help="tokens in a batch; 0: 32,768, on a CPU 512")
    parser.add_argument("--seed", type=int, default=2, help="teachlm itself was trained with 1")
    args = parser.parse_args()
    args.tokens = args.tokens or (32_768 if args.device == "cuda" else 512)

    torch.set_float32_matmul_precision("high")
    started = time.time()
    num_long = int(args.steps * LONG_SHARE) * max(1, args.tokens // LONG)
    num_short = (args.steps - int(args.steps * LONG_SHARE)) * max(1, args.tokens // SHORT)
    short = make_corpus(args.target, args.seed * 10**12, num_short, SHORT)
    long = make_corpus(args.target, args.seed * 10**12 + 5 * 10**11, max(1, num_long), LONG)
    print(f"corpus: {time.time() - started:.0f} s, {short.spoken.mean():.0%} of it answers", flush=True)

    target = load_target(args.target, args.device)
    drafters = {}
    for name in args.only:
        torch.manual_seed(args.seed)
        drafters[name] = DRAFTERS[name].fresh(target).to(args.device)
    train(drafters, PEAKS, target, short, long, args)
    for name, drafter in drafters.items():
        drafter.save(args.assets / name)
        size = sum(path.stat().st_size for path in (args.assets / name).iterdir())
        parameters = sum(p.numel() for p in drafter.parameters())
        print(f"{args.assets / name}: {parameters / 1e6:.2f} M parameters, {size / 1e6:.2f} MB")
    print(f"{time.time() - started:.0f} s in all")


if __name__ == "__main__":
    main()
