# %% [markdown]
# # 06 · Preemption, priorities, fairness: who gives way
#
# Blocks are handed out one at a time, as text grows, and how long an answer will be is not known. So requests that fit
# when they were admitted may not fit a hundred tokens later. Prefix caching (05) made memory go further; it did not
# make it endless. When the pool is empty and a request needs one more block, one of them has to give way.
#
# *Needs: 02 (blocks), 03 (the queue), 05 (prefix caching). About 20 minutes.*

# %%
from teachllm.core.policy import FirstComeFirstServed, Priority
from teachllm.core.scheduler import Scheduler
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_06 import KEY, QUESTIONS, TIGHT, By, overtaken
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.predict import predict
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what if all requests grow at once?
#
# A pool of 14 blocks, 224 tokens. Three prompts of 28 or 29 tokens take 6 blocks together: plenty of room. But each
# answer has 60 tokens, so each request ends with 6 blocks, and 18 are more than there are.


# %%
def three(**settings) -> Watch:
    watch = Watch(**(TIGHT | settings))
    for name, question in QUESTIONS.items():
        watch.add(name, question, max_tokens=60)
    return watch


crowded = three(enable_prefix_caching=False).run()
crowded.timeline()

# %% [markdown]
# C was running like the others, and then stopped in the middle of its answer. It waits until A and B are done, begins
# again with many tokens in one step (full colour), and goes on as if nothing had happened. An engine that refused C at
# the start would have left memory empty for half of the time; one that had no way to stop C would have hung.
#
# ## Show: one place decides
#
# Running requests ask for blocks in `_make_room`. If there are too few, the one with the largest key of the policy
# gives way, which may be the one that asks.

# %%
show(
    Scheduler._make_room,
    {
        "if self.kv.pinned": "blocks that come back by themselves in a moment are waited for: no request loses any",
        "max(self.running, key=self.policy.key)": "the victim: last in the policy's order, else the last to arrive",
        "self._budget += chosen.pop": "what it was to compute in this step is free for others again",
        "if victim is request": "the request that asked is itself the last: it stops",
    },
    doc=False,
)

# %%
show(
    Scheduler._preempt,
    {
        "num_computed_tokens = request.num_in": "its K and V are gone; its tokens, the answer so far included, stay",
        "self.waiting.push": "back to the queue, at the place that its key gives it: before all that arrived later",
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
# C lost its blocks. They are dashed: free, and still findable. With prefix caching its own past is a *prefix that has
# been computed*, as far as no request has taken it since. A freed table returns its blocks from the tail, so A and B
# first take those at C's end.
#
# ## Predict
#
# C knew 65 tokens when it was stopped: a prompt of 28, and 37 of its answer. Without a cache it would compute all of
# them again. It returns when A and B are done, which need two more blocks until then, and prefix caching is on.
# **How many tokens does C compute in its first step?**

# %%
yours = None

while "C" not in (scheduled := watch.step().scheduled):
    pass
predict("tokens scheduled for C on its return:", yours, scheduled["C"]["num_tokens"])

# %%
watch.run()
alone = Watch(**TIGHT)
alone.add("C", QUESTIONS["C"], max_tokens=60)
print(f"the same words as alone, without preemption: {watch.tokens('C') == alone.run().tokens('C')}")

# %% [markdown]
# ## Build: a key that lets no request starve
#
# `Priority` sorts by `(priority, arrival_index)`: the lower number first. It does what it says, and that is its
# problem. Below one patient request (priority 1) came first; urgent ones (priority 0) keep coming, and the next one
# comes whenever one is done. One request runs at a time.

# %%
for policy in (FirstComeFirstServed(), Priority()):
    number = overtaken(EngineOverrides(policy=policy))
    print(f"{type(policy).__name__:22} {number} of 24 urgent requests begin before the patient one")

# %% [markdown]
# Had more urgent ones come, it would still wait. Write `key`: a step of priority is worth **8 arrivals**. An urgent
# request may overtake a patient one that came fewer than 8 arrivals earlier for each step between their priorities;
# from 8 on, the patient one is not overtaken any more. `request.arrival_index` counts up; a smaller key goes first; no
# two requests may have the same key, and a key must not change while its request is under way.
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
# ## Break: something is wrong with the order
#
# One line has been changed. Three requests again, in a pool of 8 blocks.

# %%
broken = plant("the first to arrive gives way")
broken.symptom("teachllm_lessons.helpers.lesson_06:three_in_a_tight_pool")

# %% [markdown]
# All requests are served in both cases, and no word differs. But look who pays: the request that came first, and has
# most to compute again. Under load this never ends: requests that are nearly done are preempted. Where would you look?
# `broken.guess("teachllm/core/policy.py")`, then a better file, then a function.

# %%
broken.reveal()

# %% [markdown]
# Another one to find: `plant("newcomers take what a running request waits for")`, with
# `symptom("teachllm_lessons.helpers.lesson_06:an_urgent_newcomer")`. Read who waits, and for what reason, in each step.
#
# ## Measure: what does giving way cost?
#
# The same three requests in pools of different sizes. Without preemption 262 tokens are computed: three prompts of 28
# or 29, and 59 further tokens of each answer. All beyond that is computed for the second time.

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
# **What the papers say.** The vLLM paper (Kwon et al., SOSP 2023) compares computing again with swapping and finds that
# it never costs more than 20% of swapping's latency. Sheng et al. ("Fairness in Serving Large Language Models", 2024)
# count the *tokens* that each client was served, in place of arrivals: one client's long answers then pay for
# themselves. Your key counts arrivals, which is less fair and fits into one line.
#
# **What is still wasted.** Every request gets its turn now, and each step gives each of them a row of numbers, one for
# every token of the vocabulary. How does one word come of it? *Next: 07, sampling.*
