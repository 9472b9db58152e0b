"""Runs with `rewards`: they train, resume and replay the same, also when the server of the judge is gone."""

import itertools
import shutil

import pytest
from tests.rollout.doubles import FakeServer
from tests.train.agent.test_trainer import results

from shoal.core.data import read_trajectories
from shoal.core.errors import DataError, ShoalError
from shoal.rollout.rewards.settings import RewardConfig, reward
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.replay import Replay, find_episode

SMALL = [
    "warmup.steps=10",
    "trainer.iterations=2",
    "trainer.eval_every=1",
    "trainer.save_every=1",
    "trainer.save_trajectories_every=1",
    "trainer.tensorboard=false",
    "es_manager.val.env_groups=2",
    "es_manager.train.env_groups=3",
    "es_manager.train.group_size=4",
    "engine.width=16",
    "use_parallel_envs=false",
    "agent_proxy.max_turn=5",
]


@pytest.fixture
def server():
    with FakeServer("openai") as made:
        made.say = lambda said: f"<score>{sum(map(ord, said)) % 11 / 10}</score>"
        yield made


def rewards(server):
    judge = {"base_url": f"{server.url}/v1", "model": "m", "patience": 2.0}
    return [{"name": "env"}, {"model": judge, "weight": 0.5, "prompt": "{transcript} Good?"}]


def train(folder, given, *overrides):
    with AgentTrainer(
        compose_config("demo", [*SMALL, f"run_dir={folder}", *overrides]), rewards=given
    ) as trainer:
        rows = list(trainer.train())
    return rows, results(folder)


def test_a_judged_run_resumes_and_replays_the_same_when_its_server_is_gone(tmp_path, server):
    rows, whole = train(tmp_path / "whole", rewards(server))
    assert sum(row.get("gradient_steps", 0) for row in rows) >= 1
    for row, file in zip(
        rows[1:], sorted((tmp_path / "whole" / "trajectories").glob("train-*")), strict=True
    ):
        played = list(read_trajectories(file))
        judged = [episode.scores[1].value for episode in played]
        assert row["score/judge"] == pytest.approx(sum(judged) / len(judged))
        assert row["reward"] == pytest.approx(row["score/env"] + 0.5 * row["score/judge"])
        assert len({episode.reward for episode in played if episode.group == 0}) > 1
    assert {"heldout_score/env", "heldout_score/judge"} <= rows[-1].keys()

    train(tmp_path / "part", rewards(server), "trainer.iterations=1")
    shutil.copy(tmp_path / "whole" / "answers.jsonl", tmp_path / "part" / "answers.jsonl")
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(tmp_path / "whole" / "answers.jsonl", again)
    asked = len(server.seen)
    server.server_close()
    assert train(tmp_path / "part", rewards(server), "resume=true")[1] == whole
    assert train(again, rewards(server))[1] == whole
    assert len(server.seen) == asked
    with Replay(tmp_path / "whole") as replay:
        for name in ("train-000002:1", "heldout-000002:0"):
            found = find_episode(tmp_path / "whole", name)
            assert found.trajectory.scores
            assert replay.play(found).difference is None
    heavier = [*rewards(server)[:-1], {**rewards(server)[-1], "weight": 9}]
    for other, told in ((["env"], "rewards was"), (heavier, r"rewards\.\d\.weight was .* and is 9")):
        with pytest.raises(DataError, match=rf"with other settings: {told}"):
            train(tmp_path / "part", other, "resume=true")


def test_what_was_judged_before_an_interruption_is_not_asked_again(tmp_path, server):
    often = "trainer.save_every=100"
    straight = train(tmp_path / "whole", rewards(server), often)[1]
    config = compose_config("demo", [*SMALL, often, f"run_dir={tmp_path / 'run'}"])
    with AgentTrainer(config, rewards=rewards(server)) as trainer:
        assert [row["iteration"] for row in itertools.islice(trainer.train(), 3)] == [0, 1, 2]
    assert not (tmp_path / "run" / "summary.json").exists()
    asked = len(server.seen)
    server.server_close()
    again = train(tmp_path / "run", rewards(server), often, "resume=true")[1]
    assert again == straight
    assert len(server.seen) == asked


def test_the_settings_name_rewards_and_workers_give_the_same_scores(tmp_path, server):
    (tmp_path / "own.py").write_text(
        "from shoal.rollout.rewards.settings import reward\n\n\n"
        "@reward('turns', replace=True)\n"
        "def turns(episodes):\n"
        "    return [-len(episode.turns) / 100 for episode in episodes]\n"
    )
    listed = f"rewards=[turns, {{model: {{base_url: '{server.url}/v1', model: m}}, weight: 0.5}}]"
    use = [
        "agent_proxy.use_parallel_rollout=true",
        "agent_proxy.parallel.backend=thread",
        "trainer.iterations=1",
    ]
    config = compose_config(
        "demo", [*SMALL, f"imports=[{tmp_path / 'own.py'}]", listed, *use, f"run_dir={tmp_path / 'run'}"]
    )
    with AgentTrainer(config) as trainer:
        rows = list(trainer.train())
    own = [RewardConfig("turns"), {"model": {"base_url": f"{server.url}/v1", "model": "m"}, "weight": 0.5}]
    other, _ = train(tmp_path / "other", own, "trainer.iterations=1")
    for name in ("reward", "score/turns", "score/judge", "heldout_reward", "loss"):
        assert rows[-1][name] == other[-1][name]


def test_failed_scores_are_counted_and_a_run_without_any_score_stops(tmp_path):
    @reward("picky", replace=True)
    def picky(episodes):
        if episodes[0].iteration == 0 and episodes[0].group == 1:
            raise LookupError("no such garden")
        return [float(i) for i, _ in enumerate(episodes)]

    rows, _ = train(tmp_path / "run", ["picky"], "trainer.iterations=1")
    row = rows[-1]
    assert (row["failed_episodes"], row["failed/reward_error"], row["score_missing/picky"]) == (4, 4, 4)
    assert row["score/picky"] == row["reward"] == 1.5
    assert row["groups_too_few"] == 1

    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("name: picky", "name: of_another_script"))
    with Replay(
        tmp_path / "run"
    ) as replay:  # nothing of the rewards is needed, also where an episode got none
        for place in ("train-000001:0", "train-000001:4"):
            assert replay.play(find_episode(tmp_path / "run", place)).difference is None

    @reward("never", replace=True)
    def never(episodes):
        raise LookupError("no such garden")

    with pytest.raises(
        ShoalError, match=r"episodes of the evaluation failed; the first: reward 'never': LookupError"
    ):
        train(tmp_path / "none", ["never"])
