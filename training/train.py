"""Trains the embedded model, start to finish: tokenizer, corpus, weights. A few minutes on one H200.

    python training/train.py                         # writes teachllm/assets/teachlm
    python training/train.py --device cpu --steps 20 --out /tmp/teachlm      # a smoke test

The loss is taken on what the assistant says. What users say is meant to be unpredictable (made-up words,
typing errors), and learning to predict it would spend capacity on noise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from dialogues.corpus import CorpusRows, make_corpus
from tokenizer import MAX_LENGTH, VOCAB_SIZE, check_template, train_tokenizer

ASSETS = Path(__file__).resolve().parent.parent / "teachllm" / "assets" / "teachlm"
ROPE_THETA = 10_000.0
SHORT, LONG = 512, MAX_LENGTH
LONG_SHARE = 0.25  # of the batches
CONFIG_KEYS = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("attention_dropout", "tie_word_embeddings", "initializer_range", "pad_token_id", "eos_token_id"),
]


def build_model() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def batches(
    short: CorpusRows, long: CorpusRows, tokens: int, steps: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches of about `tokens` tokens, each of one row length; rows are used in order, then again."""
    used = [0, 0]
    for step in range(steps):
        # Every fourth batch is long: spread evenly, so that the end of training sees both.
        kind = int((step + 1) * LONG_SHARE) - int(step * LONG_SHARE)
        rows = (short, long)[kind]
        length = min(rows.ids.shape[1], tokens)
        count = max(1, min(len(rows.ids), tokens // length))
        picked = [(used[kind] + i) % len(rows.ids) for i in range(count)]
        used[kind] += count
        ids = torch.from_numpy(rows.ids[picked, :length].astype("int64"))
        spoken = torch.from_numpy(rows.spoken[picked, :length])
        yield ids.to(device, non_blocking=True), spoken.to(device, non_blocking=True)


def loss_of(model: torch.nn.Module, ids: torch.Tensor, spoken: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens that the assistant says."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # [rows, length - 1, hidden_size]
    wanted = spoken[:, 1:]
    # Logits only where they count: they are the largest tensor of the step.
    logits = model.lm_head(hidden[wanted])  # [num_spoken, vocab_size]
    return F.cross_entropy(logits.float(), ids[:, 1:][wanted])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    warmup = min(200, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: torch.nn.Module, device: str) -> torch.optim.Optimizer:
    """AdamW, whose learning rate is set at every step."""
    # Norm weights are not decayed: pulling a scale to zero is no regularisation.
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")


def train(model: torch.nn.Module, short: CorpusRows, long: CorpusRows, args: argparse.Namespace) -> None:
    model.to(args.device).train()
    optimizer = make_optimizer(model, args.device)
    started = time.time()
    for step, (ids, spoken) in enumerate(batches(short, long, args.tokens, args.steps, args.device)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            loss = loss_of(model, ids, spoken)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == args.steps - 1:
            seconds = time.time() - started
            speed = (step + 1) * args.tokens / seconds
            print(
                f"step {step:5d}  loss {loss.item():.4f}  {ids.shape[1]:4d}  {speed:,.0f} tokens/s  {seconds:.0f} s",
                flush=True,
            )
            if seconds > args.seconds:
                raise SystemExit("out of time: lower --steps")


def save(model: torch.nn.Module, folder: Path) -> None:
    """Weights in bfloat16, and a configuration that old and new versions of transformers read."""
    from safetensors.torch import save_file

    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    written = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | {key: config[key] for key in CONFIG_KEYS}
    # transformers 5 reads rope_parameters, version 4 rope_theta; both names for the dtype likewise.
    written |= {"rope_theta": ROPE_THETA, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
    written |= {"bos_token_id": None, "use_cache": True, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=0, help="tokens in a batch; 0: 65,536, on a CPU 512")
    parser.add_argument("--rows", type=int, default=0, help="short rows to make; 0: as many as the steps use")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="give up after so many seconds of training")
    parser.add_argument("--corpus-only", action="store_true", help="stop once it is made and checked")
    args = parser.parse_args()
    args.tokens = args.tokens or (65_536 if args.device == "cuda" else 512)

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    started = time.time()
    train_tokenizer(args.out, args.seed * 10**9)
    check_template(args.out, args.seed * 10**9 + 1)
    print(f"tokenizer: {time.time() - started:.0f} s", flush=True)
    num_short = args.rows or int(args.steps * (1 - LONG_SHARE)) * max(1, args.tokens // SHORT)
    num_long = args.rows // 8 or max(1, int(args.steps * LONG_SHARE) * (args.tokens // LONG))
    short = make_corpus(args.out, args.seed * 10**12, num_short, SHORT)
    long = make_corpus(args.out, args.seed * 10**12 + 5 * 10**11, num_long, LONG)
    print(f"corpus: {time.time() - started:.0f} s, {short.spoken.mean():.0%} of it answers", flush=True)
    if args.corpus_only:
        return
    model = build_model()
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    train(model, short, long, args)
    save(model, args.out)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"saved to {args.out}: {size / 1e6:.1f} MB; {time.time() - started:.0f} s in all")


if __name__ == "__main__":
    main()
