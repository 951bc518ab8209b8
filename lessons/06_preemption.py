# %% [markdown]
# # 06 · Preemption, priorities, fairness: which request gives way
#
# Blocks are handed out one at a time, as text grows, and how long an answer will be is not known. So requests that fit
# when they were admitted may not fit a hundred tokens later. Prefix caching (05) made memory go further; it did not
# make it endless. When the pool is empty and a request needs one more block, some request has to give way.
#
# *Needs: 02 (blocks), 03 (the queue), 05 (prefix caching). About 20 minutes.*

# %%
from teachllm.core.policy import FirstComeFirstServed, Priority
from teachllm.core.scheduler import Scheduler
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_06 import COMPUTED_AGAIN, KEY, QUESTIONS, TIGHT, By, overtaken
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what if all requests grow at once?
#
# A pool of 14 blocks, 224 tokens. Three prompts of 28 or 29 tokens take 6 blocks together: plenty of room. But each
# answer has 60 tokens, so each request ends with 6 blocks, and 18 are more than there are.


# %%
def three(**settings) -> Watch:
    """Return an engine with A, B and C in its queue."""
    watch = Watch(**(TIGHT | settings))
    for name, question in QUESTIONS.items():
        watch.add(name, question, max_tokens=60)
    return watch


crowded = three(enable_prefix_caching=False).run()
careful = three(enable_prefix_caching=False, max_num_seqs=2).run()
for name, each in (("all three at once", crowded), ("two at a time", careful)):
    print(f"{name}: {each.figures.num_steps} steps, {each.figures.blocks_used:.0%} of the pool used on average")
crowded.timeline()

# %% [markdown]
# C was running like the others, and then stopped in the middle of its answer. It waits until A and B are done, begins
# again with many tokens in one step (full colour), and goes on as if nothing had happened. An engine that lets a
# request begin only where its longest answer surely fits (two at a time here) never stops one, but more than half of
# its memory is empty, and it needs nearly half as many steps again. One that admits C and cannot stop it would hang.
#
# ## Show: one place decides
#
# `_make_room` takes blocks for a running request. If there are too few, the request with the largest key of the policy
# gives way. It may be the request that needs them.

# %%
show(
    Scheduler._make_room,
    {
        "if self.kv.pinned": "blocks that come back by themselves in a moment are waited for: no request loses any",
        "max(self.running, key=self.policy.key)": "the victim: the last in the policy's order, here by arrival",
        "self._budget += chosen.pop": "its share of this step's token budget is free for others again",
        "if victim is request": "the request that needs a block is itself the last: it stops",
    },
    doc=False,
)

# %%
show(
    Scheduler._preempt,
    {
        "num_computed_tokens = request.num_in": "its K and V are gone; its tokens, the answer so far included, stay",
        "self.waiting.push": "back to the queue, to the place that its key gives it: before all that arrived later",
    },
    doc=False,
)

# %% [markdown]
# No K or V is copied anywhere. The request keeps its *tokens*, and later computes their K and V again, prompt and
# answer in one pass. To the scheduler's one rule this is nothing new: more tokens to compute.
#
# > **Myth: PagedAttention swaps pages to disk, as an operating system does.** It is a map from logical to physical
# > blocks. vLLM's first version could also copy blocks to the host's memory ("swapping"); its second one, and this
# > engine, compute again: prefill is so much faster than decode that it costs little.
#
# ## Step: the moment of preemption

# %%
watch = three(enable_prefix_caching=True)
while not (step := watch.step()).line["preempted"]:
    before = watch.pool()
before

# %%
step

# %%
watch.pool()

# %% [markdown]
# C lost its blocks. They are dashed: cached, so no request uses them, and they can still be found. With prefix caching
# C's own past is a *prefix that has been computed*, as far as no other request takes its blocks. They are available to
# all, like free ones. C returned them from the tail of its table, so A and B take the last of its sequence first.
#
# ## Predict
#
# C had 65 tokens when it was stopped, a prompt of 28 and 37 of its answer; 64 of them had been through the model, in
# four full blocks of 16. Without a cache it would compute all of them again. It returns when A and B are done. Until
# then each of these takes one block more, and only C's four are available: there are no free ones. Prefix caching is
# on. **How many tokens does C compute in its first step after its return?** Put your number in the place of `None`.

# %%
yours = None

resumed = three(enable_prefix_caching=True)
while "C" in resumed.step().scheduled:
    pass  # until it is stopped
while "C" not in (scheduled := resumed.step().scheduled):
    pass  # until it returns
with Watch(**TIGHT) as alone:
    alone.add("C", QUESTIONS["C"], max_tokens=60)
    same = resumed.run().tokens("C") == alone.run().tokens("C")
COMPUTED_AGAIN.compare(yours, scheduled["C"]["num_tokens"], does="the same words as" if same else "other words than")

# %% [markdown]
# ## Build: a key that lets no request starve
#
# `Priority` sorts by `(priority, arrival_index)`: the lower number first. It does what it says, and that is its
# problem. In the next cell one patient request (priority 1) came first; urgent ones (priority 0) keep coming, the next
# one whenever one is done. One request runs at a time.

# %%
for policy in (FirstComeFirstServed(), Priority()):
    number = overtaken(EngineOverrides(policy=policy))
    print(f"{type(policy).__name__:22} {number} of 24 urgent requests begin before the patient one")

# %% [markdown]
# Had more urgent requests come, it would still wait. Write `key`: a step of priority is worth **8 arrivals**. An urgent
# request may overtake a patient one that came fewer than 8 arrivals earlier, for each step between their priorities;
# from 8 on, the patient one is not overtaken any more. `request.arrival_index` counts up; a smaller key goes first; no
# two requests may have the same key, and a request's key must never change.
#
# Stuck? `KEY.hint(1)`.


# %%
def key(request):
    raise NotImplementedError  # yours: a tuple of integers


checked = check(KEY, key)
checked

# %%
waited = {
    "first come, first served": overtaken(EngineOverrides(policy=FirstComeFirstServed())),
    "priority": overtaken(EngineOverrides(policy=Priority())),
    "with patience": overtaken(EngineOverrides(policy=By(checked.piece))),
}
bars(waited, "urgent requests served before the patient one that came first")

# %% [markdown]
# ## Break: three requests, eight blocks
#
# One line has been changed. Three requests again, in a pool of 8 blocks.

# %%
broken = plant("06a")
broken.symptom("teachllm_lessons.helpers.lesson_06:three_in_a_tight_pool")

# %% [markdown]
# All requests are served in both cases. But compare how often each request was stopped, and when it was done. What
# would the first user see on a busy server? Where would you look? Guess a file, then a function:
# `broken.guess("folder/file.py")`, then `broken.guess("folder/file.py", "function")`. Then look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# Another one to find: `plant("06b")`, with
# `symptom("teachllm_lessons.helpers.lesson_06:an_urgent_newcomer")`. Read which request waits in each step, and why.
#
# ## Measure: what does giving way cost?
#
# The same three requests in pools of different sizes. Without preemption 262 tokens are computed: three prompts of 28
# or 29, and 59 further tokens of each answer. All tokens beyond these are computed for the second time.

# %%
SIZES = (8, 12, 16, 20)


def computed(watch: Watch) -> int:
    return sum(scheduled["num_tokens"] for step in watch.trace.steps for scheduled in step["scheduled"])


def cost(caching: bool) -> list[int]:
    return [computed(three(num_gpu_blocks_override=n, enable_prefix_caching=caching).run()) for n in SIZES]


work = {"without prefix caching": (SIZES, cost(False)), "with prefix caching": (SIZES, cost(True))}
lines(work, "blocks in the pool", "tokens computed")

# %% [markdown]
# The lowest point of both lines is the pool in which all fit. Below it each preemption adds what a request had, and
# with the cache part of that is found again: the fewer blocks its neighbours took meanwhile, the more. The curves are
# not smooth, since a smaller pool may stop a request earlier, when it has less to lose. What no cache brings back is
# the wait: in 8 blocks the last answer is done after 123 steps in place of 60.
#
# **What the papers say.** The vLLM paper (Kwon et al., SOSP 2023) compares computing again with swapping. Computing
# again costs the same whatever the block size; swapping is slow with small blocks, since it makes many small transfers;
# and with blocks of 16 to 64 tokens the paper finds the two comparable from end to end. Sheng et al. ("Fairness in
# Serving Large Language Models", 2024) count the *tokens* that each client was served, in place of arrivals: one
# client's long answers then pay for themselves. Your key counts arrivals, which is less fair and fits into one line.
#
# **What is still wasted.** Every request gets its turn now, and each step gives each of them a row of numbers, one for
# every token of the vocabulary. How does one word come of it? *Next: 07, sampling.*
