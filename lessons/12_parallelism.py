# %% [markdown]
# # 12 · Parallelism: what a second GPU buys, and what it costs
#
# Codes of four bits (11) made a model four times smaller. Some models still do not fit, and some that fit are not fast
# enough. Then there are several GPUs, and three questions: *what* is split among them, *what* do they have to tell each
# other, and *who* gains from it, a single request or all of them together?
#
# Here the ranks are processes on your CPU that exchange tensors by gloo. They are slower than one process would be, and
# do exactly what ranks on GPUs do. What GPUs gain is shown from measurements.
#
# *Needs: 00 (layers), 03 (batching). About 25 minutes.*

# %%
from teachllm.distributed.layout import Layout
from teachllm.distributed.step_bytes import step_bytes
from teachllm.engine.data_parallel import Balance
from teachllm.layers.linear import Linear
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.lesson_12 import CHOOSE_REPLICA, QUESTIONS, gains, lanes, run
from teachllm_lessons.predict import predict
from teachllm_lessons.results import committed
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: is two GPUs twice as fast?
#
# Qwen3-8B, one and two GPUs, shared in three ways. On the left a single request (less is better), on the right many at
# once (more is better).

# %%
path, found = committed("parallel")
print(f"{found['device']}, commit {found['commit'][:9]}")
gains(found["workloads"]["qwen3-8b"])

# %% [markdown]
# Nothing is twice as fast. One way makes a single request faster, one makes it *slower* and helps many, one leaves it
# as it is. They are not three qualities of the same thing: they split different things.
#
# | | what is split | what is exchanged | who gains | what it costs |
# |---|---|---|---|---|
# | **tensor** | every layer: heads, columns of a product | sums of hidden states, twice a layer | each request, and memory | waits in every layer: fast links |
# | **pipeline** | layers: a range for each stage | hidden states, once a stage | many requests, and memory | bubbles; one request is no faster |
# | **data** | requests; every replica has the whole model | nothing | many requests | the weights' memory again |
# | **expert** | a mixture's experts | rows of tokens, to their experts and back | memory of large mixtures | imbalance between experts |
# | **disaggregation** | prompts and answers: other devices | K and V of each prompt | steady gaps between tokens | the transfer, idle devices |
#
# ## Show: column, then row
#
# Tensor parallelism cuts two products that follow each other, in a way that needs one exchange for both. The first is
# cut by its *outputs* (each rank has some heads, or some of the MLP's inner columns): everybody needs all inputs, and
# nobody needs the others' outputs. The second is cut by its *inputs*, which are what the rank already has: each rank
# gets a part of a sum, and the parts are added up.

# %%
show(
    Linear.forward,
    {
        "self.weight.product": "a rank multiplies with its own part of the weights: half of the bytes to read",
        "self._group.all_reduce": "cut by inputs: the parts of the sum are added up, and all ranks have the result",
    },
)

# %% [markdown]
# How much is that? The engine can say before it runs: two sums in each layer and one for the embedding, each as large
# as the hidden states of the step's tokens. `step_bytes` is that arithmetic, and traces hold it against what was sent.
#
# ## Step: two ranks, one plan
#
# Four requests to an engine of two processes. Rank 0 plans; both get the same plan, in shared memory.

# %%
tensor = run(tensor_parallel_size=2)
lanes(tensor.steps[2:5])

# %%
stages = run(pipeline_parallel_size=2)
lanes(stages.steps[2:8])

# %% [markdown]
# Above, tensor parallel: both ranks work on every step at the same time and meet in the orange parts, thirteen times a
# step. Below, pipeline parallel: a step is on one stage and then on the other. Two plans are under way, each with half
# of the requests, so that no stage waits for the other all the time. Grey is where one does: a *bubble*. (How long what
# takes says little on a laptop, where two processes share a few cores. The order of things is that of GPUs.)

# %%
with Watch(max_model_len=128, num_gpu_blocks_override=32, max_num_seqs=4) as alone:
    for name, question in QUESTIONS.items():
        alone.add(name, question, max_tokens=12)
    alone.run()
for way, ran in (("tensor parallel", tensor), ("pipeline parallel", stages)):
    print(f"{way}: the same tokens as one process: {ran.tokens == alone.all_tokens}")

# %% [markdown]
# ## Predict
#
# The model has 6 layers and a hidden size of 256, in float32. A decode step has 4 tokens, one of each request. In an
# all-reduce among two ranks each sends as many bytes as the tensor has. **How many bytes does a rank send in such a
# step for its sums of hidden states?**

# %%
yours = None

sent = tensor.sent(step=5)[0]
predict("Bytes a rank sends in a decode step for its sums:", yours, sent["all_reduce"][1])

# %%
expected = step_bytes(Layout(tensor=2).place(0), 6, 256, 4, num_tokens=4, num_sampled=4)
print(f"counted: {sent}")
print(f"by the shape of the model: {expected}")

# %% [markdown]
# One more exchange is there: to sample, ranks need not collect the logits of all 4,096 tokens. Each has half of the
# vocabulary, finds its own best one, and tells the other its number and its logit.
#
# > **Myth: data-parallel replicas have to synchronise.** In training they do, since gradients are averaged. At
# > inference there are no gradients. Replicas exchange nothing at all (unless they share a mixture's experts); there is
# > only somebody who decides which of them gets the next request.
#
# ## Build: who gets the next request?
#
# `Balance` counts, for each replica, how many of its requests wait and how many run, and asks a function.

# %%
show(
    Balance.choose,
    {"self._choose(waiting, running)": "this is yours", "group": "completions of one prompt share blocks"},
)

# %% [markdown]
# Write `choose_replica(num_waiting, num_running)`: two lists with a number for each replica, to the replica that gets
# the next request. The one with the smallest **4 × waiting + running**, and the first of several. Stuck?
# `CHOOSE_REPLICA.hint(1)`.


# %%
def choose_replica(num_waiting, num_running):
    raise NotImplementedError  # yours


checked = check(CHOOSE_REPLICA, choose_replica)
checked

# %% [markdown]
# ## Break: right for most models
#
# One line has been changed. A layer is computed by two ranks with half of its inputs each, and their parts are added
# up.

# %%
broken = plant("a bias that every rank adds")
broken.symptom("teachllm_lessons.lesson_12:two_halves")

# %% [markdown]
# Most models of today have no bias there, and would never show it. Where would you look?

# %%
broken.reveal()

# %% [markdown]
# ## Measure: what the exchange costs
#
# The picture at the top is the measure. To read it, count bytes. One decode step reads all weights: 16 GB of Qwen3-8B,
# which takes 5 ms at 3 TB/s. Shared by two, each reads half. The 73 sums in between are small (4,096 numbers a token)
# and short (about 2 microseconds each over NVLink), so a request becomes 1.67 times as fast: what is missing to 2 are
# those sums, and all that is not split. With pipeline stages a single request reads the same weights one half after the
# other, and gains nothing. With many requests both halves are busy, but *each of the two plans under way* reads its
# stage's weights for half of the batch: that is why pipelining gains less here than tensor parallelism does.
#
# | | what was measured |
# |---|---|
# | exchanges, of the time of a decode step | 4 to 6% |
# | exchanges, of the time of prompts | 15 to 19% |
# | pipeline: the first stage waits for plans | 16% |
#
# (docs/parallelism.md has the whole table.) **When to mix them.** A model too large for one machine: tensor parallel
# within a machine, where links are fast, and stages between machines, which talk once a step. A mixture of experts:
# data parallel attention, with experts spread over all ranks. A model that fits into one GPU, and many requests:
# replicas, since nothing is exchanged.
#
# **What the papers say.** Megatron-LM (Shoeybi et al., 2019) cut transformers by column and row, for training, and kept
# 76% of one GPU's efficiency on 512. GPipe (Huang et al., 2018) pipelined micro-batches and named the bubble; GShard
# (Lepikhin et al., 2020) spread experts over 2,048 cores with all-to-all.
#
# **What is still wasted.** You have seen a dozen ideas, each alone. What is each worth beside the others, on one
# workload? *Next: 13, the ladder.*
