# %% [markdown]
# # 07 · Sampling: one token out of thousands of numbers
#
# All requests so far took the most likely token at every step. So each had one answer, always the same, and we could
# compare words whatever we did to the engine. Users ask for more: a second answer, a bolder one, the same one again
# tomorrow. A step of the model ends in one number for each of 4,096 tokens (150,000 in a larger model). This lesson
# goes from those numbers to a token.
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
from teachllm_lessons.helpers.lesson_07 import COUNT_NUCLEUS, KEPT, QUESTION, Looked, peak_and_tail
from teachllm_lessons.helpers.pictures import lesson_07 as pictures
from teachllm_lessons.picture import bars
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: how do you take one?
#
# The model gives each token a number, its *logit*; softmax turns them into probabilities. There are two simple ways to
# choose: take the most likely token (*greedy*), or draw each token with its probability. A *temperature* divides the
# logits first: below 1 the likely tokens get likelier, above 1 all become more alike. Five answers to one question, in
# three ways:


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
pictures.hot_and_cold(first, look.word, (0.5, 1.0, 2.0))

# %% [markdown]
# Greedy has one answer. At temperature 1 there are several, and the model was taught each of them. At 2.2 most are
# gibberish. Why does it fail so suddenly? The picture shows the probabilities of the first token.
#
# At temperature 2 the likeliest tokens are still in front. But there are thousands of others, the *tail*, each next to
# impossible, and together they have a third. An answer takes dozens of draws, and one token from the tail spoils the
# rest. So we want to draw, but not from the tail.
#
# ## Show: temperature, then filters
#
# There are three common ways to cut the tail. *top-k* keeps the k most likely tokens. *top-p*, or nucleus sampling,
# keeps the fewest tokens whose probabilities reach p together. *min-p* keeps tokens at least p times as likely as the
# best. All three at work:

# %%
from teachllm.sampling.filters import apply_filters

show(
    apply_filters,
    {
        "scaled = logits": "temperature comes first: the filters see the flattened probabilities. Remember this one",
        "cut_min_p": "a cut token's logit is minus infinity: its probability is 0",
        "best_of": "top-k: sort, and keep the first k. top-p needs the same sort",
        "count_kept": "top-p counts among the tokens that the other filters left. You will write `nucleus`",
    },
    doc=False,
)

# %% [markdown]
# Then one of the remaining tokens is drawn. The usual way adds probabilities up until the sum passes a random number.
# The *Gumbel-max trick* is shorter: add to every logit (over the temperature) a random number from Gumbel's
# distribution, and take the largest. The winner is distributed exactly as softmax says, with no sum and no division.

# %%
from teachllm_kernels.sampling.random_sample import gumbel_noise_reference

show(
    gumbel_noise_reference,
    {
        "philox_uniform_reference": "one number per token, computed from (seed, output index, completion, token) "
        "and nothing else: there is no generator with a state",
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
look = Looked(num_gpu_blocks_override=96, max_model_len=128)
look.watch.add("A", QUESTION, 8, logprobs=0, **asked)
print(look.watch.step())
pictures.draw(look.logits, look.word, output_index=0, **asked)

# %% [markdown]
# In the last two panels a token that is cut has a grey 0% and no score. On the right the noise decides: the dot
# furthest to the right is drawn, in green. It is the same token that the engine sampled above. One step on,
# `output_index` is 1, and the noise is different.

# %%
look.watch.step()
pictures.draw(look.logits, look.word, output_index=len(look.watch.tokens("A")) - 1, **asked)

# %% [markdown]
# Here the model is sure, the nucleus is one token, and no noise can change that. top-p adapts: several tokens where
# there is a choice, one where there is none. A top-k of 6 would keep six tokens at both positions.
#
# A token's *logprob* is the logarithm of its probability before any temperature, penalty or filter. It comes with the
# token's rank.
#
# **The same again.** The noise depends on the request alone: its seed, its number of output tokens, and which of its n
# completions it is. So a request with a seed gets the same answer alone and among others.

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
with Watch(num_gpu_blocks_override=96, max_model_len=128) as alone:
    alone.add("ours", QUESTION, 12, **asked)
    alone.run()
print(f"alone:      {alone.text('ours')!r}\nin a crowd: {crowd.text('ours')!r}")

# %% [markdown]
# > **Myth: a seed fixes a text only while no other request is served.** That is so where all requests draw from one
# > generator, as each draw moves it on for all. Philox (Salmon et al., 2011) computes a random number from a key
# > and a counter, so any thread can compute any number in any order, and no number depends on earlier draws. (What may
# > still differ between batches is a logit's last bit, as sums are added up in another order. It decides only where two
# > scores are that close.)
#
# ## Predict
#
# Take a toy in place of the model: one of 4,096 tokens is 40,000 times as likely as each of the 4,095 others, which are
# all equally likely. At temperature 1 it has 40,000 of 44,095 parts, 91%, so `top_p=0.9` keeps that one token. **How
# many tokens does `top_p=0.9` keep at temperature 2?** (The logits are log 40,000 and 4,095 times 0.)

# %%
yours = None

num_kept = lesson_07.num_left(peak_and_tail(), temperature=2.0, top_p=0.9)
cool, hot = (lesson_07.num_left(first, temperature=temperature, top_p=0.9) for temperature in (1.0, 2.0))
KEPT.compare(yours, num_kept, cool=cool, hot=hot)

# %% [markdown]
# ## Build: the nucleus
#
# Write `count_nucleus`. It gets `probabilities`, a tensor [rows, tokens], each row sorted with the largest first, and
# `top_p`, a tensor [rows]. It returns a tensor [rows, 1] of integers: the smallest number of tokens, best first, whose
# probabilities reach `top_p` together. At a `top_p` of 1 that is all of them.
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
# *Penalties* make tokens that were used before less likely. `repetition_penalty=1.5` looks at prompt and output.
# `presence_penalty` and `frequency_penalty` look at the output only, and subtract. One line has been changed. The user
# says that an engine can run short of tokens, asks what else it can run short of, and allows five words as the answer.

# %%
broken = plant("07b")
broken.symptom("teachllm_lessons.helpers.lesson_07:another_word")

# %% [markdown]
# Without a penalty (the first line of each) nothing differs. With one, the word that the prompt used gets rarer in the
# engine as it is, and *more* frequent with the fault. Yet other requests with the same penalty get the answers that
# they should, so the fault may live long. Which requests would not show it? Guess with `broken.guess("...")`, then
# look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure
#
# Do draws follow the probabilities? Below are 5,000 draws by the engine's own sampler at this one position, at
# temperature 1.5 with `top_p=0.9`, beside the exact expectation. Pearson's test says how often chance alone would be so
# far off: a p-value near 0 would be a sign of a biased sampler.
#
# Then greedy (temperature 0) against sampling: how many of 16 answers differ, and the *perplexity* of the drawn tokens:
# 2 means that the model, without temperature, gave them one half each, on (geometric) average.

# %%
counts, exact = lesson_07.many_draws(first, 5_000, temperature=1.5, top_p=0.9)
chi_square, degrees, p_value = chi_square_test(counts, exact)
for token_id in torch.tensor(exact).argsort(descending=True)[:6].tolist():
    print(f"{look.word(token_id):8} drawn {counts[token_id]:4} times, expected {exact[token_id]:6.1f}")
print(f"chi-square {chi_square:.1f} with {degrees} degrees of freedom: p = {p_value:.2f}")

filters = {"no filter": {}, "top_p 0.9": {"top_p": 0.9}, "min_p 0.1": {"min_p": 0.1}}
pictures.against_temperature(lesson_07.answers(filters, num=16), 16)

# %% [markdown]
# At 0 there is one answer. Around 1 there are several, each of tokens that the model is sure of. Further on perplexity
# jumps. At 2.5 it is above 4,096, the size of the vocabulary, without a filter and with top-p: tokens are drawn to
# which the model gives *less* than one in 4,096. top-p moves that wall a little, min-p out of the picture: it compares
# each token with the best one, and at temperature 2.5 `min_p=0.1` keeps tokens at least 0.1^2.5 = 0.003 times as likely
# as the best at temperature 1, however many the tail has. What each stage costs for one row of a vocabulary as large
# as Qwen3's, on this processor:

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
# **What is still wasted.** Sampling is a small part of a step. The large parts are reading weights, and attention over
# everything in the cache, whose scores a simple program writes to memory only to read them again.
# *Next: 08, attention kernels.*
