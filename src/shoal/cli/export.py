"""`shoal export`: the model of a run as a folder of its own."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import show_warnings
from shoal.cli.output import program
from shoal.core.errors import ConfigError
from shoal.core.files import read_json, write_folder, write_json

MORE = """\
examples:
  shoal export runs/smollm2-bandit my-model                 a folder that transformers, vLLM and others load
  shoal export runs/demo my-tiny --to shoal --checkpoint best
  shoal export runs/lora adapter --adapter
"""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of an agent-training run as a folder that other programs load.

    Its shoal.json says how the run prompted the model and read its answers; `shoal eval OUT` plays it by that.
    """

    run: Annotated[Path, Positional("RUN")]
    """a run folder, such as runs/smollm2-bandit"""
    out: Annotated[Path, Positional("OUT")]
    """the new folder; must not exist"""
    to: Literal["hf", "shoal"] = "hf"
    """hf: a folder that transformers loads; shoal: one that shoal's engines load"""
    adapter: bool = False
    """with LoRA: the adapter alone, as peft and servers load it, unmerged"""
    checkpoint: str = "newest"
    """newest, best, or an iteration"""


def export(options: ExportOptions) -> None:
    """Copy the engine of a checkpoint out of its run."""
    from shoal.train.ppo.checkpoint import holds_policy
    from shoal.train.records.checkpoints import read_checkpoint
    from shoal.train.records.exported import FILE, play_of
    from shoal.train.records.read import agent_config_of, settings_of

    if options.out.exists():
        raise ConfigError(f"{options.out} exists already: choose a new folder")
    if holds_policy(options.run):
        raise ConfigError(
            f"{options.run} is a PPO run, whose policy Python loads: shoal.load_policy({str(options.run)!r}), and "
            f".export_onnx('policy.onnx') of it for other programs; shoal eval {options.run} plays it"
        )
    show_warnings("%(levelname)s %(message)s")
    with write_folder(options.out) as folder:
        name = read_checkpoint(options.run, options.checkpoint, partial(_copy, options, folder))
        plays = "custom_envs" in settings_of(options.run)  # a training on recordings plays nothing
        if plays:
            write_json(folder / FILE, play_of(agent_config_of(options.run)))
    print(f"wrote {options.out} from {name}")
    if plays and not options.adapter:
        print(f"evaluate it:  {program()} eval {shlex.quote(str(options.out))}")


def _copy(options: ExportOptions, folder: Path, checkpoint: Path) -> str:
    """Fill the new folder; the name of the checkpoint."""
    source = checkpoint / "engine"
    kind = read_json(source / "engine.json")["engine"]
    if options.adapter and kind != "huggingface-lora":
        raise ConfigError(f"{options.run} was trained without LoRA and has no adapter: leave --adapter out")
    if options.to == "hf" and not kind.startswith("huggingface"):
        raise ConfigError(
            f"{options.run} trained the {kind} engine, which transformers does not know: "
            f"shoal export {options.run} {options.out} --to shoal"
        )
    if kind == "huggingface-lora" and options.to == "hf" and not options.adapter:
        from shoal.train.agent.policies.lora import merge_lora

        merge_lora(source, folder)
    else:
        for file in source.iterdir():
            if options.to == "shoal" or file.name != "engine.json":
                shutil.copy2(file, folder / file.name)
    return checkpoint.name


COMMAND = Command(ExportOptions, export, MORE)
