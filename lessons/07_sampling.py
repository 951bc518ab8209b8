# %% [markdown]
# # 07 · Sampling: one token out of thousands of numbers
#
# All requests so far took the most likely token at every step. So each had one answer, always the same, and we could
# compare words whatever we did to the engine. People ask for more: a second answer, a bolder one, the same one again
# tomorrow. A step of the model ends in one number for each of 4,096 tokens (150,000 in a larger model). What comes
# between those numbers and a token is this lesson.
#
# *Needs: 00 (logits). About 25 minutes.*

# %%
import math
from functools import partial

import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm.sampling.sampler import Sampler
from teachllm.spec_decode.chi_square import chi_square_test
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers import lesson_07
from teachllm_lessons.helpers.lesson_07 import COUNT_NUCLEUS, QUESTION, Looked
from teachllm_lessons.picture import bars
from teachllm_lessons.predict import predict
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: how do you take one?
#
# The model gives each token a number, its *logit*; softmax makes probabilities of them. Two simple ways to choose: take
# the largest (*greedy*), or draw a token as often as its probability says. A *temperature* divides the logits before:
# below 1 the likely gets likelier, above 1 all become more alike. Five answers to one question, in three ways:


# %%
def five(watch: Watch, **params) -> None:
    name = f"request {len(watch.outputs)}"
    watch.add(name, QUESTION, 16, n=5, **params)
    watch.run()
    for completion in watch.outputs[name].outputs:
        print(f"    {completion.text!r}")


watch = Watch(num_gpu_blocks_override=96, max_model_len=128)
for settings in ({}, {"temperature": 1.0, "seed": 2}, {"temperature": 2.2, "seed": 1}):
    print(settings or "greedy")
    five(watch, **settings)

look = Looked(num_gpu_blocks_override=96, max_model_len=128)
look.watch.add("first", QUESTION, 1)
look.watch.run()
first = look.logits
lesson_07.hot_and_cold(first, look.word, (0.5, 1.0, 2.0))

# %% [markdown]
# Greedy knows one answer. At temperature 1 there are several, and each is one that the model was taught. At 2.2 most
# are no language at all. Why does it fail so suddenly? The picture has the probabilities of the first token.
#
# At temperature 2 the likeliest tokens are still in front. But there are thousands of others, the *tail*, each next to
# impossible, and together they have a third. An answer draws dozens of times, and one token from the tail spoils all
# that follow. So one wants to draw, but not from the tail.
#
# ## Show: temperature, then filters
#
# Three ways to cut the tail. *top-k* keeps the k most likely tokens. *top-p*, or nucleus sampling, keeps the fewest
# whose probabilities reach p together. *min-p* keeps those at least a share p as likely as the best. All three at work:

# %%
from teachllm.sampling.filters import apply_filters

show(
    apply_filters,
    {
        "scaled = logits": "temperature comes first: the filters see the flattened probabilities. Remember this one",
        "cut_min_p": "a cut token's logit is minus infinity: its probability is 0",
        "best_of": "top-k: sort, and keep the first k. top-p needs the same sort",
        "count_kept": "top-p counts in what the others have left. What it counts by, `nucleus`, you will write",
    },
    doc=False,
)

# %% [markdown]
# Then one of what is left is drawn. The usual way adds probabilities up until the sum passes a random number. There is
# a shorter one, the *Gumbel-max trick*: add to every logit a random number of the right shape, and take the largest.
# The token that wins is distributed exactly as softmax says, and nothing has been summed or normalised.

# %%
from teachllm_kernels.sampling.random_sample import gumbel_noise_reference

show(
    gumbel_noise_reference,
    {
        "philox_uniform_reference": "a number for each token out of (seed, output index, completion, token), "
        "and out of nothing else: there is no generator with a state",
        "return": "uniform in (0, 1) becomes Gumbel-distributed",
    },
    doc=False,
)

# %% [markdown]
# ## Step: one draw, stage by stage
#
# The engine computes the prompt and draws the first token. `Looked` is an engine whose sampler (the project's, passed
# in through `EngineOverrides`) keeps the logits that it saw, so that we can draw what it did.

# %%
asked = {"temperature": 1.5, "top_p": 0.9, "seed": 3}
look.watch.add("A", QUESTION, 8, logprobs=0, **asked)
print(look.watch.step())
lesson_07.draw(look.logits, look.word, output_index=0, **asked)

# %% [markdown]
# Grey is cut. On the right the noise decides, and green is what it decided for: the same token that the engine said
# above. One step on, `output_index` is 1, and the noise is another.

# %%
look.watch.step()
lesson_07.draw(look.logits, look.word, output_index=1, **asked)

# %% [markdown]
# Here the model is sure, the nucleus is one token, and no noise can change that. top-p adapts: several tokens where
# there is a choice, one where there is none. A top-k of 6 would have let five useless ones in at this position.
#
# What the model thought of its tokens is in their *logprobs*: logarithms of the probabilities before any temperature,
# penalty or filter, with the token's rank among all.
#
# **The same again.** The noise is named by the request alone: its seed, how many tokens it has said, and which of its n
# completions it is. So a request with a seed says the same alone and in a crowd that has come before it.

# %%
look.watch.run()
for scores in look.watch.outputs["A"].outputs[0].logprobs[:3]:
    for score in scores.values():
        p = math.exp(score.logprob)
        print(f"{score.decoded_token!r:9} logprob {score.logprob:.3f}, p = {p:.3f}, rank {score.rank}")

asked = {"temperature": 1.5, "seed": 11}
with Watch(num_gpu_blocks_override=96, max_model_len=128, max_num_batched_tokens=8, max_num_seqs=6) as crowd:
    for number in range(5):
        crowd.add(f"stranger {number}", "Tell me about blocks.", 12, temperature=1.0 + number / 4, seed=number)
    crowd.run(3)
    crowd.add("ours", QUESTION, 12, **asked)
    crowd.run()
watch.add("ours", QUESTION, 12, **asked)
watch.run()
print(f"alone:      {watch.text('ours')!r}\nin a crowd: {crowd.text('ours')!r}")

# %% [markdown]
# > **Myth: a seed fixes a text only while no other request is served.** That is so where all requests draw from one
# > generator, as each draw moves it on for all. Philox (Salmon et al., 2011) computes a random number from a key
# > and a counter, so any number can be had in any order, by any thread, and never depends on who drew before. (What may
# > still differ between batches is a logit's last bit, as sums are added up in another order. It decides only where two
# > scores are that close.)
#
# ## Predict
#
# `top_p=0.9`, at the first token of the answer above. At temperature 1 it keeps three tokens of 4,096 (the first
# picture has them). **How many does it keep at temperature 2?**

# %%
yours = None

print(f"temperature 1: {lesson_07.num_left(first, temperature=1.0, top_p=0.9)} tokens")
predict("Tokens left at temperature 2:", yours, lesson_07.num_left(first, temperature=2.0, top_p=0.9), within=0.5)

# %% [markdown]
# The tail has a third at temperature 2, and 0.9 cannot be reached without two thirds of that third. That is how top-p
# fails: it asks for a share, whoever has it. min-p compares each token with the best one, and temperature changes that
# far less. You will see both at work below.
#
# ## Build: the nucleus
#
# Write `count_nucleus`. It gets `probabilities`, a tensor [rows, tokens], each row sorted with the largest first, and
# `top_p`, a tensor [rows]. It returns a tensor [rows, 1] of integers: of how many tokens, best first, the probabilities
# reach `top_p` together; the fewest that do. At a `top_p` of 1 that is all of them.
#
# Stuck? `COUNT_NUCLEUS.hint(1)`, then 2, then 3.


# %%
def count_nucleus(probabilities, top_p):
    raise NotImplementedError  # yours


checked = check(COUNT_NUCLEUS, count_nucleus)
checked

# %%
overrides = EngineOverrides(make_sampler=partial(Sampler, nucleus=checked.piece))
with Watch(num_gpu_blocks_override=96, max_model_len=128, overrides=overrides) as watch:
    for temperature, name, p in ((1.5, "top_p", 0.9), (2.2, "top_p", 0.9), (2.2, "min_p", 0.1)):
        left = lesson_07.num_left(first, temperature=temperature, **{name: p})
        print(f"temperature {temperature}, {name} {p}: of the first token's candidates {left} are left")
        five(watch, seed=4, temperature=temperature, **{name: p})

# %% [markdown]
# ## Break: a penalty that does not do its work
#
# *Penalties* make tokens rarer that were used before. `repetition_penalty=1.5` looks at prompt and output.
# `presence_penalty` and `frequency_penalty` look at the output only, and subtract. One line has been changed. The user
# says that an engine can run short of tokens, asks for something else, and allows five words as the answer.

# %%
broken = plant("a penalty that rewards")
broken.symptom("teachllm_lessons.helpers.lesson_07:another_word")

# %% [markdown]
# Without a penalty (the first line of each) nothing differs. With one, the word that was said gets rarer in the engine
# as it is, and *more* frequent with the fault. In other requests the penalty seemed to work, which is why no one
# noticed. What is different about these five words? `first.median()` may help: which sign does a typical logit have?
# Guess with `broken.guess("...")`, then look.

# %%
broken.reveal()

# %% [markdown]
# ## Measure
#
# Is a draw what it claims to be? 5,000 draws by the engine's own sampler at this one position, at temperature 1.5 with
# `top_p=0.9`, against the exact probabilities. Pearson's test says how often chance alone would be so far off: a
# p-value near 0 would be a sign of a biased sampler.
#
# Then greedy (temperature 0) against sampling: how many of 16 answers differ, and the *perplexity* of what was drawn:
# 2 means that the model, asked without temperature, was as unsure as between two equally likely tokens.

# %%
counts, exact = lesson_07.many_draws(first, 5_000, temperature=1.5, top_p=0.9)
chi_square, degrees, p_value = chi_square_test(counts, exact)
for token_id in torch.tensor(exact).argsort(descending=True)[:6].tolist():
    print(f"{look.word(token_id):8} drawn {counts[token_id]:4} times, expected {exact[token_id]:6.1f}")
print(f"chi-square {chi_square:.1f} with {degrees} degrees of freedom: p = {p_value:.2f}")

filters = {"no filter": {}, "top_p 0.9": {"top_p": 0.9}, "min_p 0.1": {"min_p": 0.1}}
lesson_07.against_temperature(lesson_07.answers(filters, num=16), 16)

# %% [markdown]
# At 0 there is one answer. Around 1 there are several, each of tokens that the model is sure of. Further on perplexity
# jumps. At 2.5 it is above 4,096, the size of the vocabulary, without a filter and with top-p: tokens come that the
# model likes *less* than blind chance would. top-p moves that wall a little, min-p out of the picture. What each stage
# costs for one row of a vocabulary as large as Qwen3's, on this processor:

# %%
bars(lesson_07.milliseconds_of_stages(151_936), "milliseconds for a row of 151,936 logits")

# %% [markdown]
# Sorting for top-p is the most expensive stage, noise the next. So the engine does for a row only what its request asks
# for, and a GPU does it all in one kernel without a sort (`filtered_draw.py`): 0.025 ms for 64 requests, in a step of
# 6.4 ms with an 8B model on an H200 (`docs/performance.md`).
#
# **What the papers say.** Holtzman et al. (2019), who proposed top-p, report for GPT-2 a perplexity of 1.5 for greedy
# text, 22.7 for plain sampling and 13.1 for top-p 0.95, where human text has 12.4: too sure, too wild, about right.
# Nguyen et al. (2024) propose min-p for high temperatures, for the reason that you have just seen.
#
# **What is still wasted.** Sampling is a small part of a step. The large parts are weights, and attention over all that
# is in the cache, whose scores a simple program writes to memory only to read them again.
# *Next: 08, attention kernels.*
