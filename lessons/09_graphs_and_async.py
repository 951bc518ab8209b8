# %% [markdown]
# # 09 · CUDA graphs and asynchronous scheduling: a GPU that never waits
#
# The kernel of lesson 08 is as fast as memory. Yet a GPU can be idle for a quarter of the time and more, because a
# host, running Python, has to tell it what to do next. This lesson takes the host out of the way twice: its launches
# are recorded once and replayed, and its planning is done while the GPU computes.
#
# *Needs: 03 (the scheduler), 02 (blocks). About 25 minutes. The GPU is simulated, on a clock of its own: the scheduler,
# the pool and the loop around it are the engine's.*

# %%
from teachllm.engine.engine_core import EngineCore
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_09 import (
    IN_VAIN,
    ONE_BY_ONE,
    TURN,
    counting,
    in_vain,
    pretend,
    seconds_of_an_operator,
)
from teachllm_lessons.helpers.pictures.lesson_09 import draw_launches
from teachllm_lessons.picture import bars
from teachllm_lessons.results import committed
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: why does a fast GPU wait for Python?
#
# Eight requests decode on a simulated H200, with a model of 0.6 billion parameters. The engine's loop is the plain one:
# plan a step, launch it, wait for its tokens, update the books. Each number is a step.

# %%
plain = pretend(async_scheduling=False)
plain.draw()

# %% [markdown]
# While the host updates, plans and launches, the device has nothing to do. The smaller the model or the faster the
# card, the larger that share.
#
# > **Myth: twice as fast a GPU gives twice as many tokens.** It halves the device's bars. The gaps between them are
# > the host's, and stay.
#
# There is a second gap, inside of a step. How many launches does one need? On the CPU, PyTorch's operators can be
# counted, and timed on one that computes next to nothing:

# %%
watch = Watch(num_gpu_blocks_override=24, max_model_len=128)
watch.add("A", "What is a KV cache?", max_tokens=6)
watch.run(steps=2)
with counting() as counted:
    watch.step()
each = 1e6 * seconds_of_an_operator()
layers = watch.engine.model_config.num_layers
calls = counted.count / layers * 28
print(f"one decode step of {layers} layers: {counted.count} operators; to call one takes this host {each:.1f} us")
print(f"the same for 28 layers: about {calls:.0f} operators, {calls * each / 1000:.1f} ms of calls")

# %% [markdown]
# An H200 computes such a step (28 layers, 0.6B parameters, one request) in 0.7 ms, less than the calls alone would
# take. On a GPU the engine's fused kernels need 141 launches for it (docs/performance.md), so a kernel takes 5 µs on
# average. A launch from Python takes longer than that. Below are a dozen such kernels. Launched one by one, for an
# assumed 8 µs of the host each, the device waits before every kernel. Recorded as a **graph**, they are one launch:

# %%
draw_launches(12, 5.0, {"one by one": 8.0, "graph": 10.0})

# %% [markdown]
# > **Myth: a CUDA graph makes kernels faster.** Kernels take as long as before. What disappears is the host's time
# > between them, so graphs gain nothing where kernels are long, as in a long prompt.
#
# ## Show: recording, and what a recording cannot know
#
# A graph is a list of launches with all their arguments: addresses and sizes are fixed when it is recorded.

# %%
from teachllm.worker.gpu import cuda_graphs

show(
    cuda_graphs.Graphs.capture,
    {
        "begin()": "from here to `end` launches are recorded, not executed",
        "results[:] = [run()]": "the same Python code that would run a step",
        "self._recorded(": "a kernel's first launch loads it, which cannot be recorded: then `run` runs once before",
        "self._full[key]": "the tensors it writes to are the same ones in every replay",
    },
    doc=False,
)

# %% [markdown]
# So a step's inputs are copied into tensors that stay where they are, kernels read lengths and block tables from the
# device, and the number of rows is padded to one of a few sizes: 9 requests run in the graph for 16, 65 in the one for
# 96 (`GraphSizes`). Those are *full* graphs, of decodes alone. In a step with a prompt of up to 512 tokens attention
# is launched as its lengths require, and only the parts between two attentions are recorded: *piecewise*. Longer steps
# need no graph: they take longer on the device than their launches take on the host.
#
# For the other gap, between steps, the core offers the loop two halves. This is the first:

# %%
show(
    EngineCore.launch,
    {
        "plan = self.scheduler.schedule()": "made from lengths alone: no token id is needed to plan a step",
        "self.executor.sample(": "returns at once on a GPU: what comes back is a promise of tokens",
        "self._pending.append": "a step under way; `core.num_pending` counts them",
        "self.scheduler.kv.commit_all()": "more work of the host that is done while the device computes",
    },
    doc=False,
)

# %% [markdown]
# `core.collect()` is the second: it waits for the oldest step's tokens and brings the books up to date.
#
# ## Step: one ahead
#
# With `async_scheduling` the engine launches step n + 1 before it has seen the tokens of step n. (The sampled ids stay
# on the device, where the next step reads them.) A's answer is to end at a stop token, its fifth.

# %%
watch = Watch(num_gpu_blocks_override=6, max_model_len=64, async_scheduling=True)
watch.add("A", "What is a KV cache?", max_tokens=12, stop_token_ids=[281])
print(watch.step())
watch.run(steps=4)
watch.step()

# %% [markdown]
# The first turn launched step 0 and had nothing to collect. In the sixth the stop token has arrived, with step 4: A has
# ended. But step 5, which computes one more token of A, was launched before the host could know. Here is the pool at
# this moment, and what the next turn brings:

# %%
core = watch.engine.core
print(f"under way: {core.num_pending} step; does the scheduler still know A: {'A' in watch.engine.unfinished_ids}")
pool = watch.pool()
print(watch.step())
pool

# %% [markdown]
# A is gone, and its two blocks are *pinned* until the last plan that names them has come back. Then they are freed: the
# full one stays findable (cached), the other one is empty. The token of that plan is dropped: step 5 has no output.
# That is the price of running ahead: one token of this request was computed in vain.
#
# ## Predict
#
# The same request without a stop token: it ends because it may say no more than five tokens (`max_tokens=5`). The
# engine runs one step ahead as before, and plans a step from lengths alone. **How many tokens does it compute in
# vain?**

# %%
yours = None

IN_VAIN.compare(yours, in_vain(max_tokens=5), by_a_stop=in_vain(max_tokens=12, stop_token_ids=[281]))

# %% [markdown]
# ## Build: the loop
#
# Write `turn(core)`, one turn of the engine's loop, running one step ahead. You have
#
# - `core.launch()`: plans and starts a step; returns `False` if no request can compute anything now,
# - `core.num_pending`: steps that are launched and not collected,
# - `core.collect()`: waits for the oldest one; returns a list of updates.
#
# Return the updates, or `[]` if there are none yet. When your turn returns, at most one step may be under way, and at
# the end none may be left. Stuck? `TURN.hint(1)`, then 2, then 3.


# %%
def turn(core):
    raise NotImplementedError  # yours; the plain loop would be: return core.collect() if core.launch() else []


checked = check(TURN, turn)
checked

# %%
ahead = pretend(overrides=EngineOverrides(turn=checked.piece), async_scheduling=True)
ahead.draw()

# %% [markdown]
# The host does everything that it did before, one step earlier: step 6 is planned and launched while step 5 computes.
# The device goes from step to step.
#
# ## Break: another answer for B
#
# One line of the engine has been changed, in a copy. Four requests end at a stop token, and B takes their place. The
# device of this scenario is one whose last writes to the cache land late, as may happen where one queue
# moves K and V and another one computes.

# %%
broken = plant("09a")
broken.symptom("teachllm_lessons.helpers.lesson_09:ends_and_begins")

# %% [markdown]
# The four answer as before, and B, which has nothing to do with them, gets another answer. Compare the first lines,
# too. Guess a file, then a function: `broken.guess("teachllm/core/block_pool.py")`.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure
#
# The simulated H200 again, one change at a time: kernels launched one by one, as graphs, and one step ahead with the
# piece from above. (The simulation charges 57 µs per layer to start kernels one by one, as fitted to measured prompts,
# and 12 µs in a graph, as fitted to measured decodes: see `simulator/cost_model.py`.) Then a real card: the ladder of
# lesson 13 has graphs and running ahead as one rung; here it is beside the rung before it.

# %%
rates = {}
for name in ("qwen3-0.6b", "qwen3-8b"):
    rates[f"{name}, one by one, plain loop"] = pretend(name, costs=ONE_BY_ONE, async_scheduling=False)
    rates[f"{name}, graphs, plain loop"] = pretend(name, async_scheduling=False)
    rates[f"{name}, graphs, one ahead"] = pretend(
        name, overrides=EngineOverrides(turn=checked.piece), async_scheduling=True
    )
print(f"all give the same number of tokens: {len({rung.tokens for rung in rates.values()}) == 1}")
bars({name: rung.rate for name, rung in rates.items()}, "output tokens/s, 8 requests, simulated H200")

# %%
_, ladder = committed("ladder")
measured = {rung["name"]: rung["figures"] for rung in ladder["models"]["qwen3-0.6b"]["rungs"] if rung["figures"]}
print(f"{ladder['device']}, commit {ladder['commit'][:9]}, 48 requests, 0.6B")
pair = {name: measured[name] for name in ("prefix caching", "graphs, running ahead")}
for name, figures in pair.items():
    print(f"{name}: {1000 * figures['itl']['p50']:.2f} ms from token to token (median), {figures['num_steps']} steps")
bars({name: figures["output_tokens_per_s"] for name, figures in pair.items()}, "output tokens/s, measured")

# %% [markdown]
# The larger model gains less from both: its kernels are longer, and the host's microseconds are the same. The real card
# gains 7.4 times, far more than the simulated one. Without graphs a step took 16 ms there, about 0.6 ms per layer and
# not 57 µs: those steps launch every kernel from Python, one by one, on that machine's processor. The simulation,
# fitted to another machine, is no guide to that. This rung is the largest factor of that ladder.
#
# The same record has steps of *one* request without graphs (its rung "KV cache"): 7.3 ms. A single row has fused
# kernels, five launches per layer and 141 per step. Two rows or more have seven per layer, and for five of these seven
# Python builds descriptors as well, which tell the card's copy engine where its tiles lie. Neither number is the
# device's time: with graphs a step of that model takes 1.25 ms there.
#
# **What the papers say.** NVIDIA introduced graphs in 2018 and shows the effect on one short kernel (Gray, *Getting
# Started with CUDA Graphs*, 2019). NanoFlow (Zhu et al., 2024) plans the next batch while this one computes, and
# notices the end of a request one iteration late, as here.
#
# **What is still wasted.** The device works all the time, and each step still reads every weight of the model to say
# *one* token of each request. *Next: 10, speculative decoding.*
