# %% [markdown]
# # 09 · CUDA graphs and asynchronous scheduling: the host's share
#
# The kernels are fast now (08). A decode step of a small model takes half a millisecond on a GPU, and that is the time
# in which Python does rather little. Who plans the next step, starts its hundreds of kernels, and reads what came of
# them? The host. If the device waits meanwhile, the fastest kernel does not help.
#
# Nothing in this lesson needs a GPU: where one would be measured, the engine's real scheduler runs on a pretended one,
# on a clock of its own, and what was measured on a real one is shown from the project's results.
#
# *Needs: 03 (batching), 02 (blocks). About 20 minutes.*

# %%
from teachllm.core.in_flight import PlansInFlight
from teachllm.core.scheduler import Scheduler
from teachllm.engine.pieces import Pieces
from teachllm.worker.cuda_graphs import Graphs
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.lesson_09 import TURN, lanes, simulated
from teachllm_lessons.picture import bars
from teachllm_lessons.predict import predict
from teachllm_lessons.results import committed
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what does the device do while Python thinks?
#
# Eight requests, Qwen3-0.6B's shape, a pretended H200. The plain loop plans a step, launches it, waits for its tokens,
# takes them over, and plans the next one.

# %%
plain = simulated(async_scheduling=False)
lanes(plain.lines)

# %% [markdown]
# The white gaps in the lower lane are a GPU that does nothing. They are the host's `update`, `schedule` and `launch`.

# %% [markdown]
# ## Show: two ways out
#
# **First: launch less.** Starting a kernel costs the host some microseconds, and a decode step has hundreds of kernels.
# A CUDA graph is a recording of all of them, started by one call. The price: a recording fixes every address and every
# size. So it is made for a *padded* number of tokens, reads tensors that stay where they are, and all that changes (how
# long each sequence is) must be read by kernels on the device.

# %%
show(
    Graphs.capture,
    {
        "self._warm_up(run)": "once without recording: kernels are compiled, libraries take what they need",
        "with torch.cuda.stream": "what is launched in here is written down, not run",
        "self._give_up": "what cannot be recorded runs without, and a warning says why",
    },
    doc=False,
)

# %% [markdown]
# A step with prompts in it cannot be recorded whole: how attention is split depends on the lengths at hand. It is
# recorded in *pieces*, with attention launched in between.
#
# **Second: do not wait.** The next step can be planned while this one runs. But the next step needs this one's tokens?
# The *device* needs them, and has them. The scheduler needs only to know *that* there will be one token more.

# %%
show(
    Scheduler._can_compute,
    {
        "num_in_flight_tokens == 0": "nothing of it is under way: as in the plain loop",
        "runs_ahead": "a grammar or a drafter on the host needs the ids: such requests wait for them",
        "num_expected_tokens < request.max_len": "lengths are known ahead, ids are not; this may be all that is needed",
    },
)

# %% [markdown]
# What the scheduler cannot know is whether the token that is under way ends its request. Then the step planned ahead
# computes one token too many, which is dropped, and writes K and V for it. The blocks it writes into must not be given
# to anybody else before.

# %%
show(
    PlansInFlight.pinning_step,
    {"request.last_step": "the last plan that names it: its blocks stay pinned until that one has come back"},
)

# %% [markdown]
# ## Step: tokens that come one turn late
#
# The engine on this CPU, with asynchronous scheduling. A CPU computes at once, so nothing is gained, but the order of
# things is that of a GPU: the first turn brings no tokens.

# %%
watch = Watch(async_scheduling=True, num_gpu_blocks_override=16, max_model_len=128)
watch.add("A", "What is a KV cache?", max_tokens=3)
watch.step()

# %%
watch.step()

# %%
print("plans under way:", watch.engine.core.num_pending, "· A's tokens on the host:", watch.tokens("A"))
turns = 2
while watch.engine.has_unfinished_requests:
    watch.step()
    turns += 1
print(f"{turns} turns for {len(watch.tokens('A'))} tokens, in {len(watch.trace.steps)} steps")

# %% [markdown]
# > **Myth: asynchronous means several threads.** Here it is one loop, in one thread, that asks for a result later. The
# > device is what works at the same time.
#
# ## Predict
#
# Back to the first picture, of the plain loop, in which host and device take turns. **For what share of the time does
# the device work?** (From 0 to 1. Measure it with your eye.)

# %%
yours = None

predict("The device works for this share of the time:", yours, plain.figures.device_busy, within=0.05)

# %% [markdown]
# ## Build: a loop that is one step ahead
#
# Write `turn(core)`, one turn of the engine's loop. You have
#
# - `core.launch()`: plans a step and has it started; returns `False` if nobody can compute anything now
# - `core.num_pending`: how many steps are started whose tokens nobody has asked for
# - `core.collect()`: waits for the oldest of them, and returns what it changed
#
# A turn launches once. It returns what `collect()` gave, or `[]`. One step at most is ahead after a turn, the device is
# never waited for while another step could be planned, and at the end nothing is left behind. Stuck? `TURN.hint(1)`.


# %%
def turn(core):
    raise NotImplementedError  # yours


checked = check(TURN, turn)
checked

# %%
ahead = simulated(Pieces(turn=checked.piece), async_scheduling=True)
lanes(ahead.lines)

# %% [markdown]
# The lower lane has no gaps. The host's work is as much as before; it lies *under* the device's now.
#
# ## Break: who owns this block?
#
# One line has been changed. A pool of two blocks; request A ends with a token that comes back while the next plan for A
# is already under way. B waits for room.

# %%
broken = plant("blocks freed under a plan that still writes")
broken.symptom("teachllm_lessons.lesson_09:who_owns_the_block")

# %% [markdown]
# With the fault B is given a block into which a plan of A's is still going to write. Most of the time B's own writes
# come later, and all is well; one day they do not, and B reads a stranger's K and V. No test of words finds that often.
# Where would you look?

# %%
broken.reveal()

# %% [markdown]
# ## Measure
#
# On the pretended device first, where both loops can be compared on one clock.

# %%
busy = {"plain loop": 100 * plain.figures.device_busy, "one step ahead": 100 * ahead.figures.device_busy}
bars(busy, "share of the time in which the device works, %")

# %%
path, found = committed("ladder")
(model, climbed), *_ = found["models"].items()
rates = {rung["name"]: rung["figures"]["output_tokens_per_s"] for rung in climbed["rungs"] if rung["figures"]}
chosen = {"without": rates["prefix caching"], "graphs, running ahead": rates["graphs, running ahead"]}
print(f"{model} on {found['device']}, commit {found['commit'][:9]}: {climbed['size']['num_requests']} requests")
print(f"{chosen['graphs, running ahead'] / chosen['without']:.1f} times the tokens a second")
bars(chosen, "output tokens/s")

# %% [markdown]
# On a real GPU, with a small model, this one setting is worth more than any other: without graphs the host launches
# kernel after kernel, which takes far longer than the kernels themselves. The larger the model, the less the host
# matters: a step of a large one takes so long that launches hide behind it.
#
# **What the papers say.** NVIDIA introduced CUDA graphs in 2018 with CUDA 10, for work that is cut into many short
# kernels; each decode step is just that. NanoFlow (Zhu et al., 2024) plans the next batch while the present one runs,
# and so do SGLang's and vLLM's "overlap" and "asynchronous" schedulers since.
#
# **What is still wasted.** The device is busy all the time, with reading all weights of the model for one token of each
# request. Could one pass over the weights give several tokens? *Next: 10, speculative decoding.*
