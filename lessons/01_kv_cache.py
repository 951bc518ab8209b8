# %% [markdown]
# # 01 · Attention and the KV cache: what to keep of a token
#
# Lesson 00 ended with an engine that computes hundreds of positions to add two dozen tokens. This one opens the
# attention of a real layer, number by number, to see what a token needs of those before it. That is two vectors a
# layer. They never change, so they are kept; and keeping them costs more memory than one might think.
#
# *Needs: 00. About 30 minutes.*

# %%
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_00 import seconds_per_token
from teachllm_lessons.helpers.lesson_01 import (
    ATTEND,
    MODELS,
    Attending,
    AttentionRecorder,
    StaleQuery,
    attention_picture,
    kv_bytes,
    work_picture,
)
from teachllm_lessons.picture import lines
from teachllm_lessons.predict import predict
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what is computed again?
#
# One request without a cache, 16 tokens of output. A row is a step, a square is a position that it computed.

# %%
QUESTION = "What is a KV cache?"
NO_CACHE = {"enable_kv_cache": False, "enable_chunked_prefill": False, "enable_prefix_caching": False}

every_step = AttentionRecorder()  # keeps what the layers' attention is given
naive = Watch(
    num_gpu_blocks_override=16, max_model_len=128, overrides=EngineOverrides(attention=every_step), **NO_CACHE
)
naive.add("A", QUESTION, max_tokens=16)
naive.run()
work_picture(naive, "A")

# %% [markdown]
# The grey squares are work that has been done before. Can the engine keep the results? That depends on what a new
# token needs of the old ones.
#
# ## Show: where tokens meet
#
# Norms, projections and MLPs work on each token alone. There is one place in a layer where tokens meet: attention. A
# layer's input gives each token three vectors a head: a **query** (what it looks for), a **key** (what it can be
# found by) and a **value** (what it hands over).

# %%
from teachllm.models.llama import LlamaAttention

show(
    LlamaAttention.forward,
    {
        "qkv = self.qkv_proj(x)": "one product with weights makes q, k and v of all heads, for this step's tokens only",
        "Rotary.rotate(qk": "on a CPU: q and k are turned by an angle that grows with the position, so order counts",
        "write_kv(k, v": "k and v go into the cache, each to its token's slot; q goes nowhere",
    },
    doc=False,
)

# %% [markdown]
# ## Step: attention, number by number
#
# The last token of the prompt asks, in one head of the fifth layer. Its query is multiplied with the key of every
# token so far: a *score* each, times a *scale* of 1/√64, since sums of 64 products grow with √64. *Softmax* turns
# scores into weights that add up to 1. The result is the sum of values, so weighted.

# %%
seen, head = every_step.seen[4], 6  # of the first step, which computed the whole prompt
print(f"q {list(seen.q.shape)}, k {list(seen.k.shape)}, v {list(seen.v.shape)}  [tokens, heads, head size]")
kv_head = head // seen.group  # 8 query heads share 4 heads of K and V
scores = seen.k[:, kv_head] @ seen.q[-1, head] * seen.scale
weights = scores.softmax(dim=0)
result = weights @ seen.v[:, kv_head]

texts = [naive.engine.tokenizer.token_text(token_id) for token_id in naive.ids(QUESTION)]
for text, score, weight in zip(texts, scores, weights, strict=True):
    print(f"{text!r:16}score {score:6.2f}  weight {weight:5.2f}  {'#' * round(40 * float(weight))}")
print(f"largest difference from what the engine computed: {(result - seen.out[-1, head]).abs().max():.1e}")

# %% [markdown]
# That is all of attention. The token behind which the answer begins takes most, in this head, from `KV`, what the
# question is about. For a whole prompt each token does the same, and looks back only: this is the *causal mask*. (A
# token that saw the one after it would have nothing to predict.)

# %%
heads = {"layer 3, head 2": every_step.seen[2].weights(1), "layer 5, head 7": seen.weights(head)}
attention_picture(texts, heads)

# %% [markdown]
# Two heads with jobs of their own. The left one mostly takes the token before; the last row of the right one is the
# list above. Two query heads share each head of K and V: that is *grouped-query attention*, and it halves what
# follows.
#
# Now look at what a row needs: **one** query, its own, and the keys and values of **all** tokens up to it. So take
# the naive engine's steps 0 and 1, which computed positions 0 to 13 both. Did anything change?

# %%
for name in "kvq":
    changes = []
    for layer in range(6):
        before, after = (getattr(every_step.seen[6 * step + layer], name) for step in (0, 1))
        changes.append(float((after[: len(before)] - before).abs().max()))
    print(f"{name} of the same tokens one step later: largest change in any layer {max(changes):.1e}")

stale = Watch(
    num_gpu_blocks_override=16, max_model_len=128, overrides=EngineOverrides(attention=StaleQuery(num_layers=6))
)
stale.add("A", QUESTION, max_tokens=16)
stale.run()
print(f"\nas it is:              {naive.text('A')}\nwith the query before: {stale.text('A')}")

# %% [markdown]
# Nothing changes: causal attention lets nothing flow back, so a token's k and v are settled when it is computed.
# They can be kept.
#
# **Why not Q?** Old queries do not change either. But the query of token 7 is used in row 7, for the result of token
# 7, which is known. The next token asks with a query of its own, which no step has computed yet. A cache of Q would
# be written and never read. If it is read (above: each decode asks with the query of the token before it) the model
# answers a question that it has answered already: the first word comes twice, and the rest wanders off.
#
# With the cache, a step computes what is new and reads the rest:

# %%
cached = Watch(num_gpu_blocks_override=16, max_model_len=128)
cached.add("A", QUESTION, max_tokens=16)
cached.run()
print(f"the same words: {cached.text('A') == naive.text('A')}")
work_picture(cached, "A")

# %% [markdown]
# Each position once. The price is memory: 2 (K and V) x layers x KV heads x head size x bytes of a number, for each
# token of each request that is under way.

# %%
from teachllm.core.memory import KVCacheSpec

print(show(KVCacheSpec.bytes_per_token.fget), "\n")
print(f"{'':16}{'a token':>12}{'a request of 2,048':>22}{'100 of them':>14}")
per_token = {name: kv_bytes(*shape) for name, shape in MODELS.items()}
for name, each in ({"teachlm, float32": kv_bytes(6, 4, 64, 4)} | per_token).items():
    print(f"{name:16}{each / 1024:8.0f} KiB{2048 * each / 2**20:18.0f} MiB{100 * 2048 * each / 2**30:10.1f} GiB")

# %% [markdown]
# OPT-13B's 800 KiB per token are the example of the PagedAttention paper (Kwon et al., 2023): 1.6 GB for one request
# of 2,048 tokens. Later models have fewer heads of K and V than of Q, for this reason above all (Shazeer, 2019;
# Ainslie et al., 2023): Llama 3.1 8B takes a quarter of what Llama 2 7B takes.
#
# ## Predict
#
# The engine that runs here keeps about eight million numbers in float32 (seven million weights, and the embedding a
# second time, as the output head), and 12 KiB of K and V per token. **How many tokens does the cache hold when it is as
# large as the model?** Within a tenth will do.

# %%
yours = None

memory = cached.engine.core.executor._runner.memory
print(
    f"weights and tables: {memory.weights / 2**20:.1f} MiB; K and V: {memory.bytes_per_token / 1024:.0f} KiB per token"
)
predict("Tokens that weigh as much as the model:", yours, memory.weights // memory.bytes_per_token, within=0.1)

# %% [markdown]
# That is less than one request of the model's full context, 4,096 tokens. From there on the KV cache is what fills
# the memory, here as on a large GPU. Most of the lessons that follow are about it.
#
# ## Build: attention
#
# Write `attend` for one sequence. q is [queries, heads, head size], k and v are [keys, KV heads, head size]. The
# keys are those of *all* tokens; the queries are those of the *last* ones: all of them for a prompt, a few for a
# chunk, one for a decode. Return a tensor like q. Stuck? `ATTEND.hint(1)`, then 2, then 3.


# %%
def attend(q, k, v, scale):
    raise NotImplementedError  # yours


checked = check(ATTEND, attend)
checked

# %% [markdown]
# ## Break: too good to be true
#
# One line of the engine has been changed, in a copy. A prompt is computed whole, and then by one token per step; each
# time we ask how likely the model finds the prompt's tokens (log p, on average; nearer to 0 is more likely), and
# what it answers.

# %%
broken = plant("a token attends to the one after it")
broken.symptom("teachllm_lessons.helpers.lesson_01:how_likely_was_the_prompt")

# %% [markdown]
# The answer is the same, word for word, so no test of answers would notice. But the model suddenly finds the prompt
# more likely, and how likely depends on how it was cut: where its tokens were computed together, they have seen
# something that they should not have seen. Where would you look? Guess a file, then a function:
# `broken.guess("teachllm/core/scheduler.py")`. Then look.

# %%
broken.reveal()

# %% [markdown]
# ## Measure
#
# One more token behind 16 to 512 others: the naive engine of lesson 00, the engine with its cache, and the same with
# the piece from above (yours if it is right, else the definition that the engine is tested against).

# %%
LENGTHS = [16, 64, 128, 256, 512]
ways = {
    "recomputed": NO_CACHE,
    "KV cache": {},
    "KV cache, attend from above": {"overrides": EngineOverrides(attention=Attending(checked.piece))},
}
found = {}
for name, settings in ways.items():
    with Watch(max_model_len=544, num_gpu_blocks_override=80, **settings) as engine:
        found[name] = [1000 * each for each in seconds_per_token(engine, LENGTHS)]
    print(
        f"{name:28} {found[name][0]:6.1f} ms behind {LENGTHS[0]} tokens, {found[name][-1]:6.1f} ms behind {LENGTHS[-1]}"
    )
lines({name: (LENGTHS, each) for name, each in found.items()}, "tokens before it", "one more token, ms")

# %% [markdown]
# Without a cache a token costs what its whole sequence costs. With it a token costs its own products with weights,
# and a read of K and V that grows with the sequence, but is small beside them here. No word has changed.
#
# **What is still wasted.** Now each request owns memory that grows by one token per step, to a length that no one
# knows beforehand. The simplest engine reserves room for the longest possible answer. How much of that is ever used?
# *Next: 02, paged blocks.*
