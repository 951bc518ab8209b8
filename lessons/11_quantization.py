# %% [markdown]
# # 11 · Quantization: how few bits can a weight have?
#
# A decode step reads every weight of the model to compute one token per request. Speculation, in lesson 10, got more
# tokens from one such read. This lesson makes the read itself smaller: weights of 16 bits become quantized values of 8
# bits, or 4. It measures what that saves, what it loses, and why the same few bits can be useless or nearly free.
#
# *Needs: 01 (what a decode reads), a little of 03 (prompts compute, decodes read). About 25 minutes.*

# %%
from teachllm.checkpoint.files import find_folder
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_11 import (
    PERCENT_LEFT,
    QUANTIZE,
    WHOLE,
    answer,
    documented,
    kv_blocks,
    nearest_4_bits,
    on_a_gpu,
    rounded,
    rounded_smollm2,
    size_on_disk,
    told_bytes,
)
from teachllm_lessons.helpers.lesson_11_losses import layer_errors, loss
from teachllm_lessons.helpers.pictures.lesson_11 import Together, draw_grids, draw_speeds, draw_trade
from teachllm_lessons.picture import bars
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what does one token wait for?
#
# One request. For its prompt and for its first decodes, the engine counts how many bytes a step has to read and how
# many FLOPs (multiplications and additions) it has to compute.

# %%
with Watch(num_gpu_blocks_override=24, max_model_len=256) as watch:
    watch.add("A", "How does an engine that serves a language model decide which request it computes next? " * 6, 4)
    watch.run()
    for step in watch.trace.steps:
        work, num_tokens = step["roofline"], sum(scheduled["num_tokens"] for scheduled in step["scheduled"])
        num_bytes, num_flops = work["num_bytes"], work["num_flops"]
        print(
            f"step {step['step']}: {num_tokens:3} tokens, {num_bytes / 1e6:.1f} MB, {num_flops / 1e6:7.1f} MFLOP: "
            f"{num_flops / num_bytes:5.1f} FLOPs for each byte"
        )

# %% [markdown]
# A decode reads as much as a prompt does, nearly all of it weights, and does one multiplication and one addition with
# each weight (of 4 bytes on this CPU, hence half a FLOP per byte). A GPU can do well over a hundred FLOPs in the time
# in which it reads a byte. So for one request **a decode's time is bytes over bandwidth**: half the bits take about
# half the time. That is worth some loss.
#
# The obvious way: take the smallest and the largest weight of each matrix, lay 2^bits values evenly between them, and
# round. Let us do just that to all matrices of all layers, and ask the engine.

# %%
for bits in (8, 4, 3, 2):
    model = rounded(bits, WHOLE)
    print(f"{bits} bits: perplexity {loss(model).perplexity:9,.2f}   {answer(model)!r}")
print(f"plain : perplexity {loss().perplexity:9,.2f}   {answer()!r}")

# %% [markdown]
# *Perplexity* is how many equally likely tokens the model seems to choose between at each position of a text: 1 is
# certainty, and blind guessing among this vocabulary's 4,096 tokens gives 4,096. (The text is 99 held-out answers. Our
# model is sure of them: it was taught little besides inference.) 8 bits cost nothing that can be seen. With 3 the model
# falls apart, with 2 it is far worse than guessing.
#
# ## Show: dequantization
#
# The number of bits is not all that matters. A quantized file has three things: quantized values, and for each *group*
# of weights a **scale** (the size of a step from one value to the next) and a **zero point** (which value means 0.0).
#
# The tool that quantizes a model chooses the group size. Below the source are 16 weights of the model and the values
# that 4 bits can represent: if the whole matrix shares a scale, if one output's row does, and if these 16 do.

# %%
from teachllm.layers.weights.quantized_weights import GroupedWeight

show(
    GroupedWeight.dequantize,
    {
        "if self.is_e2m1": "floats of 4 bits have a fixed table of values in place of even steps: skip these lines",
        "1 << (self.bits - 1)": "symmetric: the zero is the middle of the range, not stored; else each group has one",
        "self._of_inputs(self.scales": "a weight is (quantized value - zero) * scale: all there is to it",
    },
    doc=False,
)

# %%
draw_grids("model.layers.1.mlp.down_proj", 178, first=0, count=16, bits=4)

# %% [markdown]
# The row has one weight of 0.99, eleven times its standard deviation. All others pay for such an **outlier**: with one
# scale for the matrix these 16 use 3 of 16 values. In a small group it harms only its neighbours. A scale of 16 bits
# per 128 weights adds an eighth of a bit to each.
#
# ## Step: two engines side by side
#
# Two bits again, but this time each 16 weights have their own scale and zero; beside it the unquantized model. First
# nine steps of both, then the rest.

# %%
models = {"plain": "teachlm", "2 bits, groups of 16": rounded(2, 16)}
Together(models).step(9)

# %%
Together(models).run().sure()

# %% [markdown]
# The same words, from 2 bits. Yet at token 8, the ninth, the coarse model hesitates. Greedy answers hide most of the
# loss: as long as the likeliest token stays the likeliest, nothing shows. The probabilities move. So quantizers are not
# compared by answers but by perplexity, or better by the **KL divergence**: how far all next-token probabilities have
# moved from the unquantized model's, in nats per token (a *nat* is the unit of natural logarithms: if all tokens of a
# text lose 0.01 of it, each is e^0.01 times, or one percent, less likely).
#
# > **Myth: a 4-bit model computes in 4 bits.** With *weight-only* quantization (W4A16) each value is dequantized to
# > 16 bits in the registers of the kernel that multiplies. It saves reads, and no arithmetic at all.
#
# ## Predict
#
# On disk teachlm has 11.8 MB of matrices and 2.1 MB of embedding, all in 16 bits. `teachllm quantize --method rtn`
# writes the matrices as 4-bit values, and a scale of 16 bits per 128 weights, with no zeros (it is symmetric). The
# embedding stays as it is. **How many percent of the model's size are left?**

# %%
yours = None

before, after = find_folder("teachlm"), nearest_4_bits()
left = 100 * size_on_disk(after) / size_on_disk(before)
PERCENT_LEFT.compare(yours, left, before=told_bytes(before), after=told_bytes(after))

# %% [markdown]
# ## Build: the rounding
#
# Write `quantize`. It takes a weight `[out, in]` of float32, the number of bits, and the group size: how many
# neighbouring inputs of one output share a scale. It returns `values` `[out, in]` (whole numbers from 0 to 2^bits - 1),
# `scales` `[out, in / group_size]`, and `zeros` of the same shape, whole numbers in the same range. `(value - zero) *
# scale` must be within half a step of each weight, where a *step* is the range of the group, stretched to include 0.0,
# over 2^bits - 1; and 0.0 must stay exactly 0.0. Scales are above 0, even that of a group of zeros.
#
# Stuck? `QUANTIZE.hint(1)`, then 2, then 3.


# %%
def quantize(weight, bits, group_size):
    raise NotImplementedError  # yours


checked = check(QUANTIZE, quantize)
checked

# %% [markdown]
# ## Break: the same values, three envelopes
#
# GPTQ, AWQ and AutoRound each have a format of their own, and the engine reads all three. One line of it has been
# changed. Below, the *same* quantized values are written in each format, and the engine answers from each.

# %%
broken = plant("11a")
broken.symptom("teachllm_lessons.helpers.lesson_11:three_packings")

# %% [markdown]
# Two formats are read well, so neither the values nor the arithmetic are at fault. The third is refused, with words
# that blame the file. The file is right: AutoRound's own library writes and reads it so. Where would you look? Try
# `broken.guess("teachllm/quantization/formats/auto_round.py")`, then a better file, then a function.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure: bits against loss
#
# On the left your rounding (or the engine's) of teachlm, here and now. On the right a language model of the common
# kind, SmolLM2-135M, as committed: the engine's rounding, measured on docs/server.md. (Its weights come from a file
# that had 4 bits in groups of 32, so groups of that size and smaller would show that file's values; they are left out.)
# The horizontal axis counts everything: a value's bits, and its part of a 16-bit scale and a zero. Bars are standard
# errors.

# %%
cells = [(bits, size) for bits in (4, 3, 2) for size in (256, 64, 16)]
losses = {cell: loss(rounded(*cell, checked.piece)) for cell in cells}
smollm2, source = rounded_smollm2()
other = {
    (row["bits"], row["group_size"]): (row["nats"], row["error"]) for row in smollm2["rounded"] if row["group_size"]
}
print(f"SmolLM2-135M: {smollm2['num_tokens']:,} tokens, perplexity {smollm2['perplexity']:.1f} ({source})")
for row in smollm2["rounded"]:
    if row["group_size"] in (0, 64):
        shared = "groups of 64" if row["group_size"] else "one scale per matrix"
        print(f"  {row['bits']} bits, {shared:20} perplexity {row['perplexity']:13,.1f}")
draw_trade(
    {
        "teachlm": {cell: (each.divergence, each.error) for cell, each in losses.items()},
        "SmolLM2-135M": {cell: found for cell, found in other.items() if cell[0] < 8 and cell[1] != 96},
    }
)

# %% [markdown]
# Compare what takes the same space. Just above 3 bits per weight lie 3-bit values in groups of 256 and 2-bit ones in
# groups of 16, which spend a third of their bits on scales and zeros: the former lose a fifth as much. Smaller groups
# help, more so with fewer bits, and a bit more helps more. Mind the error bars: answers are few, and with 4 bits the
# bars of all three group sizes overlap.
#
# SmolLM2 loses more for the same bits: in groups of 64, 82 times as much with 4 bits, 62 times with 3, and 7 times with
# 2, which make it useless. teachlm is sure of nearly every token, and a sure model forgives much. It does not forgive 2
# bits either: even in groups of 16, where its greedy answer above kept its words, they lose 34 times as much as 4 bits
# in groups of 64. What teachlm shows is which choice loses more; how much it loses, measure on a model like yours.
#
# Most published 4-bit checkpoints have groups of 128, and they are not made by rounding to nearest. That is the best
# for each single weight, and not for the sum of which it is part. **GPTQ** (Frantar et al., 2022) rounds the inputs one
# by one, and lets the remaining ones make up for the error; **AWQ** (Lin et al., 2023) scales weights up where
# activations are large before it rounds; **AutoRound** (Cheng et al., 2023) learns for each weight whether to go up or
# down. All three look at a calibration text. First what each lost on the whole model, as measured once; then one layer,
# here and now, in the same 4-bit grid, by the engine's own quantizers.

# %%
print("all of teachlm, 504 answers (docs/quantization.md):")
for name, each in documented().items():
    print(f"  {name:17} {each['nats']:.5f} nats per token lost")
errors = layer_errors()
bars({name: 100 * each for name, each in errors.of.items()}, f"squared error of {errors.layer}'s output, % of it")

# %% [markdown]
# Over the whole model the gain is smaller than in that layer, and has the same direction: fewer nats for the same
# bytes. (All 504 answers count here, in which sure ones come often; above each counts once.) Each of these figures has
# a standard error of half its size. Compared answer by answer, on five times as much text, GPTQ loses 0.00021 ± 0.00004
# less than `rtn`, and AutoRound 0.00011 ± 0.00004 less than GPTQ (docs/quantization.md). GPTQ's paper reports 3 to 4
# bits per weight for a model of 175 billion parameters with little loss of perplexity.
#
# Now speed. Quantization saves no time on this CPU, where weights are dequantized when they are loaded; so here are
# committed results of an 8-billion-parameter model on a GPU.

# %%
on_gpu, source = on_a_gpu()
print("Qwen3-8B;", source)
draw_speeds(on_gpu)

# %% [markdown]
# The two kinds win in different places.
#
# | | bytes of a weight | multiplied as | a decode | a prompt |
# |---|---|---|---|---|
# | bf16 | 2 | 16 bits | | |
# | weight-only: `int4`, GPTQ, AWQ, AutoRound | 1/2 | 16 bits | fastest for one request | as before |
# | weights and activations: `fp8`, `int8` | 1 | 8 bits, twice the rate | faster | faster |
#
# A quarter of the bytes made one request 2.2 times as fast, not four times: attention, the output head and starting the
# kernels cost what they did. `fp8` (e4m3: four bits of exponent, three of mantissa) is a grid as well, with steps that
# grow with the value; `int8` has steps of one size. Tensor cores multiply either.
#
# **K and V are read, too**, and many long contexts together hold more bytes of them than of weights. With
# `kv_cache_dtype` they are quantized to 8 bits. How many tokens fit into the same megabyte:

# %%
for kv_cache_dtype in ("auto", "int8"):
    num_blocks, watch = kv_blocks(kv_cache_dtype=kv_cache_dtype)
    watch.add("A", "What is a KV cache?", 12)
    print(f"{kv_cache_dtype:5} {num_blocks} blocks, {16 * num_blocks} tokens; answers {watch.run().text('A')!r}")
    watch.close()
print(
    f"Qwen3-8B, long sequences, ms per step: bf16 {on_gpu['bf16']['long']['step_ms']:.2f}, "
    f"K and V in fp8 {on_gpu['fp8-kv']['long']['step_ms']:.2f}"
)

# %% [markdown]
# **What is still wasted.** Everything so far runs on one device. When a model does not fit even in 4 bits, or one
# device is too slow, others can help. How is a model split between them, and what do they have to tell each other?
# *Next: 12, parallelism.*
