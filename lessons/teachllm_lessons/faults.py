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
        lesson: the number of the lesson that it belongs to.
        path: of the file, from the project's root.
        before, after: what stands there, once in the file, and what is put in its place.
        happens: what a user would see.
        test: which test notices, as pytest names it.
    """

    lesson: str
    name: str
    path: str
    before: str
    after: str
    happens: str
    test: str

    def planted(self) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: what is to be changed does not stand there once.
        """
        text = (ROOT / self.path).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {text.count(self.before)} times in {self.path}")
        return text.replace(self.before, self.after)


_CORE, _KERNELS = "teachllm/core", "kernels/teachllm_kernels"
_HASHES, _TABLES, _PLANS = (f"tests/core/test_{name}.py" for name in ("prefix_cache", "kv_cache_manager", "scheduler"))

FAULTS = (
    Fault(
        "00",
        "logits of the position before the last one",
        "teachllm/worker/cpu/model_runner.py",
        "logits_indices.extend(range(end - verified, end))",
        "logits_indices.extend(range(end - verified - 1, end - 1))",
        "An answer begins as if the prompt's last token had not been read. Decodes are right, and make the best of it.",
        "tests/lessons/helpers/test_lesson_00.py::test_the_next_token_is_what_the_last_position_predicts",
    ),
    Fault(
        "00",
        "half a character is shown",
        "teachllm/engine/text/detokenizer.py",
        "whole = text.rstrip(REPLACEMENT)",
        "whole = text",
        "Whoever writes in English never sees it; elsewhere characters turn into question marks.",
        "tests/engine/text/test_detokenizer.py::test_an_unfinished_character_is_shown_only_when_nothing_more_comes",
    ),
    Fault(
        "01",
        "a token attends to the one after it",
        f"{_KERNELS}/attention/paged_attention.py",
        "    mask = key_index.unsqueeze(1) > query_index\n",
        "    mask = key_index.unsqueeze(1) > query_index + 1\n",
        "A prompt's tokens see what they are to predict. Decodes are right, so answers are the same, or a little odd.",
        "tests/kernels/test_references.py::test_paged_attention_keeps_the_contract_that_readers_of_lesson_01_are_given",
    ),
    Fault(
        "02",
        "a block that is counted one token too short",
        "teachllm/worker/cpu/input_batch.py",
        "slots = blocks.astype(np.int64) * self.block_size + positions % self.block_size",
        "slots = blocks.astype(np.int64) * self.block_size + positions % (self.block_size - 1)",
        "One token in a block overwrites another one's K and V.",
        "tests/worker/cpu/test_input_batch.py::test_every_token_of_a_block_has_a_slot_of_its_own",
    ),
    Fault(
        "02",
        "a table gets a block more than it needs",
        f"{_CORE}/kv_cache_manager.py",
        "num_new = -(-num_tokens // self.block_size) - len(request.block_ids) - len(hits)",
        "num_new = num_tokens // self.block_size + 1 - len(request.block_ids) - len(hits)",
        "Nothing breaks; fewer requests fit.",
        f"{_TABLES}::test_a_table_covers_its_tokens_and_not_a_block_more",
    ),
    Fault(
        "02",
        "a shared block is given away with its first user",
        f"{_CORE}/block_pool.py",
        "        block.ref_count += 1\n",
        "        block.ref_count = 1\n",
        "The second user's K and V are overwritten by a stranger's.",
        "tests/core/test_block_pool.py::test_a_block_is_free_only_when_its_last_user_lets_go",
    ),
    Fault(
        "03",
        "a static batch lets requests join",
        f"{_CORE}/policy.py",
        "        return num_running == 0\n",
        "        return num_running >= 0\n",
        "The comparison with continuous batching shows no difference.",
        f"{_PLANS}::test_a_static_batch_drains_before_the_next_one_starts",
    ),
    Fault(
        "04",
        "prompts go before decodes",
        f"{_CORE}/scheduler.py",
        "for request in [*ready[:most_decodes], *ready_prompts]:",
        "for request in [*ready_prompts, *ready[:most_decodes]]:",
        "A long prompt takes the whole budget, and all other text stops until it is computed.",
        f"{_PLANS}::test_a_decode_is_never_skipped_for_a_prompt",
    ),
    Fault(
        "05",
        "a hash without its parent",
        f"{_CORE}/prefix_cache.py",
        "    content = parent + token_ids  # as it lies in memory\n",
        "    content = bytes(token_ids)\n",
        "The same 16 tokens behind another beginning are taken for the same K and V.",
        f"{_HASHES}::test_a_hash_covers_everything_before_it",
    ),
    Fault(
        "05",
        "a cache salt that salts nothing",
        f"{_CORE}/prefix_cache.py",
        "hash_block(self.root, token_ids[:size], request.cache_keys)",
        "hash_block(self.root, token_ids[:size])",
        "One tenant learns by a quick first token what another one has asked.",
        f"{_PLANS}::test_another_salt_shares_nothing",
    ),
    Fault(
        "05",
        "a prefix hit that leaves nothing to compute",
        f"{_CORE}/kv_cache_manager.py",
        "for i in range((len(request.token_ids) - 1) // self.block_size):",
        "for i in range(len(request.token_ids) // self.block_size):",
        "A prompt that is cached whole has no hidden state to sample its first token from.",
        f"{_TABLES}::test_at_least_the_last_token_is_left_to_compute",
    ),
    Fault(
        "05",
        "the head of a sequence is evicted first",
        f"{_CORE}/kv_cache_manager.py",
        "for block_id in reversed(block_ids)]",
        "for block_id in block_ids]",
        "One block taken makes all those behind it useless: the hit rate falls, without any sign of why.",
        f"{_TABLES}::test_the_tail_of_a_freed_table_is_evicted_first",
    ),
    Fault(
        "06",
        "the first to arrive gives way",
        f"{_CORE}/scheduler.py",
        "victim = max(self.running, key=self.policy.key)",
        "victim = min(self.running, key=self.policy.key)",
        "The request that has waited longest is thrown back again and again.",
        f"{_PLANS}::test_the_last_to_arrive_is_preempted_keeps_its_tokens_and_returns_to_the_front",
    ),
    Fault(
        "06",
        "newcomers take what a running request waits for",
        f"{_CORE}/scheduler.py",
        "available = 0 if self._short_of_blocks else self.kv.pool.num_free_blocks",
        "available = self.kv.pool.num_free_blocks",
        "A request that was preempted for want of blocks sees others start in its place.",
        f"{_PLANS}::test_a_newcomer_with_priority_waits_while_running_requests_are_short_of_blocks",
    ),
    Fault(
        "07",
        "a nucleus without the token that fills it",
        "teachllm/sampling/filters.py",
        "    before = probabilities.cumsum(dim=-1) - probabilities\n",
        "    before = probabilities.cumsum(dim=-1)\n",
        "top-p keeps less than p.",
        "tests/sampling/test_sampler.py::test_draws_follow_the_exact_distribution",
    ),
    Fault(
        "07",
        "a penalty that rewards",
        "teachllm/sampling/penalties.py",
        "scaled = torch.where(logits > 0, logits / repetition, logits * repetition)",
        "scaled = logits / repetition",
        "Tokens with negative logits become more likely by being repeated.",
        "tests/sampling/test_sampler.py::test_repetition_looks_at_prompt_and_output_the_other_penalties_only_at_the_output",
    ),
    Fault(
        "08",
        "tiles added up without rescaling",
        f"{_KERNELS}/attention/decode_tile.py",
        '    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")\n',
        '    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")\n',
        "Right until a later tile has the largest score: short sequences never show it.",
        "tests/kernels/attention/test_paged_decode.py::test_each_shape_of_programs[24]",
    ),
    Fault(
        "08",
        "splits merged by their number",
        f"{_KERNELS}/attention/merge_splits.py",
        "            weight = tl.exp2(part_lse - base[None, :])\n",
        '            weight = tl.where(part_lse > -float("inf"), 1.0, 0.0)\n',
        "Every split of a long sequence counts the same, whatever its scores.",
        "tests/kernels/attention/test_paged_decode.py::test_each_shape_of_programs[5]",
    ),
    Fault(
        "09",
        "blocks freed under a plan that still writes",
        f"{_CORE}/scheduler.py",
        "self.kv.free(request, self.in_flight.pinning_step(request))",
        "self.kv.free(request)",
        "A stranger's prompt is overwritten by the last token of one that has ended, if a device writes late.",
        f"{_PLANS}::test_tokens_that_come_after_the_end_are_dropped_and_blocks_stay_pinned_until_then",
    ),
    Fault(
        "10",
        "a rejection that draws from p",
        f"{_KERNELS}/speculation/rejection_reference.py",
        "    rest = (p - q).clamp(min=0.0)\n",
        "    rest = p\n",
        "What the drafter likes comes too often: a bad drafter changes the text.",
        "tests/kernels/speculation/test_rejection.py::test_the_reference_is_the_rule",
    ),
    Fault(
        "10",
        "rejected drafts stay computed",
        f"{_CORE}/in_flight.py",
        "            request.num_computed_tokens -= num_drafts + 1 - len(sampled)\n",
        "            request.num_computed_tokens -= 0\n",
        "The next token attends to K and V of tokens that were never said.",
        "tests/core/test_in_flight.py::test_computed_goes_back_by_the_rejected_drafts",
    ),
    Fault(
        "11",
        "a zero point off by one",
        "teachllm/quantization/formats/gptq.py",
        "            zeros = zeros + self.stored_offset\n",
        "            zeros = zeros + 0\n",
        "Every weight is off by one step of its scale, all of them in one direction: nothing that is said makes sense.",
        "tests/quantization/formats/test_golden.py::test_a_golden_file_dequantizes_to_the_weights_of_its_library[autoround_auto_gptq_int4_sym_g32]",
    ),
    Fault(
        "12",
        "a bias that every rank adds",
        "teachllm/layers/linear.py",
        "return None if self._sums and self._group.rank > 0 else self.bias",
        "return self.bias",
        "With two ranks a bias counts twice; models without one are right.",
        "tests/layers/test_layers.py::test_of_one_row_ranks_add_bias_and_residual_once",
    ),
)
