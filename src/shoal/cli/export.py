"""`shoal export`: the model of a run as a folder of its own."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import show_warnings
from shoal.cli.output import next_steps, program

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
    """Write the folder."""
    from shoal.train.records.exported import FILE, export_model

    show_warnings("%(levelname)s %(message)s")
    name = export_model(
        options.run, options.out, to=options.to, adapter=options.adapter, checkpoint=options.checkpoint
    )
    print(f"wrote {options.out} from {name}")
    if (options.out / FILE).exists() and not options.adapter:
        print(next_steps(None, {"evaluate it": f"{program()} eval {shlex.quote(str(options.out))}"}))


COMMAND = Command(ExportOptions, export, MORE)
