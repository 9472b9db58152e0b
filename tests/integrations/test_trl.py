"""TRL's own GRPOTrainer on shoal's envs, for real: skipped where TRL is not installed (`make test-integrations`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")
import torch
from tests.records import exchanges
from trl import GRPOConfig, GRPOTrainer

from shoal import envs
from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed
from shoal.integrations.trl import TRLRollout, episode_reward, tool_environment
from shoal.train.agent.algorithms.advantages import group_relative

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}
ROOT = Path(__file__).resolve().parents[2]


def config(**proxy):
    lake = {"env_type": "frozen_lake", "env_config": {"size": 3, "p": 0.9}, "max_actions_per_traj": 3}
    arms = {"env_type": "tests.integrations.doubles:LetterEnv"}
    prompt = {"mode": "append", "first": "{observation}", "later": "{observation}", "on_drift": "ignore"}
    agent = {"max_tokens": 3, "stop": [], "prompt": prompt, **proxy}
    return {"seed": 3, "custom_envs": {"lake": lake, "letter": arms}, "agent_proxy": agent}


def make_trainer(rollout, model, tokenizer, folder, **settings):
    defaults = SETTINGS | {"output_dir": str(folder)}
    return GRPOTrainer(
        model=model,
        reward_funcs=settings.pop("reward_funcs", episode_reward),
        args=GRPOConfig(**(defaults | settings)),
        train_dataset=rollout.dataset(8),
        eval_dataset=rollout.dataset(2, held_out=True),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def played(make_model, tokenizer, folder, backend="serial", steps=2, **settings):
    """The episodes of each update, and TRL's batch of the last."""
    calls, batches = [], []
    with TRLRollout(config(), backend=backend) as rollout:
        trainer = make_trainer(rollout, make_model(tokenizer), tokenizer, folder, max_steps=steps, **settings)
        score = trainer._generate_and_score_completions

        def watched(inputs):
            batches.append(score(inputs))
            calls.append(rollout.trajectories)
            return batches[-1]

        trainer._generate_and_score_completions = watched
        trainer.train()
    return calls, batches, trainer


def names(calls):
    return [
        [(t.env, t.group, t.member, t.env_seed, [turn.response_ids for turn in exchanges(t)]) for t in call]
        for call in calls
    ]


def trls_log_probs(trainer, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, batch["completion_ids"].shape[1]
    )[0]


def test_groups_share_their_start_and_the_same_seed_plays_the_same(make_model, tokenizer, tmp_path):
    calls, _, _ = played(make_model, tokenizer, tmp_path)
    for call in calls:
        for first in range(0, len(call), 4):
            group = call[first : first + 4]
            assert len({(t.env, t.group, t.env_seed) for t in group}) == 1
            assert [t.member for t in group] == [0, 1, 2, 3]
            assert group[0].env_seed == derive_seed(3, "env", 0, group[0].group)
            assert len({t.turns[0].observation for t in group}) == 1
            assert len({exchanges(t)[0].response_ids for t in group}) > 1
    again, _, _ = played(make_model, tokenizer, tmp_path, backend="thread")
    assert names(again) == names(calls)


def test_trl_sees_the_tokens_their_log_probs_and_masks(make_model, tokenizer, tmp_path):
    calls, batches, _ = played(make_model, tokenizer, tmp_path, steps=1)
    (call,), (batch,) = calls, batches
    for place, trajectory in enumerate(call):
        real = batch["completion_mask"][place].bool()
        written = (batch["tool_mask"][place] * batch["completion_mask"][place]).bool()
        ids = batch["completion_ids"][place][written].tolist()
        assert ids == [i for turn in exchanges(trajectory) for i in turn.response_ids]
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
        last = exchanges(trajectory)[-1]
        whole = prompt + batch["completion_ids"][place][real].tolist()
        assert (
            tuple(whole)[: len(last.prompt_ids) + len(last.response_ids)]
            == last.prompt_ids + last.response_ids
        )
        rewards = [t.reward for t in call]
    expected = group_relative(rewards, [t.group for t in call])  # TRL adds 1e-4 to the spread
    np.testing.assert_allclose(batch["advantages"], expected, atol=2e-3)
    assert (np.abs(expected) > 0.1).any()


@pytest.mark.parametrize("trained", [False, True])
def test_log_probs_of_the_rollout_are_those_of_trl(trained, make_model, tokenizer, tmp_path):
    """Those of its weights as they are now, which its fused optimizer has changed."""
    with TRLRollout(config(), backend="serial") as rollout:
        trainer = make_trainer(rollout, make_model(tokenizer), tokenizer, tmp_path, temperature=0.7)
        if trained:
            trainer.train()
            assert {call.weights_version for t in rollout.trajectories for call in t.calls} == {1}
        inputs = [dict(row) for row in rollout.dataset(2) for _ in range(4)]
        trainer.model.train()
        batch = trainer._generate_and_score_completions(inputs)
        assert trainer.model.training
    with torch.no_grad():
        found = trls_log_probs(trainer, batch)
    written = (batch["tool_mask"] * batch["completion_mask"]).bool()
    assert written.sum() > 24
    torch.testing.assert_close(found[written], batch["sampling_per_token_logps"][written], atol=2e-5, rtol=0)


def test_held_out_episodes_repeat_and_are_of_other_starts(make_model, tokenizer, tmp_path):
    with TRLRollout(config(), backend="serial") as rollout:
        trainer = make_trainer(
            rollout, make_model(tokenizer), tokenizer, tmp_path, per_device_eval_batch_size=8
        )
        trainer.evaluate()
        first = names([rollout.trajectories])
        trainer.evaluate()
        assert names([rollout.trajectories]) == first
        held_out = {t.env_seed for t in rollout.trajectories}
    assert not held_out & {derive_seed(3, "env", 0, group) for group in range(64)}


def failing(env, **settings):
    made = config()
    made["custom_envs"] = {"failing": {"env_type": f"tests.integrations.doubles:{env}"}}
    made["agent_proxy"]["parallel"] = {"env_retries": 0}
    return made


def test_a_failed_episode_teaches_nothing_and_stays_out_of_its_group(make_model, tokenizer, tmp_path):
    with TRLRollout(failing("FlakyEnv"), backend="serial") as rollout:
        trainer = make_trainer(rollout, make_model(tokenizer), tokenizer, tmp_path, max_steps=1)
        inputs = [dict(row) for row in rollout.dataset(2) for _ in range(4)]
        trainer.model.train()
        batch = trainer._generate_and_score_completions(inputs)
        played = rollout.trajectories
    failed = [t.status == "env_error" for t in played]
    assert any(failed)
    assert any(t.status == "ok" for t in played)
    for group in (range(4), range(4, 8)):
        whole = [i for i in group if not failed[i]]
        rewards = np.array([played[i].reward for i in whole])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) if len(whole) > 1 else [0.0]
        np.testing.assert_allclose(batch["advantages"][whole], expected, atol=1e-5)
    written = (batch["tool_mask"] * batch["completion_mask"]).sum(-1)
    for i in range(8):
        assert (written[i] == 0) == failed[i]
        assert not failed[i] or batch["advantages"][i] == 0


def test_a_batch_of_failed_episodes_leaves_the_weights_as_they_are(make_model, tokenizer, tmp_path):
    with TRLRollout(failing("BrokenEnv"), backend="serial") as rollout:
        model = make_model(tokenizer)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        settings = {"max_steps": 1, "entropy_coef": 0.1, "weight_decay": 0.0}
        trainer = make_trainer(rollout, model, tokenizer, tmp_path, **settings)
        trainer.train()
        assert {t.status for t in rollout.trajectories} == {"env_error"}
        assert {len(t.turns) for t in rollout.trajectories} == {1}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, msg=name)


def test_only_what_the_model_wrote_is_learned_from(make_model, tokenizer, tmp_path):
    """TRL's own loss is that of the written tokens alone."""
    with TRLRollout(config(), backend="serial") as rollout:
        trainer = make_trainer(rollout, make_model(tokenizer), tokenizer, tmp_path, max_steps=1)
        inputs = [dict(row) for row in rollout.dataset(2) for _ in range(4)]
        trainer.model.train()
        batch = trainer._generate_and_score_completions(inputs)
        trainer.current_gradient_accumulation_steps = 1
        found = float(trainer.compute_loss(trainer.model, batch))
        told = (batch["completion_mask"] * (1 - batch["tool_mask"])).bool()
        assert told.any()
        logps = trls_log_probs(trainer, batch)
        written = (batch["tool_mask"] * batch["completion_mask"]).bool()
        ratio = (logps - logps.detach()).exp()
        own = -(ratio * batch["advantages"][:, None])[written].sum() / batch["num_items_in_batch"]
    assert batch["num_items_in_batch"] == written.sum()
    assert found == pytest.approx(float(own), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"top_k": 5}, "top_k must be 0"), ({"top_p": 0.9}, "top_p must be 1"), ({"min_p": 0.1}, "min_p")],
)
def test_sampling_that_the_log_probs_would_not_know_is_refused(
    settings, message, make_model, tokenizer, tmp_path
):
    with TRLRollout(config(), backend="serial") as rollout:
        trainer = make_trainer(rollout, make_model(tokenizer), tokenizer, tmp_path, **settings)
        with pytest.raises(ConfigError, match=message):
            trainer.train()


def test_rows_that_name_no_start_or_break_a_group_are_refused(make_model, tokenizer, tmp_path):
    with TRLRollout(config(), backend="serial") as rollout:
        trainer = make_trainer(rollout, make_model(tokenizer), tokenizer, tmp_path)
        with pytest.raises(ConfigError, match="must name a start state"):
            rollout(["pond #3"], trainer)
        with pytest.raises(ConfigError, match="member 1 of its group"):
            rollout(["lake #3", "lake #4"], trainer)
    proxy = {"prompt": {"mode": "window"}}
    with pytest.raises(ConfigError, match=r"prompt\.mode=append"):
        TRLRollout(config(**proxy))


def test_trl_plays_an_env_by_its_tools(make_model, tokenizer, tmp_path):
    import trl
    from datasets import Dataset

    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    rows = {"prompt": [[{"role": "user", "content": ""}]] * 2, "start": [0, 1]}
    moves = ("Down", "Right", "Left", "Up")
    trainer = GRPOTrainer(
        model=make_model(tokenizer, context=4096),
        args=GRPOConfig(
            **(SETTINGS | {"output_dir": str(tmp_path), "max_steps": 1, "max_completion_length": 2000})
        ),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        environment_factory=tool_environment("tests.integrations.doubles:LetterEnv", seed=3),
    )
    asked = []

    def write(prompt_ids, *rest, **settings):
        """Each row calls the tool once with a word of its own, then ends: what a trained model would do."""
        asked.append([tokenizer.decode(ids) for ids in prompt_ids])
        if len(asked) == 1:
            calls = [json.dumps({"name": "act", "arguments": {"action": moves[i % 4]}}) for i in range(8)]
            texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
        else:
            texts = ["done"] * len(prompt_ids)
        ids = [tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"] for text in texts]
        return ids, None

    trainer._generate_single_turn = write
    trainer.train()
    assert "act" in asked[0][0]  # the tool's description stands in the prompt
    for place, prompt in enumerate(asked[0]):
        env = envs.make("tests.integrations.doubles:LetterEnv")
        start = place_starts(asked[0])[place]
        assert env.reset(seed=derive_seed(3, "env", 0, start))[0] in prompt
    paid = [sum(map(ord, f"<action>{move}</action>")) % 2 for move in moves]
    logged = next(row for row in trainer.state.log_history if "reward" in row)
    assert logged["reward"] == pytest.approx(np.mean(paid))


def place_starts(prompts):
    """Which of the two start states each prompt shows; rows of a group come together."""
    first = envs.make("tests.integrations.doubles:LetterEnv").reset(seed=derive_seed(3, "env", 0, 0))[0]
    shown = [0 if first in prompt else 1 for prompt in prompts]
    assert sorted(shown) == [0] * 4 + [1] * 4
    assert len(set(shown[:4])) == 1
    return shown


def test_the_example_learns():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, str(ROOT / "examples" / "trl_grpo_frozenlake.py"), "30"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rates = [float(line.split("success ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert rates[-1] > rates[0] + 0.15
