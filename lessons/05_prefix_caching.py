# %% [markdown]
# # 05 · Prefix caching: the same beginning, computed once
#
# A thousand users, one system prompt. Each request begins with the same few hundred tokens, and an engine that does not
# notice computes their K and V a thousand times. In lesson 04 a long prompt was cut into chunks so that it stalled no
# request. Here most of it disappears, as long as the engine can tell what is the same. If it is wrong about that, one
# user gets an answer out of another user's context.
#
# *Needs: 02 (blocks), 04 (chunks). About 20 minutes.*

# %%
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_05 import HASH_BLOCK, PROMPT_TOKENS, by_pythons_hash, num_shared, two_users
from teachllm_lessons.picture import bars
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what does a shared beginning cost?
#
# Four requests arrive one after the other. All begin with the same instructions and differ in their last words. Without
# prefix caching, how many of the prompt tokens that are computed had been computed before?

# %%
INSTRUCTIONS = (
    "You teach how language models are served. Answer in one short sentence, use plain words, and give an example "
    "where it helps. Do not repeat the question. If a number is asked for, give its unit, and say how it is found. "
    "If there is more than one answer, give the one that holds for most engines, and name one engine where it does "
    "not hold. Never guess: say so if you do not know. Here is the question. "
)
QUESTIONS = ["What is a KV cache?", "What is a block table?", "What is a token budget?", "What is a prefix cache?"]


def ask_all(**settings) -> Watch:
    watch = Watch(num_gpu_blocks_override=48, max_model_len=256, **settings)
    for name, question in zip("ABCD", QUESTIONS, strict=True):
        watch.add(name, INSTRUCTIONS + question, max_tokens=8)
        watch.run()
    return watch


without = ask_all(enable_prefix_caching=False)
without.timeline(numbers=True)

# %% [markdown]
# Each request pays for its whole prompt (full colour), although all but its last few tokens are those of the request
# before it.
#
# ## Show: a chain of hashes
#
# K and V of a token depend on every token before it, so a block may be used again only if *everything up to its end* is
# the same. The engine gives each full block a name made of its parent's name, its own tokens, and whatever else decides
# the content. Equal name, equal prefix: finding a prefix is walking a dictionary.

# %%
from teachllm.core.prefix_cache import PrefixCache

show(
    PrefixCache.hashes,
    {
        "request.cache_keys": "keys (an adapter, a cache salt) go into the first block only: its children inherit them",
        "_beginnings.extend": "what an earlier request began with, too, is compared with it, which is faster than hashing",
        "hashes[-1], token_ids": "every further block hashes its parent's hash, and so all that stands before it",
    },
)

# %%
from teachllm.core.kv_cache_manager import KVCacheManager

show(
    KVCacheManager.match,
    {
        "(len(request.token_ids) - 1)": "at least the last token is left to compute: its state gives the next one",
        "if block is None": "the first block that is not found ends the walk: no later one can match",
        "for other in": "identical prompts in one step: what a neighbour is about to write counts as there",
    },
    doc=False,
)

# %% [markdown]
# ## Step: watch a hit
#
# Two requests with the same beginning. The second one's table starts with the first one's blocks.

# %%
watch = Watch(num_gpu_blocks_override=24, max_model_len=256, enable_prefix_caching=True)
watch.add("A", INSTRUCTIONS + QUESTIONS[0], max_tokens=12)
print(watch.step())
watch.add("B", INSTRUCTIONS + QUESTIONS[1], max_tokens=12)
watch.step()

# %% [markdown]
# B's scheduled tokens start long after token 0: everything before was found. The tables show which blocks both read.

# %%
watch.tables()

# %%
watch.run()
watch.pool()

# %% [markdown]
# Both have ended and hold nothing any more, yet the pool has not forgotten: dashed blocks are *cached*. No request uses
# them, and they can still be found. Free and cached blocks together are *available*: any request may take them. They
# are taken in the order in which requests returned them, and a request returns its blocks from the tail of its table:
# fewer requests have use for the end of a sequence than for its beginning.
#
# > **Myth: a prefix cache needs memory of its own.** It is made of blocks that no request uses. A cached block is given
# > away like a free one as soon as a request needs it.
#
# ## Predict
#
# The first 96 tokens of A's prompt again, now that all of them are cached. Blocks have 16 tokens. **How many tokens
# will the engine compute for the prompt?** Put your number in the place of `None`.

# %%
yours = None

prompt = watch.ids(INSTRUCTIONS + QUESTIONS[0])
with Watch(num_gpu_blocks_override=24, max_model_len=256, enable_prefix_caching=True) as again:
    again.add("A", prompt, max_tokens=12)
    again.run()
    again.add("A2", prompt[:96], max_tokens=4)
    computed = again.step().scheduled["A2"]["num_tokens"]
PROMPT_TOKENS.compare(yours, computed)

# %% [markdown]
# ## Build: the hash
#
# Two different contents must never share a name. What goes wrong then is no crash. Before version 0.10.2 vLLM named a
# block by Python's `hash()` of a tuple, unless it was told otherwise. That hash has 64 bits and was made for
# dictionaries, not against people who *look for* collisions. (CVE-2025-25183 was about its start, which anyone could
# predict: since Python 3.12 `hash(None)` is a constant.) Here are two blocks of 16 valid token ids. After the question
# mark stand words that were searched for until both tuples had one hash. Two users send them, one after the other, to
# an engine that uses `hash()`, and to one with its own `hash_block`.

# %%
two_users(by_pythons_hash, "Python's hash()")
two_users(HASH_BLOCK.reference, "the engine's own")

# %% [markdown]
# The second user asks about a KV cache and gets the first user's answer, word for word: *another user's context in your
# answer*. A block that collides with a *given* one is hardly harder to find, because every step of that hash can be
# undone. A longer checksum is no help, either: CRC, sums and polynomials are made to notice accidents.
#
# Write `hash_block`. The engine calls it for every full block, with the parent's hash (or the root, for a first block),
# the block's token ids as an `array` of 64-bit integers, and for a first block a tuple of extra keys. It returns 32
# bytes, which must be as hard to collide as 32 bytes can be.
#
# Stuck? `HASH_BLOCK.hint(1)`, then 2, then 3.


# %%
def hash_block(parent, token_ids, extra_keys=()):
    raise NotImplementedError  # yours


checked = check(HASH_BLOCK, hash_block)
checked

# %% [markdown]
# Whatever came of it, the engine below runs: with your piece if it is right, else with its own.

# %%
from teachllm.engine.overrides import EngineOverrides

with_cache = ask_all(enable_prefix_caching=True, overrides=EngineOverrides(hash_block=checked.piece))
with_cache.timeline()

# %% [markdown]
# ## Break: three prompts
#
# One line of the engine has been changed, in a copy. A and B are prompts of their own. C begins with B's first block
# and goes on with A's second one: it may use again what B has computed of its first 16 tokens, and nothing more.

# %%
broken = plant("05a")
broken.symptom("teachllm_lessons.helpers.lesson_05:two_beginnings")

# %% [markdown]
# C found more than it should have found, and its answer is another one: it read K and V that were computed after
# another beginning. Nothing crashed, and the answer alone looks fine. Where would you look? Guess a file, then a
# function: `broken.guess("folder/file.py")`, then `broken.guess("folder/file.py", "function")`. Then look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure
#
# The same four requests, without and with the cache: prompt tokens computed, and the mean time to the first token.


# %%
def prompt_tokens_computed(watch: Watch) -> int:
    steps = (line for line in watch.trace.lines if line["event"] == "step")
    return sum(
        scheduled["num_tokens"] for step in steps for scheduled in step["scheduled"] if scheduled["phase"] == "prefill"
    )


computed = {"no prefix cache": prompt_tokens_computed(without), "prefix cache": prompt_tokens_computed(with_cache)}
bars(computed, "prompt tokens computed")

# %%
first_token = {"no prefix cache": without.figures.ttft.mean, "prefix cache": with_cache.figures.ttft.mean}
bars({name: 1000 * seconds for name, seconds in first_token.items()}, "mean time to first token, ms")

# %%
prompts = [without.ids(INSTRUCTIONS + question) for question in QUESTIONS]
total, shared = sum(map(len, prompts)), num_shared(prompts)
print(f"every answer is the same: {with_cache.all_tokens == without.all_tokens}")
print(f"of {total} prompt tokens, {shared} ({shared / total:.0%}) belong to a beginning that was computed before")
print(f"found: {with_cache.figures.prefix_hit_rate:.0%} of all prompt tokens, as only whole blocks are shared")

# %% [markdown]
# **What the paper says.** SGLang (Zheng et al., 2024) reports up to 6.4 times the throughput on workloads with much to
# share, and keeps a radix tree over token sequences. teachllm, like vLLM, keeps a chain of hashes over fixed blocks:
# less exact by up to 15 tokens per prefix, and far simpler. The gain is what your prompts share: nothing for unrelated
# prompts, nearly everything for one long system prompt.
#
# **What is still wasted.** The pool is finite. When it is full and a request needs one more block, which one gives way?
# *Next: 06, preemption, priorities and fairness.*
