# %% [markdown]
# # 10 · Speculative decoding: several tokens per step, and none of them changed
#
# Lesson 09 took the host out of the way: graphs and asynchronous scheduling keep a GPU busy. Busy with what? A decode
# step reads every weight of the model, and computes one token per request with it. The next step reads them all again.
# If the next few tokens were guessed, one read would do for all of them.
#
# *Needs: 07 (sampling), 04 (the tokens that a request still has to compute). About 30 minutes.*

# %%
from functools import partial

from teachllm.engine.overrides import EngineOverrides
from teachllm.sampling.sampler import Sampler
from teachllm.spec_decode.ngram import NgramDrafter
from teachllm_lessons.breaking import plant
from teachllm_lessons.exercise import check
from teachllm_lessons.helpers.lesson_10 import (
    JUDGE,
    PROPOSE,
    QUESTION,
    TOKENS_PER_STEP,
    Noted,
    said_again,
    speculating,
    tokens_a_step,
    told_lengths,
    verification,
)
from teachllm_lessons.helpers.pictures.lesson_10 import where_it_comes_from
from teachllm_lessons.picture import bars
from teachllm_lessons.results import committed
from teachllm_lessons.source import show
from teachllm_lessons.watch import Watch

# %% [markdown]
# ## Question: what does a second token cost?
#
# A trace counts the bytes and the arithmetic of every step. Here is a step that computes one token of a request, and
# one that computes five: the newest token and four guesses, which are always wrong.


# %%
class AlwaysWrong:
    def propose(self, token_ids, num_tokens):
        return [7] * num_tokens


def last_full_step(watch: Watch) -> dict:
    watch.add("A", QUESTION, 24)
    watch.run()
    steps = [line for line in watch.trace.lines if line["event"] == "step"]
    return max(steps[2:], key=lambda line: line["scheduled"][0]["num_tokens"])


with Watch(max_model_len=256) as plain, speculating("custom", drafter=AlwaysWrong()) as wrong:
    for step in (last_full_step(plain), last_full_step(wrong)):
        roofline, count = step["roofline"], step["scheduled"][0]["num_tokens"]
        read, computed = roofline["num_bytes"] / 1e6, roofline["num_flops"] / 1e6
        print(f"{count} token{'s' * (count > 1)}: {read:.1f} MB read and written, {computed:5.1f} million operations")
    print(f"the same answer: {plain.tokens('A') == wrong.tokens('A')}")

# %% [markdown]
# Five times the arithmetic for nearly the same bytes. A processor that waits for memory has arithmetic to spare: on an
# H200 a step of an 8B model with five tokens takes 1.07 times as long as with one (measured, see the end of this
# lesson). And four wrong guesses have not changed the answer.
#
# ## Show: guesses are tokens to compute
#
# The *drafter* guesses, the model (then called the *target*) verifies. For the scheduler a guess, a *draft*, is one
# more token that a request has not computed yet, as a chunk of a prompt is.

# %%
from teachllm.core.drafts import add_drafts

show(
    add_drafts,
    {
        "min(len(drafts), budget": "drafts get the budget that is left, and never lie beyond a request's end",
        "num_drafts -= 1": "short of blocks: one draft less. No request is preempted for a guess",
        "request.num_computed_tokens += num_drafts": "counted as computed for now; what is rejected is taken back",
    },
    doc=False,
)

# %% [markdown]
# The step has logits after the newest token *and after every draft*, so each of these positions can sample its own
# token. Verification walks along them, as long as the token that was sampled is the one that was drafted.

# %%
from teachllm.spec_decode.tree import DraftTree

show(
    DraftTree.walk,
    {
        "drafts[node] == sampled[at]": "a draft is accepted if it is the token that the position before it samples",
        "if not held": "the first position whose token was not drafted ends the walk. It has a token all the same",
    },
    doc=False,
)

# %% [markdown]
# ## Step: draft, verify, reject, recover
#
# The simplest drafter computes nothing. *Prompt lookup* (n-grams) searches the request's own tokens for its last few,
# and proposes what followed them then. `Noted` is such a drafter that keeps its proposals, for the picture.

# %%
noted = Noted(NgramDrafter(max_ngram=4, min_ngram=1).propose)
watch = speculating("custom", drafter=noted)
watch.add("A", QUESTION, 24)
for _ in range(3):
    print(watch.step())
verification(watch, noted, "A", 0)

# %% [markdown]
# "KV" is in the question, so what followed it there was proposed. The model samples " cache", too: accepted. The next
# draft is not what the model samples: *rejected*. The drafts after it were computed for nothing, as they continue a
# text that is not the answer. But the model's logits after " cache" are right, whatever was drafted there, and give "
# keeps". So the step gives one token more than it accepts drafts: the *recovered* token, or a *bonus* token if all are
# accepted.
#
# > **Myth: a rejected draft means falling back to normal decoding.** There is no second pass. The model's own token at
# > that position comes out of the same one, and a step with drafts never gives fewer tokens than a step without.
#
# Prompt lookup finds little in a first answer, and much in one that is said again. In the timeline 4/4 is "four
# accepted of four".

# %%
watch = speculating("custom", drafter=noted)
for name, prompt in (("A", QUESTION), ("B", said_again(watch))):
    watch.add(name, prompt, 24)
    watch.run()
watch.timeline()

# %% [markdown]
# ## Predict
#
# Four drafts per step. Each is accepted with probability 0.8 if all before it were, and a rejection ends the walk.
# **How many tokens does a step give on average?** The engine has a mode for benchmarks that accepts drafts by a seeded
# coin (its text means nothing): twelve requests of 160 tokens. Their coins scatter, so 5% off is right.

# %%
yours = None

coins = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.8}
with speculating("custom", drafter=AlwaysWrong(), **coins) as watch:
    for number in range(12):
        watch.add(f"{number}", QUESTION, 160)
    watch.run()
    found = 1 + watch.figures.num_accepted_tokens / watch.figures.num_drafts
TOKENS_PER_STEP.compare(yours, found, num_steps=watch.figures.num_drafts)

# %% [markdown]
# ## Build: a drafter, and the rule
#
# Write `propose`: given a request's `token_ids` (prompt and output so far), up to `num_tokens` guesses for what comes
# next. Find an earlier place where its last 4 tokens stood, or else the last 3, 2 or 1, and copy what came after them.
# Where nothing matches, return an empty list. It runs in the engine as `Engine(drafter=...)`.
#
# Stuck? `PROPOSE.hint(1)`, then 2, then 3.


# %%
def propose(token_ids, num_tokens):
    raise NotImplementedError  # yours


my_drafter = check(PROPOSE, propose)
my_drafter

# %% [markdown]
# ### The rule
#
# Greedy, a draft is right or wrong. At a temperature the model has probabilities p, and a drafter that is a model, too,
# has drawn its draft from its own probabilities q. Taking every draft that looks likely would change the text. The
# result must be distributed as p, and it should be the draft as often as possible.

# %%
where_it_comes_from(p=[0.5, 0.25, 0.15, 0.1], q=[0.1, 0.2, 0.2, 0.5])

# %% [markdown]
# The drafter draws d half of the time, and the model gives it a tenth: accept it with probability p / q = 0.2. Token a
# is drafted too rarely: accept it always, with probability min(1, p / q) = 1. Then the rejected share (hatched) is as
# large as the missing one (p - q), and a rejection draws from exactly that: max(p - q, 0), scaled to add up to 1.
# Accepted and recovered tokens together reach each line, p, and q has cancelled out. A bad drafter costs speed only.
#
# Write `judge`. `p` and `q` are tensors [rows, tokens], `token` [rows, 1] was drawn from q, `coin` [rows, 1] is uniform
# in (0, 1). Return which drafts are accepted, [rows, 1] bool, and the probabilities that a rejection draws from, [rows,
# tokens]. The contract does not sample: it adds up all cases, and compares with p. Hints: `JUDGE.hint(1)`.


# %%
def judge(p, q, token, coin):
    raise NotImplementedError  # yours


my_rule = check(JUDGE, judge)
my_rule

# %% [markdown]
# ## Break: the tests with greedy answers all pass
#
# One line of the rule has been changed. First a greedy answer with a draft model. Then 20,000 draws of one token, with
# the p and q of the picture.

# %%
broken = plant("10a")
broken.symptom("teachllm_lessons.helpers.lesson_10:greedy_and_random")

# %% [markdown]
# Greedy shows nothing: a draft is the best token or it is not, and the rule is not asked. The draws are off for all
# four tokens. Which tokens come too often: the drafter's favourites or the others? Compare with the picture above.
# Guess with `broken.guess("teachllm/spec_decode/ngram.py")`, then look.

# %% tags=["skip-execution"]
broken.reveal()

# %% [markdown]
# ## Measure
#
# Tokens per step by drafter, on a question and on an answer that is asked for again. Three drafters have weights,
# trained for this model and embedded in the package. `draft_model` is a smaller model that runs four times for four
# drafts. `eagle` is one layer that continues the model's own hidden states. `medusa` is four heads on the last hidden
# state, each for one token further ahead, which do not know what the others guess. The *tree* has second and third
# guesses beside the first, and all its branches are verified in one pass.

# %%
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]"
ways = {"no drafter": None, "look-up (my_drafter)": ("custom", {"drafter": Noted(my_drafter.piece)})}
ways |= {method: (method, {}) for method in ("draft_model", "eagle", "medusa")}
ways["medusa, a tree"] = ("medusa", {"speculative_token_tree": TREE})
overrides = EngineOverrides(make_sampler=partial(Sampler, judge=my_rule.piece))

gained, answers = {}, []
for name, way in ways.items():
    engine = Watch(max_model_len=256) if way is None else speculating(way[0], overrides=overrides, **way[1])
    with engine as watch:
        for which in ("a question", "said again"):
            watch.add(which, QUESTION if which == "a question" else said_again(watch), 40)
            watch.run()
            gained[f"{name}: {which}"] = tokens_a_step(watch, which)
        answers.append(watch.all_tokens)
print(f"all answers are the same: {all(each == answers[0] for each in answers)}")
bars(gained, "tokens per decode step")

# %% [markdown]
# The drafters with weights know the same answers by heart as their model. On questions that neither was trained on they
# gain nearly as much (figures below), as this small model is sure of nearly every token; expect less of larger models.
# To copy a text is hard for Medusa, as each of its heads guesses without knowing the guess of the head before; there a
# tree gains. Where the first guesses are right anyway, a tree only loses: near the end of a request not all of its nine
# nodes fit, and those that fit are wide and not deep.
#
# Tokens per step are not speed. A step with drafts takes longer, and the drafter takes time of its own. These figures
# are from an H200, committed with the project. The last two lines are live: an engine that always drafts, and one that
# adapts, with a drafter that is never right.

# %%
(one_file, one), (many_file, many) = committed("-speculation-", "single"), committed("-speculation-", "many")
drafters_file, drafters = committed("-drafters-", "test")
for method, found in drafters["test"].items():
    same = f"{found['num_same_answers']} of {found['num_answers']} answers the same"
    print(f"{method}: {found['mean_length']:.2f} tokens per verification, {same}")
print(f"({drafters_file.name}: {drafters['device']}, commit {drafters['commit'][:9]}; questions never trained on)\n")
step = one["single"]["verify_step"] / one["single"]["plain"]
print(f"8B model, one request: a step of 5 tokens takes {step:.2f} plain steps ({one_file.name}, {one['device']})")
print(f"8B model, 64 requests: {many_file.name}, {many['device']}; coins of 0.8 decide what is accepted")
for method in ("ngram", "draft_model"):
    lengths = told_lengths(many["many"][f"{method}_0.8_lengths"])
    print(f"  {method}, adaptive; how many drafts a request's next step was to have: {lengths}")
print()
for adaptive in (False, True):
    with speculating("custom", drafter=AlwaysWrong(), adaptive=adaptive) as watch:
        watch.add("A", QUESTION, 120)
        watch.run()
        print(f"adaptive={adaptive}: {watch.figures.num_draft_tokens:3} drafts for 120 tokens, none of them right")
bars(
    {
        "1 request, look-up: always 4 drafts": one["single"]["ngram_measured"],
        "1 request, 0.6B draft model: always 4": one["single"]["draft_model_measured"],
        "64 requests, look-up, adaptive: mostly 2 drafts": 1 / many["many"]["ngram_0.8_against_plain"],
        "64 requests, 0.6B draft model, adaptive: hardly ever drafts": 1
        / many["many"]["draft_model_0.8_against_plain"],
    },
    "times as fast as without drafts, at acceptance 0.8",
)

# %% [markdown]
# One request waits for memory, and drafts are nearly free: look-up comes close to the tokens per step that these coins
# give. With 64 requests, four drafts each would make 320 tokens per step. From about 175 on, this card's arithmetic
# takes longer than reading the weights (772 TFLOP/s over 4.4 TB/s, 2 FLOPs per weight of 2 bytes), so drafts cost time.
# The engine measures acceptance and step times as it runs and lowers the number of drafts, down to zero (`adaptive`,
# `teachllm/spec_decode/draft_length.py`), and so it did for the lower two bars. With look-up it settled on two drafts,
# 192 tokens per step. A draft model also reads its own K and V of all requests for every draft, which does not pay
# there: it hardly ever drafted. Its 0.985 is what deciding that costs, beside plain decoding. What four drafts each
# would cost is not in the record.
#
# **What the papers say.** Leviathan et al. (2023) report 2 to 3 times the speed for T5-XXL with identical outputs, Chen
# et al. (2023) 2 to 2.5 times for Chinchilla 70B. vLLM's authors (2024) report that it was 1.4 to 1.8 times *slower* at
# high request rates. It is a gain for few requests, and must know when to stop.
#
# **What is still wasted.** Every step still reads all weights, in 16 bits each. Does a weight need that many?
# *Next: 11, quantization.*
