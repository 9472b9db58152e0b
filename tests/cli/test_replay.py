"""`shoal replay`: recorded episodes again, in one process, compared, stopped, forked."""

import io
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
from tests.records import exchanges, of_no_weights, with_call

from shoal.cli.main import main
from shoal.core.data import read_trajectories, write_trajectories
from shoal.train.records.replay import Replay, find_episode

LAKE = """\
from shoal.envs.frozen_lake import FrozenLakeEnv

PAID = 1.0
GREETING = ""


class Lake(FrozenLakeEnv):
    def _advance(self, action):
        outcome = super()._advance(action)
        self.moves = getattr(self, "moves", 0) + 1
        return outcome

    def observe(self):
        return super().observe() + GREETING
"""
SMALL = [
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=5", "trainer.iterations=2",
    "trainer.eval_every=1", "trainer.save_every=1", "trainer.keep_checkpoints=2", "trainer.tensorboard=false",
    "trainer.save_trajectories_every=1", "agent_proxy.max_turn=5", "es_manager.train.env_groups=2",
    "es_manager.train.group_size=2", "es_manager.val.env_groups=2", "custom_envs.FrozenLakeEnv.env_type=own_lake:Lake",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two iterations on three workers, whose env is a module of its own."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "own_lake.py").write_text(LAKE)
    sys.path.insert(0, str(folder))
    workers = ["agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel_n_jobs=3"]
    try:
        assert main(["train", *SMALL, *workers, f"run_dir={folder / 'run'}"]) == 0
        yield folder / "run"
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("own_lake", None)


def test_every_episode_of_a_run_on_workers_is_the_same_in_a_plain_loop(trained):
    played = 0
    with Replay(trained) as replay:
        for file in sorted((trained / "trajectories").glob("*.jsonl")):
            for number, record in enumerate(read_trajectories(file)):
                again = replay.play(find_episode(trained, f"{file.stem}:{number}"))
                assert again.difference is None
                assert of_no_weights(again.trajectory) == of_no_weights(record)
                sampled = file.stem in ("train-000002", "heldout-000001", "heldout-000002")
                assert (
                    "sampled again with" if sampled else "the recorded tokens are replayed"
                ) in again.source, file
                played += 1
    assert played == 2 * 4 + 3 * 2


def test_one_token_between_given_tags_is_an_action_in_play_in_warm_up_and_again(tmp_path, capsys, prints):
    small = [item for item in SMALL if "own_lake" not in item and "warmup" not in item]
    whose = "+custom_envs.FrozenLakeEnv.prompt"
    asked = [f"{whose}.{item}" for item in ("prefill='<action>'", "closing='</action>'", "history=0")]
    asked += ["agent_proxy.max_tokens=1", "warmup.steps=120", "warmup.learning_rate=0.01"]
    assert main(["train", *small, *asked, f"run_dir={tmp_path / 'run'}"]) == 0
    records = list(read_trajectories(tmp_path / "run" / "trajectories" / "train-000001.jsonl"))
    turns = [turn for record in records for turn in exchanges(record)]
    assert {len(turn.response_ids) for turn in turns} == {1}
    assert {turn.response for turn in turns if turn.action_is_valid} <= {
        f"<action>{word}</action>" for word in ("Up", "Down", "Left", "Right")
    }
    assert sum(turn.action_is_valid for turn in turns) > 0.9 * len(turns), "the warm-up wrote one token too"
    for said in ([], ["--sampler", "recorded"], ["--turn", "1", "--action", "Up"]):
        capsys.readouterr()
        told = prints("replay", tmp_path / "run", "train-000002:0", *said)
        assert "the same" in told or said[-1:] == ["Up"]
    with Replay(tmp_path / "run") as replay:
        found = find_episode(tmp_path / "run", "train-000002:0")
        forked = replay.play(found, fork=(2, "Up")).trajectory
        assert forked.turns[0] == found.trajectory.turns[0], "what is before the fork is the record"


def test_the_command_says_that_it_is_the_same(trained, capsys, prints):
    said = prints("replay", trained, "train-000002:3")
    assert "train-000002:3: FrozenLakeEnv, iteration 1, group" in said
    assert "sampled again with checkpoints/step-000001" in said
    assert "the same: 5 turns" in said
    assert main(["replay", str(trained), "1", "--sampler", "recorded", "--json"]) == 0
    said = capsys.readouterr()
    assert "heldout-000002:1: FrozenLakeEnv, held out, after 2 iterations, group 1" in said.err
    result = json.loads(said.out)
    assert (result["episode"], result["equal"], result["difference"]) == ("heldout-000002:1", True, None)


def test_what_another_sampler_played_is_called_neither_equal_nor_different(trained, capsys):
    assert main(["replay", str(trained), "train-000001:0", "--sampler", str(trained), "--json"]) == 0
    said = capsys.readouterr()
    assert "not compared" in said.err
    assert json.loads(said.out)["equal"] is None


@pytest.mark.parametrize("sampler", ["auto", "recorded"])
def test_an_env_that_changed_since_is_found_with_the_turn_and_how(trained, monkeypatch, capsys, sampler):
    lake = sys.modules["own_lake"].Lake
    old = lake.observe

    def observe(self):
        return old(self) + ("!" if getattr(self, "moves", 0) >= 2 else "")

    monkeypatch.setattr(lake, "observe", observe)
    assert main(["replay", str(trained), "train-000002:0", "--sampler", sampler]) == 1
    said = capsys.readouterr().out
    assert "iteration 1, group 0, member 0, turn 3: observation is" in said
    assert "the env answered otherwise than when the episode was recorded" in said
    assert "--- recorded" in said


def test_an_env_that_pays_otherwise_or_ends_early_is_found(trained, monkeypatch, capsys):
    lake = sys.modules["own_lake"].Lake
    step = lake.step

    def paid(self, action):
        observation, reward, terminated, truncated, info = step(self, action)
        return observation, reward + 1, terminated, truncated, info

    def over(self, action):
        observation, reward, terminated, _truncated, info = step(self, action)
        return observation, reward, terminated, self._steps == 2, info

    def raises(self, action):
        raise RuntimeError("the lake is frozen")

    for broken, where in ((paid, "turn 1: reward is"), (over, "the number of turns is 5 and 2")):
        monkeypatch.setattr(lake, "step", broken)
        assert main(["replay", str(trained), "train-000001:1"]) == 1
        assert where in capsys.readouterr().out
    monkeypatch.setattr(lake, "step", raises)
    assert main(["replay", str(trained), "train-000001:1"]) == 1
    assert "turn 1: the turn is 'went on' and 'RuntimeError: the lake is frozen (" in capsys.readouterr().out


def test_other_weights_are_found_at_the_first_token(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = run / "trajectories" / "train-000002.jsonl"
    first, *rest = read_trajectories(file)
    wrong = (exchanges(first)[0].response_ids[0] + 1, *exchanges(first)[0].response_ids[1:])
    write_trajectories(file, [with_call(first, 0, response_ids=wrong), *rest])
    assert main(["replay", str(run), "train-000002:0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["what"], found["turn"], found["token"]) == ("response token", 1, 0)
    assert main(["replay", str(trained), "--diff", str(run)]) == 1
    assert (
        "train-000002, iteration 1, group 0, member 0, turn 1, token 0: response token"
        in capsys.readouterr().out
    )
    assert main(["replay", str(trained), "--diff", str(trained)]) == 0


def test_a_fork_takes_another_action_and_the_model_plays_on(trained, capsys, prints):
    assert (
        main(["replay", str(trained), "heldout-000002:0", "--turn", "2", "--action", "Left", "--json"]) == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["forked"], result["equal"]) == (True, None)
    with Replay(trained) as replay:
        found = find_episode(trained, "heldout-000002:0")
        forked = replay.play(found, fork=(2, "Left")).trajectory
        again = replay.play(found, fork=(2, "Left")).trajectory
    assert forked == again
    assert forked.turns[0] == found.trajectory.turns[0]
    assert forked.turns[1].action == "Left"
    assert exchanges(forked)[1].prompt_ids == exchanges(found.trajectory)[1].prompt_ids
    assert len(forked.turns) > 2
    assert "is no action of FrozenLakeEnv; there are: Left, Down, Right, Up" in prints(
        "replay", trained, "heldout-000002:0", "--action", "Sideways", code=2
    )


def test_a_fork_without_weights_says_what_is_needed(trained, tmp_path, capsys, prints):
    assert "pass --sampler with a run" in prints(
        "replay", trained, "train-000001:0", "--action", "Left", code=2
    )
    assert (
        main(["replay", str(trained), "train-000001:0", "--action", "Left", "--sampler", str(trained)]) == 0
    )
    assert "forked at turn 1" in capsys.readouterr().out


def test_pdb_stops_in_the_envs_own_code_at_the_turn(trained, monkeypatch, prints):
    monkeypatch.setattr(sys, "stdin", io.StringIO("p self._steps\nw\nc\n"))
    said = prints("replay", trained, "train-000002:0", "--turn", "3", "--pdb")
    assert "own_lake.py" in said
    assert "_advance" in said
    assert "(Pdb) 2\n" in said  # two steps were made before the third turn
    assert "the same: 5 turns" in said
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
    assert "left the debugger" in prints("replay", trained, "train-000002:0", "--pdb")


def test_a_server_s_run_is_replayed_and_compared(trained, tmp_path, capsys, prints, monkeypatch):
    from tests.rollout.doubles import FakeServer

    run = tmp_path / "run"
    small = [
        "es_manager.train.env_groups=2",
        "es_manager.train.group_size=2",
        "agent_proxy.parallel_n_jobs=2",
    ]
    with FakeServer("openai") as server:  # which is gone after that: replaying does not need it
        server.say = lambda said: "<action>Down</action>"
        named = ["engine.name=openai", f"engine.server.url={server.url}"]
        assert main(["rollout", *small, *named, f"run_dir={run}"]) == 0
    said = prints("replay", run, "rollout:3")
    assert "the recorded tokens are replayed" in said
    assert "the same" in said
    file = run / "trajectories" / "rollout.jsonl"
    records = list(read_trajectories(file))
    changed = replace(records[3].turns[0], observation="elsewhere")
    write_trajectories(file, [*records[:3], replace(records[3], turns=(changed, *records[3].turns[1:]))])
    assert main(["replay", str(run), "rollout:3"]) == 1
    assert "turn 1: observation is 'elsewhere'" in capsys.readouterr().out


class Served:
    """What a fake vLLM server writes, by tokens: a move that follows from the prompt, then the end token."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def __call__(self, reply):
        for choice in reply.get("choices", ()):
            prompt = choice["prompt_token_ids"]
            self.asked.append(tuple(prompt))
            word = ("Left", "Down", "Right", "Up")[sum(i * at for at, i in enumerate(prompt)) % 4]
            said = f"it is slippery{' <' * (len(self.asked) % 3)} <action>{word}</action>"
            ids = [*self.tokenizer.encode(said), self.tokenizer.end_ids[0]]
            choice |= {"token_ids": ids, "finish_reason": "stop"}
            choice["logprobs"] = {"token_logprobs": [-0.01 * at for at in range(len(ids))]}
        return reply


@pytest.fixture(scope="module")
def asked_by_tokens(tmp_path_factory):
    """A run that asked a server by tokens, and what the server was asked; the server is gone."""
    from tests.rollout.doubles import FakeServer, fast_tokenizer

    from shoal.samplers.registry import load_tokenizer

    base = tmp_path_factory.mktemp("asked")
    folder, run = base / "tokenizer", base / "run"
    fast_tokenizer().save_pretrained(folder)
    words = [
        "engine.name=openai", f"engine.server.tokenizer={folder}",
        "agent_proxy.max_turn=4", "agent_proxy.max_tokens=40", "agent_proxy.parallel_n_jobs=2",
        "es_manager.train.env_groups=2", "es_manager.train.group_size=2", f"run_dir={run}",
        "custom_envs.FrozenLakeEnv.env_config.size=6",
    ]  # fmt: skip
    with FakeServer("vllm") as server:
        server.change = served = Served(load_tokenizer(str(folder)))
        assert main(["rollout", *words, f"engine.server.url={server.url}"]) == 0
    return run, served


@pytest.fixture
def from_vllm(asked_by_tokens, tmp_path):
    """The same in a folder that a test may change."""
    return shutil.copytree(asked_by_tokens[0], tmp_path / "run"), asked_by_tokens[1]


def test_the_tokens_that_a_vllm_server_wrote_are_replayed_and_compared(from_vllm, prints):
    run, served = from_vllm
    file = run / "trajectories" / "rollout.jsonl"
    records = list(read_trajectories(file))
    written = [turn for record in records for turn in exchanges(record)]
    assert sorted(turn.prompt_ids for turn in written) == sorted(served.asked)
    assert all(turn.response_ids[-1] == served.tokenizer.end_ids[0] for turn in written)
    assert len({turn.action for turn in written}) > 1
    for number, record in enumerate(records):
        said = json.loads(prints("replay", run, f"rollout:{number}", "--turn", "1", "--json"))
        assert (said["equal"], said["turns"]) == (True, len(record.turns))
    with Replay(run) as replay:
        again = replay.play(find_episode(run, "rollout:2"))
    assert of_no_weights(again.trajectory) == of_no_weights(records[2])
    assert "the recorded tokens are replayed" in again.source


@pytest.mark.parametrize("what", ["prompt token", "response", "observation"])
def test_a_record_of_a_server_that_says_otherwise_than_its_tokens_is_found(from_vllm, capsys, what):
    run, _ = from_vllm
    file = run / "trajectories" / "rollout.jsonl"
    records = list(read_trajectories(file))
    at = next(number for number, record in enumerate(records) if len(record.turns) > 1)
    record = records[at]
    begun, call = record.turns[1], record.calls[1]
    asked, said = call.new_prompt_ids, call.response_ids
    other = replace(begun, observation=begun.observation + "?")
    records[at] = {
        "prompt token": with_call(record, 1, new_prompt_ids=(*asked[:5], asked[5] + 1, *asked[6:])),
        "response": with_call(record, 1, response_ids=(*said[:-2], said[0], said[-1])),
        "observation": replace(record, turns=(record.turns[0], other, *record.turns[2:])),
    }[what]
    write_trajectories(file, records)
    assert main(["replay", str(run), f"rollout:{at}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["what"], found["turn"]) == (what, 2)
    if what == "prompt token":
        assert found["token"] == len(record.prompt_ids(1)) - len(asked) + 5


def test_what_vllm_wrote_in_process_is_replayed_even_where_its_checkpoint_is(
    from_vllm, trained, tmp_path, prints
):
    """An engine in process records what the server does: its tokens, under the tokenizer of its model's folder."""
    served, written = from_vllm
    config = (served / "config.yaml").read_text()
    folder = re.search(r"tokenizer: (.*)", config)[1]
    (served / "config.yaml").write_text(
        config.replace("name: openai", "name: vllm").replace("model: null", f"model: {folder}", 1)
    )
    said = prints("replay", served, "rollout:0")
    assert "the recorded tokens are replayed" in said
    assert "the same" in said
    assert written.asked
    run = tmp_path / "relabelled"
    shutil.copytree(trained, run)
    config = (run / "config.yaml").read_text()
    assert "name: tiny" in config
    (run / "config.yaml").write_text(config.replace("name: tiny", "name: vllm"))
    assert "the recorded tokens are replayed: vLLM wrote them" in prints("replay", run, "train-000002:0")
    assert "sampled again with checkpoints/step-000001" in prints(
        "replay", run, "train-000002:0", "--sampler", "checkpoint"
    )


@pytest.mark.slow
@pytest.mark.ray
def test_an_episode_of_a_run_on_ray_is_the_same_in_a_plain_loop(trained, tmp_path, prints):
    on_ray = [
        "agent_proxy.use_parallel_rollout=true",
        "agent_proxy.parallel.backend=ray",
        "agent_proxy.parallel_n_jobs=2",
    ]
    words = [word for word in SMALL if "own_lake" not in word]
    assert main(["train", *words, *on_ray, f"run_dir={tmp_path / 'run'}"]) == 0
    assert "sampled again" in prints("replay", tmp_path / "run", "train-000002:1")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nosuch"], "is not a run folder"),
        (
            ["RUN", "train-000009:0"],
            "has no file of episodes 'train-000009'; there are: heldout-000000, train-000001",
        ),
        (["RUN", "99"], "has episodes 0 to 1, got 99"),
        (["RUN", "0", "--turn", "77"], "has turns 1 to 5, got --turn 77"),
        (["RUN", "train-000001:0", "--sampler", "checkpoint"], "keep more checkpoints"),
        (["RUN", "--diff", "nosuch"], "no file of episodes is in both runs"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_a_line(trained, prints, words, why):
    assert why in prints("replay", *[trained if word == "RUN" else word for word in words], code=2)
