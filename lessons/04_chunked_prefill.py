# %% [markdown]
# # 04 · Chunked prefill: one token budget for all requests
#
# Continuous batching (03) lets a request join as soon as there is room. But what joins first is its *prompt*, and a
# prompt can be thousands of tokens long. All that run share one pass through the model, so all of them wait until the
# longest share of that pass is computed.
#
# *Needs: 03 (continuous batching). About 20 minutes.*

# %%
from teachllm.config import EngineConfig
from teachllm.core.scheduler import Scheduler
from teachllm.engine.overrides import EngineOverrides
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import simulate
from teachllm.simulator.workload import Workload
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_04 import CHUNK, TALKERS, Cut, gaps, newcomers, talk
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.predict import predict
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
        "return num_uncomputed if num_uncomputed <= self._budget": "without chunking: all tokens still to compute, or wait for a step with enough budget",
        "min(num_uncomputed, self._budget": "with it: what is left of the budget",
        "self.policy.chunk": "a policy may take less of a prompt; a single token, as of a decode, is never asked about",
    },
)

# %%
show(
    Scheduler._schedule_running,
    {
        "decodes = [": "one token to compute: these come first, so that no answer waits for a prompt",
        "prompts = [": "more than one: prompts that are under way",
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
# > of them belong to prompts. (There are servers that put prompts and answers on different devices, to keep them out
# > of each other's way: disaggregation, lesson 12.)
#
# ## Predict
#
# The long prompt has more than 400 tokens. With a budget of 64 and three talkers, **after how many steps has the last
# of its prompt been computed?** Count the step in which the first piece is computed as 1.

# %%
yours = None

scheduled_requests = [s for step in pieces.trace.steps for s in step["scheduled"] if s["request_id"] == "long"]
prompt_steps = sum(scheduled["phase"] == "prefill" for scheduled in scheduled_requests)
print(f"the prompt has {pieces.state.requests['long'].arrival['num_prompt_tokens']} tokens")
predict("Steps for the prompt:", yours, prompt_steps)

# %% [markdown]
# ## Build: a chunk that is polite
#
# A budget protects requests that are *answering*. It does not protect new ones: a long prompt that arrived first takes
# all of it, step after step, and short questions after it wait.

# %%
crowd = newcomers()
crowd.timeline(last=10)

# %% [markdown]
# Write `chunk(request, num_tokens)`. The scheduler asks it whenever more than one token of a request could be computed
# now: `num_tokens` is what budget and prompt allow, and you return how many it gets. Prompts of up to **64** tokens
# (`request.num_prompt_tokens`) are taken as they are; of a longer one a step takes **16** at most. What a long prompt
# leaves, others get.
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
# ## Break: the wrong way round
#
# One line has been changed. Three requests are answering with a budget of 16 when a longer prompt comes.

# %%
broken = plant("prompts go before decodes")
broken.symptom("teachllm_lessons.helpers.lesson_04:who_waits")

# %% [markdown]
# All words are right, and tests that compare words pass. But those who were answering got nothing while the prompt was
# computed. Where would you look? `broken.guess("teachllm/core/policy.py")`, then a better file, then a function.

# %%
broken.reveal()

# %% [markdown]
# ## Measure: the budget is a dial
#
# On a larger machine with a larger model: the real scheduler on a simulated H200 with Qwen3-8B's shape. 32 requests are
# answering, and prompts of 6,000 tokens keep coming.

# %%
WORK = [
    Workload(num_requests=32, prompt_len=64, output_len=300),
    Workload(num_requests=12, rate=8.0, prompt_len=6000, output_len=16),
]
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)


def at(budget: int):
    config = EngineConfig(
        max_num_batched_tokens=budget, max_num_seqs=64, max_model_len=8192, enable_prefix_caching=False
    )
    return simulate(config, WORK, model_shape("qwen3-8b")).figures


found = [at(budget) for budget in BUDGETS]
lines(
    {
        "99% of gaps between tokens are shorter than": (BUDGETS, [1000 * each.itl.p99 for each in found]),
        "mean time to first token": (BUDGETS, [1000 * each.ttft.mean for each in found]),
    },
    "token budget of a step",
    "ms",
    log="xy",
)

# %% [markdown]
# A small budget keeps gaps short and lets new requests wait: each chunk reads all weights again and attends to all that
# was computed before. A large one is the other way round. There is no right budget, only one that fits your promise.
#
# **What the paper says.** Sarathi-Serve (Agrawal et al., OSDI 2024) made chunked prefills and "stall-free" batches
# known, and reports 2.6 times the serving capacity of vLLM for Mistral-7B on one A100, and up to 5.6 times for
# Falcon-180B with pipeline parallelism, within limits for the latency of tokens. Its rule is the one above: answers
# first, then a prompt's chunk with what is left of the budget.
#
# **What is still wasted.** The long prompts are computed token for token, even if half of them is the same text for
# all. *Next: 05, prefix caching.*
