"""Episodes are written down as they end, and work that is broken off anywhere goes on to the end it would have had."""

import json

import msgspec
import pytest
from tests.records import Exchange, trajectory_of
from tests.rollout.doubles import BreakingOff, BrokenOff, HashEngine, config, in_lockstep

from shoal.core.data import encode_trajectory
from shoal.core.errors import ConfigError, DataError
from shoal.rollout.journal import Journal
from shoal.rollout.plan import Assignment, place_of
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.sampler import Sampling
from shoal.train.agent.run.playing import collect_with_signal

SAMPLING = Sampling(16, 1.0, ("</action>",))
SETTINGS = {"seed": 7, "env": {"size": (4, 4)}}


def episode(group, status="ok", seed=7):
    turn = Exchange("see é", (1, 2), (3,), (-0.1,), "say\n", None, True, 0.1 + group, "")
    return trajectory_of(
        "e", 0, group, 0, place_of(seed, 0, group, 0).env_seed, (turn,), True, True, False, status
    )


def read_back(path, n, settings=SETTINGS):
    """Which of the first `n` groups are there, each as it was."""
    journal = Journal(path, settings)
    found = journal.known([Assignment(group, place_of(7, 0, group, 0), "e") for group in range(n)], 0)
    assert all(trajectory == episode(group) for group, trajectory in found.items())
    return list(found)


def test_a_journal_that_was_cut_anywhere_goes_on_with_its_whole_episodes(tmp_path, caplog):
    path, torn = tmp_path / "whole", tmp_path / "torn"
    journal = Journal(path, SETTINGS)
    begun = path.stat().st_size  # which is there as a whole or not at all
    ends = []
    for group in range(3):
        journal.add(episode(group))
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    edges = {end + by for end in (begun, *ends) for by in (-1, 0, 1)} & set(range(begun, len(data) + 1))
    for cut in sorted({*range(begun, len(data), 37), *edges}):
        torn.write_bytes(data[:cut])
        whole = [group for group, end in enumerate(ends) if cut >= end - 1]  # a line may lack its newline
        assert read_back(torn, 3) == whole
        again = Journal(torn, SETTINGS)
        for group in range(3):
            if group not in whole:
                again.add(episode(group))
        assert read_back(torn, 3) == [0, 1, 2]
    assert "holds no complete episode: it is played again" in caplog.text


def test_episodes_of_others_and_those_that_failed_are_not_taken_for_the_ones_asked_for(tmp_path):
    journal = Journal(path := tmp_path / "file", SETTINGS)
    for trajectory in (episode(0, seed=8), episode(1, "engine_error"), episode(2), episode(2)):
        journal.add(trajectory)
    with path.open("ab") as file:
        file.write(b"\n\0\0\0\n[1]\n" + b"[" * 10_000 + b"\n" + encode_trajectory(episode(4)))
    assert read_back(path, 5) == [2, 4]


def test_other_settings_are_refused_by_name_while_there_is_something_to_lose(tmp_path):
    path = tmp_path / "file"
    other = SETTINGS | {"env": {"size": (4, 5)}}
    Journal(path, other)
    journal = Journal(path, SETTINGS)
    journal.add(episode(0))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"1 episodes .* env.size.1 was 4 and is 5; continue with"):
        Journal(path, other)
    assert path.read_bytes() == before
    assert read_back(path, 1) == [0]


def test_a_file_of_something_else_is_named_and_left_and_an_empty_one_is_begun(tmp_path):
    path = tmp_path / "file"
    for data in (b"x", b"[]\n", b'{"set": 1}\n', encode_trajectory(episode(0)), b"[" * 10_000):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"file must begin with the settings .* restore it or remove it"):
            Journal(path, SETTINGS)
        assert path.read_bytes() == data
    path.write_bytes(b"")
    Journal(path, SETTINGS).add(episode(0))
    assert read_back(path, 1) == [0]


def test_the_disk_is_waited_for_at_the_first_episode_and_then_now_and_then(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(descriptor))
    journal = Journal(tmp_path / "file", SETTINGS)
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    synced.clear()
    for at in (0.0, 0.5, 0.99, 1.0, 1.5, 60.0):
        clock[0] = at
        before = len(synced)
        journal.add(episode(0))
        assert len(synced) - before == (at in (0.0, 1.0, 60.0))


# --- on every backend
def player(backend, engine, journal=None, **changes):
    settings = config(groups=4, **changes)
    if backend == "lockstep":
        return in_lockstep(settings, engine, journal=journal)
    return ParallelRolloutManager(settings, engine, backend=backend, journal=journal)


def collect(playing):
    try:
        return playing.collect(4, SAMPLING)
    finally:
        playing.close()


def dynamic(playing):
    """Whole groups until four of them have signal; these envs pay by the turn, so none ever has."""
    try:
        return collect_with_signal(playing, 4, SAMPLING, max_batches=3)[0]
    finally:
        playing.close()


BACKENDS = ["lockstep", "serial", "thread", "process", pytest.param("loky", marks=pytest.mark.slow)]


@pytest.mark.parametrize("play", [collect, dynamic])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollout_that_is_broken_off_twice_plays_each_episode_once_and_ends_as_if_it_had_not(
    backend, play, tmp_path
):
    calm = play(player("serial", HashEngine()))
    path = tmp_path / "file"
    for _ in range(2):
        with pytest.raises(BrokenOff):
            play(player(backend, HashEngine(), BreakingOff(path, SETTINGS)))
    kept = Journal(path, SETTINGS)
    assert kept.count == 6
    engine = HashEngine()
    again = play(player(backend, engine, kept))
    assert list(map(encode_trajectory, again)) == list(map(encode_trajectory, calm))
    assert sum(engine.batches) == sum(len(t.turns) for t in calm[6:])  # all are equally long
    engine = HashEngine()
    assert play(player(backend, engine, Journal(path, SETTINGS))) == calm
    assert engine.batches == []
    lines = path.read_bytes().splitlines()[1:]
    assert len(lines) == len(set(lines)) == len(calm)


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_episodes_that_fail_are_played_again_and_fail_alike(backend, tmp_path):
    calm = collect(player("serial", HashEngine(), fault="raise", every=2))
    failed = [t for t in calm if t.status != "ok"]
    assert failed
    with pytest.raises(BrokenOff):
        collect(
            player(backend, HashEngine(), BreakingOff(tmp_path / "file", SETTINGS), fault="raise", every=2)
        )
    assert (
        collect(player(backend, HashEngine(), Journal(tmp_path / "file", SETTINGS), fault="raise", every=2))
        == calm
    )
    assert Journal(tmp_path / "file", SETTINGS).count == len(calm) - len(failed)


def test_a_rollout_that_lost_a_worker_and_was_broken_off_counts_each_episode_once(tmp_path):
    calm, path, once = collect(player("serial", HashEngine())), tmp_path / "file", tmp_path / "once"
    faults = {"fault": "kill", "once": str(once), "every": 1}
    with pytest.raises(BrokenOff):
        collect(player("process", HashEngine(), BreakingOff(path, SETTINGS), **faults))
    assert once.exists()
    once.unlink()  # and once more as it goes on
    assert collect(player("process", HashEngine(), Journal(path, SETTINGS), **faults)) == calm
    assert once.exists()
    assert len(path.read_bytes().splitlines()) == 1 + len(calm)


def test_a_full_disk_ends_a_rollout_and_what_it_wrote_is_kept(tmp_path, monkeypatch):
    calm = collect(player("serial", HashEngine()))
    path = tmp_path / "file"
    with monkeypatch.context() as disk:
        disk.setattr("shoal.rollout.journal.append_line", full_after(5))
        with pytest.raises(OSError, match="No space left"):
            collect(player("thread", HashEngine(), Journal(path, SETTINGS)))
    assert not path.read_bytes().endswith(b"\n")
    kept = Journal(path, SETTINGS)
    assert kept.count == 5
    assert collect(player("process", HashEngine(), kept)) == calm
    assert Journal(path, SETTINGS).count == len(calm)


def full_after(n):
    """`append_line` of a disk that has no room for the last half of a line after the `n`-th."""
    from shoal.core.files import append_line

    left = [n]

    def write(path, line, **options):
        left[0] -= 1
        if left[0] < 0:
            with open(path, "ab") as file:
                file.write(line[: len(line) // 2])
            raise OSError(28, "No space left on device", str(path))
        append_line(path, line, **options)

    return write


def test_what_other_weights_wrote_is_played_again_and_what_is_safe_elsewhere_is_forgotten(tmp_path):
    calm = collect(player("serial", HashEngine(), Journal(path := tmp_path / "file", SETTINGS)))
    engine = HashEngine()
    engine.weights_version += 1
    collect(player("serial", engine, Journal(path, SETTINGS)))
    assert engine.batches
    kept = Journal(path, SETTINGS)
    assert kept.count == 2 * len(calm)
    kept.forget(calm[0].iteration)
    assert Journal(path, SETTINGS).count == kept.count == 2 * len(calm)
    kept.forget(calm[0].iteration + 1)
    assert Journal(path, SETTINGS).count == kept.count == 0
    engine = HashEngine()
    assert collect(player("serial", engine, kept)) == calm
    assert engine.batches


def test_settings_may_hold_what_yaml_can(tmp_path):
    import datetime

    settings = {"day": datetime.date(2026, 1, 2), "sizes": (1, 2), "deep": {"a": None}}
    Journal(tmp_path / "file", settings).add(episode(0))
    assert read_back(tmp_path / "file", 1, settings) == [0]
    assert json.loads((tmp_path / "file").read_text().splitlines()[0]) == {
        "settings": json.loads(msgspec.json.encode(settings))
    }
