# %% [markdown]
# # 08 · Attention in Triton: one pass over K and V
#
# Lesson 07 turned logits into a token. What takes the time comes before that: attention, the one part of a step that
# grows with every token of a sequence. Written as in a textbook it moves far more bytes than the cache holds. Here
# you write the inner loop of a GPU *kernel* (a function that the GPU runs in many copies at once, called *programs*)
# that moves each of them once, and the engine decodes with it.
#
# *Needs: 01 (attention, the cache), 02 (block tables). About 30 minutes. No GPU is needed: an
# interpreter runs the kernels in Python, thousands of times slower and with the same results. It is Triton's own on
# Linux; elsewhere, where there is no Triton, it is `teachllm_kernels/torch_interpreter.py`.*

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm_kernels._triton import tl, triton  # noqa: F401 (Triton, or what stands in for it where there is none)
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_08 import RESCALINGS, UPDATE, draw_roofline, draw_tiles, rescalings_of_all_orders
from teachllm_lessons.helpers.lesson_08_kernels import Probe, run_tile
from teachllm_lessons.picture import bars
from teachllm_lessons.results import committed
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: where do the bytes come from?
#
# softmax(q kᵀ) v as it is written: compute a matrix of scores, write it to memory, read it for the softmax, write the
# weights, read them to multiply by V. A probe in the engine counts for a long prompt what that moves, and what has to
# be moved in any case: Q, K and V in, the result out (2 bytes a number, all layers).

# %%
probe = Probe()
with Watch(
    overrides=EngineOverrides(attention=probe),
    num_gpu_blocks_override=96,
    max_model_len=1536,
    max_num_batched_tokens=1536,
) as watch:
    watch.add("A", "Paged attention reads keys and values through a block table. " * 120, max_tokens=1)
    watch.run()
print(f"a prompt of {len(watch.outputs['A'].prompt_token_ids):,} tokens")
moved = {"Q, K, V and the result": probe.once / 1e6, "scores and weights": probe.scores / 1e6}
bars(moved, "MB that attention moves, all layers")

# %% [markdown]
# Nearly all of the traffic is for numbers that are not results: scores are only a step on the way. And it grows with
# the square of the length. That matters because of how a GPU's memory is built. For an A100 the FlashAttention paper
# gives:
#
# | memory | size | bandwidth |
# |---|---|---|
# | on the chip (shared memory of all multiprocessors) | 20 MB | 19 TB/s |
# | the GPU's own memory (HBM) | 40 GB | 1.5 TB/s |
# | the host's | more | 0.01 TB/s |
#
# A kernel that keeps a small tile of scores on the chip, uses it and forgets it, never pays for the matrix. What stands
# in the way is softmax: it needs the largest score and the sum of *all* weights before it can give the first result.
#
# ## Show: a tile through the block table
#
# This is how the engine's decode kernel fetches a tile of keys. A program has a block table and a range of keys; it
# needs no contiguous cache.

# %%
from teachllm_kernels.attention import decode_tile, paged_decode

show(
    decode_tile.keys_and_values,
    {
        "kv_row =": "the physical block that the table names, and the place inside of it; one address for each key",
        "k_ptrs, v_ptrs =": "K comes transposed, [D, TILE], since it is multiplied by the queries from the right",
        "k = tl.load": "a load of a whole tile; what the mask leaves out is not read",
    },
)

# %% [markdown]
# A kernel is run by a grid of **programs**. Each handles one KV head of one sequence, for all query heads that share it
# (they are the rows of a matrix product, so K and V are read once for all of them), and goes through the keys tile by
# tile. What it keeps between two tiles are three things for each row: the largest score so far, the sum of weights, and
# the weighted sum of V, *both relative to that largest score*.
#
# ## Step: online softmax in numbers
#
# One row, two keys per tile, V of one column. `run_tile` sends a tile through the engine's own update, interpreted.
# Scores are in base 2 (multiplied by log₂ e beforehand): 2ˣ is what the hardware computes.

# %%
tiles = [([1.0, 0.0], [10.0, 20.0]), ([3.0, 1.0], [30.0, 40.0]), ([2.0, 3.0], [50.0, 60.0])]
state = None
for scores, v in tiles:
    state = run_tile(decode_tile.add_tile, torch.tensor([scores]), torch.tensor([v]).T, state)
    largest, total, acc = (each.item() for each in state)
    print(f"{scores}: largest {largest:g}, total {total:.4f}, acc {acc:.4f}; acc / total = {acc / total:.4f}")

everything = torch.tensor([score for scores, _ in tiles for score in scores])
values = torch.tensor([value for _, v in tiles for value in v])
print(f"softmax over all six at once: {torch.softmax(everything * torch.log(torch.tensor(2.0)), 0) @ values:.4f}")

# %% [markdown]
# After the first tile `total` is 2⁰ + 2⁻¹ = 1.5, relative to 1. The second tile brings a 3, so what was there shrinks
# by 2¹⁻³ = ¼ before 2⁰ + 2⁻² is added: 0.375 + 1.25 = 1.625. After every tile acc / total is exact for the keys so
# far. This is *online softmax* (Milakov and Gimelshein, 2018). Now in the engine: a request decodes, and the probe
# keeps what its heads see.

# %%
probe = Probe()
watch = Watch(overrides=EngineOverrides(attention=probe), num_gpu_blocks_override=48, max_model_len=512)
watch.add("A", "Explain paged attention, continuous batching and chunked prefill to me. " * 14, max_tokens=8)
watch.step()
watch.step()

# %%
one = probe.decodes[3][0]  # of layer 3, the only request
draw_tiles(one.scores[6], 32, one.blocks)

# %% [markdown]
# Each bar of the upper picture is the score of a key, and the colours change with the tile. At each step of the red
# line everything summed up so far has to shrink: after the second tile `total` is less than after the first, although
# weights are only ever added.
#
# > **Myth: FlashAttention is faster because it approximates, or computes less.** It computes the same softmax, exactly,
# > with a few more multiplications. It moves fewer bytes.
#
# A long sequence would be one program's work while the rest of the GPU waits. So its keys are cut into **splits**, one
# program each (flash-decoding), and each leaves a pair: its result v, and s = log Σ exp(score), the *log-sum-exp* of
# its scores, which is the weight of v. Two pairs become one, in any order and any grouping. (Here in
# the natural base, as in the picture above: the same rule, with e in place of 2.)


# %%
def part(first, last):
    """What the program of keys [first, last) leaves: (v, s), for all heads."""
    s = torch.logsumexp(one.scores[:, first:last], dim=-1, keepdim=True)
    return torch.einsum("hk,khd->hd", torch.exp(one.scores[:, first:last] - s), one.v[first:last]), s


def merge(a, b):
    s = torch.logaddexp(a[1], b[1])
    return a[0] * torch.exp(a[1] - s) + b[0] * torch.exp(b[1] - s), s


whole = part(0, len(one.v))
a, b, c = part(0, 64), part(64, 128), part(128, len(one.v))
orders = {
    "(a + b) + c": merge(merge(a, b), c),
    "a + (b + c)": merge(a, merge(b, c)),
    "(c + a) + b": merge(merge(c, a), b),
}
for name, merged in orders.items():
    print(f"{name} differs from one pass by {(merged[0] - whole[0]).abs().max():.0e}")
print(f"the mean of a, b and c, by {((a[0] + b[0] + c[0]) / 3 - whole[0]).abs().max():.0e}")

# %% [markdown]
# Up to rounding, merging is associative and commutative, so programs may end in any order. It has another use. If 64
# requests share a system prompt, attention to it can be computed once for all their queries, as one product with 64
# rows, and merged with each request's own part: *cascade attention*. (teachllm's kernels do not: each request reads
# its whole table, and finds some of it in the GPU's second-level cache.)
#
# > **Myth: cascade attention gains by sharing memory.** Prefix caching shares the memory already. What cascade saves is
# > reading the shared K and V again for every request.
#
# ## Predict
#
# `total` and `acc` are rescaled when a tile has a larger score than all before it. The first tile has nothing to
# rescale. Take a sequence of six tiles whose scores come in random order, so that each of the six is as likely as any
# other to hold the largest score of all. **How many times, on average, does the kernel rescale?**

# %%
yours = None

RESCALINGS.compare(yours, rescalings_of_all_orders(6))

# %% [markdown]
# ## Build: the inner loop
#
# Write `update`, in Triton: one tile's step of online softmax. It is called by a small decode kernel
# (`lesson_08.py`, `_decode`) for every tile, and so by the engine for every layer and token.
#
# `scores` [rows, keys] are in base 2 and -inf where masked; `v` is [keys, D]; `largest` and `total` are
# [rows], `acc` is [rows, D]. Return the three as they are after this tile. At first `largest` is -inf, the others 0.
# A whole row of a tile may be -inf, even of the first one: `total` and `acc` stay as they were, and nothing may be NaN.
# You need `tl.maximum`, `tl.max(x, axis=1)`, `tl.sum(x, axis=1)`, `tl.exp2`, `tl.where`, `tl.dot`, and `x[:, None]`.
#
# Stuck? `UPDATE.hint(1)`, then 2, then 3.


# %%
@triton.jit
def update(scores, v, largest, total, acc):
    raise NotImplementedError  # yours


checked = check(UPDATE, update)
checked

# %% [markdown]
# `checked.piece` is yours if it is right, else the engine's own. Either is what a GPU would compile: Triton turns
# `tl.dot` into tensor-core instructions and deals rows out to threads. Here it is Python: `print` what you like.
#
# Real scores are not in random order. The decode above has 178 keys in six tiles; here are all heads of all layers:

# %%
rises, num_later = probe.rises(32)
print(f"{rises} of {num_later} tiles after the first rescale: {rises / num_later:.0%}")
print(
    "the largest score lies in", ", ".join(f"the {where} for {count} heads" for where, count in probe.peaks(32).items())
)
print(f"weight of the first token: {probe.weight_of_first():.1%} on average")

# %% [markdown]
# Half of them, more than a random order would have, as the largest score is mostly in the last tile. That is no law.
# This small model, asked right after its prompt, looks mostly at the end of the question and at the tokens of the chat
# template behind it. Many large models give much of their attention to the very first token, an *attention sink* (Xiao
# et al., *Efficient Streaming Language Models with Attention Sinks*, 2023): the largest score then lies in the first
# tile, and nothing after it is rescaled. teachlm has no such sink, as the last line shows. A kernel has to be right in
# any order.
#
# ## Break: something is missing
#
# One line of the kernels that serve has been changed, in a copy. The question has more than one tile of tokens, and
# the GPU is pretended to be so small that each tile is a split of its own.

# %%
broken = plant("08b")
broken.symptom("teachllm_lessons.helpers.lesson_08:long_answer")

# %% [markdown]
# Another answer, and a fluent one so far. A short question would be answered as ever. Which part of the computation
# knows of splits at all? Guess a file, then a function:
# `broken.guess("kernels/teachllm_kernels/attention/paged_decode.py")`.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# Another one to find: `plant("08a")`, with `symptom("teachllm_lessons.helpers.lesson_08:rising_scores")`.
#
# ## Measure
#
# An interpreter says nothing of speed. So these figures are of a GPU, from `benchmarks/results`: decode attention with
# K and V in blocks in random order, 32 query and 8 KV heads of 128, 2 bytes a number. First, what the kernel reaches of
# the memory's bandwidth.

# %%
path, decode = committed("decode-attention")
lengths = {"8 x 16,448": [16448] * 8, "64 x 1,088": [1088] * 64, "1 x 16,448": [16448], "1 x 300": [300]}
fused = {each["shape"]: each for each in decode["results"] if each["kernel"] == "fused" and each["num_heads"] == 32}
work = {name: paged_decode.cost([1] * len(lens), lens, 32, 8, 128) for name, lens in lengths.items()}
reached = {name: work[name][0] / fused[name]["us"] / 1e6 for name in lengths}
most = decode["ceilings"]["read_bandwidth"] / 1e12
print(f"{decode['device']}, commit {decode['commit'][:9]}: reads at most {most:.2f} TB/s")
for what, megabytes in moved.items():
    print(f"the prompt of this lesson's question at {most:.2f} TB/s, {what}: {megabytes / most:.0f} us")
bars(reached, "TB/s (sequences x tokens)")

# %% [markdown]
# Where there is enough to read, the kernel reaches over nine tenths of the memory's bandwidth: the arithmetic on the
# way hardly counts. One sequence alone is different. It has few bytes to read, and waits three times in a row: for the
# query, for the first tile, for the other splits. All of them in one picture, a roofline:

# %%
_, prefill = committed("prefill-attention")
prompt = next(
    each
    for each in prefill["results"]
    if each["shape"] == "1 x 16,384" and each["num_heads"] == 32 and each["kernel"].startswith("hopper_prefill")
)
points = [
    (f"decode {name}", flops / num_bytes, flops / fused[name]["us"] * 1e6) for name, (num_bytes, flops) in work.items()
]
num_bytes, num_flops = paged_decode.cost([16384], [16384], 32, 8, 128)
points.append(("prompt of 16,384", num_flops / num_bytes, prompt["tflops"] * 1e12))
draw_roofline(decode["ceilings"], "attention_flops", points, f"{decode['device']}: attention under its roof")

# %% [markdown]
# A decode does 4 operations per byte (4 query heads share a KV head), however long the sequence. So it stands below the
# slope, where bandwidth is the limit. A prompt uses each key for thousands of queries and stands below the flat part. A
# better kernel moves a point up towards the roof; moving it to the right takes fewer bytes (lesson 11) or more queries
# per step and sequence (lesson 10).
#
# **What the papers say.** FlashAttention (Dao et al., 2022) reports attention 7.6 times as fast as PyTorch's on GPT-2,
# and Flash-Decoding (Dao et al., 2023) generation up to 8 times as fast on very long sequences. The first is about
# bytes, as in this lesson's question: its ratio grows with the prompt. The second is about splits: for a decode scores
# are few bytes beside K and V, and what is gained is that the whole GPU reads.
#
# **What is still wasted.** The kernel is as fast as memory, and a step of a model runs well over a hundred kernels.
# Python has to start each of them. *Next: 09, CUDA graphs and asynchronous scheduling.*
