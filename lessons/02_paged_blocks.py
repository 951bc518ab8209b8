# %% [markdown]
# # 02 · Paged blocks: memory as it is needed
#
# Lesson 01 keeps K and V of every token, and so gives every request memory that grows by one token per step, to a
# length that is not known. The simple way is to reserve room for the longest answer there may be. This lesson
# measures what that costs, and does what operating systems did about it sixty years ago.
#
# *Needs: 01. About 25 minutes.*

# %%
from teachllm.core.block_pool import BlockPool
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_01 import AttentionRecorder
from teachllm_lessons.helpers.lesson_02 import MYPOOL, add_a_dozen, memory_map, reserved, usage_of
from teachllm_lessons.picture import bars, lines
from teachllm_lessons.predict import predict
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: how much of the memory is used?
#
# Three requests have 100, 500 and 1,000 tokens. On the left each has a slot of 2,048 tokens, the longest that it
# might become; on the right each has as many blocks of 16 as it needs.

# %%
memory_map([100, 500, 1000], slot=2048, block_size=16)

# %% [markdown]
# Now live: twelve requests, and memory for 1,024 tokens. `block_size=max_model_len` is a pre-paging engine, with
# one slot of 256 tokens per request.

# %%
IN_SLOTS = {"block_size": 256, "num_gpu_blocks_override": 4, "max_model_len": 256, "enable_prefix_caching": False}
IN_BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 64, "max_model_len": 256, "enable_prefix_caching": False}

slots = Watch(**IN_SLOTS)
add_a_dozen(slots)
print(slots.step())
slots.pool()

# %% [markdown]
# Four run, each slot is nearly empty (full colour is what is used), and eight wait for memory that no request writes
# to. This is *internal fragmentation*: waste inside of what has been given out.
#
# ## Show: a table for each request
#
# The cure is a level of indirection. Memory is cut into small *physical blocks*, a request counts its tokens in
# *logical blocks*, and its *block table* says which physical block each logical one is in. A table grows by a block
# when its last one is full.

# %%
from teachllm.core.kv_cache_manager import KVCacheManager

show(
    KVCacheManager.allocate,
    {
        "num_new = -(-num_tokens": "rounded up: 100 tokens take 7 blocks of 16, 50 take 4; less what the table has",
        "self.num_missing_blocks": "all or nothing: who cannot get all of them gets none, and waits",
        "request.block_ids += new_ids": "physical ids, in logical order; any free block will do",
    },
    doc=False,
)

# %% [markdown]
# And this is how a token's place is found, wherever its block lies:

# %%
from teachllm.worker.cpu.input_batch import InputBatch

show(
    InputBatch.slots,
    {
        "places // self.block_size": "logical block of a token, and by the table the physical one",
        "blocks * self.block_size + places % self.block_size": "slot = table[i // size] * size + i % size",
    },
)

# %% [markdown]
# ## Step: holes that do no harm
#
# Twenty-four blocks; A, B and C take six each. Then B ends.

# %%
recorder = AttentionRecorder()  # keeps what attention is given, for a check below
watch = Watch(
    max_model_len=256,
    num_gpu_blocks_override=24,
    enable_prefix_caching=False,
    overrides=EngineOverrides(attention=recorder),
)
words = watch.ids("Explain paged attention, continuous batching, chunked prefill and block tables to me. " * 10)
for name, max_tokens in (("A", 40), ("B", 2), ("C", 40)):
    watch.add(name, words[:90], max_tokens)
watch.run(steps=2)
watch.pool()

# %% [markdown]
# Twelve blocks are free, in two holes of six. D comes with a prompt that needs ten. An allocator that gives out
# memory in one piece would refuse: there is enough, but not side by side. That is *external fragmentation*. Here:

# %%
watch.add("D", words[:159], max_tokens=8)
print(watch.step())
watch.tables("A", "C", "D")

# %% [markdown]
# D's table goes through both holes, and only the table knows. Where is D's token 100? By the formula, and by
# looking whether its key is there:

# %%
table = watch.state.requests["D"].table
slot = table[100 // 16] * 16 + 100 % 16
runner = watch.engine.core.executor._runner
row = runner._batch.row("D")
print(f"table {table}: token 100 is in logical block {100 // 16}, physical block {table[100 // 16]}, slot {slot}")
print(f"the worker says slot {runner._batch.slots(row, [100])[0]}")

k_cache, _ = runner._kv_caches[0]  # of the first layer
key = recorder.seen[-6].k[-159:][100]  # of this step, whose last 159 tokens are D's
print(f"its key is there: {bool((k_cache.flatten(0, 1)[slot] == key).all())}")

# %% [markdown]
# | an operating system | an engine |
# |---|---|
# | process, its virtual pages | request, its logical blocks |
# | physical frame | physical block |
# | page table, walked by the MMU | block table, walked by the attention kernel |
# | page fault: take a frame | last block is full: take a block, before the step |
# | shared pages, copied on write | shared prefix blocks, full and never written again (lesson 05) |
# | swapping to disk | none: who is thrown out computes again (lesson 06) |
#
# > **Myth: PagedAttention pages weights, or moves data in and out of the GPU.** It moves nothing. Weights are no
# > part of it. It maps logical blocks of K and V to physical ones, so that a sequence need not lie in one piece.
#
# ## Predict
#
# A prompt of exactly 64 tokens, four blocks' worth. The first step computes it and samples a token, so that 65 are
# known. **How many blocks does the request hold after that step?**

# %%
yours = None

watch.run()
watch.add("P", words[:64], max_tokens=4)
watch.step()
after_first = len(watch.state.requests["P"].table)
watch.step()
print(f"(after the second step it holds {len(watch.state.requests['P'].table)})")
predict("Blocks after the first step:", yours, after_first)

# %% [markdown]
# A sampled token is an id. It has no K and V until it goes through the model, and that is in the next step. So the
# newest token of a sequence never has a place yet, and at most 15 places of a request are empty.
#
# ## Build: the pool
#
# Something has to hand out blocks and take them back. Write `take` and `release` of a pool. A block has a
# `ref_count`, its number of users. Free blocks stand in a list: `self.free_blocks()` walks it from its head,
# `self._unlink(block)` takes a block off it, `self._append(block)` puts one at its end; both do the counting.
#
# - `take(count)`: the first `count` free blocks as a list, each with one user now. `IndexError` if there are fewer, and
# then nothing has changed.
# - `release(blocks)`: one user less of each; a block without users goes to the end of the list.
#
# Stuck? `MYPOOL.hint(1)`, then 2, then 3.


# %%
class MyPool(BlockPool):
    def take(self, count):
        raise NotImplementedError  # yours

    def release(self, blocks):
        raise NotImplementedError  # yours


checked = check(MYPOOL, MyPool)
checked

# %% [markdown]
# ## Break: one request writes where another reads
#
# One line of the engine has been changed, in a copy. A short question and a longer one:

# %%
broken = plant("a block that is counted one token too short")
broken.symptom("teachllm_lessons.helpers.lesson_02:short_and_long")

# %% [markdown]
# The first answer does not show it; the second begins well, and then says things that are not so. A sentence or two
# in answer to a short question is what most quick tests look at. What gets worse with each block of a sequence?
# Guess a file, then a function: `broken.guess("teachllm/core/block_pool.py")`. Then look.

# %%
broken.reveal()

# %% [markdown]
# Two more to find, in files that you have read: `plant("a table gets a block more than it needs")`, with
# `symptom("teachllm_lessons.helpers.lesson_02:blocks_of_prompts")`, and `plant("a shared block is given away with its
# first user")`, with `symptom("teachllm_lessons.helpers.lesson_02:one_beginning_for_two")`.
#
# ## Measure
#
# The same twelve requests and the same memory, in slots and in blocks, with the pool from above (yours if it is
# right, else the engine's own).

# %%
paged = Watch(overrides=EngineOverrides(make_pool=checked.piece), **IN_BLOCKS)
add_a_dozen(paged)
usage = {"slots of 256": usage_of(slots), "blocks of 16": usage_of(paged)}
for name, steps in usage.items():
    share = sum(step.used for step in steps) / sum(step.held for step in steps)
    at_once = max(len(step.lengths) for step in steps)
    turns = (slots if name.startswith("slots") else paged).state.step + 1
    print(f"{name}: {share:.0%} of held memory is used, {at_once} requests at once, {turns} steps in all")
print(f"every answer is the same: {slots.all_tokens == paged.all_tokens}")
lines(
    {name: (range(len(steps)), [step.used for step in steps]) for name, steps in usage.items()},
    "step",
    "tokens in the cache, of 1,024",
)

# %%
lengths = [step.lengths for step in usage["blocks of 16"]]
used = sum(map(sum, lengths))
wasted = {
    f"blocks of {size}": 100 * (1 - used / sum(reserved(each, size) for each in lengths))
    for size in (1, 4, 16, 64, 256)
}
bars(wasted, "waste, % of the memory held by these requests")

# %% [markdown]
# Why not blocks of one token, then? Each block is an entry in a table, a step in a kernel's walk, and one thing more
# to hash and hand out; and a kernel reads long runs better than scattered tokens. The share that is wasted falls
# with the length, too: it is 12 % here, where sequences are short, and 2 % for the three longer requests above. From 16
# on, smaller blocks save little that long sequences would notice.
#
# **What the paper says.** "Efficient Memory Management for Large Language Model Serving with PagedAttention" (Kwon
# et al., SOSP 2023) finds that in the systems of its time 20.4 to 38.2 % of KV memory held tokens, and reports 2 to
# 4 times the throughput of FasterTransformer and Orca at the same latency. The gain is not faster attention, which
# the look-ups made slower (by 20 to 26 % there). It is *more requests at once*.
#
# **What is still wasted.** More requests at once are of use only if they may join: if the engine waited for the
# slowest of a batch before it began the next one, free blocks would lie idle. *Next: 03, continuous batching.*
