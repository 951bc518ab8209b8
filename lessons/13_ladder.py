# %% [markdown]
# # 13 · The ladder: where the speed comes from
#
# Thirteen lessons, and about as many ideas. Each was measured on a workload that shows it best, which flatters all of
# them. Here all climb the same ladder: **one** workload, **one** memory, a setting at a time, from recomputing
# everything to the full engine. No rung but *8-bit weights* (grey in the pictures) may change a greedy token, except
# where rounding decides between two that are equally likely.
#
# *Needs: all that came before, or the patience to look things up. About 20 minutes.*

# %%
from teachllm.bench import ladder
from teachllm.bench.ceilings import ceilings_of
from teachllm.config import EngineConfig
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_13 import (
    COMPUTED_AT_THE_TOP,
    MAX_LEN,
    NUM_SLOTS,
    SETTINGS,
    SMALL,
    bottom,
    climb_often,
    draw_ladder,
    serve,
    tokens_of_eight,
    told_ladder,
    top,
)
from teachllm_lessons.results import committed
from teachllm_lessons.source import show

# %% [markdown]
# ## Question: is this engine slow because of the model?
#
# Eight users ask at once. All eight prompts begin with the same instructions, and one of them (D) brings a long text.
# The engine below is not a toy: it is *the* engine, with its ideas switched off. It serves one request at a time, in a
# slot that has room for the longest.

# %%
slow = serve(bottom())
print(f"{slow.steps} steps for {sum(map(len, slow.tokens.values()))} output tokens; {slow.computed} tokens computed")
slow.watch.timeline(numbers=False)

# %% [markdown]
# The model is the same as ever. The engine around it is slow: H waits for seven others, and each step reads every
# weight of the model for a single row.
#
# ## Show: a rung is a setting
#
# There is no slow copy of the engine that lessons use. Every rung is a configuration of the one that serves.

# %%
show(
    ladder.climb,
    {
        "here = settings | rung.settings(size)": "a rung is the settings below it, and one more",
        "why_not": "a rung that a device cannot climb is left out, with the reason",
        "if rung.stays": "the last rungs are tried one by one: each on top of the same engine, not on each other",
    },
    doc=False,
)

# %%
for rung in ladder.RUNGS:
    changed = ", ".join(f"{name}={value}" for name, value in rung.settings(SMALL).items())
    print(f"{rung.name:22} {changed}")

# %% [markdown]
# A result means little without the best that would be possible. `of_ceiling` compares with that: the tokens per second
# that the machine's own bandwidth and arithmetic would allow, if all requests were served at once and nothing else took
# time (lessons 03 and 08).
#
# ## Step: the same eight requests, at the top
#
# All of it on: small blocks, continuous batching, a token budget that cuts the long prompt, a prefix cache.

# %%
fast = serve(top())
print(f"{fast.steps} steps for {sum(map(len, fast.tokens.values()))} output tokens; {fast.computed} tokens computed")
fast.watch.timeline()

# %% [markdown]
# By step 3 all eight are in: prompts fill the budget of 64 tokens step by step. A computes 36 prompt tokens; the others
# compute only what differs, as their first block is found. D's long prompt is cut, so it delays no running answer; E to
# H start a step or two later.
#
# > **Myth: batching makes each request slower, so it is a trade.** Where the device's reads are what a step waits for,
# > a step with eight rows reads the same weights as a step with one and takes nearly the same time. In steps, A ends as
# > early as before and all others end earlier. The trade begins where arithmetic becomes the limit (lesson 03). A step
# > that waits for its *host* is another matter: the GPU's table below has such rungs.
#
# ## Predict
#
# Eight other requests, all at once, with the settings of the top (blocks of 16 tokens, a prefix cache). Each prompt has
# 60 tokens, and the first 48 are the same in all eight. Each request gets 10 output tokens. **How many tokens does the
# engine compute in all**, prompts and decodes? (The rung at the bottom, which keeps no K and V, computes 5,160.)

# %%
yours = None

computed = tokens_of_eight(top())
uncached, recomputed = tokens_of_eight(bottom()), tokens_of_eight(bottom() | {"enable_kv_cache": False})
COMPUTED_AT_THE_TOP.compare(yours, computed, uncached=uncached, bottom=recomputed, times=recomputed / computed)

# %% [markdown]
# ## Build: find the settings yourself
#
# You have a KV cache of 576 token slots and the eight requests from above. Write `settings`: a function that returns
# fields of `EngineConfig`. The engine must answer the same as at the bottom, in **28 steps or fewer**, and compute
# **320 tokens or fewer**. Steps and tokens, not seconds: they are the same on every machine.
#
# Start from `bottom()`, the settings of the ladder's lower end, and change what you have learned to change. Stuck?
# `SETTINGS.hint(1)`.

# %%
print(f"{NUM_SLOTS} slots, sequences of up to {MAX_LEN} tokens; the bottom has", bottom())


# %%
def settings():
    raise NotImplementedError  # yours: bottom() | {...}


checked = check(SETTINGS, settings)
checked

# %% [markdown]
# ## Break: at which rung does it show?
#
# A ladder is also an instrument. One line of the engine has been changed. Each rung switches one idea on, so the first
# rung at which answers differ, or end, names the idea whose code is broken.

# %%
broken = plant("13a")
broken.symptom("teachllm_lessons.helpers.lesson_13:which_rung")

# %% [markdown]
# This is bisecting by configuration: one rung fails, and all others hold. Where would you look? For instance
# `broken.guess("teachllm/core/drafts.py")`.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure: the ladder, here and on a GPU
#
# First this machine, with a small workload of the same kind. A pass takes a second or less, and other programs take
# time, too, so there are three: a dot is the median, the line through it goes from the slowest pass to the fastest.

# %%
engine = EngineConfig(device="cpu")
ceilings = ceilings_of(engine)
climbed = climb_often(engine, ceilings)
verdicts = ladder.compare(engine, climbed.results)
for result, verdict in zip(climbed.results, verdicts, strict=True):
    print(f"{result.rung.name:22} {verdict.text or result.why_not or 'all others are compared with this one'}")
here = ladder.as_json(SMALL, ceilings, climbed.results, verdicts)
draw_ladder(
    here["rungs"],
    f"teachlm on this CPU: {SMALL.num_requests} requests, {here['ratio']:.1f} times in all",
    climbed.spread,
)

# %% [markdown]
# Faster, and not a token changed. Without that check all other numbers would be worthless: an engine that may answer
# something else can be as fast as you like. Now a GPU, as committed:

# %%
path, found = committed("ladder")
(name, on_gpu), *_ = found["models"].items()
print(path.name)
print(told_ladder(on_gpu["rungs"]))
draw_ladder(
    on_gpu["rungs"],
    f"{name} on one {found['device']} (commit {found['commit'][:9]}): {on_gpu['size']['num_requests']} requests, "
    f"{on_gpu['ratio']:.0f} times in all",
)

# %% [markdown]
# The same rungs, and another picture. On a CPU the model's arithmetic is the largest cost, and not computing things
# twice (the KV cache, the prefix cache) is worth most. On a GPU this small model takes so little time that the *host*
# is the largest cost. The gains come from doing more per step (batching, paging) and from taking Python out of the way
# (graphs, running ahead). There the arithmetic is in bfloat16, and 7 to 10 of 48 answers part from those in float32 at
# a token where two are equally likely, up to rounding.
#
# **A second row costs more than it should, without graphs.** The median gap is 7.3 ms with one row per step (*KV
# cache*), and 16.7 ms with about two (*static batching*). The device reads the same weights for both, and with graphs a
# step takes 1.25 ms. It is the host: one row has fused kernels of its own, five launches per layer. More rows have
# seven, and for five of these seven Python also builds descriptors of the tiles that the kernel fetches
# (`teachllm/models/families/llama_fast_paths.py`, `teachllm_kernels/linear/hopper_linear.py`).
#
# **Continuous batching's 5.3 times are in large part a budget's.** A static batch is what one prefill step can take,
# and the budget on that rung is 1,536 tokens: two to four of these prompts, of up to 992 tokens. So the batch has two
# rows on average, and memory for 16 sequences is 13% full. Continuous batching fills rows as they become free, and has
# 13 on average. With a budget for 16 prompts the scheduler would need 279 steps in place of 1,202 for the static
# batches, and continuous batching needs 194.
#
# **Chunked prefill makes everything worse here.** It is there for the gaps between tokens (lesson 04), and even their
# p99 rises, from 19.9 to 22.2 ms; the time to a first token nearly triples, from 148 to 425 ms. The record shows why.
# On the rungs with a batch and without graphs a step takes 16 ms, as the host launches it kernel by kernel, and hardly
# ever more than 20, even with whole prompts in it. A prompt has at most 992 tokens here, which this GPU computes in
# less: there is no gap to shorten. But a budget of 384 tokens spreads the prompts over 134 steps in place of 102, and
# all requests come at once, so the later ones wait. Chunks pay where a prompt takes much longer than a decode.
#
# **Speculation gains 7% and spoils the gaps.** Nearly all of its drafts are right (1,290 of 1,316: a model with random
# weights repeats itself, and look-up foresees that), so a request that verifies gets 1,290 / 427 + 1 = 4.0 tokens.
# After the last prompt (the p99 of the time to a first token says when) the rest takes 34 ms in place of 87. But until
# then it takes 200 ms in place of 163, which costs most of that again. And the gaps are counted otherwise: a request's
# 4 tokens arrive together, so 1,142 gaps are left of 2,432. Most of these lie before the end of the last prompt, in
# steps that compute prompts, too. So the median gap is no longer that of a decode, 1.25 ms, but that of such a step,
# 5.57 ms; and p99 grows from 5.4 to 23.7 ms. For one request speculation pays (lesson 10).
#
# **8-bit weights** are even 2% slower: they halve what a step reads, and reading is not what takes the time here, as
# the model is too small. For the same reason two GPUs gain 14%; a model of 8B gains up to 1.76 times (lesson 12). A
# picture that flattered every rung would be a picture of a chosen workload.
#
# **What the papers say.** vLLM's paper (Kwon et al., 2023) reports 2 to 4 times the throughput of the systems before it
# at the same latency; Orca (Yu et al., 2022) 36.9 times that of FasterTransformer on GPT-3 175B. Each compares with
# what was there before, on its own workload. Multiply such figures at your own risk: here is one chain whose links were
# measured together.
#
# **What is still wasted.** The rest of the ceiling: the best rung reaches 31% of it on the GPU. The distance has names:
# attention over short sequences, sampling, prompts and answers that do not fit each other's step. `teachllm bench` and
# a trace say which it is for your workload (docs/performance.md), `teachllm ladder --model YOURS` climbs with your
# model, and you have changed a working engine often enough by now to try the next idea yourself.
