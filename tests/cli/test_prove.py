"""`shoal prove`: trainings on several backends are equal; one that differs or fails is found and named."""

import json

import pytest

from shoal.cli import prove
from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.train.records import proof

TINY = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=2", "trainer.iterations=2",
    "agent_proxy.max_turn=4", "es_manager.train.env_groups=3", "es_manager.train.group_size=3",
    "es_manager.val.env_groups=2",
]  # fmt: skip


def proved(monkeypatch, run, *words, rows=("sequential", "synchronous", "3 threads")):
    """The exit code and the summary of `shoal prove` with these rows."""
    monkeypatch.setattr(prove, "BACKENDS", {name: prove.BACKENDS[name] for name in rows})
    code = main(["prove", "--quick", "--no-ray", *TINY, *words, "--out", str(run)])
    return code, json.loads((run / "summary.json").read_text())


def test_trainings_on_several_backends_leave_the_same_episodes_and_weights(tmp_path, monkeypatch, capsys):
    every = tuple(name for name in prove.BACKENDS if "Ray" not in name and "16" not in name)
    code, summary = proved(monkeypatch, tmp_path / "run", "--json", rows=every)
    assert code == 0
    assert json.loads(capsys.readouterr().out) == summary
    rows = summary["metrics"]["rows"]
    assert [row["name"] for row in rows] == [*every]
    assert all(row["digests"] == rows[0]["digests"] and not row["problem"] for row in rows)
    assert {*rows[0]["digests"]} == {"episodes", "weights"}
    saved = (tmp_path / "run" / "sequential" / "trajectories").glob("*.jsonl")
    assert sorted(path.stem for path in saved) == [
        "heldout-000000", "heldout-000002", "train-000001", "train-000002",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_training_with_a_lag_is_proved_where_it_can_run(tmp_path, monkeypatch):
    rows = ("sequential", "synchronous", "synchronous, 3 env workers", "3 threads", "3 processes")
    code, summary = proved(monkeypatch, tmp_path / "run", "trainer.lag=1", rows=rows)
    assert code == 0
    assert [row["name"] for row in summary["metrics"]["rows"]] == ["sequential", "3 threads", "3 processes"]


def test_a_training_that_differs_is_found_with_its_first_token(tmp_path, monkeypatch, capsys):
    from msgspec.structs import replace

    from shoal.rollout import play
    from shoal.rollout.hosts.episodes import Begin

    class Broken(play.VectorHost):
        """One turn of one episode takes another token than the model wrote."""

        slot, answers = None, 0

        def tell(self, message):
            place = message.assignment.place if isinstance(message, Begin) else None
            if place and (place.iteration, place.group, place.member) == (1, 2, 1):
                self.slot = message.slot
            elif message.slot == self.slot:
                self.answers += 1
                if self.answers == 2:
                    other = 4 if message.completion.token_ids[0] != 4 else 5
                    message = replace(message, completion=replace(message.completion, token_ids=(other,)))
            return super().tell(message)

    monkeypatch.setattr(play, "VectorHost", Broken)
    code, summary = proved(monkeypatch, tmp_path / "run", rows=("sequential", "synchronous"))
    assert code == 1
    assert (summary["status"], summary["metrics"]["equal"]) == ("failed", False)
    first, second = summary["metrics"]["rows"]
    assert first["problem"] == ""
    where = "first: train-000002, iteration 1, group 2, member 1, turn 2, token 0: response token is "
    assert where in second["problem"]
    assert "1 of 2 DIFFER" in capsys.readouterr().out


@pytest.mark.slow
def test_episodes_that_fail_alike_are_equal_on_every_backend(tmp_path, monkeypatch):
    lost = "custom_envs.FrozenLakeEnv.env_type=tests.cli.test_rollout:LostLake"
    code, _ = proved(monkeypatch, tmp_path / "run", lost, rows=("sequential", "synchronous, 3 env workers"))
    assert code == 0
    files = (tmp_path / "run" / "sequential" / "trajectories").glob("*.jsonl")
    assert {t.status for file in files for t in read_trajectories(file)} == {"ok", "env_error"}


@pytest.mark.slow
@pytest.mark.ray
def test_ray_is_equal_too(tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "BACKENDS", {n: prove.BACKENDS[n] for n in ("sequential", "3 workers on Ray")})
    assert main(["prove", "--quick", "--ray", *TINY, "--out", str(tmp_path / "run")]) == 0


LOUD = {"an env that is gone": ("custom_envs.FrozenLakeEnv.env_type=tests.cli.test_prove:gone",)}


def gone(**_):
    raise RuntimeError("no such env")


def test_a_first_training_that_fails_is_the_error_and_a_later_one_a_row(tmp_path, monkeypatch, prints):
    sequential = {"sequential": prove.BACKENDS["sequential"]}
    monkeypatch.setattr(prove, "BACKENDS", {**LOUD, **sequential})
    with pytest.raises(RuntimeError, match="no such env"):
        main(["prove", "--quick", *TINY, "--out", str(tmp_path / "first")])
    assert json.loads((tmp_path / "first" / "summary.json").read_text())["status"] == "failed"
    monkeypatch.setattr(prove, "BACKENDS", {**sequential, **LOUD})
    assert main(["prove", "--quick", *TINY, "--out", str(tmp_path / "second")]) == 1
    rows = json.loads((tmp_path / "second" / "summary.json").read_text())["metrics"]["rows"]
    assert [bool(row["problem"]) for row in rows] == [False, True]
    assert "no such env" in rows[1]["problem"]


def test_a_mistake_in_the_settings_is_refused_before_a_folder_is_made(tmp_path, monkeypatch, prints):
    monkeypatch.setattr(prove, "BACKENDS", {**prove.BACKENDS, "broken": ("agent_proxy.max_turn=none",)})
    assert "max_turn" in prints("prove", "--quick", *TINY, "--out", tmp_path / "run", code=2)
    assert not (tmp_path / "run").exists()


def test_what_was_proved_until_ctrl_c_is_kept(tmp_path, monkeypatch):
    begun = proof.prove

    def interrupted(trainings):
        yield next(begun(trainings))
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "prove", interrupted)
    code, summary = proved(monkeypatch, tmp_path / "run")
    assert (code, summary["status"]) == (130, "interrupted")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["name"] == "sequential"
