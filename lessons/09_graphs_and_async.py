# %% [markdown]
# # 09 · CUDA graphs and asynchronous scheduling: a GPU that never waits
#
# The kernel of lesson 08 is as fast as memory. Yet a GPU can stand still for a quarter of the time, because something
# has to tell it what to do next: a host, running Python. This lesson takes the host out of the way twice: its launches
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
    ONE_BY_ONE,
    TURN,
    counting,
    draw_launches,
    pretend,
    seconds_of_an_operator,
)
from teachllm_lessons.picture import bars
from teachllm_lessons.predict import predict
from teachllm_lessons.results import committed
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: why does a fast GPU wait for Python?
#
# Eight requests decode on a pretended H200, with a model of 0.6 billion parameters. The engine's loop is the plain one:
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
# An H200 computes a step of a 28-layer model of 0.6B in 0.7 ms. Fused kernels, as the engine has them on a GPU, make
# fewer launches of it (141 for one request), and a kernel of 5 µs is still shorter than its own launch from Python.
# Below: a dozen of them. Launched one by one, for 8 µs of the host each, the device waits before every kernel. Recorded
# as a **graph**, they are one launch:

# %%
draw_launches(12, 5.0, {"one by one": 8.0, "graph": 10.0})

# %% [markdown]
# > **Myth: a CUDA graph makes kernels faster.** Kernels take as long as before. What disappears is the host's part
# > between them, and so graphs gain nothing where kernels are long: in a long prompt.
#
# ## Show: recording, and what a recording cannot know
#
# A graph is a list of launches with all their arguments: addresses and sizes are fixed when it is recorded.

# %%
from teachllm.worker.gpu import cuda_graphs

show(
    cuda_graphs.Graphs.capture,
    {
        "self._warm_up(run)": "run once before: compilation and libraries' set-up must not be recorded",
        "torch.cuda.graph(": "inside of it launches are written down, not executed",
        "result = run()": "the same Python code that would run a step",
        "self._full[key]": "the tensors it writes to are the same ones in every replay",
    },
    doc=False,
)

# %% [markdown]
# So a step's inputs are copied into tensors that stay where they are, kernels read lengths and block tables from the
# device, and the number of rows is padded to one of a few sizes: 9 requests run in the graph for 16, 65 in the one for
# 96 (`padded_size`). That holds for *full* graphs, of decodes alone. In a step with a long prompt attention is launched
# as its lengths require; it stays outside, and what lies between two attentions is recorded: *piecewise*.
#
# For the other gap, between steps, the core offers the loop two halves. This is the first:

# %%
show(
    EngineCore.launch,
    {
        "plan = self.scheduler.schedule()": "made from lengths alone: no token id is needed to plan a step",
        "self.executor.sample(": "returns at once on a GPU: what comes back is a promise of tokens",
        "self._pending.append": "a step under way; core.num_pending counts them",
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
# A is gone, and its two blocks are *pinned* until the last plan that names them has come back. Then they are given
# back: the full one stays findable (cached), the other one is free. The token of that plan is thrown away: step 5 says
# nothing. That is the price of running ahead: a request whose end cannot be foreseen computes one token in vain.
#
# ## Predict
#
# The same request, but it ends because it may say no more than five tokens (`max_tokens=5`). **How many tokens does
# the engine compute in vain, running one step ahead?**

# %%
yours = None


def in_vain(**params) -> int:
    with Watch(num_gpu_blocks_override=6, max_model_len=64, async_scheduling=True) as watch:
        watch.add("A", "What is a KV cache?", **params)
        watch.run()
        computed = sum(scheduled["num_tokens"] for step in watch.trace.steps for scheduled in step["scheduled"])
        needed = len(watch.ids("What is a KV cache?")) + len(watch.tokens("A")) - 1  # the last one is never computed
        return computed - needed


print("ended by a stop token:", in_vain(max_tokens=12, stop_token_ids=[281]))
predict("Computed in vain, ended by max_tokens:", yours, in_vain(max_tokens=5))

# %% [markdown]
# None. The scheduler does not know *which* tokens are under way, but it knows *how many*. It plans by lengths, so an
# end by length is no surprise. Only what depends on an id (a stop token, a stop string, a rejected draft) comes late.
#
# ## Build: the loop
#
# Write `turn(core)`, one turn of the engine's loop, running one step ahead. You have
#
# - `core.launch()`: plans a step and has it started; `False` if no request can compute anything now,
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
# The host does all that it did before, one step earlier: step 6 is planned and launched while step 5 computes. The
# device goes from step to step.
#
# ## Break: a block too early
#
# One line of the engine has been changed, in a copy. Four requests end at a stop token, and B takes their place. The
# device of this scenario is one whose last writes to the cache land late, as may happen where K and V are moved by
# another queue than the one that computes. (On a single queue the order would be kept, and the fault would sleep.)

# %%
broken = plant("blocks freed under a plan that still writes")
broken.symptom("teachllm_lessons.helpers.lesson_09:ends_and_begins")

# %% [markdown]
# The four answer as ever; it is B, a stranger, who says something else. Who gives blocks back when a request ends?
# Guess a file, then a function: `broken.guess("teachllm/core/block_pool.py")`.

# %%
broken.reveal()

# %% [markdown]
# ## Measure
#
# The simulated H200 again, a rung at a time: kernels launched one by one, as graphs, and one step ahead with the piece
# from above. (A layer whose kernels start one by one is taken to cost 57 µs, in a graph 12: as fitted to measured steps
# of prompts and of decodes, see `simulator/cost_model.py`.) Then a real card: the ladder of lesson 13 has graphs and
# running ahead as one rung; here it is beside the rung before it.

# %%
rates = {}
for name in ("qwen3-0.6b", "qwen3-8b"):
    rates[f"{name}, one by one, plain loop"] = pretend(name, costs=ONE_BY_ONE, async_scheduling=False)
    rates[f"{name}, graphs, plain loop"] = pretend(name, async_scheduling=False)
    rates[f"{name}, graphs, one ahead"] = pretend(
        name, overrides=EngineOverrides(turn=checked.piece), async_scheduling=True
    )
print(f"all say the same number of tokens: {len({rung.tokens for rung in rates.values()}) == 1}")
bars({name: rung.rate for name, rung in rates.items()}, "output tokens/s, 8 requests, simulated H200")

# %%
_, ladder = committed("ladder")
measured = {rung["name"]: rung["figures"] for rung in ladder["models"]["qwen3-0.6b"]["rungs"] if rung["figures"]}
print(f"{ladder['device']}, commit {ladder['commit'][:9]}, 48 requests, 0.6B")
pair = {name: measured[name]["output_tokens_per_s"] for name in ("prefix caching", "graphs, running ahead")}
bars(pair, "output tokens/s, measured")

# %% [markdown]
# The larger model gains less from both: its kernels are longer, and the host's microseconds are the same. The real card
# gains more than the simulated one: what a launch costs depends on the host and on how it is called, and from Python
# it is dear. It is the largest factor of that ladder.
#
# **What the papers say.** NVIDIA introduced graphs in 2018 and shows the effect on one short kernel (Gray, *Getting
# Started with CUDA Graphs*, 2019). NanoFlow (Zhu et al., 2024) plans the next batch while this one computes, and
# notices the end of a request one iteration late, as here.
#
# **What is still wasted.** The device works all the time, and each step still reads every weight of the model to say
# *one* token of each request. *Next: 10, speculative decoding.*
