# %% [markdown]
# # 12 · Parallelism: what a second GPU buys
#
# Quantization, in the lesson before, made a model smaller. At some point that is not enough: 32 billion parameters
# of 16 bits are 64 GB, and a GPU has 80 for them and for the KV cache of all requests. Or the model fits, and one GPU
# is too slow, or serves too few. A second one can be used in several ways, which buy different things. All of them run
# here, as processes on one CPU.
#
# *Needs: 03 (batches), 11 (what a decode reads). About 30 minutes.*

# %%
from teachllm.distributed.layout import Layout
from teachllm.distributed.step_bytes import step_bytes
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_12 import (
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
from teachllm_lessons.helpers.lesson_12_pictures import draw_experts, draw_gains, draw_ranks, draw_split
from teachllm_lessons.predict import predict
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
# Each rank has half of the matrices (norms and tables of positions are whole at both), so a step reads half as much
# at each. The tokens are the same. But there is a new cost: within a single step the ranks talked 14 times, and each
# time no rank could go on before all had spoken. What do they have to tell each other, and could it be less?
#
# ## Show: first by columns, then by rows
#
# A layer multiplies twice in a row: the MLP by gate and up, then by down; attention by Q, K and V, then by the
# output projection. **Tensor parallelism** cuts the first matrix by its outputs (columns) and the second by its
# inputs (rows). What one rank's half of the first matrix makes is exactly what its half of the second one needs.
# Between the two nothing is exchanged; behind them each rank has a part of a sum.

# %%
draw_split()

# %%
from teachllm.layers.linear import Linear

show(
    Linear.forward,
    {
        "self.weight.product": "this rank's columns or rows: an ordinary product",
        "all_reduce": "of a matrix that is cut by rows; one by columns has nothing to add up",
    },
)

# %% [markdown]
# Two sums per layer, one behind attention and one behind the MLP, and one for the embedding, which is cut along the
# vocabulary: 6 layers make 13. **Pipeline parallelism** cuts the other way: a rank has some *whole* layers, and
# hands on what it has computed, once.
#
# ## Step: what ranks do with their time
#
# Three steps of the two tensor-parallel ranks above, as the trace has them.

# %%
draw_ranks(two.trace.steps[4:7])

# %% [markdown]
# Both work on the same step at the same time, and meet in every layer. A light grey stripe is an exchange with the
# wait for the slower rank in it. On a CPU, where two ranks share what one had, these waits are a large part; between
# two GPUs with a fast link they were 4 to 19% (docs/parallelism.md).
#
# Now two **stages** of three layers each. First a single request.

# %%
staged = Watch(**SMALL, pipeline_parallel_size=2)
ask(staged, count=1)
alone = staged.trace.steps
draw_ranks(alone[2:6])

# %% [markdown]
# They take turns. A token goes through all layers, half of them here and half there, and the next token cannot begin
# before this one is known. Whatever is hatched is a **bubble**: hardware that waits. Four requests, in as many plans
# under way as there are stages:

# %%
ask(staged, names="EFGH")
together = staged.trace.steps[len(alone) :]
staged.close()
for what, steps in (("one request", alone), ("four requests", together)):
    print(f"{what}: bubbles are", " and ".join(f"{each:.0%}" for each in bubbles(steps)), "of the stages' time")
draw_ranks(together[4:10])

# %% [markdown]
# While stage 1 works on one half of the requests, stage 0 works on the other. What is left of the bubbles is where
# stages take unequally long, and where a plan comes late.
#
# **Experts** are a third way, for models that have them. In each layer a router picks a few of many MLPs for each
# token (here 2 of 8; the model is ours, upcycled). With **expert parallelism** each rank has some experts whole, and
# tokens travel to them. Here are two ranks with requests of their own that share the experts.

# %%
load, sent = shared_experts()
print("what a rank exchanged in one step:", sent)
draw_experts(load)

# %% [markdown]
# One rank has experts 0 to 3, the other 4 to 7. In each of the 6 layers a rank tells the other how many tokens are
# coming, sends their rows, and the ids and weights of their experts, and gets the results: four *all-to-alls*. And the
# layer takes as long as the rank with the most to do. Routers do not share out fairly by themselves, and this one,
# which was never trained, is no exception.
#
# ## Predict
#
# Four requests decode in one step on two tensor-parallel ranks. A hidden state has 256 numbers of 4 bytes. There are
# 13 sums; in a ring each of two ranks sends, for one sum, as many bytes as the tensor has. Then each tells the best
# logit of its half of the vocabulary and its token: 16 bytes per request. **How many bytes does a rank send in that
# step?**

# %%
yours = None

step = next(step for step in two.trace.steps if [s["num_tokens"] for s in step["scheduled"]] == [1, 1, 1, 1])
counted = sum(num_bytes for _, num_bytes in step["ranks"][0]["sent"].values())
print("by the shape of the model:", step_bytes(Layout(tensor=2).coords(0), 6, 256, 4, num_tokens=4, num_sampled=4))
print("a pipeline's first stage would send:", step_bytes(Layout(pipeline=2).coords(0), 3, 256, 4, 4, 4))
predict("Bytes that a rank sends:", yours, counted, " bytes", within=0.02)

# %% [markdown]
# Against the 14 MB of weights that the same rank reads in that step (of the 18 MB above it does not read the tables of
# positions, nor most of the embedding) this is nothing. What costs is not the bytes: it is
# 14 times waiting for each other. A stage sends a thirteenth of it, once, so stages may stand far apart, even in
# different machines, while tensor-parallel ranks belong on the fastest link there is.
#
# ## Build: who gets the next request?
#
# The simplest way to use a second GPU is **data parallelism**: a second engine, a *replica* with all of the weights
# and a cache of its own. Requests are shared out, and nothing else is.
#
# > **Myth: data parallelism synchronises gradients.** In training it does. At inference there are none: replicas know
# > nothing of each other. Only a router in front of them has to choose.
#
# Ten requests, every other one long; each replica has room for two at a time. In turn, one here, one there:

# %%
in_turn = serve(RoundRobin())
in_turn.picture()

# %% [markdown]
# All long ones went to the same replica, and the other one was soon idle. It is not known beforehand how long an answer
# will be, but the waiting requests can be counted. Write `choose_replica`: given how many requests wait and how many
# run on each replica, return the number of the one with the smallest `4 * waiting + running`, the first of equals. A
# waiting request weighs more, as it says that there is no room. Stuck? `CHOOSE_REPLICA.hint(1)`.


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
broken = plant("a bias that every rank adds")
broken.symptom("teachllm_lessons.helpers.lesson_12:one_and_two_ranks")

# %% [markdown]
# One process is right, and so are two ranks of the model without biases. Many models have none there, so such a
# fault may live long. y = x W + b: of a sum of parts, how often is b in it? Try
# `broken.guess("teachllm/distributed/group.py")`, then a better file.

# %%
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
# **Tensor parallel** makes everything faster, one request as well, and not twice: exchanges, and whatever both ranks
# do whole, stay. **Two stages** make one request *slower* (it still visits all layers, and now travels), and pay
# where many prompts keep both busy. **Two replicas** do nothing for one request, so there is no bar. They double
# prompts, which are compute, but not decodes: each reads all the weights for half of the requests.
#
# | | split | exchanged | improves | costs |
# |---|---|---|---|---|
# | tensor | every layer | 2 sums per layer | latency, throughput, memory | waiting in every layer; needs a fast link |
# | pipeline | layers, in stages | hidden states, once a stage | memory, throughput | bubbles; one request no faster |
# | data | requests | nothing | throughput | weights and prefix caches once per replica |
# | expert | experts of a layer | tokens there and back | memory of mixtures | imbalance: the busiest sets the pace |
# | disaggregation | prompts here, decodes there | a prompt's KV | decodes' latency | moving KV; one side may idle |
#
# They are mixed: tensor parallel within a machine and stages between machines for a model too large for one;
# replicas whose attention is their own and whose experts are shared for large mixtures. The last row is not in this
# engine: it mixes prompts and decodes in one step (lesson 04). DistServe (Zhong et al., 2024) splits them, and
# reports up to 7.4 times the requests within given latencies. Megatron-LM (Shoeybi et al., 2019) is where columns
# and rows come from, and reports 76% of linear scaling on 512 GPUs in training; GPipe (Huang et al., 2018) is where
# bubbles do.
#
# **What is still wasted.** Each lesson measured its idea on the workload that shows it best. What do they bring
# together, on one workload, one after the other? *Next: 13, the ladder.*
