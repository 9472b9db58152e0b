"""A list of rewards, and not the environment, says what is learned: on a frozen lake an agent learns to stay alive."""

import sys
import tempfile
from pathlib import Path

from shoal import AgentTrainer
from shoal.rollout.rewards.settings import reward
from shoal.train.agent.config import compose_config

PROGRAM = """
import json, sys
scores = []
for episode in json.load(sys.stdin)["episodes"]:
    actions = [turn["action"] for turn in episode["turns"] if turn["action"]]
    scores.append(len(set(actions)) / 4)
print(json.dumps(scores))
"""


@reward("alive")
def alive(episodes):
    """How long each episode of a group lasted, of 20 turns: a hole in the ice ends it."""
    return [len(episode.turns) / 20 for episode in episodes]


def run(folder: Path, iterations: int = 5) -> list[dict[str, float]]:
    """The metrics of a short training with two rewards: a function, and a program that pays for all four directions."""
    config = compose_config(
        "demo",
        [
            f"run_dir={folder}", f"trainer.iterations={iterations}", "trainer.eval_every=100",
            "es_manager.train.env_groups=8", "es_manager.val.env_groups=2",
        ],
    )  # fmt: skip
    varied = {"name": "varied", "command": ["{python}", "-c", PROGRAM], "weight": 0.2}
    with AgentTrainer(config, rewards=["alive", varied]) as trainer:
        return [row for row in trainer.train() if row["iteration"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        rows = run(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "run")
    for row in rows:
        told = {
            name: round(row[name], 2)
            for name in ("turns", "reward", "score/alive", "score/varied", "success")
        }
        print(int(row["iteration"]), *(f"{name} {value}" for name, value in told.items()), sep="   ")
