"""Every call, YAML key and command that the five reference documents show; where a name differs, the user is told."""

import inspect
import json
import logging
import shlex

import gymnasium
import pytest
import yaml

import shoal
from shoal.cli.main import main
from tests.records import exchanges

CONTAINER = {"dim_room": (6, 6), "num_boxes": 1}


# --- 000: splitting in parallel
@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    from shoal.splitting.processors import build_qwen_processor, load_processor
    from shoal.splitting.synthetic import write_gui_recordings

    root = tmp_path_factory.mktemp("dataset")
    ids = write_gui_recordings(root / "data", 3, steps=(2, 3), size=(112, 84), seed=0)
    return load_processor(build_qwen_processor(root / "processor", vocabulary=20_000)), root / "data", ids


@pytest.mark.parametrize(
    ("name", "stride"),
    [("TrajectorySplitter", 5), ("StepwiseTrajectorySplitter", 1), ("LastNTrajectorySplitter", 1)],
)
def test_000_splitters_are_made_as_shown_and_split(recorded, name, stride):
    import torch

    processor, root, dataset_ids = recorded
    splitter = getattr(shoal, name)(
        processor=processor, root_dir=str(root), window_size=5, stride_size=stride
    )
    reward_tensor = torch.tensor([0.8, 0.6, 0.9])
    result = splitter.split(dataset_ids, reward_tensor)
    assert len({sample for sample in result["dataset_ids"].tolist()}) == 3


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_000_on_ray_the_result_is_that_of_the_sequential_method(recorded):
    import ray
    import torch

    processor, root, dataset_ids = recorded
    splitter = shoal.TrajectorySplitter(processor=processor, root_dir=str(root), window_size=5, stride_size=5)
    reward_tensor = torch.tensor([0.8, 0.6, 0.9])
    one, other = (
        splitter.split(dataset_ids, reward_tensor),
        splitter.split_parallel(dataset_ids, reward_tensor, num_cpus=2),
    )
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.is_tensor(value) == torch.is_tensor(other[key])
        assert not torch.is_tensor(value) or torch.equal(value, other[key]), key
    ray.shutdown()


# --- 001: parallel rollout
def test_001_the_keys_and_their_defaults():
    from shoal.train.agent.config import compose_config

    plain = compose_config("base", [], None).agent_proxy
    assert (plain.use_parallel_rollout, plain.parallel_n_jobs) == (False, -1)
    assert compose_config("base-parallel", [], None).agent_proxy.use_parallel_rollout is True
    shown = yaml.safe_load("agent_proxy:\n  use_parallel_rollout: True\n  parallel_n_jobs: 4")
    proxy = shoal.AgentConfig.read(shown).agent_proxy
    assert (proxy.use_parallel_rollout, proxy.parallel_n_jobs) == (True, 4)


def test_001_a_manager_and_a_shared_engine_play_what_the_sequential_code_plays():
    from shoal.samplers.registry import make_engine
    from shoal.train.agent.config import compose_config

    small = [
        "es_manager.train.env_groups=2",
        "es_manager.train.group_size=2",
        "agent_proxy.parallel_n_jobs=2",
    ]
    config = compose_config("base-parallel", [*small, "agent_proxy.max_turn=3"], None)
    engine = make_engine(config.engine, ["Left", "Down", "Right", "Up"])
    with shoal.ParallelRolloutManager(config, engine) as manager:
        parallel = manager.rollout(0)
        assert isinstance(manager.inference, shoal.SharedLLMInferenceManager)
    with shoal.ParallelRolloutManager(config, engine, backend="serial") as manager:
        alone = manager.rollout(0)
    assert [[turn.response_ids for turn in exchanges(t)] for t in parallel] == [
        [turn.response_ids for turn in exchanges(t)] for t in alone
    ]


# --- 002: parallel environments
def test_002_the_container_as_shown(caplog):
    with caplog.at_level(logging.DEBUG, "shoal"):
        container = shoal.MultiProcessEnvironmentContainer(
            env_type="sokoban", env_num=4, group_n=3, seed=42, env_kwargs=CONTAINER
        )
        try:
            obs_list, info_list = container.reset()
            assert len(obs_list) == len(info_list) == 12
            assert all(str(obs_list[k]) == str(obs_list[3 * (k // 3)]) for k in range(12))  # groups of three
            actions = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]
            obs_list, rewards, dones, infos = container.step(actions)
            assert len(obs_list) == len(rewards) == len(dones) == len(infos) == 12
        finally:
            container.close()
    assert "4 groups of 3 of sokoban" in caplog.text


def test_002_projection_as_shown():
    projection_f = shoal.create_projection_function("sokoban")
    assert projection_f(["<action>up</action>", "<action>down</action>"]) == ([1, 2], [True, True])


@pytest.mark.parametrize(
    ("env", "right", "wrong"),
    [
        ("countdown", "<answer>(1+2)*3</answer>", ["import os", "1+", "hello world"]),
        ("metamathqa", "<answer>42</answer>", ["hello"]),
        ("webshop", "<action>search[red shoes]</action>", ["dance[now]"]),
        ("frozen_lake", "<action>left</action>", ["sideways"]),
        ("bandit", "<action>1</action>", ["seventeen"]),
    ],
)
def test_002_projections_validate_what_they_are_said_to(env, right, wrong):
    projection = shoal.create_projection_function(env)
    accepted = projection([right])[1]
    if env == "bandit":  # its arms have names
        from shoal.envs.catalogue import env_class

        accepted = projection([f"<action>{env_class(env).projection.words()[0]}</action>"])[1]
    assert accepted == [True]
    tag = "answer" if "answer" in right else "action"
    assert projection([f"<{tag}>{text}</{tag}>" for text in wrong])[1] == [False] * len(wrong)


@pytest.mark.parametrize("name", ["Sokoban", "WebShop", "Countdown", "MetaMathQA", "FrozenLake", "Bandit"])
def test_002_every_manager_is_there(name):
    assert issubclass(getattr(shoal, f"{name}EnvironmentManager"), shoal.EnvironmentManager)


SHOWN = """
es_manager:
  train:
    env_groups: 4
    group_size: 3
    env_configs: {tags: ["SokobanEnv"], n_groups: [1]}
  val:
    env_groups: 2
    group_size: 1
    env_configs: {tags: ["SokobanEnv"], n_groups: [1]}
custom_envs:
  SokobanEnv:
    env_type: sokoban
    max_actions_per_traj: 50
    env_config: {dim_room: [6, 6], num_boxes: 1, max_steps: 100, search_depth: 30}
use_parallel_envs: false
"""


def test_002_the_yaml_makes_the_environments_and_the_collector_takes_them():
    config = yaml.safe_load(SHOWN)
    shoal.validate_environment_config(config)
    train_envs, val_envs = shoal.make_environments(config)
    try:
        assert (len(train_envs.tags) * train_envs.group_size, len(val_envs.tags)) == (12, 2)
        assert "envs" in inspect.signature(shoal.TrajectoryCollector).parameters
    finally:
        train_envs.pool.close()
        val_envs.pool.close()


def test_002_sampling_and_normalization_keys():
    for method in ("mean_std", "mean", "asym_clip", "identity"):
        for grouping in ("state", "inductive", "batch"):
            values = {"agent_proxy": {"reward_normalization": {"grouping": grouping, "method": method}}}
            shoal.AgentConfig.read(values)
    shown = {"algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 10}}}
    assert shoal.AgentConfig.read(shown).algorithm.filter_groups.max_num_gen_batches == 10


# --- 003: parallel PPO
EXAMPLES = [
    "--n-envs 4",
    "--n-envs 16",
    "--n-envs 4 --parallel-start-method spawn",
    "--n-envs 8 --num-episodes 1000 --device cpu --learning-rate 3e-4 --checkpoint-dir checkpoints/parallel_v1",
    "--num-episodes 1000 --seed 3",
]


@pytest.mark.parametrize("words", EXAMPLES)
def test_003_the_command_takes_the_flags_as_shown(words, monkeypatch, tmp_path):
    from shoal.cli import train_ppo

    monkeypatch.chdir(tmp_path)
    made = []

    def record(options, config, *rest):
        made.append((options, config))
        raise KeyboardInterrupt

    monkeypatch.setattr(train_ppo, "PPORun", record)
    assert main(["train-ppo", *shlex.split(words)]) == 130
    (options, config), given = (
        made[0],
        dict(zip(shlex.split(words)[::2], shlex.split(words)[1::2], strict=True)),
    )
    assert options.n_envs == int(given.get("--n-envs", 8))
    assert options.parallel_start_method == given.get("--parallel-start-method")
    assert options.checkpoint_dir == given.get("--checkpoint-dir")
    assert options.num_episodes == (int(given["--num-episodes"]) if "--num-episodes" in given else None)
    if "--learning-rate" in given:
        assert config.learning_rate == 3e-4


def test_003_a_device_that_is_not_here_is_refused_with_those_that_are(capsys):
    assert main(["train-ppo", "--device", "mps"]) in (0, 2)
    assert "torch can use cpu" in capsys.readouterr().err


def test_003_what_is_printed_while_it_trains(tmp_path, capsys):
    words = "--n-envs 8 --num-episodes 20 --parallel-start-method spawn --eval-episodes 1 --no-tensorboard"
    assert main(["train-ppo", *words.split(), "--backend", "serial", "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    for line in ("Using 8 parallel environments for training", "Start method: spawn", "Parallel mode: 8 environments",
                 "Reward: ", "|  Length: ", "|  Mean(100): ", "n_completed_episodes: ", "|  n_envs: 8"):  # fmt: skip
        assert line in out


def cartpole():
    return gymnasium.make("CartPole-v1")


def test_003_the_trainer_and_the_environments_of_the_guide():
    envs = shoal.ParallelEnv([cartpole] * 2, start_method=None)
    trainer = shoal.PPOTrainer(device="cpu", seed=0, learning_rate=3e-4)
    try:
        metrics = trainer.train_episode_vectorized(envs)
    finally:
        envs.close()
    assert {"n_completed_episodes", "n_envs"} <= set(metrics)
    env = cartpole()
    assert "reward" in trainer.train_episode(env)
    env.close()


# --- 004: skills
def test_004_sparse_experts_become_contiguous():
    names = ["A", "B", "C"]
    done = {name: {"expert_idx": index} for name, index in zip(names, (0, 5, 10), strict=True)}
    global_to_local, local_to_global = shoal.build_remapping(names, 50, done)
    assert global_to_local == {0: 0, 5: 1, 10: 2, 50: 3}
    assert local_to_global == {0: 0, 1: 5, 2: 10, 3: 50}


@pytest.mark.parametrize(
    "words",
    [
        "--max_nodes 3 --max_parallel_skills 2 --total_timesteps 5e7 --no-use_wandb",
        "--max_nodes 5 --max_parallel_skills 2 --total_timesteps 1e8",
        "--scheduler_poll_interval 30 --max_retries 2",
    ],
)
def test_004_the_command_takes_the_flags_as_shown(words, capsys, tmp_path):
    assert main(["skills", "train", *words.split(), "--dry-run", "--graph-path", str(tmp_path / "run")]) == 0
    assert "Collect Wood: needs nothing" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_004_the_defaults_of_the_flags():
    from shoal.cli.skills_train import TrainOptions

    options = TrainOptions()
    assert (options.max_parallel_skills, options.max_retries) == (3, 2)


def test_004_what_a_run_leaves(tmp_path, capsys):
    run = tmp_path / "run"
    quick = [
        "--num_envs", "32", "--num-steps", "16", "--layer_size", "8", "--bank-worlds", "64", "--min-success", "0",
        "--evaluation_episodes", "32", "--total_timesteps", "4e3", "--evaluation-worlds", "0", "--no-film",
        "--max_nodes", "1",
    ]  # fmt: skip
    assert main(["skills", "train", *quick, "--graph-path", str(run)]) == 0
    assert (run / "skills" / "0_Collect_Wood" / "expert_0_policy").is_dir()
    assert list((run / "checkpoints").glob("global_latest.*"))
    state = json.loads((run / "scheduler_state.json").read_text())
    assert state["skills"]["Collect_Wood"]["status"] == "completed"
    assert list((run / "training_runs").iterdir()) == []  # cleaned up
