# %% [markdown]
# # 11 · Quantization: how few bits can a weight have?
#
# A decode step reads every weight of the model to make one token for each request. Speculation, in the lesson
# before, made more tokens of one such read. This one makes the read itself smaller: weights of 16 bits become quantized
# values of 8, or 4. What that saves, what it loses, and why the same 4 bits can be useless or nearly free, is measured
# here.
#
# *Needs: 01 (what a decode reads), a little of 03 (prompts compute, decodes read). About 25 minutes.*

# %%
from teachllm.models.checkpoint import find_folder
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_11 import (
    QUANTIZE,
    WHOLE,
    answer,
    documented,
    kv_blocks,
    nearest_4_bits,
    on_a_gpu,
    rounded,
    size_on_disk,
    tensor_bytes,
)
from teachllm_lessons.helpers.lesson_11_losses import layer_errors, loss
from teachllm_lessons.helpers.lesson_11_pictures import Together, draw_grids, draw_speeds
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.predict import predict
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what does one token wait for?
#
# One request. For its prompt and for its first decodes, the engine says how many bytes a step cannot help reading
# and how many FLOPs (multiplications and additions) it cannot help doing.

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
# A decode reads as much as a prompt does, nearly all of it weights, and does one multiplication and one addition
# with each weight (of 4 bytes on this CPU, hence half a FLOP a byte). A GPU could do hundreds of FLOPs in the time
# in which it reads a byte. So **a decode's time is bytes over bandwidth**: half the bits, half the time. That is
# worth some loss.
#
# The obvious way: of each weight matrix take the smallest and the largest weight, lay 2^bits values evenly between
# them, and round. Let us do just that to all matrices of all layers, and ask the engine.

# %%
for bits in (8, 4, 3, 2):
    model = rounded(bits, WHOLE)
    print(f"{bits} bits: perplexity {loss(model).perplexity:9,.2f}   {answer(model)!r}")
print(f"plain : perplexity {loss().perplexity:9,.2f}   {answer()!r}")

# %% [markdown]
# *Perplexity* is how many tokens the model seems to choose between at each position of a text: 1 is certainty, and
# whoever guesses among this vocabulary's 4,096 tokens has 4,096. (Our model is sure of itself: it was taught little
# besides inference.) 8 bits cost nothing that can be seen. With 3 it falls apart, with 2 it is far worse than
# guessing.
#
# ## Show: dequantization
#
# What is wrong is not the number of bits. In the file are three things: quantized values, and for each *group* of
# weights a **scale** (the size of a step from one value to the next) and a **zero point** (which value means 0.0).
#
# The tool that quantizes a model chooses the group size. Below the source are 16 weights of the model and the values
# that 4 bits can represent: if the whole matrix shares a scale, if one output's row does, and if these 16 do.

# %%
from teachllm.quantization.quantized_weights import GroupedWeight

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
# The row has one weight of 0.99, eleven times its standard deviation. All others pay for this **outlier**: with a
# scale for the matrix they use 3 of 16 values. In a small group it harms only its neighbours. A scale of 16 bits for
# each 128 weights adds an eighth of a bit to each.
#
# ## Step: two engines side by side
#
# Two bits again, but this time each 16 weights have their own scale and zero; beside it the unquantized model.
# First nine steps of both, then the rest.

# %%
both = Together({"plain": "teachlm", "2 bits, groups of 16": rounded(2, 16)})
both.step(9)

# %%
both.run().sure()

# %% [markdown]
# The same words, from 2 bits. Yet at token 8, the ninth, the coarse model hesitates. Greedy words hide most of the
# loss: as long as the likeliest token stays the likeliest, nothing shows. What moves is the probabilities. That is
# why quantizers are not compared by answers but by perplexity, or better by the **KL divergence**: how far all
# next-token probabilities have moved from the unquantized model's, in nats per token (a *nat* is the unit of natural
# logarithms: 0.01 of it is a factor of e^0.01, one percent, in a token's probability).
#
# > **Myth: a 4-bit model computes in 4 bits.** With *weight-only* quantization (W4A16) each value is dequantized to
# > 16 bits in the multiplying kernel's registers. It saves reading, and no arithmetic at all.
#
# ## Predict
#
# `teachllm quantize --method rtn` writes 4-bit values in place of 16-bit weights, and a scale for each 128. **How
# many percent of its size on disk is left of teachlm?**

# %%
yours = None

before, after = find_folder("teachlm"), nearest_4_bits()
for name, folder in (("before", before), ("after", after)):
    print(f"{name:7}" + ", ".join(f"{what} {size / 1e6:.2f} MB" for what, size in tensor_bytes(folder).items()))
left = 100 * size_on_disk(after) / size_on_disk(before)
predict("Percent that is left:", yours, left, " %", within=0.1)

# %% [markdown]
# The matrices did shrink to little more than a quarter. The embedding, which is the output head as well, stays as it
# was: what goes into the softmax is sensitive, and in a large model it is a small part. In ours it is a seventh
# before and two fifths after.
#
# ## Build: the rounding
#
# Write `quantize`. It is given a weight `[out, in]` of float32, the number of bits, and the size of a group: so many
# neighbouring inputs of one output. It returns `values` `[out, in]` (whole numbers from 0 to 2^bits - 1), `scales`
# `[out, in / group_size]`, and `zeros` of the same shape, whole numbers in the same range. `(value - zero) * scale`
# must be within half a step of each weight, where a *step* is the range of the group, stretched to include 0.0, over
# 2^bits - 1; and 0.0 must stay exactly 0.0. Scales are above 0, also those of a group of zeros.
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
broken = plant("a zero point off by one")
broken.symptom("teachllm_lessons.helpers.lesson_11:three_packings")

# %% [markdown]
# Two formats are read well, so neither the values nor the arithmetic are at fault: it is how one of them is unpacked.
# And a single step too much in each of a thousand weights adds up in every sum. Where would you look? Try
# `broken.guess("teachllm/quantization/formats/auto_round.py")`, then a better file, then a function.

# %%
broken.reveal()

# %% [markdown]
# The first GPTQ format stores each zero less one. GPTQ's own files get it back on the packed word, before it is
# unpacked (`adds_to_words`), and are unharmed. AutoRound's files are read by the same class, which gives each zero its
# one back by itself: that is the line.
#
# ## Measure: bits against loss
#
# Your rounding (or the engine's), with 4, 3 and 2 bits, in groups of 256, 64 and 16. The horizontal axis counts
# everything: a value's bits, and its share of a 16-bit scale and a zero.

# %%
trade = {}
for bits in (4, 3, 2):
    sizes = [256, 64, 16]
    cost = [bits + (16 + bits) / size for size in sizes]
    trade[f"{bits} bits, groups of 256, 64, 16"] = (
        cost,
        [loss(rounded(bits, size, checked.piece)).divergence for size in sizes],
    )
lines(trade, "bits per weight, scales and zeros included", "KL divergence, nats per token", log="y")

# %% [markdown]
# Compare what takes the same space. Just above 3 bits per weight lie 3-bit values in groups of 256 and 2-bit ones in
# groups of 16, which spend a third of their bits on scales and zeros: the former lose a tenth as much. Small groups
# help, and a bit more helps more. Four bits in groups of 64 or 128 are where most published checkpoints lie. (Few
# answers are scored here. The smallest losses hang on a few tokens, and may change places.)
#
# Round to nearest is the best for one weight, not for the sum of which it is part. **GPTQ** (Frantar et al., 2022)
# rounds the inputs one by one, and lets those still to come make up for the error; **AWQ** (Lin et al., 2023) widens
# weights where activations are large before rounding; **AutoRound** (Cheng et al., 2023) learns for each weight
# whether to go up or down. All three look at a calibration text. First what each lost on the whole model, as
# measured once; then one layer, here and now, in the same 4-bit grid, by the engine's own quantizers.

# %%
print("all of teachlm, 504 answers (docs/quantization.md):")
for name, each in documented().items():
    print(f"  {name:17} {each['MB']:5.1f} MB   {each['nats']:.5f} nats per token lost")
errors = layer_errors()
bars({name: 100 * each for name, each in errors.of.items()}, f"squared error of {errors.layer}'s output, % of it")

# %% [markdown]
# Over the whole model the gain is smaller than in that layer, and has the same direction: fewer nats for the same
# bytes. GPTQ's paper reports 3 to 4 bits per weight for a model of 175 billion parameters with little loss of
# perplexity. Ours is small and sure; take the order from it, not the size.
#
# Now speed. Quantization saves nothing on this CPU, where weights are dequantized when they are read; so here are
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
# | weight-only: `int4`, GPTQ, AWQ, AutoRound | 1/2 | 16 bits | fastest alone | as before |
# | weights and activations: `fp8`, `int8` | 1 | 8 bits, twice the rate | faster | faster |
#
# A quarter of the bytes made one request twice as fast, not four times: attention, the output head and starting the
# kernels cost what they did. `fp8` (e4m3: four bits of exponent, three of mantissa) is a grid as well, with steps
# that grow with the value; `int8` has steps of one size. Tensor cores multiply either.
#
# **K and V are read, too**, and many long contexts together hold more of them than there are weights. With
# `kv_cache_dtype` they are quantized to 8 bits. How many tokens fit into the same megabyte:

# %%
for kv_cache_dtype in ("auto", "int8"):
    num_blocks, watch = kv_blocks(kv_cache_dtype=kv_cache_dtype)
    watch.add("A", "What is a KV cache?", 12)
    print(f"{kv_cache_dtype:5} {num_blocks} blocks, {16 * num_blocks} tokens; says {watch.run().text('A')!r}")
    watch.close()
print(
    f"Qwen3-8B, long sequences, ms per step: bf16 {on_gpu['bf16']['long']['step_ms']:.2f}, "
    f"K and V in fp8 {on_gpu['fp8-kv']['long']['step_ms']:.2f}"
)

# %% [markdown]
# **What is still wasted.** Everything so far is one device. When a model does not fit it even in 4 bits, or one
# device is too slow, others stand beside it. What is to be split between them, and what do they have to tell each
# other?
# *Next: 12, parallelism.*
