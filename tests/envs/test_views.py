"""MiniGrid, BabyAI and NetHack as agents see them; and GEM's tasks."""

import enum
import random
import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal.envs
from shoal.core.errors import ConfigError
from shoal.testing import check_text_env

pytestmark = pytest.mark.filterwarnings("ignore")


# --- MiniGrid
def grid(**settings):
    pytest.importorskip("minigrid")
    return shoal.envs.make("gymnasium", **settings)


def test_minigrid_is_told_in_words_as_its_own_view_says():
    """What the text says of a red ball is where the grid of the env has it, seen from the agent."""
    env = grid(id="minigrid:BabyAI-GoToRedBall-v0")
    choose = random.Random(0)
    told = 0
    for seed in range(8):
        seen, info = env.reset(seed=seed)
        for _ in range(12):
            inner = env.inner.unwrapped
            ball = next(
                ((x, y) for x in range(inner.width) for y in range(inner.height)
                 if (it := inner.grid.get(x, y)) is not None and (it.type, it.color) == ("ball", "red")),
            )  # fmt: skip
            here, ahead = np.array(inner.agent_pos), inner.dir_vec
            forward = int((ball - here) @ ahead)
            right = int((ball - here) @ inner.right_vec)
            parts = [f"{forward} step{'s' * (forward > 1)} ahead"] if forward else []
            if right:
                side = "right" if right > 0 else "left"
                parts.append(f"{abs(right)} step{'s' * (abs(right) > 1)} to the {side}")
            line = f"You see a red ball, {' and '.join(parts)}."
            assert (line in seen) == bool(inner.in_view(*ball) and inner.agent_sees(*ball))
            told += line in seen
            assert seen.startswith("Mission: go to the red ball\n")
            seen, _, terminated, truncated, info = env.step(choose.choice(info["available_actions"][:3]))
            if terminated or truncated:
                break
    assert told > 10


def test_minigrid_tells_doors_walls_and_what_is_carried():
    env = grid(id="minigrid:MiniGrid-DoorKey-6x6-v0")
    env.reset(seed=0)
    inner = env.inner.unwrapped
    from minigrid.core.world_object import Key, Lava

    inner.carrying = Key("yellow")
    assert env.step("done")[0].endswith("You carry a yellow key.")
    inner.carrying = None
    inner.grid.set(*inner.front_pos, Lava())
    assert "You see lava, 1 step ahead." in env.step("done")[0]
    seen = env.reset(seed=0)[0]
    assert "a locked yellow door" in seen
    assert "There is a wall 1 step away, in front of you." in seen
    assert env.projection.words()[:3] == ["turn left", "turn right", "go forward"]


def test_a_solved_mission_is_a_success():
    env = grid(id="minigrid:MiniGrid-Empty-5x5-v0")
    env.reset(seed=0)
    for word in ("go forward", "go forward", "turn right", "go forward"):
        assert not env.step(word)[4]["success"]
    _, reward, terminated, _, info = env.step("go forward")
    assert (terminated, info["success"]) == (True, True)
    assert 0 < reward < 1
    check_text_env(lambda: grid(id="minigrid:MiniGrid-Empty-5x5-v0", max_steps=20), seeds=range(2))
    numbers = grid(id="minigrid:MiniGrid-Empty-5x5-v0", show="values").reset(seed=0)[0]
    assert numbers.startswith("direction: ")
    with pytest.raises(ConfigError, match="has no render_mode 'ansi'"):
        grid(id="minigrid:MiniGrid-Empty-5x5-v0", show="ansi")


# --- NetHack: an env with NLE's interface, whose reset(seed=) leaves the game random, as NLE's does
Compass = enum.IntEnum("CompassDirection", {"N": 1, "SE": 2})
Longer = enum.IntEnum("CompassDirectionLonger", {"N": 3})
Command = enum.IntEnum("Command", {"PICKUP": 4})
Status = enum.IntEnum("StepStatus", {"RUNNING": 0, "TASK_SUCCESSFUL": 2})


class Dungeon(gymnasium.Env):
    """Its hero stands where the game's own generator put him; the second step is down the stairs."""

    __module__ = "nle.env.tasks"
    metadata = {"render_modes": ["human", "ansi"]}  # noqa: RUF012
    actions = (Compass.N, Compass.SE, Longer.N, Command.PICKUP)
    action_space = spaces.Discrete(4)
    observation_space = spaces.Dict({"tty_chars": spaces.Box(0, 255, (24, 80), np.uint8)})

    def __init__(self):
        self.game = np.random.default_rng()

    def seed(self, core=None, disp=None, reseed=True):
        assert not reseed, "NetHack would draw new seeds by itself"
        self.game = np.random.default_rng([core, disp])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.at = 0, int(self.game.integers(70))
        return self.screen(), {"end_status": Status.RUNNING}

    def step(self, action):
        self.steps += 1
        status = Status.TASK_SUCCESSFUL if self.steps == 2 else Status.RUNNING
        return self.screen(), 0.0, self.steps == 2, False, {"end_status": status, "is_ascended": False}

    def screen(self):
        rows = np.full((24, 80), ord(" "), np.uint8)
        rows[3, self.at] = ord("@")
        rows[23, :6] = np.frombuffer(b"Dlvl:1", np.uint8)
        return {"tty_chars": rows}


def test_nethack_is_its_screen_and_its_game_follows_the_seed():
    def make():
        return shoal.envs.make("gymnasium", id=f"{__name__}:Dungeon")

    env = make()
    screens = [env.reset(seed=seed)[0] for seed in range(5)]
    assert [make().reset(seed=seed)[0] for seed in range(5)] == screens
    assert len({*screens}) > 1
    assert [screen.split("\n")[1] for screen in screens] == ["Dlvl:1"] * 5
    assert screens[0].split("\n")[0].strip() == "@"
    assert env.projection.words() == ["north", "southeast", "far north", "pickup"]
    assert not env.step("far north")[4]["success"]
    assert env.step("pickup")[4]["success"]
    check_text_env(make, seeds=range(2))


# --- GEM: a library with its interface, whose games draw from the global generators, as GEM's do
def gem():
    """The library: a number from 1 to 9 is hidden, and hints come as its suffix."""
    library, core = types.ModuleType("gem"), types.ModuleType("gem.core")

    class Env:
        def reset(self, seed=None):
            random.seed(seed)
            np.random.seed(seed)
            return None

        def sample_random_action(self):
            raise NotImplementedError

        @property
        def unwrapped(self):
            return self

    class Guess(Env):
        def __init__(self, turns=4):
            self.turns = turns

        def reset(self, seed=None):
            super().reset(seed)
            self.number, self.turn = random.randint(1, 9), 0
            return "Guess a number from 1 to 9.", {"suffix": "Your first guess."}

        def step(self, action):
            self.turn += 1
            inside = action.partition("\\boxed{")[2].partition("}")[0]
            right = inside == str(self.number)
            told = f"Turn {self.turn}: {inside} is {'right' if right else 'wrong'}."
            return (
                told,
                1.0 if right else -0.1,
                right,
                self.turn >= self.turns and not right,
                {"suffix": "Again."},
            )

        def sample_random_action(self):
            return f"\\boxed{{{random.randint(1, 9)}}}"

    class Silent(Guess):
        sample_random_action = Env.sample_random_action

    def make(id, **kwargs):
        if id not in ("game:Guess", "game:Silent"):
            raise ValueError(f"Environment {id} not found in registry.")
        return {"game:Guess": Guess, "game:Silent": Silent}[id](**kwargs)

    core.Env, library.core, library.make = Env, core, make
    return {"gem": library, "gem.core": core}


@pytest.fixture
def with_gem(monkeypatch):
    for name, module in gem().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("with_gem")
def test_gem_is_played_with_draws_of_its_own():
    env = shoal.envs.make("gem", id="game:Guess")
    check_text_env(lambda: shoal.envs.make("gem", id="game:Guess"), seeds=range(3))
    seen, _ = env.reset(seed=1)
    assert seen == "Guess a number from 1 to 9.\nYour first guess."
    number = env._inner.number
    state = random.getstate()
    word = env.random_action(np.random.default_rng(0))
    assert word == env.random_action(np.random.default_rng(0))
    assert random.getstate() == state
    wrong = str(number % 9 + 1)
    seen, reward, *_, info = env.step(wrong)
    assert seen == f"Guess a number from 1 to 9.\nTurn 1: {wrong} is wrong.\nAgain."
    assert (reward, info["success"]) == (-0.1, False)
    seen, reward, terminated, _, info = env.step(f"It is \\boxed{{{number}}}.")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.usefixtures("with_gem")
def test_gem_envs_without_random_actions_and_unknown_ones():
    assert shoal.envs.make("gem", id="game:Guess", kwargs={"turns": 2}).draws_actions
    silent = shoal.envs.make("gem", id="game:Silent")
    assert not silent.draws_actions
    assert silent.random_action(np.random.default_rng(0)) is None
    with pytest.raises(
        ConfigError, match="gem cannot make 'game:None': ValueError: Environment game:None not found"
    ):
        shoal.envs.make("gem", id="game:None")


# --- a library of one's own that draws from the global generators
def test_private_random_is_public():
    dice = shoal.envs.PrivateRandom()
    dice.seed(3)
    before = random.getstate()
    with dice.active():
        drawn = random.random()
    assert random.getstate() == before
    dice.seed(3)
    with dice.active():
        assert random.random() == drawn
