import errno
import json
import os

import pytest
import yaml
from tests.records import exchanges

import shoal
from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.core.errors import ShoalError
from shoal.core.run_folder import FolderLock
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.records.evaluation import PANELS
from shoal.train.records.exported import export_model

SMALL = [
    "warmup.steps=3", "trainer.iterations=1", "engine.width=16", "es_manager.train.env_groups=2",
    "es_manager.val.env_groups=3", "use_parallel_envs=false",
]  # fmt: skip


def trained(folder, *overrides):
    with AgentTrainer(compose_config("demo", [*SMALL, f"run_dir={folder}", *overrides])) as trainer:
        list(trainer.train())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("eval") / "run", "warmup.steps=10")


def test_a_run_is_evaluated_and_its_episodes_kept(run, tmp_path, capsys):
    assert main(["eval", str(run), "--episodes", "70", "--temperature", "1", "--json",
                 "--out", str(tmp_path / "out")]) == 0  # fmt: skip
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    played = list(read_trajectories(tmp_path / "out" / "trajectories" / "eval.jsonl"))
    assert result["episodes"] == len(played) == 70
    assert result["success"] == sum(t.success for t in played) / 70
    assert len({(t.group, t.member) for t in played}) == 70
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["command"] == "eval"


def test_a_run_is_evaluated_with_its_own_limit_of_turns_and_choice_of_tokens(tmp_path, capsys):
    limits = ["agent_proxy.max_turn=2", "agent_proxy.top_k=1", "algorithm.rollout_correction.method=truncate"]
    trained(tmp_path / "run", *limits)

    def play(*options):
        main(["eval", str(tmp_path / "run"), "--episodes", "9", "--out", str(tmp_path / "out"), *options])
        return list(read_trajectories(tmp_path / "out" / "trajectories" / "eval.jsonl"))

    greedy, sampled = play(), play("--temperature", "1")
    assert max(len(t.turns) for t in greedy) == 2
    # the likeliest token is the only one to sample from
    assert [[turn.response_ids for turn in exchanges(t)] for t in sampled] == [
        [turn.response_ids for turn in exchanges(t)] for t in greedy
    ]
    settings = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["agent_proxy"]
    assert (settings["max_turn"], settings["top_k"]) == (2, 1)
    another = play("--env", "frozen_lake", "--env-config", "is_slippery=false")
    assert max(len(t.turns) for t in another) > 2  # which has a limit of its own


def test_evaluate_in_python_gives_what_the_command_prints_and_holds_its_folder_meanwhile(
    run, tmp_path, capsys
):
    words = ["--env", "frozen_lake", "--env-config", "size=3", "--episodes", "70", "--seed", "5"]
    assert main(["eval", str(run), *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    out, seen = tmp_path / "out", []

    def progress(played, total):
        assert FolderLock(out / ".lock").is_taken()  # so its summary has the time that playing took, too
        seen.append((played, total))

    settings = {"episodes": 70, "seed": 5, "out": out, "progress": progress}
    found = shoal.evaluate(run, "frozen_lake", {"size": 3}, **settings)
    assert found.metrics == printed
    assert (len(found.trajectories), found.metrics["episodes"]) == (70, 70)
    assert found.metrics["reward"] == pytest.approx(sum(t.reward for t in found.trajectories) / 70)
    assert list(read_trajectories(out / "trajectories" / "eval.jsonl")) == found.trajectories
    assert not FolderLock(out / ".lock").is_taken()
    assert seen[0] == (0, 70)
    assert seen[-1] == (70, 70)
    assert sorted(seen) == seen


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env_config": {"size": 3}}, "give env too"),
        ({"video": "film.gif"}, "video films a PPO run"),
    ],
)
def test_evaluate_refuses_what_it_would_pass_over(run, settings, said):
    with pytest.raises(ShoalError, match=said):
        shoal.evaluate(run, **settings)


def test_an_evaluation_that_ends_as_it_writes_leaves_nothing_of_the_one_before(
    run, tmp_path, monkeypatch, capsys
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    evaluate = ["eval", str(run), "--episodes", "2", "--out", str(out)]
    assert main(evaluate) == 0
    with monkeypatch.context() as disk:
        disk.setattr("shoal.train.records.evaluation.write_trajectories", full)
        assert main([*evaluate, "--env", "frozen_lake"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert sorted(os.listdir(out)) == [".lock", "config.yaml", "log.txt", "trajectories", "unfinished.jsonl"]
    assert os.listdir(out / "trajectories") == []
    assert main(evaluate) == 2
    assert "holds 2 episodes of unfinished work" in capsys.readouterr().err
    assert main([*evaluate, "--env", "frozen_lake"]) == 0
    assert main(evaluate) == 0


def test_a_panel_and_an_evaluation_leave_nothing_of_each_other_in_a_folder(run, tmp_path, monkeypatch):
    monkeypatch.setitem(PANELS, "core", {"frozen_lake": {"size": 3}})
    out = tmp_path / "out"
    evaluate = ["eval", str(run), "--episodes", "2", "--out", str(out)]
    for _ in range(2):
        assert main([*evaluate, "--panel", "core"]) == 0
        assert sorted(os.listdir(out)) == [".lock", "log.txt", "panel.json", "summary.json", "trajectories"]
        assert os.listdir(out / "trajectories") == ["frozen_lake.jsonl"]
        assert main(evaluate) == 0
        assert sorted(os.listdir(out)) == [".lock", "config.yaml", "log.txt", "summary.json", "trajectories"]
        assert os.listdir(out / "trajectories") == ["eval.jsonl"]


def test_a_checkpoint_is_named_by_its_iteration_or_its_folder(run, capsys):
    told = []
    for which in ("0", "step-000000"):
        assert main(["eval", str(run), "--episodes", "2", "--checkpoint", which, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert told[0] == told[1]


def test_a_run_can_be_tried_on_another_env(run, capsys):
    assert main(["eval", str(run), "--env", "frozen_lake", "--env-config", "size=3", "--episodes", "5"]) == 0
    assert "5 whole, 0 failed" in capsys.readouterr().out


def test_the_model_of_a_run_is_exported(run, tmp_path, capsys):
    from shoal.train.agent.policies.loading import load_engine

    assert main(["export", str(run), str(tmp_path / "model"), "--to", "shoal"]) == 0
    assert load_engine(tmp_path / "model").tokenizer.encode("Down")
    assert export_model(run, tmp_path / "first", to="shoal", checkpoint="0") == "step-000000"
    for file in (run / "checkpoints" / "step-000000" / "engine").iterdir():
        assert (tmp_path / "first" / file.name).read_bytes() == file.read_bytes()
    assert main(["export", str(run), str(tmp_path / "hf")]) == 2
    assert "transformers does not know" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "model"), "--to", "shoal"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "nowhere"], "there is no run folder and no model folder nowhere"),
        (
            ["eval", "RUN", "--checkpoint", "77"],
            "has no checkpoint '77'; it has newest, best, 0, 1 (trainer.keep_checkpoints",
        ),
        (["eval", "RUN", "--env", "frozn_lake"], "no env named 'frozn_lake'. Did you mean 'frozen_lake'"),
        (["eval", "RUN", "--episodes", "0"], "must be at least 1, got 0"),
        (["show", "nowhere"], "not a run folder"),
        (["show", "RUN", "--episode", "9"], "--episode must be in [0, 2], got 9"),
        (["trian"], "no command named 'trian'. Did you mean 'train'"),
    ],
)
def test_a_mistake_in_a_call_is_one_readable_line(run, capsys, arguments, message):
    assert main([str(run) if word == "RUN" else word for word in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env-config", "size=5"], "add --env NAME"),
        (["--env", "frozen_lake", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
    ],
)
def test_eval_passes_over_nothing_that_was_asked_for(words, said, capsys):
    assert main(["eval", "runs/demo", *words]) == 2
    assert said in capsys.readouterr().err
