"""`shoal export`: the model of a run as a folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.cli.grammar import parser_of
from shoal.core.errors import ConfigError
from shoal.core.files import read_json, verify_folder, write_folder

EPILOG = """\
examples:
  shoal export runs/smollm2-bandit my-model                 a folder that transformers, vLLM and others load
  shoal export runs/demo my-tiny --to shoal --checkpoint best
  shoal export runs/lora adapter --adapter
"""


def main(argv: list[str]) -> int:
    """Copy the engine of a checkpoint out of its run."""
    parser = parser_of(
        "shoal export",
        "Write the model of an agent-training run as a folder that other programs load.",
        EPILOG,
    )
    parser.add_argument("run", type=Path, help="a run folder, such as runs/smollm2-bandit")
    parser.add_argument("out", type=Path, help="the new folder; must not exist")
    parser.add_argument("--to", choices=["hf", "shoal"], default="hf",
                        help="hf: a folder that transformers loads; shoal: one that shoal's engines load")  # fmt: skip
    parser.add_argument("--adapter", action="store_true",
                        help="with LoRA: the adapter alone, as peft and servers load it, unmerged")  # fmt: skip
    parser.add_argument("--checkpoint", default="newest", help="newest (default), best, or an iteration")
    options = parser.parse_args(argv)
    from shoal.train.agent.evaluation import checkpoint_of

    source = verify_folder(checkpoint_of(options.run, options.checkpoint)) / "engine"
    kind = read_json(source / "engine.json")["engine"]
    if options.adapter and kind != "huggingface-lora":
        raise ConfigError(f"{options.run} was trained without LoRA and has no adapter: leave --adapter out")
    if options.to == "hf" and not kind.startswith("huggingface"):
        raise ConfigError(
            f"{options.run} trained the {kind} engine, which transformers does not know: use --to shoal"
        )
    if options.out.exists():
        raise ConfigError(f"{options.out} exists already: choose a new folder")
    with write_folder(options.out) as folder:
        if kind == "huggingface-lora" and options.to == "hf" and not options.adapter:
            from shoal.train.agent.lora import merge_lora

            merge_lora(source, folder)
            copied: list[Path] = []
        else:
            copied = list(source.iterdir())
        for file in copied:
            if options.to == "shoal" or file.name != "engine.json":
                shutil.copy2(file, folder / file.name)
    print(f"wrote {options.out} from {source.parent.name}")
    return 0
