# %% [markdown]
# # 04 · Chunked prefill: one token budget for all requests
#
# Continuous batching (03) lets a request join as soon as there is room. But it joins with its *prompt*, and a prompt
# can be thousands of tokens long. All running requests share one pass through the model, so each of them waits until
# the whole pass is computed.
#
# *Needs: 03 (continuous batching). About 20 minutes.*

# %%
from teachllm.config import EngineConfig
from teachllm.core.scheduler import Scheduler
from teachllm.engine.overrides import EngineOverrides
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import simulate
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_04 import (
    CHUNK,
    PROMPT_STEPS,
    TALKERS,
    Cut,
    answers_and_long_prompts,
    gaps,
    measured_budgets,
    measured_rungs,
    newcomers,
    talk,
    ttft_of_long_prompts,
)
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.source import show

# %% [markdown]
# ## Question: why does all text stop?
#
# A, B and C are in the middle of their answers when a request with a long prompt comes. Without chunking its prompt is
# computed in one step, together with one token for each of the others.

# %%
whole = talk(enable_chunked_prefill=False, max_num_batched_tokens=512)
whole.timeline(last=12)

# %%
stall = max(max(gaps(whole)[name]) for name in TALKERS)
usual = sorted(gaps(whole)["A"])[7]
print(f"usually {1000 * usual:.0f} ms from one token to the next; {1000 * stall:.0f} ms when the long prompt came")

# %% [markdown]
# The picture shows steps, and steps look alike. The clock does not: the step with the long prompt takes many times as
# long, and A, B and C get *one* token from it like from any other. Their readers see the text stop.
#
# ## Show: computed catches up with known
#
# The scheduler knows no "prefill" and no "decode". A request has tokens that it *knows* and tokens that it has
# *computed*, and each step hands out a budget of tokens so that the second number catches up with the first. A chunk is
# nothing but a budget that is smaller than the number of tokens still to compute.

# %%
show(
    Scheduler._chunk,
    {
        "return num_uncomputed if": "without chunking: all tokens still to compute, or wait for a step with room",
        "min(num_uncomputed, self._budget": "with it: what is left of the budget",
        "self.policy.chunk": "a policy may take less of a prompt; it is not asked about a single token, as of a decode",
    },
)

# %%
show(
    Scheduler._schedule_running,
    {
        "decodes = [": "one token to compute: these come first, so that no answer waits for a prompt",
        "prompts = [": "more than one: prompts that are partly computed",
        "self._budget -= num_tokens": "one budget for all; what is left after these goes to the queue",
    },
    doc=False,
)

# %% [markdown]
# ## Step: the same prompt in pieces
#
# A budget of 64 tokens per step. Three go to A, B and C, and 61 are left for the long prompt.

# %%
pieces = talk(max_num_batched_tokens=64)
pieces.timeline(last=14)

# %%
after = max(max(gaps(pieces)[name]) for name in TALKERS)
bars({"in one piece": 1000 * stall, "in chunks": 1000 * after}, "longest gap between two tokens of A, B and C, ms")

# %% [markdown]
# > **Myth: a server has a prefill phase and a decode phase.** It has steps. Each step is a flat row of tokens, and some
# > of them belong to prompts. (There are servers that compute prompts and answers on different devices, to keep them
# > out of each other's way: disaggregation, lesson 12.)
#
# ## Predict
#
# The long prompt has 409 tokens. It comes when A, B and C have 4 of their 16 tokens each, as above, but the budget is
# **48** tokens per step. **How many steps compute a part of the prompt?** Put your number in the place of `None`.

# %%
yours = None

smaller = talk(max_num_batched_tokens=48)
shares = [s for step in smaller.trace.steps for s in step["scheduled"] if s["request_id"] == "long"]
PROMPT_STEPS.compare(yours, sum(scheduled["phase"] == "prefill" for scheduled in shares))

# %% [markdown]
# ## Build: a chunk that is polite
#
# A budget protects requests that are *answering*. It does not protect new ones: a long prompt that arrived first takes
# all of it, step after step, and short questions that came later wait.

# %%
crowd = newcomers()
crowd.timeline(last=10)

# %% [markdown]
# Write `chunk(request, num_tokens)`. The scheduler asks it whenever more than one token of a request could be computed
# now: `num_tokens` is what budget and prompt allow, and you return how many it gets. Prompts of up to **64** tokens
# (`request.num_prompt_tokens`) are taken as they are; of a longer one a step takes **16** at most. The rest of the
# budget goes to other requests.
#
# Stuck? `CHUNK.hint(1)`.


# %%
def chunk(request, num_tokens):
    raise NotImplementedError  # yours


checked = check(CHUNK, chunk)
checked

# %%
polite = newcomers(EngineOverrides(policy=Cut(checked.piece)))
polite.timeline(last=10)

# %% [markdown]
# A, B and C have their first tokens at once, and the long prompt pays for it: it needs more steps now. Nothing is free:
# we only moved the wait to another request. `long_prefill_token_threshold` is the engine's own setting for such a
# limit.

# %% [markdown]
# ## Break: answers that pause
#
# One line has been changed. Three requests are answering with a budget of 16 when a longer prompt comes.

# %%
broken = plant("04a")
broken.symptom("teachllm_lessons.helpers.lesson_04:who_waits")

# %% [markdown]
# All words are right, and tests that compare words pass. But the answers pause, although the long prompt is done hardly
# sooner. Where would you look? Guess a file, then a function: `broken.guess("folder/file.py")`, then
# `broken.guess("folder/file.py", "function")`. Then look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure: the budget is a dial
#
# On a larger machine with a larger model: the real scheduler on a simulated H200 with Qwen3-8B's shape. 32 requests are
# answering, and after half a second twelve prompts of 6,000 tokens come, eight per second. Below which length are 99%
# of the gaps between two tokens, and how long does a *long* prompt wait for its first token? (A mean over all requests
# would mix them with the 32 short ones, which have their first token within 65 ms whatever the budget.)

# %%
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)


def at(budget: int):
    config = EngineConfig(
        max_num_batched_tokens=budget, max_num_seqs=64, max_model_len=8192, enable_prefix_caching=False
    )
    return simulate(config, answers_and_long_prompts(), model_shape("qwen3-8b"))


found = [at(budget) for budget in BUDGETS]
gap = [1000 * each.figures.itl.p99 for each in found]
ttft = [1000 * ttft_of_long_prompts(each) for each in found]
for row in zip(BUDGETS, gap, ttft, strict=True):
    print("budget {:5,}: 99% of gaps are below {:4.0f} ms, mean TTFT of a long prompt {:5,.0f} ms".format(*row))
measured, where = measured_budgets()
whole = measured["whole"]
print(f"\nmeasured on one {where}, prompts not cut: 99% of gaps are below {whole['gap_p99_ms']:.0f} ms, ", end="")
print(f"mean TTFT of a long prompt {whole['long_ttft_mean_ms']:.0f} ms")
series = {"gap, 99th percentile, simulated": gap, "long prompt's TTFT, simulated": ttft}
series |= {"gap, 99th percentile, measured": [measured[str(budget)]["gap_p99_ms"] for budget in BUDGETS]}
series |= {"long prompt's TTFT, measured": [measured[str(budget)]["long_ttft_mean_ms"] for budget in BUDGETS]}
lines({name: (BUDGETS, values) for name, values in series.items()}, "token budget of a step", "ms", log="xy")

# %% [markdown]
# A small budget keeps gaps short and lets long prompts wait. Each chunk reads all weights again, but that is *not* why:
# next to 32 answers, even a step of 256 tokens is bound by arithmetic (in the simulation 4.0 ms to read, 5.8 ms to
# compute). Prompts wait because every step with a chunk has a fixed cost, here 2.4 ms of the host and of launching the
# kernels of 36 layers, and because the answers take their 32 tokens of the budget first. Without the fixed cost a
# prompt would wait 532 ms at a budget of 256, in place of 888. From 2,048 tokens on both matter little, so a prompt
# gains nothing more, while gaps nearly double with every doubling.
#
# On the real card all these times are longer, from 2,048 tokens on by 2 to 8% only. The outliers are budgets of 256
# and 1,024: 99% of their gaps are below 13.7 and 41.6 ms, in place of 8.5 and 27.9, and their prompts wait 1.4 and 1.3
# times as long as in the simulation. Against whole prompts a budget of 512 makes the gaps a ninth as long (150 to
# 17 ms), and a long prompt waits 1.6 times as long for its first token (497 to 799 ms). There is no right budget, only
# one that fits your promise.
#
# Does it always pay? No:

# %%
rungs, where = measured_rungs()
for name, figures in rungs.items():
    gap, ttft, rate = 1000 * figures["itl"]["p99"], 1000 * figures["ttft"]["mean"], figures["output_tokens_per_s"]
    print(f"{where}, {name:15}: 99% of gaps below {gap:.1f} ms, mean TTFT {ttft:3.0f} ms, {rate:,.0f} tokens/s")

# %% [markdown]
# These are two rungs of the ladder in lesson 13, where chunking brought *nothing*: gaps did not get shorter, first
# tokens came later, and fewer tokens were made. Its model is small, its prompts have 992 tokens at most, and at these
# two rungs a step takes some 16 ms however many tokens it has, because Python starts every kernel (with CUDA graphs,
# two rungs later, the median gap is 1.3 ms). So whole prompts made no step longer, and chunks (a budget of 384) only
# made more steps. Chunking pays where a prompt takes much longer than a decode step, as in the measurement above.
#
# **What the paper says.** Sarathi-Serve (Agrawal et al., OSDI 2024) made chunked prefills and "stall-free" batches
# known, and reports 2.6 times the serving capacity of vLLM for Mistral-7B on one A100, and up to 5.6 times for
# Falcon-180B with pipeline parallelism, within limits for the latency of tokens. Its rule is the one above: answers
# first, then a prompt's chunk with what is left of the budget.
#
# **What is still wasted.** Long prompts are computed token for token, even if half of their text is the same in all of
# them. *Next: 05, prefix caching.*
