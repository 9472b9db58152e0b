"""`shoal prove`: train one config on several backends, and compare the recorded episodes and the weights."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import (
    AgentOptions,
    ConfigName,
    Progress,
    composed,
    new_folder,
    print_json,
    show_warnings,
    table,
)
from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.viewer.markup import counted

PARALLEL = "agent_proxy.use_parallel_rollout=true"
SYNCHRONOUS = ("agent_proxy.use_parallel_rollout=false", "vector.step_timeout=null")
BACKENDS: dict[str, tuple[str, ...]] = {
    "sequential": (PARALLEL, "agent_proxy.parallel.backend=serial"),
    "synchronous": (*SYNCHRONOUS, "use_parallel_envs=false"),
    "synchronous, 3 env workers": (
        *SYNCHRONOUS, "use_parallel_envs=true", "vector.backend=process", "vector.num_workers=3",
    ),
    "3 threads": (PARALLEL, "agent_proxy.parallel.backend=thread", "agent_proxy.parallel_n_jobs=3"),
    "3 processes": (PARALLEL, "agent_proxy.parallel.backend=process", "agent_proxy.parallel_n_jobs=3"),
    "16 processes": (PARALLEL, "agent_proxy.parallel.backend=process", "agent_proxy.parallel_n_jobs=16"),
    "3 workers on Ray": (PARALLEL, "agent_proxy.parallel.backend=ray", "agent_proxy.parallel_n_jobs=3"),
}  # fmt: skip
"""The rows, each with its settings; the first is the one that the others must equal."""
RECORDED = ("trainer.save_trajectories_every=1", "trainer.tensorboard=false", "trainer.wandb=false")
QUICK = (
    "trainer.iterations=2", "trainer.eval_every=2", "trainer.save_every=2", "warmup.steps=20", "agent_proxy.max_turn=6",
    "es_manager.train.env_groups=3", "es_manager.train.group_size=4", "es_manager.val.env_groups=4",
)  # fmt: skip
MORE = """\
examples:
  shoal prove --quick                                two short iterations of the demo on each backend
  shoal prove --config-name demo-bandit              a whole run of a config on each backend
  shoal prove --config-name demo trainer.iterations=5
  shoal prove --quick --json | jq .metrics.rows      the table for a program

A row is one training in a folder of its own; with trainer.lag there is no
synchronous one. It is compared by the sha256 of
all recorded episodes and, where the engine is exact to the bit, of the newest
checkpoint's tensors. A row that differs names the first differing token.
Exit status: 0 if all rows are equal, 1 if one is not.
The table is in OUT/summary.json, and each row as it comes in OUT/metrics.jsonl.
"""


@dataclass(frozen=True)
class ProveOptions(AgentOptions):
    """Check that a training is reproducible on several backends and numbers of workers."""

    config_name: Annotated[str, ConfigName] = "demo"
    overrides: Annotated[tuple[str, ...], Positional("[KEY=VALUE ...]")] = ()
    """Settings to change, as in Hydra; with --quick they win over the short run's."""
    quick: bool = False
    """Train two short iterations instead of the whole run."""
    ray: bool | None = None
    """Also run on Ray; by default where it is installed."""


def prove(options: ProveOptions) -> int:
    """Train on each backend and print the table; 0 if all are equal."""
    from shoal.train.records import proof

    show_warnings()
    given = {word.partition("=")[0].lstrip("+~") for word in options.overrides}
    short = [word for word in QUICK if options.quick and word.partition("=")[0] not in given]
    config = composed(replace(options, overrides=(*options.overrides, *BACKENDS["sequential"])))
    path = Path(config.run_dir) if config.run_dir else new_folder("prove")
    if (path / "summary.json").exists():
        raise ConfigError(f"{path} holds a run already: choose another folder with --out")
    ray = importlib.util.find_spec("ray") is not None if options.ray is None else options.ray
    names = [name for name in BACKENDS if ray or "Ray" not in name]
    if config.trainer.lag:  # what plays while it learns has hosts of its own
        names = [name for name in names if not name.startswith("synchronous")]
    trainings = []
    for name in names:
        words = (*short, *options.overrides, *RECORDED, *BACKENDS[name])
        training = composed(replace(options, overrides=words, run_dir=None))
        trainings.append((name, replace(training, run_dir=str(path / re.sub(r"\W+", "-", name)))))
    rows: list[proof.Row] = []
    with RunFolder(path, "prove", config.seed) as folder:
        print(f"{counted(len(names), 'training')} of {options.config_name}, in {path}", flush=True)
        try:
            with Progress("training") as progress:
                for row in proof.prove(trainings):
                    rows.append(row)
                    folder.append_metrics(asdict(row))
                    line = f"{row.name}: {row.problem or 'equal'} ({row.seconds:.1f} s)"
                    progress.at(len(rows) / len(names), f"{len(rows)}/{len(names)} {row.name}", f"  {line}")
        except BaseException as error:
            folder.fail(error)
            raise
        differ = sum(bool(row.problem) for row in rows)
        metrics = {"equal": not differ, "rows": [asdict(row) for row in rows]}
        summary = folder.finish(metrics, "failed" if differ else "completed")
    kinds = list(rows[0].digests)
    cells = [
        [
            row.name,
            *(row.digests.get(kind, "-")[:12] for kind in kinds),
            f"{row.seconds:.1f}",
            row.problem or "equal",
        ]
        for row in rows
    ]
    table("", ["", *kinds, "seconds", "result"], cells, text=(0, *range(1, 1 + len(kinds)), len(kinds) + 2))
    print(
        f"{differ} of {len(rows)} DIFFER" if differ else f"all {len(rows)} trainings are equal", f"in {path}"
    )
    if options.json:
        print_json(summary)
    return int(differ > 0)


COMMAND = Command(ProveOptions, prove, MORE)
