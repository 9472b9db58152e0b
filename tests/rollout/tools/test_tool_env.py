"""Envs that act by tools in rollouts: the same everywhere, recorded as other tools, replayed, and learned from."""

import json
import re

import pytest
from tests.rollout.doubles import byte_tokenizer, in_lockstep, of_kind
from tests.rollout.tools.test_chats import CONTROL, TEMPLATES
from tests.rollout.tools.vault import Vault

from shoal import AgentTrainer, ParallelRolloutManager
from shoal.core.data import encode_trajectory
from shoal.core.errors import ConfigError
from shoal.envs.tools import tools_of
from shoal.samplers.sampler import Sampling
from shoal.samplers.scripted import ScriptedEngine
from shoal.samplers.tokenizers import TemplateTokenizer
from shoal.train.agent.config import compose_config
from shoal.train.records.replay import Replay, find_episode

VAULT = "tests.rollout.tools.vault:Vault"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def opens(text, key):
    """Nothing, then a call of a tool that is not there beside two others, then one without arguments, then the code."""
    lock, argument = ("dial", "number") if "with a dial" in text else ("keypad", "digit")
    code = re.findall(r"code is (\d)", text)
    return [
        "I look around.",
        call("note") + call("drill") + call(lock, **{argument: 77}),
        call(lock),
        call(lock, **{argument: int(code[-1]) if code else -1}),
    ][min(key.path[-1], 3)]


def config(mode="window", env=VAULT, **proxy):
    settings = of_kind(env, 4, 2, "Vault", parallel_n_jobs=2, **proxy)
    settings["agent_proxy"]["prompt"] = {"mode": mode}
    return settings


def play(engine, backend="serial", **changes):
    with ParallelRolloutManager(config(**changes), engine, backend=backend) as manager:
        return manager.collect(0)


@pytest.mark.parametrize("mode", ["append", "window"])
def test_episodes_are_the_same_wherever_they_are_played(mode):
    engine = ScriptedEngine(opens)
    played = {b: play(engine, b, mode=mode) for b in ("serial", "thread", "process")}
    for backend in ("serial", "process"):
        with in_lockstep(config(mode), engine, {"backend": backend}) as collector:
            played[f"abreast, {backend}"] = collector.collect(0, Sampling(999, 1.0))
    assert len({b"".join(map(encode_trajectory, episodes)) for episodes in played.values()}) == 1
    seen = {episode.turns[0].observation for episode in played["serial"]}
    assert seen == {"A vault with a dial.", "A vault with a keypad."}  # tools of their own


def test_calls_and_results_are_recorded_as_those_of_other_tools():
    first = play(ScriptedEngine(opens))[0]
    lock, argument = ("dial", "number") if "dial" in first.turns[0].observation else ("keypad", "digit")
    _, mixed, lacking, right = first.turns
    code = mixed.tools[0].result.removeprefix("the code is ")
    assert [[(use.name, use.arguments, use.result, use.error) for use in turn.tools] for turn in first.turns] == [
        [("", "I look around.", "", f"an answer must call a tool; there are: note, {lock}")],
        [
            ("note", {}, f"the code is {code}", None),
            ("drill", {}, "", f"there is no tool 'drill'; there are: note, {lock}"),
            (lock, {argument: 77}, "", "ValueError: there are digits from 0 to 9"),
        ],
        [(lock, {}, "", f"Object missing required field `{argument}`")],
        [(lock, {argument: int(code)}, "it opens", None)],
    ]  # fmt: skip
    assert [turn.action for turn in first.turns] == [None, None, f"call {lock}", f"call {lock}"]
    assert [turn.action_is_valid for turn in first.turns] == [False, False, True, True]
    assert [turn.reward for turn in first.turns] == [0, 0, 0, 1]
    assert (first.success, first.terminated, first.truncated, first.ended) == (True, True, False, "env")
    assert [each.parent for each in first.calls] == [None, 0, 1, 2]
    assert right.observation == lacking.tools[0].shown
    assert lacking.observation == "\n".join(use.shown for use in mixed.tools)


def test_a_turn_without_a_call_is_a_step_and_turns_are_limited_as_those_of_any_env():
    silent = ScriptedEngine(lambda text, key: "I wait.")
    assert {len(e.turns) for e in play(silent)} == {6}  # max_steps of the env
    short = play(silent, max_turn=2)
    assert {(len(e.turns), e.truncated, e.ended) for e in short} == {(2, True, "turns")}
    assert {e.status for e in short} == {"ok"}
    assert not any(turn.action_is_valid for e in short for turn in e.turns)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("mode", ["append", "window"])
def test_the_prompt_is_the_model_s_own_template_with_the_tools_of_the_episode(kind, mode):
    control = CONTROL.get(kind, ("<|im_start|>", "<|im_end|>"))
    engine = ScriptedEngine(lambda text, key: "not now" if key.path[-1] % 2 else "later")
    engine.tokenizer = TemplateTokenizer(byte_tokenizer(TEMPLATES[kind], control))
    for episode in play(engine, mode=mode, max_turn=2):
        assert episode.status == "ok", episode.error
        env = Vault()
        observation, info = env.reset(seed=episode.env_seed)
        names = [tool.name for tool in tools_of(info)]
        assert len(names) == 2
        told = f"Error: an answer must call a tool; there are: {', '.join(names)}"
        chat = [
            {"role": "user", "content": f"Open the vault.\n\n{observation}"},
            {"role": "assistant", "content": "later"},
            {"role": "tool", "content": told, "tool_call_id": "call00000"},
        ]
        schemas = [{"type": "function", "function": schema} for schema in info["tools"]]
        whole = engine.tokenizer.tokenizer.apply_chat_template(
            chat, tokenize=False, tools=schemas, add_generation_prompt=True
        )
        seen = engine.tokenizer.spell(episode.prompt_ids(1))
        assert seen.strip() == whole.strip()
        assert "<action>" not in seen


def test_tools_of_the_run_beside_those_of_the_env_are_refused():
    with pytest.raises(
        ConfigError, match=r"custom_envs\.Vault has tools of its own: leave agent_proxy\.tools"
    ):
        play(ScriptedEngine(opens), tools=["tests.rollout.tools.functions:add"])


class NoResults(Vault):
    """Forgets what its tools said."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "tool_results": info["tool_results"][1:]}


class NoTools(Vault):
    """Has none."""

    def tools(self):
        return []


def test_an_env_that_names_no_tools_or_answers_too_few_calls_has_failed():
    episodes = play(ScriptedEngine(opens), env=f"{__name__}:NoResults")
    assert {e.status for e in episodes} == {"env_error"}
    assert "must list what came of 1 calls" in episodes[0].error
    with pytest.raises(ConfigError, match="must list the tools of the episode"):
        play(ScriptedEngine(opens), env=f"{__name__}:NoTools")


SMALL = [
    "custom_envs={Vault: {env_type: 'tests.rollout.tools.vault:Vault'}}", "es_manager.train.env_configs.tags=[Vault]",
    "es_manager.train.env_groups=4", "es_manager.train.group_size=2", "es_manager.val.env_groups=8",
    "engine.width=32", "engine.layers=1", "engine.heads=2", "agent_proxy.max_tokens=32", "warmup.steps=150",
    "warmup.batch_size=16", "warmup.expert=1", "warmup.rehearsal=0", "trainer.iterations=1", "trainer.eval_every=1",
    "vector.backend=serial", "trainer.check_envs=false", "trainer.tensorboard=false",
    "algorithm.filter_groups.enable=false", "algorithm.entropy_coef=0.01", "algorithm.entropy_target=100",
]  # fmt: skip


def test_a_model_is_warmed_up_trained_and_replayed(tmp_path):
    with AgentTrainer(compose_config("base", [*SMALL, f"run_dir={tmp_path}"])) as trainer:
        rows = list(trainer.train())
    assert rows[-1]["heldout_valid_actions"] > 0.5  # it has learned to write calls
    assert rows[-1]["tool_calls"] > 1
    assert rows[-1]["grad_norm"] > 0
    for sampler in ("checkpoint", "recorded"):
        with Replay(tmp_path, sampler) as replay:
            found = find_episode(tmp_path, "heldout-000000:0")
            assert found.trajectory.turns[0].tools
            assert replay.play(found).difference is None
