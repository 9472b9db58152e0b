"""Two PPO trainings run side by side, and an evaluation that needs both picks the better: any function is a job."""

import json
import subprocess
import sys
import tempfile

from shoal.skills.jobs.graph import Graph
from shoal.skills.jobs.run import Run


def shoal(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "shoal", *map(str, arguments)], check=True)


def train(run: Run) -> None:
    """`shoal train-ppo` in the job's folder; a killed launch goes on from its checkpoint."""
    again = ["--resume"] if (run.folder / "ppo" / "checkpoints").exists() else []
    budget = ["--total-timesteps", run.settings["timesteps"], "--seed", run.settings["seed"]]
    shoal("train-ppo", "--env", "CartPole-v1", "--run-dir", run.folder / "ppo", *budget, *again)
    summary = json.loads((run.folder / "ppo" / "summary.json").read_text())
    run.finish(run.folder / "ppo", {"return": summary["metrics"]["eval_return_mean"]})


def best(run: Run) -> None:
    """The training with the higher return, with its whole run folder."""
    winner = max(run.needs, key=lambda name: run.numbers(name)["return"])
    run.finish(run.input(winner), {"best": winner, **run.numbers(winner)})


def main(timesteps: int = 20_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graph = Graph(folder, slots=2)
        for seed in (0, 1):
            graph.add(f"ppo {seed}", train, settings={"seed": seed, "timesteps": timesteps})
        graph.add("best", best, needs=["ppo 0", "ppo 1"])
        assert graph.run(), graph.failures()
        print(graph.numbers("best"))
        graph.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
