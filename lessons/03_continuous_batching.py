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
    QUEUE,
    crowd,
    curves,
    live_steps,
    measured_steps,
    places,
    roofline,
    serve,
    simulated_step,
    waits,
)
from teachllm_lessons.picture import bars
from teachllm_lessons.predict import predict
from teachllm_lessons.source import show

# %% [markdown]
# ## Question: why wait for the slowest of a batch?
#
# Six requests are queued, and the engine has three places. A wants 10 tokens, B 3 and C 2; behind them wait D, E and F.
# Every step gives each request in the batch one token. With **static batching** the next three begin when the first
# three are done.

# %%
print(QUEUE)
static = serve("static").run()
places({"static": static})

# %% [markdown]
# The first batch lasts as long as A. B and C are done after 3 and 2 steps, and their places stay empty while D, E and F
# stand in the queue. (It used to be worse: `generate` of a library that pads a batch goes on computing the rows of
# those who are done, and hands out no answer before the last one is complete.) It is not known in advance how long an
# answer will be, so putting requests of one length together is not an option.
#
# ## Show: a decision in every step
#
# What if the batch were put together anew in *every step*? That is all there is to continuous batching. The loop knows
# no batches, only steps:

# %%
show(
    EngineCore.turn,
    {
        "self.launch()": "who computes what is decided here, once for each step, and the step is started",
        "self.collect()": "its tokens arrive; who has enough of them leaves now",
    },
)

# %%
show(
    Scheduler.schedule,
    {
        "opens_batch": "the policy decides whether a request may join; a static one only if none is running",
        "_schedule_running": "those who are in the batch first",
        "_schedule_waiting": "then the queue, from its head, until a request has to wait for a place, tokens or blocks",
    },
)

# %% [markdown]
# The requests of a step need not be equally far. Tokens of all of them are laid one behind the other in a flat row, and
# each attends to its own blocks: one that joins with a prompt and one at its 500th token share a pass. So nothing is
# padded, either.
#
# ## Step: the same queue, continuously
#
# C is done after step 1. Look who computes in the step after it.

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
# Why do empty places hurt? Because a full batch costs hardly more than an empty one, or so they say. A model of 8
# billion parameters on an H200: a step for *one* request takes 4 ms, simulated with the real scheduler and the card's
# measured limits. **How many times as long does a step for 64 requests take?** (Each has a context of 64 tokens.)

# %%
yours = None

one, many = simulated_step(1), simulated_step(64)
print(f"{1000 * one:.2f} ms per step for one request, {1000 * many:.2f} ms for 64")
predict("A step for 64 takes, in steps for one:", yours, many / one, within=0.1)

# %% [markdown]
# 64 times the tokens, in nearly the same time. The reason is what a step has to *read*: all weights, 16 GB, once, for
# however many requests. One token needs about 2 FLOPs for each weight, which has 2 bytes. So a step for one request
# does one FLOP for each byte that it reads, and the card could do 180 in that time.

# %%
roofline()

# %% [markdown]
# Every further request adds arithmetic and hardly any bytes: circles climb along the slope, and the batch is nearly
# free up to the ridge. A *prompt* is beyond it alone, since its tokens are a batch of their own. Prefill is bound by
# arithmetic, decode by memory. (1,024 requests are less far to the right than four times 256: weights are read once for
# all, K and V for each request. The longer the contexts, the sooner batching stops to pay.)
#
# > **Myth: in a batch of 64 each request gets a 64th of the speed.** Below the ridge each of them is served at nearly
# > full speed, and the machine does 64 times the work.
#
# ## Build: who joins first?
#
# A place that is free goes to the head of the queue. Who is that? In order of arrival, short answers wait behind long
# ones. Write a policy that takes **whoever wants the fewest output tokens** first:
#
# - `opens_batch(num_running)`: whether requests may join in this step, with so many running already.
# - `key(request)`: a tuple; the smaller one goes first. No two requests may have the same key, and of two that want as
#   many tokens the one that came first is first. `request.max_len` is the longest that prompt and answer may become
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
# 120 requests for answers of 4 to 200 tokens, 40 per second, for 8 places. How long does one wait for its first token?

# %%
policies = {"static": Static, "in order of arrival": FirstComeFirstServed, "shortest first": checked.piece}
runs = {name: crowd(policy) for name, policy in policies.items()}
bars({name: run.figures.ttft.mean for name, run in runs.items()}, "mean wait for a first token, s")

# %%
bars({name: max(waits(run)) for name, run in runs.items()}, "longest wait for a first token, s")

# %% [markdown]
# The mean falls and the longest wait grows: who wants much is overtaken again and again. Here the queue ends some time;
# under steady load it would not, and one of them would wait for ever. Lesson 06 comes back to that.
#
# ## Break: the door
#
# One line of the engine has been changed. The same queue in three places, under both policies.

# %%
broken = plant("a static batch lets requests join")
broken.symptom("teachllm_lessons.helpers.lesson_03:two_ways")

# %% [markdown]
# No answer changes, and one of the two even gets faster. Few people look for a bug in the *baseline*:
# compared with this one, continuous batching brings nothing. Which of the two lines is wrong, and where
# would you look? `broken.guess("teachllm/core/scheduler.py")`, then a better file, then a function.

# %%
broken.reveal()

# %% [markdown]
# ## Measure: what a batch costs, and where it stops to pay
#
# The same step for more and more requests: on the simulated H200 with short and with longer contexts, and on the
# machine that runs this notebook with its small model. Crosses were measured on a real one.

# %%
sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
measured, where = measured_steps()
series = {
    "simulated, 64 tokens each": {size: simulated_step(size) for size in sizes},
    "simulated, 1,024 tokens each": {size: simulated_step(size, 1024) for size in sizes[:-1:2]},
    "teachlm on this machine": live_steps(),
}
print(f"measured: {where}; contexts of about 128 tokens for one request, 1,024 for each of 64")
curves(series, {"measured": measured})

# %% [markdown]
# Left is what a *user* sees, the time from one token to the next; right is what the *owner* sees. As long as the left
# curve is flat, the right one doubles with every doubling of the batch. Then comes the knee, where the left one begins
# to climb and the right one flattens: from there on, one more request takes from all others what it gets. With contexts
# of 1,024 tokens the curve bends sooner, for the K and V that each request has to read. On this machine a step of the
# small model has a fixed cost, Python's and that of starting every operation. Sixteen requests share it, and take
# nowhere near sixteen times as long as one.

# %%
bars({name: run.figures.output_tokens_per_s for name, run in runs.items()}, "output tokens/s of 120 requests, 8 places")

# %% [markdown]
# The same machine with the same places: all that continuous batching does is fill those that were empty. In which
# *order* they are filled decides who waits, and not how much is done.
#
# **What the paper says.** Orca (Yu et al., OSDI 2022) called it iteration-level scheduling, and reports 36.9 times the
# throughput of FasterTransformer for GPT-3 175B at the same latency. Little of that factor is a law of nature. It
# depends on how different the answers' lengths are: with equal lengths a static batch has no empty places at all.
#
# **What is still wasted.** D joined with its prompt, and all others in that step waited until it was computed. Here it
# had a dozen tokens. What if it has ten thousand? *Next: 04, chunked prefill.*
