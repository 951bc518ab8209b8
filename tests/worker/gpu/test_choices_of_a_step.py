"""What is fixed before a step is asked, not found out again: what its graph holds."""

from __future__ import annotations

from teachllm.worker.gpu.cuda_graphs import FullKey


def test_a_graph_says_whether_it_samples_and_whether_its_drafter_is_done() -> None:
    decodes = FullKey(num_seqs=2, num_tokens=2, decode_len=1, variant=(False, False), num_drafts=2)
    assert decodes.samples and decodes.settles_drafts
    assert decodes._replace(num_drafts=None).settles_drafts  # it asks for none
    prompts = decodes._replace(decode_len=0, num_drafts=None)
    assert prompts.samples and not prompts.settles_drafts
    with_logits = decodes._replace(variant=None)
    assert not with_logits.samples and not with_logits.settles_drafts
