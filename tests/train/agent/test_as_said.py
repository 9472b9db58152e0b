"""What a run records and honours is what its settings and its files say."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.samplers.huggingface.test_huggingface import make_engine
from tests.train.agent.run.test_crash_points import SMALL, train

from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError
from shoal.core.files import read_json
from shoal.train.agent.algorithms.losses import LOSSES, PolicyLoss, policy_loss
from shoal.train.agent.config import Algorithm, KLPenalty, Lora, compose_config
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.lora import add_lora
from shoal.train.agent.policies.policy import weights_sha256
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.update import kl_coef

FILTERED = "algorithm.filter_groups.enable=true"
BANDIT = [
    "engine.name=huggingface", "custom_envs.FrozenLakeEnv=null", "+custom_envs.BanditEnv={env_type: bandit}",
    "es_manager.train.env_configs.tags=[BanditEnv]", "es_manager.val.env_configs.tags=[BanditEnv]",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "agent_proxy.max_tokens=auto", "warmup.steps=0", "warmup.rehearsal=0", "use_parallel_envs=false",
    "trainer.tensorboard=false", "trainer.iterations=1", "agent_proxy.prompt.first='{observation}'",
    "trainer.stop_at_success=null",
]  # fmt: skip


# --- advantages
def test_the_advantages_that_are_kept_are_those_that_entered_the_loss(tmp_path):
    """Here from the rewards on disk, by hand."""

    def in_odd_groups_by_member(episodes):
        return [float(episode.group % 2 * episode.member) for episode in episodes]

    sizes = ["es_manager.train.env_groups=6", "trainer.save_trajectories_every=1", "trainer.iterations=1"]
    rows = train(tmp_path, FILTERED, *sizes, rewards=[in_odd_groups_by_member])
    played = list(read_trajectories(tmp_path / "trajectories" / "train-000001.jsonl"))
    kept = [
        json.loads(line) for line in (tmp_path / "advantages" / "train-000001.jsonl").read_text().splitlines()
    ]
    returns = [sum(0.97**k * turn.reward for k, turn in enumerate(t.turns)) for t in played]
    groups = {t.group for t in played}
    differing = {
        g for g in groups if len({r for r, t in zip(returns, played, strict=True) if t.group == g}) > 1
    }
    assert (len(differing), len(groups)) == (3, 6)
    assert rows[1]["groups_trained"] == len(differing)
    for t, mine, found in zip(played, returns, kept, strict=True):
        if t.group not in differing:
            assert found is None
            continue
        own = [r for r, other in zip(returns, played, strict=True) if other.group == t.group]
        advantage = (mine - np.mean(own)) / np.std(own, ddof=1)
        # of a turn, whose tokens share it
        assert found == pytest.approx([advantage] * len(t.turns), abs=1e-5)


# --- checkpoints
def test_a_checkpoint_holds_adapters_and_the_head_of_the_critic_and_no_frozen_base(base, tmp_path):
    settings = [*BANDIT, f"engine.model={base}", "model.lora.rank=2", "algorithm=ppo", "trainer.save_every=1"]
    config = compose_config("base", [*settings, f"run_dir={tmp_path / 'run'}"])
    with AgentTrainer(config) as trainer:
        list(trainer.train())
        learned = {
            name: p.detach().clone() for name, p in trainer.critic.named_parameters() if p.requires_grad
        }
    saved = load_file(list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "critic.safetensors")
    assert {name for name in saved if ".lora_" not in name} == {"output.weight", "output.bias"}
    assert saved.keys() == learned.keys()
    more = compose_config(
        "base", [*settings, f"run_dir={tmp_path / 'run'}", "trainer.iterations=2", "resume=true"]
    )
    with AgentTrainer(more) as trainer:
        run = trainer.train()
        next(run)
        for name, parameter in trainer.critic.named_parameters():
            assert name not in learned or torch.equal(parameter, learned[name])


def test_the_version_of_the_weights_counts_iterations_with_and_without_a_step(tmp_path):
    config = compose_config(
        "demo", [*SMALL, f"run_dir={tmp_path}", "algorithm.entropy_coef=0", "warmup.rehearsal=5"]
    )
    with AgentTrainer(config) as trainer:
        found = [(row["iteration"], trainer.policy.weights_version) for row in trainer.train()]
    assert found == [(n, n) for n in range(5)]
    state = read_json(list_checkpoints(tmp_path / "checkpoints")[-1] / "state.json")
    assert (state["iteration"], state["weights_version"]) == (4, 4)


# --- settings act
def test_the_threads_of_the_engine_are_those_of_the_run_and_the_callers_come_back(tmp_path):
    seen = set()

    @policy_loss("test_threads", replace=True)
    def counting(tokens, config):
        seen.add(torch.get_num_threads())
        return PolicyLoss(-tokens.advantages * tokens.logprobs, tokens.logprobs > 0)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(tmp_path, "algorithm.policy_loss=test_threads", "engine.threads=1", "trainer.iterations=1")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        LOSSES._items.pop("test_threads")
    assert seen == {1}


def test_a_run_goes_on_with_a_lower_rate_and_says_so(tmp_path, caplog):
    train(tmp_path, "trainer.iterations=2")
    with caplog.at_level(logging.WARNING):
        rows = train(tmp_path, "trainer.iterations=3", "resume=true", "algorithm.learning_rate=0.0005")
    assert rows[-1]["learning_rate"] == 0.0005
    assert "algorithm.learning_rate=0.0005, which was 0.001" in caplog.text
    caplog.clear()
    train(tmp_path, "trainer.iterations=4", "resume=true", "algorithm.learning_rate=0.0005")
    assert "learning_rate" not in caplog.text


# --- adapters on tied layers
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_adapters_on_one_of_two_tied_layers_are_refused_by_name(module):
    def adapted(tied):
        engine = make_engine()
        if not tied:
            weight = engine.model.get_output_embeddings().weight
            engine.model.get_output_embeddings().weight = torch.nn.Parameter(weight.detach().clone())
        return add_lora(policy_of(engine), Lora(2, target_modules=[module]), "x", 0)

    with pytest.raises(ConfigError, match=rf"puts adapters on {module}, whose weight is that of"):
        adapted(tied=True)
    adapted(tied=False)
    add_lora(policy_of(make_engine()), Lora(2), "x", 0)  # all-linear leaves the head out


# --- what a KL penalty holds on to
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("anchor", ["warmup", "start"])
def test_a_penalty_holds_on_to_the_weights_after_the_warm_up_or_before_it(base, tmp_path, rank, anchor):
    settings = [
        *BANDIT, f"engine.model={base}", f"model.lora.rank={rank}", "warmup.steps=20", "warmup.learning_rate=0.01",
        "algorithm=grpo", f"algorithm.kl.anchor={anchor}",
    ]  # fmt: skip
    with AgentTrainer(compose_config("base", [*settings, f"run_dir={tmp_path}"])) as trainer:
        run = trainer.train()
        next(run)
        after_warm_up = weights_sha256(trainer.policy.module)
        assert after_warm_up == weights_sha256(trainer.policy.module)
        kl = next(run)["kl_to_reference"]
    assert (kl < 1e-6) == (anchor == "warmup")
    if anchor == "start":
        return
    again = [*settings, f"run_dir={tmp_path}", "trainer.iterations=2", "resume=true"]
    with AgentTrainer(compose_config("base", again)) as trainer:  # the reference is read back
        rows = list(trainer.train())
    assert rows[-1]["iteration"] == 2
    assert math.isfinite(rows[-1]["kl_to_reference"])


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_with_a_target_a_penalty_grows_with_the_square_of_the_kl(tmp_path, place):
    settings = [
        *BANDIT, "engine.name=tiny", "algorithm=grpo", "algorithm.kl.coef=0.4", f"algorithm.kl.place={place}",
        "warmup.steps=20", "trainer.iterations=6",
    ]  # fmt: skip

    def trained(name, *own):
        with AgentTrainer(compose_config("base", [*settings, f"run_dir={tmp_path}/{name}", *own])) as trainer:
            rows = [row for row in trainer.train() if row["iteration"]]
            return rows, weights_sha256(trainer.policy.module)

    one_step = "algorithm.minibatch_size=null"  # so that the row tells the KL of what was played
    held, weights = trained("held", "algorithm.kl.target=0.01", one_step)
    wanted = [0.4 * (row["kl_to_reference"] / 0.01) ** 2 for row in held]
    assert [row["kl_coef"] for row in held] == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert held[0]["kl_coef"] < 1e-6
    assert max(row["kl_coef"] for row in held) > 0.4
    constant, others = trained("constant", one_step)
    assert [row["kl_coef"] for row in constant] == [0.4] * 6
    assert weights != others


def test_a_rare_token_alone_does_not_make_a_penalty_immense():
    algorithm = Algorithm(kl=KLPenalty(coef=0.3, target=0.5))
    sampled, reference = [np.float32([-9, -1]), np.float32([-1])], [np.float32([-1, -1]), np.float32([-1])]
    assert kl_coef(algorithm, sampled, reference) == pytest.approx(0.3 * (10 / 3 / 0.5) ** 2)  # not 2972 nats
    assert kl_coef(Algorithm(kl=KLPenalty(coef=0.3)), sampled, reference) == 0.3
