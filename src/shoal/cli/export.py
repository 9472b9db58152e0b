"""`shoal export`: the model of a run as a folder of its own."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.files import read_json, verify_folder, write_folder


def main(argv: list[str]) -> int:
    """Copy the engine of a checkpoint out of its run."""
    parser = argparse.ArgumentParser(
        prog="shoal export",
        description="Write the model of an agent-training run as a folder that other programs load.",
    )
    parser.add_argument("run", type=Path, help="a run folder, such as runs/smollm2-bandit")
    parser.add_argument("out", type=Path, help="the new folder; must not exist")
    parser.add_argument("--to", choices=["hf", "shoal"], default="hf",
                        help="hf: a folder that transformers loads; shoal: one that shoal's engines load")  # fmt: skip
    parser.add_argument("--checkpoint", default="newest", help="newest, best, or an iteration")
    options = parser.parse_args(argv)
    from shoal.train.agent_evaluation import checkpoint_of

    source = verify_folder(checkpoint_of(options.run, options.checkpoint)) / "engine"
    kind = read_json(source / "engine.json")["engine"]
    if options.to == "hf" and kind != "huggingface":
        raise ConfigError(
            f"{options.run} trained the {kind} engine, which transformers does not know: use --to shoal"
        )
    if options.out.exists():
        raise ConfigError(f"{options.out} exists already: choose a new folder")
    with write_folder(options.out) as folder:
        for file in source.iterdir():
            if options.to == "shoal" or file.name != "engine.json":
                shutil.copy2(file, folder / file.name)
    print(f"wrote {options.out} from {source.parent.name}")
    return 0
