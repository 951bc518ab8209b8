"""Faults to find: one line of the engine changed, what goes wrong then, and the test that notices.

Each is the kind of mistake that still answers, most of the time. A lesson plants one and asks what is wrong; `make
mutants` plants all, one after the other, and checks that the named test fails with it and passes without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A change of one place.

    Attributes:
        id: its lesson's number and a letter, which says nothing of what it is: "05a".
        name: what is wrong, in a few words; a reader sees it when the fault is revealed.
        path: the file, from the project's root.
        before, after: what stands there, once in the file, and what is put in its place.
        happens: what a user would see, and why.
        test: which test notices, as pytest names it.
    """

    id: str
    name: str
    path: str
    before: str
    after: str
    happens: str
    test: str

    @property
    def lesson(self) -> str:
        """Return the number of the lesson that the fault belongs to."""
        return self.id[:2]

    def planted(self) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: what is to be changed does not stand there once.
        """
        text = (ROOT / self.path).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.id}: {self.before!r} stands {text.count(self.before)} times in {self.path}")
        return text.replace(self.before, self.after)


def find_fault(id: str) -> Fault:
    """Return the fault of an id.

    Raises:
        ValueError: there is none.
    """
    for fault in FAULTS:
        if fault.id == id:
            return fault
    raise ValueError(f"there is no fault {id!r}: choose one of {', '.join(fault.id for fault in FAULTS)}")


_CORE, _KERNELS = "teachllm/core", "kernels/teachllm_kernels"
_HASHES, _TABLES, _PLANS = (f"tests/core/test_{name}.py" for name in ("prefix_cache", "kv_cache_manager", "scheduler"))

FAULTS = (
    Fault(
        "00a",
        "logits of the position before the last one",
        "teachllm/worker/cpu/model_runner.py",
        "logits_indices.extend(range(end - verified, end))",
        "logits_indices.extend(range(end - verified - 1, end - 1))",
        "An answer's first token is sampled from the position before the prompt's last one, so it is what is predicted "
        "after `assistant`, not after the line end. In steps of decodes alone all positions are used and none is "
        "picked, so they are right and make the best of it; next to a prompt a decode would get its neighbour's token.",
        "tests/lessons/helpers/test_lesson_00.py::test_the_next_token_is_what_the_last_position_predicts",
    ),
    Fault(
        "00b",
        "half a character is shown",
        "teachllm/engine/text/detokenizer.py",
        "whole = text.rstrip(REPLACEMENT)",
        "whole = text",
        "English text never shows it. In other languages half of a character turns into `�`, and a stream that has "
        "sent one cannot take it back.",
        "tests/engine/text/test_detokenizer.py::test_an_unfinished_character_is_shown_only_when_nothing_more_comes",
    ),
    Fault(
        "01a",
        "a token attends to the one after it",
        f"{_KERNELS}/attention/paged_attention.py",
        "    mask = key_index.unsqueeze(1) > query_index\n",
        "    mask = key_index.unsqueeze(1) > query_index + 1\n",
        "Each of a prompt's tokens sees the one that it is to predict, if that is computed in the same step, so a "
        "prompt that is computed whole seems more likely than it is. A token alone in its step has none after it: "
        "decodes are right, and answers are the same, or a little odd.",
        "tests/kernels/test_references.py::test_paged_attention_keeps_the_contract_that_readers_of_lesson_01_are_given",
    ),
    Fault(
        "02a",
        "a block that is counted one token too short",
        "teachllm/worker/cpu/input_batch.py",
        "slots = blocks.astype(np.int64) * self.block_size + positions % self.block_size",
        "slots = blocks.astype(np.int64) * self.block_size + positions % (self.block_size - 1)",
        "The last token of a prompt's first block is written over the first one. In every later block all K and V are "
        "off by a slot or more, one token of them overwrites another, and attention reads a slot that was never "
        "written. So the longer a sequence, the more of it is lost.",
        "tests/worker/cpu/test_input_batch.py::test_every_token_of_a_block_has_a_slot_of_its_own",
    ),
    Fault(
        "02b",
        "a table gets a block more than it needs",
        f"{_CORE}/kv_cache_manager.py",
        "num_new = -(-num_tokens // self.block_size) - len(request.block_ids) - len(hits)",
        "num_new = num_tokens // self.block_size + 1 - len(request.block_ids) - len(hits)",
        "A table gets an empty block whenever its tokens fill their blocks exactly. Nothing breaks, but fewer requests "
        "fit.",
        f"{_TABLES}::test_a_table_covers_its_tokens_and_not_a_block_more",
    ),
    Fault(
        "02c",
        "a shared block is given away with its first user",
        f"{_CORE}/block_pool.py",
        "        block.ref_count += 1\n",
        "        block.ref_count = 1\n",
        "The block has one user in the books where it has two. When the first lets go it counts as free, another "
        "request gets it, and the second user reads that one's K and V.",
        "tests/core/test_block_pool.py::test_a_block_is_free_only_when_its_last_user_lets_go",
    ),
    Fault(
        "03a",
        "a static batch lets requests join",
        f"{_CORE}/policy.py",
        "        return num_running == 0\n",
        "        return num_running >= 0\n",
        "The static policy lets requests join a running batch, so it is continuous batching under another name. Few "
        "people look for a bug in the baseline: compared with this one, continuous batching brings nothing.",
        f"{_PLANS}::test_a_static_batch_drains_before_the_next_one_starts",
    ),
    Fault(
        "04a",
        "prompts go before decodes",
        f"{_CORE}/scheduler.py",
        "for request in [*ready[:most_decodes], *ready_prompts]:",
        "for request in [*ready_prompts, *ready[:most_decodes]]:",
        "Prompts that are partly computed get the budget before decodes do. A long prompt takes all of it, and all "
        "other text stops until its last, smaller chunk leaves some.",
        f"{_PLANS}::test_a_decode_is_never_skipped_for_a_prompt",
    ),
    Fault(
        "05a",
        "a hash without its parent",
        f"{_CORE}/prefix_cache.py",
        "    content = parent + token_ids  # as it lies in memory\n",
        "    content = bytes(token_ids)\n",
        "A block's hash covers its own tokens and not those before them. The same 16 tokens after another beginning "
        "are taken for the same block, and a request reads K and V that were computed in another context.",
        f"{_HASHES}::test_a_hash_covers_everything_before_it",
    ),
    Fault(
        "05b",
        "a cache salt that salts nothing",
        f"{_CORE}/prefix_cache.py",
        "hash_block(self.root, token_ids[:size], request.cache_keys)",
        "hash_block(self.root, token_ids[:size])",
        "One tenant's prompts are found for another's, which learns by a quick first token what was asked before.",
        f"{_PLANS}::test_another_salt_shares_nothing",
    ),
    Fault(
        "05c",
        "a prefix hit that leaves nothing to compute",
        f"{_CORE}/kv_cache_manager.py",
        "for i in range((len(request.token_ids) - 1) // self.block_size):",
        "for i in range(len(request.token_ids) // self.block_size):",
        "A prompt that is cached whole has no hidden state to sample its first token from.",
        f"{_TABLES}::test_at_least_the_last_token_is_left_to_compute",
    ),
    Fault(
        "05d",
        "the head of a sequence is evicted first",
        f"{_CORE}/kv_cache_manager.py",
        "for block_id in reversed(block_ids)]",
        "for block_id in block_ids]",
        "When a block is taken, all later ones of its sequence are useless: the hit rate falls, without a sign of why.",
        f"{_TABLES}::test_the_tail_of_a_freed_table_is_evicted_first",
    ),
    Fault(
        "06a",
        "the first to arrive gives way",
        f"{_CORE}/scheduler.py",
        "victim = max(self.running, key=self.policy.key)",
        "victim = min(self.running, key=self.policy.key)",
        "The victim is the first in the policy's order, not the last. The oldest request has the most to compute "
        "again, and on a busy server it is thrown back whenever memory is short.",
        f"{_PLANS}::test_the_last_to_arrive_is_preempted_keeps_its_tokens_and_returns_to_the_front",
    ),
    Fault(
        "06b",
        "newcomers take what a running request waits for",
        f"{_CORE}/scheduler.py",
        "available = 0 if self._short_of_blocks else self.kv.pool.num_free_blocks",
        "available = self.kv.pool.num_free_blocks",
        "A request that was preempted for want of blocks sees others start in its place.",
        f"{_PLANS}::test_a_newcomer_with_priority_waits_while_running_requests_are_short_of_blocks",
    ),
    Fault(
        "07a",
        "a nucleus without the token that fills it",
        "teachllm/sampling/filters.py",
        "    before = probabilities.cumsum(dim=-1) - probabilities\n",
        "    before = probabilities.cumsum(dim=-1)\n",
        "top-p keeps less than p.",
        "tests/sampling/test_sampler.py::test_draws_follow_the_exact_distribution",
    ),
    Fault(
        "07b",
        "a penalty that rewards",
        "teachllm/sampling/penalties.py",
        "scaled = torch.where(logits > 0, logits / repetition, logits * repetition)",
        "scaled = logits / repetition",
        "A positive logit over 1.5 is smaller, a negative one is larger: tokens with negative logits become more "
        "likely when they are repeated. Here the logit of ' tokens' is -2.9: none of the five words is a likely "
        "beginning. A token that the model is about to repeat by itself has a positive logit, so most penalties seem "
        "to work.",
        "tests/sampling/test_sampler.py::test_repetition_looks_at_prompt_and_output_the_other_penalties_only_at_the_output",
    ),
    Fault(
        "08a",
        "tiles added up without rescaling",
        f"{_KERNELS}/attention/decode_tile.py",
        '    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")\n',
        '    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")\n',
        "What was summed up before is relative to a smaller score and has to shrink when a later tile has a larger "
        "one. A sequence of one tile never shows it, so a test with short prompts would not notice.",
        "tests/kernels/attention/test_paged_decode.py::test_each_shape_of_programs[24]",
    ),
    Fault(
        "08b",
        "splits merged by their number",
        f"{_KERNELS}/attention/merge_splits.py",
        "            weight = tl.exp2(part_lse - base[None, :])\n",
        '            weight = tl.where(part_lse > -float("inf"), 1.0, 0.0)\n',
        "Every split of a long sequence counts the same, whatever its scores: the merged result is the plain mean of "
        "its parts. A short sequence has a single split, and nothing to merge.",
        "tests/kernels/attention/test_paged_decode.py::test_each_shape_of_programs[5]",
    ),
    Fault(
        "09a",
        "blocks freed under a plan that still writes",
        f"{_CORE}/scheduler.py",
        "self.kv.free(request, self.in_flight.pinning_step(request))",
        "self.kv.free(request)",
        "A request that ended by a stop token still has a step under way, and its blocks are given to another request "
        "before that step has written to them. If the device writes late, it overwrites K and V of that request. On a "
        "single queue the order of writes is kept, and the fault never shows.",
        f"{_PLANS}::test_tokens_that_come_after_the_end_are_dropped_and_blocks_stay_pinned_until_then",
    ),
    Fault(
        "10a",
        "a rejection that draws from p",
        f"{_KERNELS}/speculation/rejection_reference.py",
        "    rest = (p - q).clamp(min=0.0)\n",
        "    rest = p\n",
        "After a rejection the next token must come from max(p - q, 0). Drawn from p, tokens that accepted drafts "
        "already cover come again: what the drafter likes comes too often, and a bad drafter changes the text.",
        "tests/kernels/speculation/test_rejection.py::test_the_reference_is_the_rule",
    ),
    Fault(
        "11a",
        "a zero point off by one",
        "teachllm/quantization/formats/gptq.py",
        "            zeros = zeros + self.stored_offset\n",
        "            zeros = zeros + 0\n",
        "The first GPTQ format stores each zero less one. GPTQ's own files get it back on the packed word, before it "
        "is unpacked (`adds_to_words`), and are unharmed. AutoRound's files are read by the same class, which gives "
        "each zero its one back by itself: that is the line. Without it every weight is off by one step of its scale, "
        "all in one direction. A symmetric file has all zeros in the middle, so the engine notices, and blames the "
        "file; one with zeros of its own would be read wrong without a word.",
        "tests/quantization/formats/test_golden.py::test_a_golden_file_dequantizes_to_the_weights_of_its_library[autoround_auto_gptq_int4_sym_g32]",
    ),
    Fault(
        "12a",
        "a bias that every rank adds",
        "teachllm/layers/linear.py",
        "return None if self._sums and self._group.rank > 0 else self.bias",
        "return self.bias",
        "The output projection is cut by rows, so each rank has a part of the sum x W. The bias must be in one part "
        "only: if every rank adds it, it counts twice with two ranks. One process and models without a bias there are "
        "right.",
        "tests/layers/test_layers.py::test_of_one_row_ranks_add_bias_and_residual_once",
    ),
    Fault(
        "13a",
        "rejected drafts stay computed",
        f"{_CORE}/in_flight.py",
        "            request.num_computed_tokens -= num_drafts + 1 - len(sampled)\n",
        "            request.num_computed_tokens -= 0\n",
        "The count of computed tokens must go back by the rejected drafts, as other tokens come in their place. If it "
        "does not, the request has less than nothing left to compute: the next step cannot be built, or the request "
        "never ends. Where it goes on, the next token attends to K and V of rejected tokens. Only speculation has "
        "drafts.",
        "tests/core/test_in_flight.py::test_computed_goes_back_by_the_rejected_drafts",
    ),
)
