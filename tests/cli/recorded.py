"""Made-up records of episodes."""

from tests.records import Exchange, trajectory_of


def turn(**changes):
    values = {
        "observation": "a room", "prompt_ids": (1, 2, 3), "response_ids": (4, 5), "logprobs": (-0.5, -0.25),
        "response": "<action>Up</action>", "action": "Up", "action_is_valid": True, "reward": 0.5, "anchor": "a room",
        "finish": "stop",
    }  # fmt: skip
    return Exchange(**{**values, **changes})


def trajectory(turns=None, **changes):
    values = {
        "env": "Lake", "iteration": 0, "group": 0, "member": 0, "env_seed": 7, "turns": turns or (turn(), turn()),
        "success": False, "terminated": False, "truncated": True,
    }  # fmt: skip
    return trajectory_of(**{**values, **changes})
