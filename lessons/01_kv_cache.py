# %% [markdown]
# # 01 · Attention and the KV cache: what to keep of a token
#
# Lesson 00 ended with an engine that computes hundreds of positions to add two dozen tokens. This one opens the
# attention of a real layer, number by number, to see what a token needs of the tokens before it: their keys and values
# in each layer. These never change, so they are kept; and keeping them costs more memory than one might think.
#
# *Needs: 00. About 30 minutes.*

# %%
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_00 import seconds_per_token
from teachllm_lessons.helpers.lesson_01 import (
    AS_LARGE_AS_THE_MODEL,
    ATTEND,
    MODELS,
    Attending,
    AttentionRecorder,
    attention_picture,
    kv_bytes,
    uses,
    work_picture,
)
from teachllm_lessons.picture import lines
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
# layer gives each token three kinds of vectors: **queries** (what it looks for), **keys** (what it can be found by) and
# **values** (what it hands over), one of each per head.

# %%
from teachllm.models.families.llama import LlamaAttention

show(
    LlamaAttention.forward,
    {
        "qkv = self.qkv_proj(x)": "one product with weights makes q, k and v of all heads, for this step's tokens only",
        "Rotary.rotate(qk": "on a CPU: q and k are turned by angles that grow with the position, so order counts",
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
# That is all of attention. The token after which the answer begins takes most, in this head, from `KV`, the subject of
# the question. For a whole prompt each token does the same, and looks back only: this is the *causal mask*. (A token
# that saw the one after it would have nothing to predict.)

# %%
heads = {"layer 3, head 2": every_step.seen[2].weights(1), "layer 5, head 7": seen.weights(head)}
attention_picture(texts, heads)

# %% [markdown]
# Two heads with jobs of their own. The left one mostly takes the token before; the last row of the right one is the
# list above. Two query heads share each head of K and V: that is *grouped-query attention*, and it halves the memory
# that K and V take.
#
# The engine computes whole steps, with many sequences in them, as *rectangles* of queries and keys, and plans each
# rectangle once for all layers. (Leave blocks to lesson 02, trees to lesson 10, and skip windows.)

# %%
from teachllm_kernels.attention import paged_attention

show(
    paged_attention._rectangle,
    {
        "seq, first_token, kv_begin": "sequences with equally many queries, and where the keys of each begin and end",
        "key_index =": "the position of each key in its sequence",
        "query_index = (kv_end": "the position of each query: queries are the last tokens",
        "mask = mask[:": "which keys a query may not look at, one mask for all heads and layers",
        "slots = block_tables": "where the keys lie in the cache",
    },
)

# %% [markdown]
# Now look at what a row needs: **one** query, its own, and the keys and values of **all** tokens up to it. Can these be
# kept from earlier steps? The naive engine computed positions 0 to 13 in step 0 and again in step 1. Did they change?

# %%
for name in "kvq":
    changes = []
    for layer in range(6):
        before, after = (getattr(every_step.seen[6 * step + layer], name) for step in (0, 1))
        changes.append(float((after[: len(before)] - before).abs().max()))
    print(f"{name} of the same tokens one step later: largest change in any layer {max(changes):.1e}")

# %% [markdown]
# Nothing changes (but for the last digits, on machines that round differently for 14 and for 15 rows). Causal attention
# lets nothing flow back, so a token's k and v are settled when it is computed. They can be kept. With this cache a step
# computes what is new and reads the rest:

# %%
recorder = AttentionRecorder()
cached = Watch(num_gpu_blocks_override=16, max_model_len=128, overrides=EngineOverrides(attention=recorder))
cached.add("A", QUESTION, max_tokens=16)
cached.run()
print(f"the same words: {cached.text('A') == naive.text('A')}\n")
print(f"{'position':>8}{'steps that use its q':>24}{'steps that read its k and v':>30}")
used = uses(recorder.seen[::6])  # calls of the first layer
for position in (0, 7, 13, 14, 21, 28):
    print(f"{position:8}{used[position].of_q:24}{used[position].of_kv:30}")
work_picture(cached, "A")

# %% [markdown]
# Each position is computed once. **Why is Q not kept?** Old queries do not change either. But token 7's query is used
# in row 7 alone, for token 7's own result; the next token asks with its own query, which no step has computed before.
# A cache of Q would be right, and no answer would change, because nothing would ever read it. It would only take
# memory: with two query heads per head of K and V as much again as K and V together.
#
# The price of the cache is memory: 2 (K and V) x layers x KV heads x head size x bytes of a number, for each token of
# each request that is running.

# %%
from teachllm.core.memory import KVCacheSpec

print(show(KVCacheSpec.bytes_per_token.fget), "\n")
print(f"{'16-bit cache':16}{'one token':>12}{'2,048 tokens':>22}{'100 x 2,048':>14}")
for name, shape in MODELS.items():
    each = kv_bytes(*shape)
    print(f"{name:16}{each / 1024:8.0f} KiB{2048 * each / 2**20:18.0f} MiB{100 * 2048 * each / 2**30:10.1f} GiB")

# %% [markdown]
# OPT-13B's 800 KiB per token are the example of the PagedAttention paper (Kwon et al., 2023): 1.6 GB for one request
# of 2,048 tokens. Later models have fewer heads of K and V than of Q (Shazeer, 2019; Ainslie et al., 2023). The papers
# do it for speed, since every step has to *read* all K and V from memory. It saves room as well: Llama 3.1 8B takes a
# quarter of what Llama 2 7B takes.
#
# ## Predict
#
# The model that runs here has 6 layers with 8 query heads, which share 4 heads of K and V, of size 64. Weights and KV
# cache are float32, 4 bytes per number. The engine holds 8.0 million numbers of weights: 7.0 million, and the
# embedding's 4,096 x 256 a second time, laid out for the output head. **How many tokens does the KV cache hold when it
# is as large as the weights?** Put your number in the place of `None`; within a tenth will do.

# %%
yours = None

memory = cached.engine.core.executor._runner.memory
AS_LARGE_AS_THE_MODEL.compare(
    yours,
    memory.weights // memory.bytes_per_token,
    weights=memory.weights / 2**20,
    per_token=memory.bytes_per_token // 1024,
)

# %% [markdown]
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
# what it answers. (This model was trained on answers alone, so any question seems unlikely to it.)

# %%
broken = plant("01a")
broken.symptom("teachllm_lessons.helpers.lesson_01:how_likely_was_the_prompt")

# %% [markdown]
# The answer is the same, word for word, so no test of answers would notice. But the model suddenly finds the prompt
# more likely, and how likely depends on how it was cut. Which of the two runs is off? What is different for a token
# when the whole prompt shares its step? Guess a file, then a function: `broken.guess("folder/file.py")`, then
# `broken.guess("folder/file.py", "function")`. Then look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure
#
# One more token after 16 to 512 others: the naive engine of lesson 00, the engine with its cache, and the same with
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
        f"{name:28} {found[name][0]:6.1f} ms after {LENGTHS[0]} tokens, {found[name][-1]:6.1f} ms after {LENGTHS[-1]}"
    )
lines({name: (LENGTHS, each) for name, each in found.items()}, "tokens before it", "one more token, ms")

# %% [markdown]
# Without a cache a token costs what its whole sequence costs. With it a token costs its own products with weights,
# and a read of K and V that grows with the sequence, but is small beside them at these lengths. No word has changed.
#
# **What is still wasted.** Now each request owns memory that grows by one token per step, to a length that is not known
# beforehand. The simplest engine reserves room for the longest possible answer. How much of that is ever used?
# *Next: 02, paged blocks.*
