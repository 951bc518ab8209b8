# %% [markdown]
# # 03 · Continuous batching: no request waits for the slowest
#
# Blocks (02) made room for many requests at once. But *when* may one begin? The obvious answer is to collect a batch,
# run it, and collect the next one. It leaves much of the room empty for much of the time. This lesson is about the
# other answer, and about why it matters at all: what does a batch cost, and what does it bring?
#
# *Needs: 01 (the KV cache), 02 (blocks). About 25 minutes.*

# %%
from teachllm.core.policy import FirstComeFirstServed, Static
from teachllm.core.scheduler import Scheduler
from teachllm.engine.engine_core import EngineCore
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_03 import (
    BATCHING,
    BYTES_OF_A_BATCH,
    QUEUE,
    bytes_of_a_step,
    ceilings,
    crowd,
    live_steps,
    measured_points,
    serve,
    simulated_step,
    waits,
)
from teachllm_lessons.helpers.pictures.lesson_03 import curves, places, roofline
from teachllm_lessons.picture import bars
from teachllm_lessons.source import show

# %% [markdown]
# ## Question: why wait for the slowest of a batch?
#
# Six requests are queued, and the engine has three places. A wants 10 tokens, B 3 and C 2; D, E and F wait after them.
# Here every step gives each request in the batch one token. With **static batching** the next three begin when the
# first three are done.

# %%
print(QUEUE)
static = serve("static").run()
places({"static": static})

# %% [markdown]
# The first batch lasts as long as A. B and C are done after 3 and 2 steps, and their places stay empty while D, E and F
# stand in the queue. (It can be worse: `generate` of a library that pads a batch goes on computing the rows of finished
# requests, and returns no answer before the last one is complete.) It is not known in advance how long an answer will
# be, so putting requests of one length together is not an option.
#
# ## Show: a decision in every step
#
# What if the batch were put together anew in *every step*? That is all there is to continuous batching. The loop knows
# no batches, only steps:

# %%
show(
    EngineCore.turn,
    {
        "self.launch()": "the step is planned here, once per step, and started",
        "self.collect()": "its tokens arrive; a request that has all of its tokens leaves now",
    },
)

# %%
show(
    Scheduler.schedule,
    {
        "opens_batch": "the policy decides whether a request may join; a static one only if none is running",
        "_schedule_running": "the running requests first",
        "_schedule_waiting": "then the queue, from its head, until a request has to wait for a place, tokens or blocks",
    },
)

# %% [markdown]
# The requests of a step need not be equally far. Their tokens are laid one after the other in a flat row, and each
# attends to its own blocks: a request that joins with its prompt and one at its 500th token share a pass. So no request
# is padded to the length of another.
#
# ## Step: the same queue, continuously
#
# C is done after step 1. Look which requests compute in the step after it.

# %%
continuous = serve("fcfs")
continuous.run(2)
continuous.step()

# %%
continuous.step()

# %%
continuous.run()
print(f"every answer is the same: {static.all_tokens == continuous.all_tokens}")
places({"static": static, "continuous": continuous})

# %% [markdown]
# D joined in the very next step after C's last, in full colour since it computed its prompt, and was done before the
# static batch would have let it begin. Places stay empty only at the end, when no request is left to take them.
#
# ## Predict
#
# Why do empty places hurt? Because of what a step has to read. A decode step of Qwen3-8B in bfloat16 reads the weights
# of its layers and of its output head, 15.1 GB, once for all requests, and for each request the K and V of its whole
# context: 36 layers x 2 (K and V) x 8 heads x size 128 x 2 bytes per token of it. Take a step for *one* request with a
# context of 256 tokens, and a step for *eight* requests with 16,448 tokens each. **How many times as many bytes does
# the second step read?** Put your number in the place of `None`; within 5 % will do.

# %%
yours = None

points, where = measured_points()  # of benchmarks/results
alone, long = points["1 x 256"], points["8 x 16,448"]
BYTES_OF_A_BATCH.compare(
    yours,
    bytes_of_a_step(long.step) / bytes_of_a_step(alone.step),
    simulated=simulated_step(8, 16_448) / simulated_step(1, 256),
    alone=1000 * alone.seconds,
    many=1000 * long.seconds,
    measured=long.seconds / alone.seconds,
    where=where,
)

# %% [markdown]
# ## Build: which request joins first?
#
# A free place goes to the head of the queue. Which request should that be? In order of arrival, short answers wait
# behind long ones. How long an answer will *be* is not known; what a client *allows* is: `max_tokens`. Write a policy
# that takes the request with **the lowest bound on its output tokens** first:
#
# - `opens_batch(num_running)`: whether requests may join in this step, with so many running already.
# - `key(request)`: a tuple; the smaller one goes first. No two requests may have the same key, and of two with the same
#   bound the one that came first is first. `request.max_len` is the longest that prompt and answer may become
#   together, `request.num_prompt_tokens` the prompt; `request.arrival_index` counts arrivals.
#
# Stuck? `BATCHING.hint(1)`, then 2, then 3.


# %%
class Batching(FirstComeFirstServed):
    def opens_batch(self, num_running):
        raise NotImplementedError  # yours: True or False

    def key(self, request):
        raise NotImplementedError  # yours: a tuple of numbers


checked = check(BATCHING, Batching)
checked

# %% [markdown]
# 120 requests for answers of 4 to 200 tokens arrive, 40 per second, for 8 places of a simulated H200. Each answer is
# exactly as long as its bound, so this order is by true length; real answers often end before it, and then the bound is
# only a guess. How long does a request wait for its first token?

# %%
policies = {"static": Static, "in order of arrival": FirstComeFirstServed, "lowest bound first": checked.piece}
runs = {name: crowd(policy) for name, policy in policies.items()}
bars({name: run.figures.ttft.mean for name, run in runs.items()}, "mean wait for a first token, s")

# %%
bars({name: max(waits(run)) for name, run in runs.items()}, "longest wait for a first token, s")

# %% [markdown]
# The mean falls and the longest wait grows: a request for many tokens is overtaken again and again. Here the arrivals
# end; with more arriving all the time than the engine can do, it might never begin. Lesson 06 comes back to that.
#
# ## Break: one queue, two policies
#
# One line of the engine has been changed. The same queue in three places, under both policies.

# %%
broken = plant("03a")
broken.symptom("teachllm_lessons.helpers.lesson_03:two_ways")

# %% [markdown]
# No answer changes, and one of the two runs even gets faster, so no test of answers notices, and no test that something
# is not too slow. Which of the two runs is wrong, and where would you look? Guess a file, then a function:
# `broken.guess("folder/file.py")`, then `broken.guess("folder/file.py", "function")`. Then look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure: what a batch costs, and where it stops paying off
#
# The same step for more and more requests: on the simulated H200 with short and with longer contexts, and on the
# machine that runs this notebook with its small model. Crosses were measured on a real H200.

# %%
sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
series = {
    "simulated, 64 tokens each": {size: simulated_step(size) for size in sizes},
    "simulated, 1,088 tokens each": {size: simulated_step(size, 1088) for size in sizes[:-1:2]},
    "teachlm on this machine": live_steps(),
}
print(f"measured: {where}")
crosses = {1: points["1 x 256"].seconds, 64: points["64 x 1,088"].seconds}
curves(series, {"measured, 1 x 256 and 64 x 1,088 tokens": crosses})

# %% [markdown]
# Left is what a *user* sees, the time from one token to the next; right is what the *owner* sees. As long as the left
# curve is flat, the right one doubles with every doubling of the batch. Then comes the knee, where the left one begins
# to climb and the right one flattens: from there on, one more request takes from all others what it gets. With contexts
# of 1,088 tokens the curve bends sooner, for the K and V that each request has to read. On this machine a step of the
# small model has a fixed cost, Python's and that of starting every operation. Sixteen requests share it, and take
# nowhere near sixteen times as long as one.
#
# The same as a **roofline**: over the FLOPs that a step does per byte that it reads, the FLOPs per second that it could
# reach. One token needs about 2 FLOPs per weight, which has 2 bytes, so a step for one request does one FLOP per byte.
# How many could the card do in that time? Divide its ceilings, the best that was measured on several H200s: large
# matrix products, and plain reading. Circles are computed from the model, so they lie on the roof by construction: they
# only say *where* a step is. Crosses are measured steps, and lie below it.

# %%
flops, bandwidth = ceilings().gemm_flops, ceilings().read_bandwidth
print(f"measured: {flops / 1e12:.0f} TFLOP/s and {bandwidth / 1e12:.2f} TB/s, {flops / bandwidth:.0f} FLOPs per byte")
roofline(measured=points)

# %% [markdown]
# Every further request adds arithmetic and hardly any bytes, as long as contexts are short: circles climb along the
# slope, and the batch is nearly free up to the ridge. A *prompt* alone is beyond the ridge, since its tokens are a
# batch of their own. Prefill is bound by arithmetic, decode by memory. (Circles have 256 tokens each. 1,024 requests
# are less far to the right than four times 256: weights are read once for all, K and V for each request. So 64 requests
# of 1,088 tokens are left of 64 requests of 256, and 8 of 16,448 tokens are left of both. The longer the contexts, the
# sooner batching stops paying off.)
#
# > **Myth: in a batch of 64 each request gets a 64th of the speed.** In the measured step each of them has 60 % of the
# > speed that it has alone, and the card gives 39 times as many tokens.

# %%
bars({name: run.figures.output_tokens_per_s for name, run in runs.items()}, "output tokens/s of 120 requests, 8 places")

# %% [markdown]
# The same machine with the same places: all that continuous batching does is fill the empty ones. In which *order* they
# are filled decides which requests wait, and hardly how much is done.
#
# **What the paper says.** Orca (Yu et al., OSDI 2022) called it iteration-level scheduling, and reports 36.9 times the
# throughput of FasterTransformer for GPT-3 175B at the same latency. Little of that factor is a law of nature. It
# depends on how requests arrive and how different their answers' lengths are: if all arrive at once and all answers are
# equally long, a static batch has no empty places at all.
#
# **What is still wasted.** D joined with its prompt, and the other requests of that step waited until it was computed.
# It had a dozen tokens. What if it has ten thousand? *Next: 04, chunked prefill.*
