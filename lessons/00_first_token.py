# %% [markdown]
# # 00 · The first token: what happens between a question and its answer
#
# You type a question, and words come back, one after the other. Nothing looks the answer up; nothing plans the
# sentence. There is one function, called again and again: it takes token ids and gives a number for each token of its
# vocabulary. This lesson follows one question through it, with a model of seven million weights that runs on your CPU.
# All later lessons make the same function run less often, or do more at once.
#
# *Needs: Python. About 25 minutes.*

# %%
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_00 import (
    CHOOSE,
    FORESEEN,
    life_of_a_request,
    look_inside,
    sampler_of,
    seconds_per_token,
    streamed,
    strip,
)
from teachllm_lessons.picture import lines
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: where does the answer come from?
#
# The same question, asked twice: once as it is, once in the *chat template* that the model was trained with.

# %%
watch = Watch(num_gpu_blocks_override=48, max_model_len=256)
tokenizer = watch.engine.tokenizer
QUESTION = "What is a KV cache?"

bare, templated = tokenizer.encode(QUESTION), watch.ids(QUESTION)
for name, ids in (("bare", bare), ("templated", templated)):
    watch.add(name, ids, max_tokens=24, ignore_eos=False)
    watch.run()
    print(f"{name:9}  {len(ids):2} tokens in, {len(watch.tokens(name)):2} out: {watch.text(name)!r}")

strip(tokenizer, templated)

# %% [markdown]
# The bare question gets no answer at all: the one token that comes out is `<|im_end|>`, "the speaker has finished".
# That means little: this model was trained to predict what an assistant says, and nothing else, so what follows a
# user's question mark is a guess. The template adds what a transcript of a conversation has around it (grey boxes are
# special tokens) and ends with `<|im_start|>assistant\n`, so that what comes next is the answer. **The model continues
# a text. The template makes a text whose continuation is an answer.** If a good model answers badly, look at the
# template first.
#
# Fourteen tokens in, 24 out. How many times was the model run, and on what?
#
# ## Show: one pass, and the loop around it
#
# The model takes token ids and their positions, and returns one *hidden state* for each of them.

# %%
from teachllm.models.decoder import CausalLM

show(
    CausalLM.forward,
    {
        "self.embed(input_ids)": "each id picks a row of a table: 256 numbers that stand for the token, alone",
        "x, residual = layer(": "each layer adds what attention finds at positions up to this one, and an MLP",
        "normed, _ = self.norm(x, residual)": "one state per position; `logits` multiplies it by the output head",
    },
    doc=False,
)

# %% [markdown]
# Around the pass there is a loop, and around the loop a server. This is a request's way through all of them.

# %%
life_of_a_request()

# %% [markdown]
# Text lives on the left only. Token ids cross to the engine and back, which is why scheduling, caching and computing
# need to know nothing about words. (With one process, as here, the three are objects that call each other.) The loop
# runs once per step, and a step does not always give a token: one that computes the first half of a long prompt gives
# none (lesson 04), and one that verifies guesses can give several (lesson 10). In this lesson each step gives one.
#
# ## Step: inside one pass
#
# Here is the pass over the fourteen tokens, opened up. The output head is meant for the state after the last layer,
# but it can be put on the states before, too: what would the model say if it ended here? (This is known as a *logit
# lens*.)

# %%
inside = look_inside(watch, templated)
print(f"states {list(inside.residuals.shape)} = [embedding and layers, positions, hidden size]")
print(f"logits {list(inside.logits[-1].shape)} = [positions, vocabulary]")
inside.lens()

# %% [markdown]
# These are the last eight positions; read them from the bottom. After the embedding a state knows its own token and
# nothing else: the likeliest "next" token is the token itself, since this model has one table for both ends. Then
# attention brings in what stands before. That `KV` is followed by `cache` is known after one layer; how the answer
# begins is settled in the last. In the top row *every* position has a prediction of what follows it. (Most of them are
# nonsense: this model was trained on what the assistant says alone, so none of the prompt's positions but the last was
# ever trained to predict.) The engine uses one of them: that of the **last position** (framed), whose state has seen
# the whole prompt.
#
# > **Myth: a special "generation embedding" is put after the prompt to ask for the next token.** There is none.
# > Token n + 1 is predicted from the state of token n, in a prompt and in an answer alike. So is it in training: one
# > pass over a text is a prediction for each of its positions, and it is a choice which of them count.
#
# Now the loop. The token that was predicted is appended, and the model is run again: *autoregression*.

# %%
stepped = Watch(num_gpu_blocks_override=48, max_model_len=256)
stepped.add("A", templated, max_tokens=24)
stepped.step()

# %%
stepped.step()

# %% [markdown]
# In the first step fourteen tokens go in, and one comes out. In the second step that one goes in, at the next
# position, and the next one comes out; and so on. Only *one* has to go in because of the KV cache, the subject of the
# next lesson; the last section of this one shows what happens without it.
#
# Ids become text on the way out. That is less simple than it looks: this tokenizer works on bytes, and a character
# may have four of them. The last column is what a stream may show so far.

# %%
print(f"{'the token':12}{'all ids decoded':20}{'shown':16}")
for alone, decoded, shown_text in streamed(tokenizer, "naïve café 😀"):
    print(f"{alone!r:12}{decoded!r:20}{shown_text!r:16}")

# %% [markdown]
# Half a character decodes to `�`. It is held back until the rest has come, since a stream cannot take back what it
# has sent.
#
# ## Predict
#
# The engine needs 24 passes for A's 24 tokens: one for the prompt, and one for each further token. Now give prompt
# *and* answer, 14 + 24 tokens, to the model in a single pass. From the prompt's last position on, each position
# predicts a token, as in the top row of the picture. **How many of the first 24 of these predictions are the very
# tokens of the answer, each in its place?** Put your number in the place of `None`.

# %%
yours = None

answer = stepped.run().tokens("A")
predictions = look_inside(stepped, templated + answer).predictions()[len(templated) - 1 : -1]
FORESEEN.compare(yours, sum(map(int.__eq__, predictions, answer)))

# %% [markdown]
# ## Build: the choice
#
# Write `choose`: logits of shape [R, vocabulary], one row per request, to [R] token ids. It takes the most likely
# token, and of equally likely ones the lowest id. This is *greedy* sampling (lesson 07 has the rest), and it needs no
# probabilities.
#
# Stuck? `CHOOSE.hint(1)`, then 2, then 3.


# %%
def choose(logits):
    raise NotImplementedError  # yours


checked = check(CHOOSE, choose)
checked

# %% [markdown]
# Whatever came of it, the engine below runs: with your piece if it is right, else with its own.

# %%
from teachllm.engine.overrides import EngineOverrides

with Watch(
    num_gpu_blocks_override=48, max_model_len=256, overrides=EngineOverrides(make_sampler=sampler_of(checked.piece))
) as own:
    own.add("A", QUESTION, max_tokens=24)
    own.run()
    print(own.text("A"), "...")

# %% [markdown]
# ## Break: something is off
#
# One line of the engine has been changed, in a copy. These are the first tokens of two answers.

# %%
broken = plant("00a")
broken.symptom("teachllm_lessons.helpers.lesson_00:first_tokens")

# %% [markdown]
# Neither answer begins as an answer does, and both go on fluently. Compare A's first token with the picture of the
# pass above: does it stand somewhere in the top row? Then ask which part of the engine turns hidden states into a first
# token, and what it needs to know for that. Guess a file, then a function: `broken.guess("folder/file.py")`, then
# `broken.guess("folder/file.py", "function")`. Then look.
#
# (Another fault to find on your own: `plant("00b")`, with the symptom
# `"teachllm_lessons.helpers.lesson_00:a_stream"`.)

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure
#
# What does a token cost? First without any cleverness: each step runs the model over the whole sequence, as the
# function's definition has it, and throws all states away. `enable_kv_cache=False` does that. How long does one more
# token take after 16, 64, ... tokens?

# %%
LENGTHS = [16, 64, 128, 256, 512]
settings = dict(enable_kv_cache=False, enable_chunked_prefill=False, enable_prefix_caching=False)
with Watch(max_model_len=544, num_gpu_blocks_override=40, **settings) as naive:
    times = seconds_per_token(naive, LENGTHS)
    naive.add("A", QUESTION, max_tokens=24)
    naive.run()
computed = [line["scheduled"][0]["num_tokens"] for line in naive.trace.lines if line["event"] == "step"][-24:]
print(f"{LENGTHS[-1] // LENGTHS[0]} times the tokens, {times[-1] / times[0]:.0f} times as long")
print(f"A computed {computed[0]}, {computed[1]}, ... {computed[-1]} tokens in its steps: {sum(computed)} in all")
print(f"the same answer as above: {naive.text('A') == stepped.text('A')}")
lines({"everything recomputed": (LENGTHS, [1000 * each for each in times])}, "tokens before it", "one more token, ms")

# %% [markdown]
# **What the paper says.** "Attention Is All You Need" (Vaswani et al., 2017) gives O(n² · d) operations for a
# self-attention layer over n tokens of width d. The products with weights, which grow with n alone, are the larger
# part for sequences as short as these: the line is nearly straight.
#
# **What is still wasted.** A's sequence had 37 tokens in its last step, and the engine computed 612 on the way
# there. In each step all but the newest had been computed before, from the same tokens, with the same result: causal
# attention sees to that. *Next: 01, attention, Q, K and V, and which of them to keep.*
