"""`shoal prove`: equal runs are equal, a broken promise is found and named, a fault that was not felt is none."""

import json
import shutil
import subprocess
import sys

import pytest

from shoal.cli import prove as command
from shoal.cli.main import main
from shoal.core.data import read_trajectories, write_trajectories
from shoal.core.errors import WorkerError
from shoal.testing import proof, prove_agents, prove_commands
from shoal.testing.proof import Case, Part, Row, Toll, kill_when, prove
from shoal.testing.recorded_runs import first_difference, weights_digest

TINY = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=2", "trainer.iterations=2",
    "trainer.eval_every=2", "trainer.save_every=2", "agent_proxy.max_turn=4", "es_manager.train.env_groups=3",
    "es_manager.train.group_size=3", "es_manager.val.env_groups=2",
]  # fmt: skip


def agents(*wanted, faults=False, more=()):
    part = prove_agents.agents("demo", [*TINY, *more], faults=faults, ray=False)
    cases = [case for case in part.cases if case.name in wanted]
    return Part(part.name, part.again, cases, part.digests, part.difference)


def test_one_run_made_three_ways_leaves_the_same_bytes(tmp_path):
    rows = prove(agents("one by one", "lockstep", "3 workers, greedy"), tmp_path)
    assert [(row.name, row.problem) for row in rows] == [
        ("one by one", ""), ("lockstep", ""), ("3 workers, greedy", ""),
    ]  # fmt: skip
    assert all(row.digests == rows[0].digests for row in rows)
    saved = list((tmp_path / "one-by-one" / "trajectories").glob("*.jsonl"))
    assert sorted(path.stem for path in saved) == [
        "heldout-000000",
        "heldout-000002",
        "train-000001",
        "train-000002",
    ]


@pytest.mark.slow
def test_episodes_that_fail_alike_are_equal_whoever_played_them(tmp_path):
    lost = "custom_envs.FrozenLakeEnv.env_type=tests.cli.test_rollout:LostLake"
    rows = prove(agents("one by one", "lockstep, envs in 3 workers", more=[lost]), tmp_path)
    assert [row.problem for row in rows] == ["", ""]
    assert rows[0].digests == rows[1].digests
    files = (tmp_path / "one-by-one" / "trajectories").glob("*.jsonl")
    assert {t.status for file in files for t in read_trajectories(file)} == {"ok", "env_error"}


def test_a_stream_that_is_broken_is_found_and_its_first_token_is_named(tmp_path, monkeypatch):
    import msgspec

    from shoal.rollout.hosts import pool

    class Broken(pool.Episode):
        """One turn of one episode hears another token than the model wrote."""

        def respond(self, completion):
            place = self.place
            if (place.iteration, place.group, place.member, len(self._turns)) == (1, 2, 1, 1):
                other = 4 if completion.token_ids[0] != 4 else 5
                completion = msgspec.structs.replace(completion, token_ids=(other,))
            return super().respond(completion)

    monkeypatch.setattr(pool, "Episode", Broken)
    rows = prove(agents("one by one", "lockstep"), tmp_path)
    assert rows[0].equal
    assert not rows[1].equal
    # an oracle that reads the JSON itself
    one, other = (
        [
            json.loads(line)
            for line in (tmp_path / name / "trajectories" / "train-000002.jsonl").read_text().splitlines()
        ]
        for name in ("one-by-one", "lockstep")
    )
    parted = [(a["group"], a["member"]) for a, b in zip(one, other, strict=True) if a != b]
    assert parted == [(2, 1)]
    a, b = (next(t for t in run if (t["group"], t["member"]) == (2, 1))["calls"][1] for run in (one, other))
    token = [x == y for x, y in zip(a["response_ids"] + [-1], b["response_ids"] + [-2], strict=False)].index(
        False
    )
    named = f"train-000002, iteration 1, group 2, member 1, turn 2, token {token}: response token is "
    assert "differ; first: " in rows[1].problem
    assert named in rows[1].problem


def test_workers_that_are_killed_are_counted_with_what_was_played_again(tmp_path):
    part = agents("one by one", "workers killed", faults=True)
    rows = prove(part, tmp_path)
    assert [row.problem for row in rows] == ["", ""]
    assert rows[1].toll.kills >= 1
    lost = [
        json.loads(line) for line in (tmp_path / "workers-killed" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[1].toll.again == sum(row.get("replayed_episodes", 0) for row in lost) >= 1


@pytest.mark.parametrize(
    ("toll", "felt"), [(Toll(0, 0), 0), (Toll(2, 0), 0), (Toll(0, 3), 0), (Toll(1, 1), 1), (None, 0)]
)
def test_a_fault_that_was_not_felt_proves_nothing(tmp_path, toll, felt):
    tried = []
    cases = [
        Case("calm", lambda run: None),
        Case("killed", lambda run: tried.append(run) or toll, fault=True),
    ]
    rows = prove(Part("made up", "episodes", cases, lambda run: {"hash": "a"}, lambda a, b: ""), tmp_path)
    assert rows[1].equal == bool(felt)
    assert (len(tried) == 1) == bool(felt)  # it is tried again until it is felt
    assert felt or "no fault was felt" in rows[1].problem


def test_a_case_that_raises_is_a_row_that_says_so(tmp_path):
    def broken(run):
        raise RuntimeError("no luck")

    cases = [Case("calm", lambda run: None), Case("broken", broken), Case("third", lambda run: None)]
    rows = prove(Part("made up", "episodes", cases, lambda run: {"hash": "a"}, lambda a, b: ""), tmp_path)
    assert [row.problem for row in rows] == ["", "RuntimeError: no luck", ""]


def test_a_first_run_that_fails_ends_the_proof_with_its_own_error(tmp_path, monkeypatch, capsys):
    def broken(run):
        raise ModuleNotFoundError(name="PIL")

    def made(*args, **kwargs):
        return Part("agents", "episodes", [Case("one", broken), Case("two", made)], str, lambda a, b: "")

    monkeypatch.setattr(prove_agents, "agents", made)
    assert main(["prove", "--run-dir", str(tmp_path / "p")]) == 1
    assert capsys.readouterr().err == 'shoal: shoal prove needs an extra: run pip install "shoal[vision]"\n'
    assert json.loads((tmp_path / "p" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("same", [True, False])
def test_the_command_ends_with_0_only_if_all_is_equal(tmp_path, monkeypatch, capsys, same):
    def made(*args, **kwargs):
        cases = [Case("one", lambda run: None), Case("two", lambda run: None)]
        return Part("agents", "episodes", cases, lambda run: {"episodes": "a" if same else run.name},
                    lambda a, b: "turn 3, token 1")  # fmt: skip

    monkeypatch.setattr(prove_agents, "agents", made)
    assert main(["prove", "--run-dir", str(tmp_path / "p"), "--json"]) == int(not same)
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert summary == json.loads((tmp_path / "p" / "summary.json").read_text())
    assert (summary["status"], summary["metrics"]["equal"]) == ("completed" if same else "failed", same)
    assert ("turn 3, token 1" in said.err) == (not same)
    assert main(["prove", "--run-dir", str(tmp_path / "p")]) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "seed"), [(["seed=5"], 5), (["--seed", "6"], 6), (["ppo", "--seed", "7"], 7), (["split"], 0)]
)
def test_the_summary_names_the_seed_of_the_runs(tmp_path, monkeypatch, words, seed):
    monkeypatch.setattr(proof, "prove", lambda part, folder, told: told(Row("one", False, {}, 0.0)))
    assert main(["prove", *words, "--no-ray", "--run-dir", str(tmp_path / "p")]) == 0
    assert json.loads((tmp_path / "p" / "summary.json").read_text())["seed"] == seed


def test_what_was_proved_until_ctrl_c_is_kept(tmp_path, monkeypatch, capsys):
    def interrupted(run):
        raise KeyboardInterrupt

    def made(*args, **kwargs):
        cases = [Case("one", lambda run: None), Case("two", interrupted)]
        return Part("agents", "episodes", cases, lambda run: {"episodes": "a"}, lambda a, b: "")

    monkeypatch.setattr(prove_agents, "agents", made)
    assert main(["prove", "--run-dir", str(tmp_path / "p")]) == 130
    summary = json.loads((tmp_path / "p" / "summary.json").read_text())
    assert (summary["status"], [row["name"] for row in summary["metrics"]["rows"]]) == (
        "interrupted",
        ["one"],
    )
    assert summary["metrics"]["equal"] is False
    assert "interrupted" in capsys.readouterr().err


def test_commands_that_were_left_running_end_with_the_proof(tmp_path, monkeypatch):
    started = []

    def leaves(run):
        started.append(proof.shoal_command(["train", "--config-name", "demo"], tmp_path / "log"))
        raise KeyboardInterrupt

    part = Part("made up", "episodes", [Case("one", leaves)], lambda run: {}, lambda a, b: "")
    with pytest.raises(KeyboardInterrupt):
        prove(part, tmp_path)
    assert started[0].poll() == -9


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["pppo"], "Did you mean 'ppo'"),
        (["ppo", "seed=3"], "has no agent config"),
        (["ppo", "split"], "takes one part"),
        (["trainer.iteratons=3"], "Did you mean"),
    ],
)
def test_a_mistake_in_the_call_is_told(tmp_path, capsys, words, why):
    assert main(["prove", *words, "--run-dir", str(tmp_path / "p")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_one_changed_byte_of_a_tensor_changes_the_hash_and_the_order_of_names_does_not(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    x, y = np.arange(5, dtype=np.float32), np.ones((2, 3))
    save_file({"x": x, "y": y}, folders[0] / "w.safetensors")
    save_file({"y": y, "x": x}, folders[1] / "w.safetensors", metadata={"written": "later"})
    save_file({"x": np.nextafter(x, 9, dtype=np.float32), "y": y}, folders[2] / "w.safetensors")
    save_file({"x": x, "y": y.reshape(3, 2)}, folders[3] / "w.safetensors")
    one, same, other, shape = map(weights_digest, folders)
    assert one == same
    assert len({one, other, shape}) == 3


def test_a_process_that_ends_by_itself_was_not_killed():
    def sleeper(seconds):
        return subprocess.Popen(
            [sys.executable, "-c", f"import time; time.sleep({seconds})"], start_new_session=True
        )

    assert not kill_when(sleeper(0), lambda: False)
    process = sleeper(60)
    assert kill_when(process, lambda: True)
    assert process.returncode == -9


def test_a_command_that_hangs_is_ended_whatever_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "RUN_SECONDS", 0.2)
    hung = []

    def shoal_command(words, log):
        hung.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return hung[-1]

    for module in (proof, prove_commands):
        monkeypatch.setattr(module, "shoal_command", shoal_command)
    for part in (prove_commands.ppo(quick=True), prove_commands.skills(quick=True)):
        for case in part.cases:
            with pytest.raises(WorkerError, match=r"did not end within 0\.2 s"):
                case.make(tmp_path / "run")
    assert len(hung) == 9
    assert all(process.poll() == -9 for process in hung)


def test_runs_of_other_files_and_missing_episodes_differ(tmp_path):
    from tests.cli.recorded import trajectory

    one, other = tmp_path / "one", tmp_path / "other"
    write_trajectories(one / "trajectories" / "train-000001.jsonl", [trajectory(member=m) for m in range(3)])
    shutil.copytree(one, other)
    assert first_difference(one, other) is None
    file = other / "trajectories" / "train-000001.jsonl"
    write_trajectories(file, list(read_trajectories(file))[:2])
    assert str(first_difference(one, other)) == (
        "train-000001, iteration 0, group 0, member 2: the episode is 'there' and 'missing'"
    )
    write_trajectories(other / "trajectories" / "train-000002.jsonl", [])
    file.unlink()
    assert first_difference(one, one) is None
    assert main(["replay", str(one), "--diff", str(other)]) == 2


def test_the_first_metric_that_differs_is_named_but_for_the_clock(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for run, entropy in ((one, 0.5), (other, 0.25)):
        run.mkdir()
        rows = [{"steps": 8, "entropy": 0.5, "seconds": entropy}, {"steps": 16, "entropy": entropy}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prove_commands._first_row(one, one) == ""
    assert prove_commands._first_row(one, other) == "iteration 2, step 16: entropy is 0.5 and 0.25"


def test_every_part_is_known_to_the_command():
    from shoal.testing import prove_commands

    assert {name for name in command.PARTS if name != "agents"} <= set(vars(prove_commands))


@pytest.mark.parametrize(
    ("part", "flag"),
    [
        (prove_commands.ppo, "--num-workers"),
        (prove_commands.split, "--num-cpus"),
        (prove_commands.skills, "--max_parallel_skills"),
    ],
)
def test_a_case_has_as_many_workers_as_its_name_says(tmp_path, monkeypatch, part, flag):
    told = []
    monkeypatch.setattr(prove_commands, "run_shoal", lambda words, log: told.append(words))
    monkeypatch.setattr("shoal.splitting.synthetic.write_gui_recordings", lambda *args, **settings: None)
    monkeypatch.setattr("shoal.splitting.processors.build_qwen_processor", lambda folder, **settings: folder)
    for case in part(faults=False, ray=False).cases:
        case.make(tmp_path / "run")
        workers = told[-1][told[-1].index(flag) + 1] if flag in told[-1] else "in"
        assert {"1": "one"}.get(workers, workers) == case.name.split()[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["agents", "ppo", "split", "skills"])
def test_the_whole_promise_holds(tmp_path, part, capsys):
    assert main(["prove", part, "--quick", "--run-dir", str(tmp_path / "p"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["metrics"]["rows"]
    assert all(row["equal"] for row in rows)
    assert all(row["toll"]["kills"] and row["toll"]["again"] for row in rows if row["fault"])
    assert sum(row["fault"] for row in rows) >= 1
    assert all(
        row["toll"]["kills"] == 1 for row in rows if row["name"] in ("trainer killed", "command killed")
    )
