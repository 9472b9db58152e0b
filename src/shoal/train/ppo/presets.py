"""Settings tuned for an environment, each with where they come from.

"zoo" is the published table of RL Baselines3 Zoo (hyperparams/ppo.yml), without state-dependent exploration;
"cleanrl" is CleanRL's ppo_continuous_action, its 2,048 steps of one environment spread over eight and its weight of the
critic halved, since its squared error is; "own" was found by trying a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.errors import unknown_name
from shoal.envs.catalogue import names_batch


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for one environment."""

    n_envs: int
    total_timesteps: int
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    atari: bool = False
    frame_stack: int = 0
    wrappers: tuple[str, ...] = ()
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eval_deterministic: bool = True
    """Whether its published score is that of the likeliest actions; where a policy that never errs can walk in circles
    for ever, as in MiniGrid, and in Atari, the field draws them."""
    name: str | None = None
    """Under which it was found."""


NO_PRESET = Preset(8, 100_000, "none")
"""What holds where there is none."""


LANDER = Preset(
    16, 1_000_000, "zoo",
    {"n_steps": 1024, "batch_size": 64, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01},
)  # fmt: skip
MUJOCO = Preset(
    8, 1_000_000, "cleanrl",
    {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "lr_schedule": "linear",
     "clip_range_vf": 0.2, "vf_coef": 0.25, "normalize_obs": True, "normalize_reward": True},
)  # fmt: skip
ATARI = Preset(
    8, 10_000_000, "zoo",
    {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4, "lr_schedule": "linear",
     "clip_range": 0.1, "clip_schedule": "linear", "ent_coef": 0.01},
    atari=True, frame_stack=4, eval_deterministic=False,
)  # fmt: skip
MINIGRID = Preset(
    8, 100_000, "zoo",
    {"n_steps": 128, "batch_size": 64, "n_epochs": 10, "learning_rate": 2.5e-4, "normalize_obs": True,
     "normalize_reward": True},
    wrappers=("minigrid.wrappers:FlatObsWrapper",), eval_deterministic=False,
)  # fmt: skip

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(
        8, 100_000, "zoo",
        {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8,
         "learning_rate": 1e-3, "lr_schedule": "linear", "clip_schedule": "linear"},
    ),
    "Acrobot-v1": Preset(
        16, 1_000_000, "zoo",
        {"n_steps": 256, "batch_size": 64, "n_epochs": 4, "gae_lambda": 0.94, "normalize_obs": True,
         "normalize_reward": True},
    ),
    "MountainCar-v0": Preset(
        16, 1_000_000, "zoo",
        {"n_steps": 16, "batch_size": 64, "n_epochs": 4, "gae_lambda": 0.98, "normalize_obs": True,
         "normalize_reward": True},
    ),
    "LunarLander-v3": LANDER,
    "Pendulum-v1": Preset(
        4, 100_000, "zoo",
        {"n_steps": 1024, "batch_size": 64, "n_epochs": 10, "gamma": 0.9, "learning_rate": 1e-3},
    ),
    "MountainCarContinuous-v0": Preset(
        8, 200_000, "own",
        {"n_steps": 1000, "batch_size": 256, "n_epochs": 10, "gamma": 0.9999, "normalize_obs": True,
         "normalize_reward": True},
    ),
    "LunarLanderContinuous-v3": LANDER,
    "BipedalWalker-v3": Preset(
        32, 5_000_000, "zoo",
        {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "gamma": 0.999, "clip_range": 0.18,
         "normalize_obs": True, "normalize_reward": True},
    ),
    **{f"{name}-v5": MUJOCO for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")},
    **{f"ALE/{name}-v5": ATARI for name in ("Pong", "Breakout")},
    "MiniGrid-Empty-Random-5x5-v0": MINIGRID,
    "MiniGrid-DoorKey-5x5-v0": MINIGRID,
    "MiniGrid-DoorKey-6x6-v0": replace(MINIGRID, total_timesteps=400_000, source="own"),
    "MiniGrid-MemoryS7-v0": replace(
        MINIGRID, total_timesteps=1_000_000, source="own",
        settings={**MINIGRID.settings, "recurrent": "lstm", "n_steps": 128, "batch_size": 256, "ent_coef": 0.01},
    ),
}  # fmt: skip


def preset_for(env: str, name: str = "auto", *, native: bool = False) -> Preset | None:
    """The preset `name`, or with "auto" the one of `env` if there is any, or with "none" no preset.

    With `native`, or for the name of a batch, nothing is put around the environment: the batch does that itself.
    """
    if name == "none":
        return None
    wanted = id_of(env) if name == "auto" else name
    if wanted not in PRESETS:
        if name == "auto":
            return None
        raise unknown_name("preset", name, [*PRESETS, "auto", "none"])
    found = replace(PRESETS[wanted], name=wanted)
    bare = native or names_batch(env)
    return replace(found, atari=False, frame_stack=0, wrappers=()) if bare else found


def id_of(env: str) -> str:
    """The id in a name: of "module:Id-v0" what is behind the module, of "ale:Pong-v5" ale_py's "ALE/Pong-v5"."""
    return f"ALE/{env.removeprefix('ale:')}" if env.startswith("ale:") else env.rpartition(":")[2]
