"""Whether agents of three packages learn to ask a tool and to answer in their structured output what fits the weather.

    python benchmarks/agents_learn.py [PACKAGE …] [--seeds 0 1 …] [--quick] [--table]

Each run is what docs/programs.md shows: a small model with random weights, demonstrations of `weather_start.py` that it
imitates (they ask the tool rightly, repeat the weather, and bring something at random), `shoal train`, and `shoal eval`
of the last weights in 128 held-out episodes, greedily. An answer is valid if the last one of its episode is JSON that
fits the output type. A run that is done is one line of `benchmarks/results/agents_learn.jsonl`, and is not run again.
`--table` only writes the table of docs/programs.md; `--quick` runs two iterations of one package, and saves nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from benchmarks.real_model import HELD_OUT, shoal  # noqa: E402
from benchmarks.tables import put, table  # noqa: E402

from shoal.envs.calls import read_calls  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "agents_learn.jsonl"
EXAMPLES = REPO / "examples" / "gateway"
EPISODES = 128
PACKAGES = {
    "openai-agents": ("agents", ""),
    "pydantic-ai-slim": ("pydantic_ai", "final_result"),
    "smolagents": ("smolagents", "final_answer"),
}
"""By name: the end of the example's, and the tool by which the package wants the answer if it wants one."""
FIELDS = {"weather": {"rain", "snow", "sun", "wind"}, "bring": {"umbrella", "boots", "hat", "coat"}}
DEMONSTRATIONS = (
    f"imports=[{EXAMPLES / 'weather_start.py'}]",
    "engine.name=demonstrations",
    "es_manager.train.env_groups=128",
    "es_manager.train.group_size=1",
)
IMITATION = (
    "use_recorded_tokens=true",
    "heldout=0",
    "threads=1",
    "train.learning_rate=0.003",
    "train.minibatch_size=16",
    "train.epochs=12",
)


def is_valid(package: str, answer: str) -> bool:
    """Whether an answer is JSON of the output type: as it stands, or as the arguments of the package's own tool."""
    _, tool = PACKAGES[package]
    try:
        calls = read_calls(answer, "tags") if tool else []
        value = calls[0].arguments if len(calls) == 1 and calls[0].name == tool else json.loads(answer)
    except ValueError:
        return False
    if tool == "final_answer" and isinstance(value, dict):
        value = value.get("answer")
    return (
        isinstance(value, dict)
        and set(value) == set(FIELDS)
        and all(value[field] in known for field, known in FIELDS.items())
    )


def valid_share(package: str, episodes: Path) -> float:
    """The share of recorded episodes whose last answer is valid."""
    recorded = [json.loads(line) for line in episodes.read_text("utf-8").splitlines()]
    answers = [episode["turns"][-1]["response"] if episode["turns"] else "" for episode in recorded]
    return sum(is_valid(package, answer) for answer in answers) / len(answers)


def start(config: Sequence[str], seed: int, folder: Path) -> tuple[Path, float]:
    """A small model that has imitated the demonstrations, and the CPU seconds of that."""
    small, warm, model = (str(folder / name) for name in ("small", "warm", "model"))
    subprocess.run(
        [sys.executable, str(EXAMPLES / "weather_start.py"), small], check=True, capture_output=True
    )
    demos = str(folder / "demos")
    _, played = shoal(
        "rollout", *config, *DEMONSTRATIONS, f"engine.model={small}", f"seed={seed}", "--out", demos
    )
    _, imitated = shoal(
        "train-recorded",
        f"recordings={demos}",
        f"model={small}",
        *IMITATION,
        f"seed={seed}",
        f"run_dir={warm}",
    )
    for part in ("processor", "last/model"):
        shutil.copytree(folder / "warm" / "checkpoints" / part, model, dirs_exist_ok=True)
    return Path(model), played + imitated


def train(package: str, seed: int, folder: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """One run of a package: its start, its training, and its last weights in held-out episodes."""
    function = f"custom_envs.Weather.env_config.function=weather_{PACKAGES[package][0]}:play"
    config = ["--config-dir", str(EXAMPLES), "--config-name", "weather", function]
    config.append(f"custom_envs.Weather.env_config.folder={EXAMPLES}")
    model, before = start(config, seed, folder)
    run = folder / "run"
    _, seconds = shoal(
        "train", *config, f"engine.model={model}", f"seed={seed}", f"run_dir={run}", "trainer.tensorboard=false",
        *settings,
    )  # fmt: skip
    said, _ = shoal(
        "eval", str(run), "--episodes", str(EPISODES), "--temperature", "0", "--seed", str(HELD_OUT),
        "--out", str(folder / "eval"), "--json",
    )  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    held_out = [[row["iteration"], row["heldout_success"]] for row in rows if "heldout_success" in row]
    return {
        "package": package,
        "version": metadata.version(package),
        "seed": seed,
        "start": held_out[0][1],
        "start_valid": valid_share(package, run / "trajectories" / "heldout-000000.jsonl"),
        "heldout_success": json.loads(said.splitlines()[0])["success"],
        "heldout_valid": valid_share(package, folder / "eval" / "trajectories" / "eval.jsonl"),
        "start_seconds": round(before, 1),
        "train_seconds": round(seconds, 1),
        "iterations": rows[-1]["iteration"],
        "success": [round(row["success"], 3) for row in rows if "success" in row],
        "heldout": held_out,
        "date": datetime.date.today().isoformat(),
    }


def finished() -> list[dict[str, Any]]:
    """The runs in the file of results."""
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def write_table() -> None:
    """Write the table of docs/programs.md."""
    lines = [
        [
            f"`{row['package']}` {row['version']}",
            str(row["seed"]),
            f"{row['start']:.2f} → {row['heldout_success']:.2f}",
            f"{row['start_valid']:.2f} → {row['heldout_valid']:.2f}",
            str(row["iterations"]),
            f"{row['start_seconds'] / 60:.1f} + {row['train_seconds'] / 60:.1f}",
        ]
        for row in sorted(finished(), key=lambda row: (row["package"], row["seed"]))
    ]
    head = ["package", "seed", "success, held out", "valid answers, held out", "iterations", "CPU minutes"]
    put("programs.md", "agents", table(head, lines))


def main() -> None:
    """Run the named packages, or all, with each seed that has no line yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="two iterations of one package, nothing saved")
    parser.add_argument("--table", action="store_true", help="write the table alone")
    parser.add_argument("--keep", type=Path, help="a folder to keep the runs in, for a look")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PACKAGES):
        parser.error(f"no package named {', '.join(sorted(unknown))}; there are: {', '.join(PACKAGES)}")
    known = set() if options.quick else {(row["package"], row["seed"]) for row in finished()}
    names = options.names or [*PACKAGES]
    for seed in () if options.table else options.seeds:
        for name in names[:1] if options.quick else names:
            if (name, seed) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                place = (options.keep or Path(folder)) / f"{name}-{seed}"
                row = train(name, seed, place, ["trainer.iterations=2"] if options.quick else [])
            print(json.dumps(row), flush=True)
            if not options.quick:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if not options.quick:
        write_table()


if __name__ == "__main__":
    main()
