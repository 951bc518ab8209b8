# %% [markdown]
# # 12 · Parallelism: what a second GPU buys
#
# Quantization, in lesson 11, made a model smaller. At some point that is not enough: 32 billion parameters of 16 bits
# are 64 GB, and a GPU may have 80 GB for them and for the KV cache of all requests. Or the model fits, and one GPU is
# too slow, or serves too few requests. A second one can be used in several ways, which buy different things. Most of
# them run here, as processes on one CPU.
#
# *Needs: 03 (batches), 11 (what a decode reads). About 30 minutes.*

# %%
from teachllm.distributed.layout import Layout
from teachllm.distributed.step_bytes import step_bytes
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_12 import (
    BYTES_SENT,
    CHOOSE_REPLICA,
    RoundRobin,
    ask,
    bubbles,
    exchanged,
    on_gpus,
    serve,
    shared_experts,
    weight_bytes,
)
from teachllm_lessons.helpers.pictures.lesson_12 import draw_experts, draw_gains, draw_ranks, draw_split
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

SMALL = {"num_gpu_blocks_override": 48, "max_model_len": 256}

# %% [markdown]
# ## Question: two processes, half the work each?
#
# Four requests, answered by one process, and then by two **ranks**, processes that share every layer.

# %%
one = ask(Watch(**SMALL))
two = ask(Watch(**SMALL, tensor_parallel_size=2))
two.close()
print("one process: weights and tables of", f"{weight_bytes()[0] / 1e6:.1f} MB")
print("two ranks:   weights and tables of", " and ".join(f"{each / 1e6:.1f} MB" for each in weight_bytes(tensor=2)))
print("the same tokens:", one.all_tokens == two.all_tokens)
print("what a rank exchanged in one step:", exchanged(two.trace.steps))

# %% [markdown]
# Each rank has half of the matrices (both have whole norms and tables of positions), so each reads half as much per
# step. The tokens are the same. But there is a new cost: within a single step the ranks exchanged data 14 times, and
# each time no rank could go on before both had sent their part. What do they have to tell each other, and could it be
# less?
#
# ## Show: first by columns, then by rows
#
# A layer multiplies twice in a row: the MLP by gate and up, then by down; attention by Q, K and V, then by the output
# projection. **Tensor parallelism** cuts the first matrix by its outputs (columns) and the second by its inputs (rows).
# One rank's half of the first matrix computes exactly the inputs of its half of the second. Between the two nothing is
# exchanged; after them each rank has a part of a sum.

# %%
draw_split()

# %%
from teachllm.layers.linear import Linear

show(
    Linear.forward,
    {
        "self.weight.product": "this rank's columns or rows: an ordinary product, and the bias that the property "
        "`_own_bias` gives, in models that have one",
        "all_reduce": "of a matrix that is cut by rows; one by columns has nothing to add up",
    },
)

# %% [markdown]
# Two sums per layer, one after attention and one after the MLP, and one for the embedding, which is cut along the
# vocabulary: 6 layers make 13. **Pipeline parallelism** cuts the other way: a rank has some *whole* layers, and sends
# its hidden states on, once.
#
# ## Step: what ranks do with their time
#
# Three steps of the two tensor-parallel ranks above, as the trace has them.

# %%
draw_ranks(two.trace.steps[4:7])

# %% [markdown]
# Both work on the same step at the same time, and meet in every layer. Each plain grey stripe is an exchange, and the
# wait for the slower rank is part of it. On a CPU, where two ranks share the cores that one had, these waits are a
# large part of the time; between two GPUs with a fast link exchanges took 4 to 19% (docs/parallelism.md).
#
# Now two **stages** of three layers each. First a single request.

# %%
with Watch(**SMALL, pipeline_parallel_size=2) as staged:
    alone = ask(staged, count=1).trace.steps
draw_ranks(alone[2:6])

# %% [markdown]
# They take turns. A token goes through all layers, half of them here and half there, and the next token cannot begin
# before this one is known. Hatched parts are **bubbles**: hardware that waits. Now four requests. The engine keeps as
# many plans under way as there are stages, here two, and each has half of the requests:

# %%
with Watch(**SMALL, pipeline_parallel_size=2) as staged:
    together = ask(staged).trace.steps
for what, steps in (("one request", alone), ("four requests", together)):
    print(f"{what}: bubbles are", " and ".join(f"{each:.0%}" for each in bubbles(steps)), "of the stages' time")
draw_ranks(together[4:10])

# %% [markdown]
# While stage 1 works on one half of the requests, stage 0 can work on the other. In theory bubbles go from half of the
# time to nearly nothing. Here much is left: a stage waits where the other one takes longer, and where a plan comes
# late, since two stages and the scheduler share this CPU's few cores. On two H100s the first stage waits 16% of the
# time for plans in a busy mix of requests, the last one 3% (docs/parallelism.md).
#
# **Experts** are a third way, for models that have them. In each layer a router picks a few of many MLPs for each
# token (here 2 of 8; the model is ours, upcycled). With **expert parallelism** each rank has some experts whole, and
# tokens travel to them. Here are two ranks with requests of their own that share the experts.

# %%
load, sent = shared_experts()
print("what a rank exchanged in one step:", sent)
draw_experts(load)

# %% [markdown]
# One rank has experts 0 to 3, the other 4 to 7. In each of the 6 layers a rank tells the other how many rows are
# coming, sends the rows, and the ids and weights of their experts, and gets the results: four *all-to-alls*. And a
# layer takes as long as its busiest rank. Routers do not spread tokens evenly by themselves, and this one, which was
# never trained, does not either.
#
# ## Predict
#
# Four requests decode in one step on two tensor-parallel ranks. A hidden state has 256 numbers of 4 bytes, and every
# sum is one of all four hidden states. A *ring* adds up a tensor on n ranks in two rounds: in each, a rank sends n - 1
# parts of 1/n of the tensor. Besides the 13 sums, each rank tells once per request its best logit and that token: 16
# bytes. **How many bytes does a rank send in that step?**

# %%
yours = None

step = next(step for step in two.trace.steps if [s["num_tokens"] for s in step["scheduled"]] == [1, 1, 1, 1])
counted = sum(num_bytes for _, num_bytes in step["ranks"][0]["sent"].values())
stage = step_bytes(Layout(pipeline=2).coords(0), 3, 256, 4, num_tokens=4, num_sampled=4)
BYTES_SENT.compare(yours, counted, stage=stage["send"][1])

# %% [markdown]
# ## Build: who gets the next request?
#
# The simplest way to use a second GPU is **data parallelism**: a second engine, a *replica* with all of the weights
# and a cache of its own. Requests are shared out, and nothing else is.
#
# > **Myth: data parallelism synchronises gradients.** In training it does. At inference there are none: replicas know
# > nothing of each other. Only a router in front of them has to choose.
#
# Ten requests, every other one long; each replica has room for two at a time. They go to the replicas in turn:

# %%
in_turn = serve(RoundRobin())
in_turn.picture()

# %% [markdown]
# All long requests went to the same replica, and the other one was soon idle. Nothing tells beforehand how long an
# answer will be, but the waiting requests can be counted. Write `choose_replica`: given how many requests wait and how
# many run on each replica, return the number of the replica with the smallest `4 * waiting + running`, the first of
# equals. A waiting request weighs more, as it shows that there is no room. Stuck? `CHOOSE_REPLICA.hint(1)`.


# %%
def choose_replica(num_waiting, num_running):
    raise NotImplementedError  # yours


checked = check(CHOOSE_REPLICA, choose_replica)
checked

# %%
balanced = serve(checked.piece)
print(f"in turn: {in_turn.num_steps} steps; by load: {balanced.num_steps}")
balanced.picture()

# %% [markdown]
# ## Break: right with one process, wrong with two
#
# One line of the engine has been changed. Two models answer, by one process and by two tensor-parallel ranks:
# `teachlm`, and a copy of it with a small *bias* on the output projection of attention, a matrix that is cut by
# rows.

# %%
broken = plant("12a")
broken.symptom("teachllm_lessons.helpers.lesson_12:one_and_two_ranks")

# %% [markdown]
# One process is right with both models, and so are two ranks with the model without biases. Many models have no bias
# there, so such a fault may live long. What does each rank compute of y = x W + b, and what happens to it then? Try
# `broken.guess("teachllm/distributed/group.py")`, then a better file.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure: two GPUs against one
#
# On a CPU all ranks share the cores, so what a second device buys shows only where there is one. The same engine on
# two GPUs, as measured and committed:

# %%
ways, source = on_gpus()
print(source)
draw_gains(ways)

# %% [markdown]
# The bytes are not what costs. The same rank reads 14 MB of weights in that step (of the 18 MB above it does not read
# the tables of positions, nor more than four rows of the embedding), hundreds of times as much as it sends. It is the
# 14 times that each waits for the other. So tensor-parallel ranks belong on the fastest link there is; stages, which
# send less and once, may stand far apart, even in different machines.
#
# **Tensor parallel** makes everything faster, even one request, and not twice as fast: exchanges stay, and so does the
# work that both ranks do whole. **Two stages** make one request *slower* (it still visits all layers, and now travels),
# and pay where many prompts keep both busy. **Two replicas** do nothing for one request, so there is no bar. They
# double prompts, which are compute, but not decodes: each replica reads all the weights for half of the requests.
#
# | | split | exchanged | improves | costs |
# |---|---|---|---|---|
# | tensor | every layer | 2 sums per layer | latency, throughput, memory | waiting in every layer; needs a fast link |
# | pipeline | layers, in stages | hidden states, once per stage | memory, throughput | bubbles; one request no faster |
# | data | requests | nothing | throughput | weights and prefix caches once per replica |
# | expert | experts of a layer | tokens there and back | memory of mixtures | imbalance: the busiest sets the pace |
# | disaggregation | prompts here, decodes there | a prompt's KV | gaps; each side tuned alone | moving KV; idle GPUs |
#
# They are mixed: tensor parallel within a machine and stages between machines for a model too large for one; replicas
# whose attention is their own and whose experts are shared for large mixtures.
#
# The last row is not in this engine, which mixes prompts and decodes in one step (lesson 04). With *disaggregation*
# some GPUs compute prompts only and others decodes only. No prompt delays a decode, no decode takes part of a prompt's
# step, and each side can have the batch size and the parallelism that suit it. The prompts' side samples the first
# token, so moving K and V delays the *second* one. Throughput per GPU does not grow by itself: when prompts and decodes
# do not come in the ratio of the two sides, one of them is idle, and with too few GPUs for prompts the time to a first
# token gets worse.
#
# **What the papers say.** Megatron-LM (Shoeybi et al., 2019) introduced the split by columns, then rows, and reports
# 76% of linear scaling on 512 GPUs in training. GPipe (Huang et al., 2018) described pipelines of batches and their
# bubbles. DistServe (Zhong et al., 2024) proposes disaggregation. It reports up to 7.4 times the requests, or limits on
# latency 12.6 times tighter, against engines of its time that mix both, with both latencies within their limits for
# over 90% of requests.
#
# **What is still wasted.** Each lesson measured its idea on the workload that shows it best. What do they bring
# together, on one workload, one after the other? *Next: 13, the ladder.*
