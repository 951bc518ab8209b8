# %% [markdown]
# # 13 · The ladder: where the speed comes from
#
# Thirteen lessons, and about as many ideas. Each was measured against the one before it, on a workload that shows it
# best. That is fair to none of them. Here all climb the same ladder: **one** workload, **one** memory, a setting at a
# time, from recomputing everything to the full engine. No rung but *8-bit weights* (grey in the pictures) may change a
# greedy token.
#
# *Needs: all that came before, or the patience to look things up. About 20 minutes.*

# %%
from teachllm.bench import ladder
from teachllm.bench.ceilings import ceilings_of
from teachllm.config import EngineConfig
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_13 import (
    MAX_LEN,
    NUM_SLOTS,
    SETTINGS,
    SMALL,
    bottom,
    draw_ladder,
    serve,
    top,
)
from teachllm_lessons.predict import predict
from teachllm_lessons.results import committed
from teachllm_lessons.source import show

# %% [markdown]
# ## Question: is this engine slow because of the model?
#
# Eight people ask at once. All eight prompts begin with the same instructions, and one of them (D) brings a long text.
# The engine below is not a toy: it is *the* engine, with its ideas switched off. One request at a time, each in a slot
# that has room for the longest.

# %%
slow = serve(bottom())
print(f"{slow.steps} steps for {sum(map(len, slow.tokens.values()))} output tokens; {slow.computed} tokens computed")
slow.watch.timeline(numbers=False)

# %% [markdown]
# The model is the same as ever. What is slow is everything around it: H waits for seven others, and each step reads
# every weight of the model for a single row.
#
# ## Show: a rung is a setting
#
# There is no slow copy of the engine that lessons use. Every rung is a configuration of the one that serves.

# %%
show(
    ladder.climb,
    {
        "here = settings | rung.settings(size)": "a rung is the settings below it, and one more",
        "why_not": "what a device cannot do is said, and not faked",
        "if rung.stays": "the last rungs are tried one by one: each on top of the same engine, not on each other",
    },
    doc=False,
)

# %%
for rung in ladder.RUNGS:
    changed = ", ".join(f"{name}={value}" for name, value in rung.settings(SMALL).items())
    print(f"{rung.name:22} {changed}")

# %% [markdown]
# A result is worth something only if it can be compared with what would be possible. `of_ceiling` is that: the tokens
# a second that the machine's own bandwidth and arithmetic would allow, if all requests were served at once and nothing
# else took time (lessons 03 and 08).
#
# ## Step: the same eight requests, at the top
#
# All of it on: small blocks, continuous batching, a token budget that cuts the long prompt, a prefix cache.

# %%
fast = serve(top())
print(f"{fast.steps} steps for {sum(map(len, fast.tokens.values()))} output tokens; {fast.computed} tokens computed")
fast.watch.timeline()

# %% [markdown]
# By step 3 all eight are in: prompts fill the budget of 64 tokens step by step, and no answer waits for them. A
# computes 36 prompt tokens; those behind it compute only what differs, as their first block was found. D's long prompt
# is cut, and stalls no request.
#
# > **Myth: batching makes each request slower, so it is a trade.** Up to the point where arithmetic becomes the limit,
# > a step with eight rows reads the same weights as a step with one and takes nearly the same time. Here all end
# > earlier. The trade begins beyond that point, and lesson 03 shows where it lies.
#
# ## Predict
#
# A laptop's CPU now climbs the whole ladder with a workload of this kind. From the first rung (everything is recomputed
# for each token) to the best one, **by how many times does the number of tokens per second grow?**

# %%
yours = None

engine = EngineConfig(device="cpu")
ceilings = ceilings_of(engine)
results = list(ladder.climb(engine, SMALL, ceilings, num_devices=0, num_passes=1))
predict("From bottom to top, times", yours, ladder.gain(results), within=0.3)

# %%
verdicts = ladder.compare(engine, results)
for result, verdict in zip(results, verdicts, strict=True):
    print(f"{result.rung.name:22} {verdict.text or result.why_not or 'all others are compared with this one'}")

# %% [markdown]
# Faster, and not a token changed. Without that line all other numbers would be worthless: an engine that may answer
# something else can be as fast as you like.
#
# ## Build: find the settings yourself
#
# You have a KV cache of 576 token slots and the eight requests from above. Write `settings`: a function that returns
# fields of `EngineConfig`. The engine must answer the same as at the bottom, in **28 steps or fewer**, and compute
# **320 tokens or fewer**. Steps and tokens, not seconds: they are the same on every machine.
#
# Start from `bottom()`, which is all of the ladder's lower end, and change what you have learned to change. Stuck?
# `SETTINGS.hint(1)`.

# %%
print(f"{NUM_SLOTS} slots, sequences of up to {MAX_LEN} tokens; the bottom has", bottom())


# %%
def settings():
    raise NotImplementedError  # yours: bottom() | {...}


checked = check(SETTINGS, settings)
checked

# %% [markdown]
# ## Break: which rung betrays it?
#
# A ladder is also an instrument. One line of the engine has been changed, and you are not told where. But each rung
# switches one idea on, so the rung at which answers differ, or end, names the idea whose code is broken.

# %%
broken = plant("rejected drafts stay computed")
broken.symptom("teachllm_lessons.helpers.lesson_13:which_rung")

# %% [markdown]
# Bisecting by configuration: one rung does not survive it, and all others hold. Where would you look? For instance
# `broken.guess("teachllm/core/drafts.py")`.

# %%
broken.reveal()

# %% [markdown]
# ## Measure: the ladder, here and on a GPU
#
# First this machine. Watch the right side, too: speed without a ceiling beside it says little.

# %%
here = ladder.as_json(SMALL, ceilings, results, verdicts)
draw_ladder(here["rungs"], f"teachlm on this CPU: {SMALL.num_requests} requests, {here['ratio']:.1f} times in all")

# %%
path, found = committed("ladder")
(name, climbed), *_ = found["models"].items()
draw_ladder(
    climbed["rungs"],
    f"{name} on one {found['device']} (commit {found['commit'][:9]}): {climbed['size']['num_requests']} requests, "
    f"{climbed['ratio']:.0f} times in all",
)

# %% [markdown]
# The same rungs, and another picture. On a CPU the model's arithmetic is the largest cost, and keeping K and V is worth
# more than anything else. On a GPU this small model takes so little time that the *host* is the largest cost: what is
# gained comes from doing more per step (batching, paging) and from taking Python out of the way (graphs, running
# ahead).
#
# Chunked prefill costs some throughput on both: it is there for the gaps between tokens (lesson 04), which this picture
# does not show. Speculation brings little in a batch of this size, although nearly all of its drafts are right on the
# GPU (a model with random weights repeats itself, and look-up foresees that): with 48 requests a step has arithmetic to
# do already. Alone, it pays (lesson 10). 8-bit weights halve what a step reads, and reading is not what takes the
# time here: the model is too small. For the same reason two GPUs gain little; a model of 8B gains 1.7 times (lesson
# 12). A picture that flattered every rung would be a picture of a chosen workload.
#
# **What the papers say.** vLLM's paper (Kwon et al., 2023) reports 2 to 4 times the throughput of the systems before it
# at the same latency; Orca (Yu et al., 2022) 36.9 times that of FasterTransformer on GPT-3 175B. Each compares with
# what was there before, on its own workload. Multiply such figures at your own risk: here is one chain whose links were
# measured together.
#
# **What is still wasted.** The right-hand bars. No rung reaches its ceiling, and the distance has names: attention over
# short sequences, sampling, prompts and answers that do not fit each other's step. `teachllm bench` and a trace say
# which it is for your workload (docs/performance.md), `teachllm ladder --model YOURS` climbs with your model, and you
# have changed a working engine often enough by now to try the next idea yourself.
