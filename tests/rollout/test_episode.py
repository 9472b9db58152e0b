import logging
import re
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from tests.records import exchanges
from tests.rollout.doubles import TEMPLATE, byte_tokenizer, of_kind

from shoal.core.data import decode_trajectory, encode_trajectory
from shoal.core.errors import ConfigError, EngineError, EnvError
from shoal.envs import make
from shoal.envs.actions import Projection
from shoal.rollout.episode import Episode, EpisodeId, Role, anchor_of, words_of
from shoal.rollout.factory import make_environments
from shoal.rollout.play import ParallelRolloutManager, TrajectoryCollector
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.samplers.sampler import Completion, Request, Sampling
from shoal.samplers.scripted import RandomEngine, ScriptedEngine
from shoal.samplers.tokenizers import ChatCodec, TemplateTokenizer

WORDS = ["Left", "Down", "Right", "Up"]
LAKE = {"desc": "4x4", "is_slippery": False, "max_steps": 9}


def collect(engine, prompt=None, env_config=LAKE, sampling=None, **tag):
    config = of_kind({"env_type": "frozen_lake", "env_config": env_config, **tag}, members=2)
    train, _ = make_environments(config | {"vector": {"backend": "serial"}})
    prompt = prompt or PromptConfig(history=0, first="{observation}", later="{observation}")
    playing = TrajectoryCollector(train.pool, train.tags, train.roles, 2, engine, prompt, 0)
    return playing.collect(0, sampling or Sampling(60))


def episode_of(env, prompter):
    role = Role("Lake", env.instructions, env.projection, 9)
    return Episode(EpisodeId(0, 0, 0, 0, 0), role, prompter, Sampling(20))


# --- several actions in a turn
def test_one_response_may_hold_several_actions_where_the_config_says_so():
    way = "<action>Down||Down||Right||Right||Down||Right||Left</action>"
    engine = ScriptedEngine(lambda prompt, key: way, WORDS)
    for trajectory in collect(engine, max_actions_per_turn=7):
        assert trajectory.success
        (turn,) = trajectory.turns
        assert (turn.reward, turn.action_is_valid) == (1.0, True)
        assert turn.action == "Down, Down, Right, Right, Down, Right, Left"
    for trajectory in collect(engine, max_actions_per_turn=6):
        assert not any(turn.action_is_valid for turn in trajectory.turns)
    with pytest.raises(ConfigError, match="max_actions_per_turn must be at least 1"):
        collect(engine, max_actions_per_turn=0)


@pytest.mark.parametrize(
    ("limit", "turns", "terminated"), [(1, 1, False), (5, 5, False), (6, 6, True), (7, 6, True)]
)
def test_an_episode_is_truncated_after_its_last_turn_unless_it_has_ended_in_it(limit, turns, terminated):
    way = ["Down", "Down", "Right", "Right", "Down", "Right"]
    engine = ScriptedEngine(lambda prompt, key: f"<action>{way[key.path[-1]]}</action>", WORDS)
    for trajectory in collect(engine, max_actions_per_traj=limit):
        assert (len(trajectory.turns), trajectory.status) == (turns, "ok")
        assert (trajectory.terminated, trajectory.truncated) == (terminated, not terminated)
        assert trajectory.ended == ("env" if terminated else "turns")
    longer = collect(engine, max_actions_per_traj=limit + 1)
    for trajectory, further in zip(collect(engine, max_actions_per_traj=limit), longer, strict=True):
        shown = [turn.observation for turn in further.turns[turns:]] or [further.last]
        assert trajectory.last == shown[0]  # what the next turn would have shown


# --- templates of one kind of env
def test_a_kind_of_env_may_have_templates_of_its_own():
    seen = []

    def answer(prompt, key):
        seen.append(prompt)
        return "<action>Down</action>"

    side = {"env_groups": 2, "group_size": 1, "env_configs": {"tags": ["A", "B"]}}
    kinds = {
        "A": {"env_type": "frozen_lake", "env_config": LAKE, "prompt": {"first": "own"}},
        "B": {"env_type": "frozen_lake", "env_config": LAKE},
    }
    config = {
        "custom_envs": kinds,
        "es_manager": {"train": side, "val": side},
        "vector": {"backend": "serial"},
    }
    train, _ = make_environments(config)
    base = PromptConfig(first="general", later="general")
    TrajectoryCollector(
        train.pool, train.tags, train.roles, 1, ScriptedEngine(answer, WORDS), base, 0
    ).collect(0, Sampling(20))
    assert seen[:2] == ["own", "general"]


# --- pictures
def test_pictures_are_carried_in_the_trajectory_and_to_engines_that_take_them():
    class Sees(RandomEngine):
        def __init__(self):
            super().__init__(WORDS)
            self.tokenizer, self.seen = ChatCodec(), []

        def generate(self, requests):
            self.seen += requests
            return super().generate(requests)

    for mode, counts in (("window", {1}), ("append", {1, 2, 3, 4, 5, 6, 7, 8, 9})):
        engine = Sees()
        prompt = PromptConfig(mode=mode, history=0, first="look", later="look")
        trajectories = collect(engine, prompt, {**LAKE, "observation": "rgb"})
        pictures = [turn.image for t in trajectories for turn in t.turns]
        assert all(picture.startswith("data:image/png;base64,") for picture in pictures)
        assert {len(request.images) for request in engine.seen} <= counts
        for request in engine.seen:
            engine.tokenizer.messages(request.prompt_ids, request.images)  # as many marks as pictures
        assert len({t.turns[0].anchor for t in trajectories}) == 1
        for trajectory in trajectories:
            assert decode_trajectory(encode_trajectory(trajectory)) == trajectory


@pytest.mark.parametrize(("mode", "counts"), [("window", [1, 0, 1]), ("append", [1, 1, 2])])
def test_a_turn_without_a_picture_is_not_asked_with_that_of_the_turn_before(mode, counts):
    tokenizer = ChatCodec()
    prompter = Prompter(PromptConfig(mode=mode), tokenizer)
    episode = episode_of(make("frozen_lake"), prompter)
    picture, found = "data:image/png;base64,AAAA", []
    episode.begin("a page", {"image": picture})
    for shown in ({}, {"image": picture}, {}):
        request = episode.request()
        found.append(len(request.images))
        tokenizer.messages(request.prompt_ids, request.images)  # as many marks as pictures
        episode.respond(Completion(tokenizer.encode("<action>Up</action>"), (), "stop"))
        episode.observe("a page", 0.0, False, False, shown)
        episode.end_turn()
    assert found == counts


def test_an_engine_that_takes_no_pictures_is_not_shown_an_empty_prompt():
    for trajectory in collect(RandomEngine(WORDS), env_config={**LAKE, "observation": "rgb"}):
        assert (trajectory.status, trajectory.turns) == ("engine_error", ())
        assert trajectory.error.startswith("Lake shows pictures only, and this engine takes none")


# --- token exactness
STRIPS = (  # like templates that cut the thoughts out of earlier turns
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Templated(ScriptedEngine):
    def __init__(self, template, answer):
        super().__init__(answer)
        self.tokenizer = TemplateTokenizer(byte_tokenizer(template))

    def generate(self, requests):
        said = [(*self.tokenizer.encode(self._answer("", r.key)), 1) for r in requests]
        return [Completion(ids, (0.0,) * len(ids), "stop") for ids in said]


THINKING = "<think>hm</think><action>Down</action>"


def append(**settings):
    return PromptConfig(mode="append", first="{observation}", later="{observation}", **settings)


def drifts(caplog):
    return [record.name for record in caplog.records].count("shoal.rollout.prompts")


@pytest.mark.parametrize(("template", "text"), [(TEMPLATE, THINKING), (STRIPS, "<action>Down</action>")])
def test_a_template_that_only_appends_does_not_drift(template, text, caplog):
    with caplog.at_level(logging.WARNING):
        played = collect(Templated(template, lambda prompt, key: text), append(on_drift="raise"))
    assert {trajectory.status for trajectory in played} == {"ok"}
    assert drifts(caplog) == 0


def test_a_template_that_cuts_thoughts_is_named_with_the_message_and_its_text(caplog):
    engine = Templated(STRIPS, lambda prompt, key: THINKING)
    named = r"in message 1 \(assistant\) the model saw '.*<think>hm.*writes '.*<action>"
    for trajectory in collect(engine, append(on_drift="raise")):
        assert trajectory.status == "engine_error"
        assert re.search(named, trajectory.error)
    with caplog.at_level(logging.WARNING):
        trajectories = collect(engine, append())
    assert drifts(caplog) == 1
    for trajectory in trajectories:  # the tokens are those that were sampled all the same
        for before, after in zip(exchanges(trajectory), exchanges(trajectory)[1:], strict=False):
            known = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(known)] == known
    caplog.clear()
    collect(engine, append(on_drift="ignore"))
    assert drifts(caplog) == 0


@pytest.mark.parametrize(("backend", "workers"), [("serial", 1), ("thread", 1), ("thread", 3)])
def test_drift_that_is_to_be_raised_ends_each_episode_whoever_plays_it(backend, workers):
    """It ended the first one that a worker came to, and the others went on."""
    lake = {"env_type": "frozen_lake", "env_config": LAKE}
    config = of_kind(lake, 3, 4, prompt=asdict(append(on_drift="raise")), max_tokens=60)
    engine = Templated(STRIPS, lambda prompt, key: THINKING)
    with ParallelRolloutManager(config, engine, workers, backend=backend) as manager:
        played = manager.collect()
    assert [(t.status, len(t.turns)) for t in played] == [("engine_error", 1)] * 12


def test_a_prompt_that_does_not_extend_the_one_before_is_refused_with_the_place():
    class Rewrites(Prompter):
        def prompt(self, scene, before=None):
            ids = super().prompt(scene, before)
            return ids if before is None else ids[:3] + self.tokenizer.encode("!") + ids[4:]

        def variant(self, settings):
            return self

    engine = RandomEngine(WORDS)
    env = make("frozen_lake", **LAKE)
    episode = episode_of(env, Rewrites(append(), engine.tokenizer))
    episode.begin(*env.reset(seed=0))
    request = episode.request()
    assert isinstance(request, Request)
    for action in episode.respond(engine.generate([request])[0]):
        episode.observe(*env.step(action))
    episode.end_turn()
    assert not episode.over
    with pytest.raises(EngineError, match="turn 1 does not extend the one before: at token 3, in its prompt"):
        episode.request()


def test_arrays_that_are_no_pictures_are_refused():
    env = make("frozen_lake", **LAKE, observation="grid")
    episode = episode_of(env, Prompter(append(), ChatCodec()))
    with pytest.raises(ValueError, match="a picture must be"):
        episode.begin(*env.reset(seed=0))


def test_actions_that_are_listed_as_numbers_are_shown():
    env = make("frozen_lake", **LAKE)
    episode = episode_of(env, Prompter(PromptConfig(), ChatCodec()))
    observation, info = env.reset(seed=0)
    episode.begin(observation, info | {"available_actions": [0, 7]})
    assert "0, 7" in ChatCodec().decode(episode.request().prompt_ids)


def test_a_prompt_names_the_words_of_an_env_that_lists_none_and_free_text_as_any_text():
    def asked(projection):
        env = SimpleNamespace(instructions="", projection=projection)
        episode = episode_of(env, Prompter(PromptConfig(), ChatCodec()))
        episode.begin("begin", {})
        return ChatCodec().decode(episode.request().prompt_ids)

    assert "Possible actions: go, take." in asked(Projection(lookup={"go": 1, "take": 2}))
    assert "Possible actions: any text." in asked(Projection(parse=str))


def test_actions_of_a_set_have_the_order_of_the_alphabet_in_every_process():
    words = ["up", "down", "left", "right", "wait"]
    for listed in (set(words), frozenset(words[::-1])):
        assert words_of({"available_actions": listed}) == sorted(words)
    assert words_of({"available_actions": tuple(words)}) == words
    assert words_of({"available_actions": None}) == words_of({}) == []


def test_one_text_is_no_list_of_actions():
    with pytest.raises(EnvError, match="available_actions must be a list of words, got 'up'"):
        words_of({"available_actions": "up"})


def test_anchors_are_equal_for_equal_states_alone():
    grid = np.zeros((40, 40), np.int64)
    moved, near = grid.copy(), np.array([0.123456789012])
    moved[20, 20] = 1

    def same(one, other):
        return anchor_of({"anchor": one}, "shown") == anchor_of({"anchor": other}, "shown")

    assert not same(grid, moved)  # `str` shows the corners of both
    assert not same((1, grid), (1, moved))
    assert not same({"grid": grid}, {"grid": moved})
    assert not same(near, near + 1e-12)  # nor as many digits
    assert not same(("a, b",), ("a", "b"))
    assert not same(np.array([["a"]], object), np.array([["b"]], object))
    assert same((1, grid), (1, grid.copy()))
    assert same(np.array([["a"]], object), np.array([["a"]], object))
    assert same({"b": 1, "a": {"x", "y", "z"}}, {"a": {"z", "y", "x"}, "b": 1})
    assert anchor_of({"anchor": None}, "shown") == anchor_of({}, "shown") == "shown"
    assert anchor_of({"anchor": (1, 2)}, "shown") == "(1, 2)"
