"""What a KL penalty holds on to does not move with the policy."""

import torch
from tests.train.agent.tiny_model import write_tiny_model

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.reference import Reference


def test_the_reference_keeps_its_output_layer_while_the_policy_is_trained(tmp_path):
    """Also when the policy was asked for scores before the copy was made."""
    write_tiny_model(tmp_path / "model")
    engine = policy_of(HuggingFaceEngine.load(tmp_path / "model"))
    ids, lengths = torch.arange(2, 12)[None], torch.tensor([10])
    where = torch.zeros(1, 10, dtype=torch.bool)
    where[0, 5:] = True
    with torch.no_grad():
        before = engine.logits(ids, lengths, where)
        reference = Reference(engine.copy(), tmp_path / "reference")
        reference.keep(engine)
        engine.module.lm_head.weight.mul_(2)
        assert torch.equal(reference.policy.logits(ids, lengths, where), before)
        assert not torch.equal(engine.logits(ids, lengths, where), before)
        reference.load()
        assert torch.equal(reference.policy.logits(ids, lengths, where), before)
