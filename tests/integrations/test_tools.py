"""An env as a tool for TRL, without TRL."""

import pytest
from tests.integrations import doubles

from shoal import envs
from shoal.core.errors import ConfigError
from shoal.core.seeding import derive_seed
from shoal.envs.text import Outcome
from shoal.integrations.trl import tool_environment
from shoal.rollout.hosts.episodes import EnvFailedError


def test_an_env_is_a_tool_of_its_start_state():
    env = tool_environment("frozen_lake", seed=5, size=3, is_slippery=False)()
    told = env.reset(start=4, prompt="ignored")
    expected = envs.make("frozen_lake", size=3, is_slippery=False)
    observation, _ = expected.reset(seed=derive_seed(5, "env", 0, 4))
    assert observation in told
    assert "Possible actions: Left, Down, Right, Up." in told
    total = 0.0
    for word in ("Down", "Right", "nonsense", "Up"):
        answer = env.act(word)
        if "over" in answer:
            break
        total += expected.step(expected.projection(f"<action>{word}</action>").actions[0])[1]
    assert env.get_reward() == pytest.approx(total)
    with pytest.raises(ConfigError, match="column `start`"):
        env.reset()


@pytest.mark.parametrize("fault", [RuntimeError("lost"), SystemExit(3), float("nan"), "5"])
def test_an_env_that_fails_as_a_tool_pays_nothing_and_is_replaced(fault, monkeypatch):
    env = tool_environment("tests.integrations.doubles:LetterEnv", seed=5)()

    def fails(self, action):
        if isinstance(fault, BaseException):
            raise fault
        return Outcome(fault, False)

    env.reset(start=1)
    calm = env.act("up"), env.get_reward()
    broken = env._env
    env.reset(start=1)
    with monkeypatch.context() as patch:
        patch.setattr(doubles.LetterEnv, "_advance", fails)
        with pytest.raises(EnvFailedError, match="step failed"):
            env.act("up")
    assert env.act("up") == "The episode is over."
    assert env.get_reward() is None
    env.reset(start=1)
    assert (env.act("up"), env.get_reward()) == calm
    assert env._env is not broken
