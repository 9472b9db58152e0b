"""`shoal prove`: train one config on several backends, and compare the recorded episodes and the weights."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import (
    AgentOptions,
    ConfigName,
    Progress,
    composed,
    count_of,
    new_folder,
    print_json,
    show_warnings,
    table,
)
from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder

PARALLEL = "agent_proxy.use_parallel_rollout=true"
SYNCHRONOUS = ("agent_proxy.use_parallel_rollout=false", "vector.step_timeout=null")
BACKENDS: dict[str, tuple[str, ...]] = {
    "sequential": (PARALLEL, "agent_proxy.parallel.backend=serial"),
    "synchronous": (*SYNCHRONOUS, "use_parallel_envs=false"),
    "synchronous, 3 env workers": (
        *SYNCHRONOUS, "use_parallel_envs=true", "vector.backend=process", "vector.num_workers=3",
    ),
    "3 threads": (PARALLEL, "agent_proxy.parallel.backend=threads", "agent_proxy.parallel_n_jobs=3"),
    "3 processes": (PARALLEL, "agent_proxy.parallel.backend=processes", "agent_proxy.parallel_n_jobs=3"),
    "16 processes": (PARALLEL, "agent_proxy.parallel.backend=processes", "agent_proxy.parallel_n_jobs=16"),
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

A row is one training in a folder of its own. It is compared by the sha256 of
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
    ray: bool = importlib.util.find_spec("ray") is not None
    """Also run on Ray."""


@dataclass
class Row:
    """One training."""

    name: str
    digests: dict[str, str]
    seconds: float
    problem: str = ""


def prove(options: ProveOptions) -> int:
    """Train on each backend and print the table; 0 if all are equal."""
    show_warnings()
    given = {word.partition("=")[0].lstrip("+~") for word in options.overrides}
    short = [word for word in QUICK if options.quick and word.partition("=")[0] not in given]
    config = composed(options)
    path = Path(config.run_dir) if config.run_dir else new_folder("prove")
    if (path / "summary.json").exists():
        raise ConfigError(f"{path} holds a run already: choose another folder with --out")
    names = [name for name in BACKENDS if options.ray or "Ray" not in name]
    rows: list[Row] = []
    with RunFolder(path, "prove", config.seed) as folder:
        print(f"{count_of(len(names), 'training')} of {options.config_name}, in {path}", flush=True)
        try:
            with Progress("training") as progress:
                for row in _rows(options, short, names, path):
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


def _rows(options: ProveOptions, short: list[str], names: list[str], path: Path) -> Iterator[Row]:
    import torch

    from shoal.train.agent.trainer import AgentTrainer
    from shoal.train.records.compare import episodes_digest, first_difference, weights_digest

    first: tuple[Path, Row] | None = None
    for name in names:
        run = path / re.sub(r"\W+", "-", name)
        words = (*short, *options.overrides, *RECORDED, *BACKENDS[name])
        config = replace(composed(replace(options, overrides=words, run_dir=None)), run_dir=str(run))
        engine = config.engine
        torch.set_num_threads(engine.threads)
        exact = engine.name == "tiny" and engine.device == "cpu" and engine.threads == 1
        began = time.monotonic()
        try:
            with AgentTrainer(config) as trainer:
                for _ in trainer.train():
                    pass
            digests = {"episodes": episodes_digest(run, tokens_only=not exact)}
            if exact:
                newest = max((run / "checkpoints").glob("step-*"), key=lambda step: int(step.name[5:]))
                digests["weights"] = weights_digest(newest)
            row = Row(name, digests, time.monotonic() - began)
        except Exception as error:  # a border: a backend that fails is a row; the first one is an error
            if first is None:
                raise
            row = Row(name, {}, time.monotonic() - began, f"{type(error).__name__}: {error}")
        if first is None:
            first = run, row
        elif not row.problem and row.digests != first[1].digests:
            parted = [kind for kind in row.digests if row.digests[kind] != first[1].digests[kind]]
            found = first_difference(first[0], run, tokens_only=not exact)
            row.problem = f"{' and '.join(parted)} differ" + (f"; first: {found}" if found else "")
        yield row
