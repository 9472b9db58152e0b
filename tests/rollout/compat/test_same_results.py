"""Managers give the same prompts, rewards, infos and episodes as at the commit that wrote these digests."""

import hashlib
import json

import numpy as np
import pytest

from shoal.core.data import encode_trajectory
from shoal.core.seeding import stream
from shoal.rollout.compat.managers import make_manager, multi_turn_loop
from shoal.samplers.sampler import Sampling
from shoal.samplers.scripted import ScriptedEngine

LAKE = {"size": 4, "is_slippery": True, "max_steps": 7}
LONG = {"history": 3, "turn": "{step}/{action}/{reward}/{response}/{observation}"}
KINDS = {
    "sokoban": ("sokoban", {"dim_room": (6, 6), "max_steps": 8}, {}),
    "frozen_lake": ("frozen_lake", LAKE, {"prompt": LONG}),
    "bandit": ("bandit", {}, {}),
    "countdown": ("countdown", {}, {}),
    "metamathqa": ("metamathqa", {}, {}),
    "webshop": ("webshop", {"max_steps": 6}, {}),
    "moves at once": ("frozen_lake", LAKE, {"projection": {"separator": "||", "max_actions": 3}}),
    "lenient": ("sokoban", {"dim_room": (6, 6)}, {"projection": {"lenient": True}}),
    "pictures": ("frozen_lake", {**LAKE, "observation": "rgb"}, {"prompt": LONG}),
    "pictures beside": ("sokoban", {"dim_room": (6, 6), "render_mode": "rgb_array"}, {}),
}
FREE = {"<expression>": "(4 + 25) * 7", "<answer>": "33.5", "search[<your query>]": "search[red shoes]"}
"""What is said where an env takes text of a kind."""
KNOWN = {
    "sokoban": "08eb165272449df6 349dfd4c12d1ac8a",
    "frozen_lake": "ca582965abdffd0c 3e7759caa27fcd7a",
    "bandit": "b45e7e8dadcb876b f1bf5215255d7c6e",
    "countdown": "7c4b20d2279a21be cb3488e45d74aba9",
    "metamathqa": "c38ac562ea1d9905 98554584b62c8d8b",
    "webshop": "8a05f1cfd55594e0 24a60115f1b080b0",
    "moves at once": "f5b208edccccf08e f11901a4a73d06ee",
    "lenient": "acacba95e2464100 3e85963a540d2e76",
    "pictures": "7556c5f053828872 ffc113843b72b4f0",
    "pictures beside": "5dab752e1d993a7e 2dd96c2da9b5f2a3",
}


def plain(value):
    """JSON of whatever a manager gives; pictures by their bytes."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return hashlib.sha256(value.tobytes()).hexdigest()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)


def digest(value):
    return hashlib.sha256(json.dumps(value, default=plain, sort_keys=True).encode()).hexdigest()[:16]


def said(words, *place):
    """What an agent says: mostly a word that its env takes, sometimes several, nothing usable or nothing at all."""
    rng = stream(5, "said", *place)
    words = [FREE.get(word, word) for word in words] or ["up"]  # there are none behind the end
    some = [words[int(rng.integers(len(words)))] for _ in range(int(rng.integers(1, 4)))]
    kind = int(rng.integers(8))
    if kind == 0:
        return None
    if kind == 1:
        return "up, I think"
    tag = "answer" if words[0] in ("(4 + 25) * 7", "33.5") else "action"
    return f"<think>well</think><{tag}>{'||'.join(some if kind == 2 else some[:1])}</{tag}>"


def steps_of(manager):
    """All that a manager gives in two episodes of each env, beyond their ends."""
    given = []
    for episode in range(2):
        given.append(manager.reset())
        infos = []
        for step in range(9):
            listed = manager.get_available_actions()
            given.append(
                (listed, manager.step([said(words, episode, step, i) for i, words in enumerate(listed)]))
            )
            infos.append(given[-1][1][3])
        given.append(manager.success_evaluator(total_infos=list(zip(*infos, strict=True))))
    return given


def loops_of(manager):
    """The records of two loops, one of them cut short."""
    words = manager.get_available_actions()[0]
    engine = ScriptedEngine(lambda prompt, key: said(words, *key.path) or "")
    played = multi_turn_loop(manager, engine, Sampling(400)) + multi_turn_loop(manager, engine, max_turns=2)
    records = [json.loads(encode_trajectory(trajectory)) for trajectory in played]
    for turn in [turn for record in records for turn in record["turns"]]:
        turn["image"] = bool(turn.get("image"))  # how well it is compressed depends on zlib
    return records


@pytest.mark.parametrize("kind", KINDS)
def test_managers_give_the_known_results(kind):
    env, settings, more = KINDS[kind]
    with make_manager(env, 2, 2, 3, settings, backend="serial", **more) as manager:
        assert f"{digest(steps_of(manager))} {digest(loops_of(manager))}" == KNOWN[kind]
