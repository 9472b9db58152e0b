"""`shoal prove`: make one run in many ways and with its processes killed, and show that it is always the same run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.cli.command import Command, Flag
from shoal.cli.grammar import Progress, count_of, new_folder, print_json, refuse_twice, table
from shoal.core.errors import ConfigError

PARTS = {
    "agents": "agent training: one by one, in lockstep, on 3 and 16 workers, on Ray; workers, sampler, trainer killed",
    "ppo": "PPO: in this process, on 3 and 16 workers; a worker and the trainer killed",
    "split": "splitting: serially, on threads, on Ray; the whole command killed",
    "skills": "a graph of skills: one and three at a time, in tmux; a training and the scheduler killed",
}
"""What can be proved."""
_ABOUT = "\n".join(f"  {name:<7} {about}" for name, about in PARTS.items())
MORE = f"""\
parts:
{_ABOUT}

examples:
  shoal prove --quick                             two short iterations of the demo, eleven times
  shoal prove --config-name demo-bandit           a whole run of a config, as often as there are rows
  shoal prove --config-name demo trainer.iterations=5
  shoal prove ppo                                 the same for PPO; also split, skills
  shoal prove --quick --json | jq .metrics.rows   the table for a program

Each row is a run in a folder of its own. Two hashes stand for what it left: of all recorded episodes, and of the
newest checkpoint's tensors. A row with a fault counts the kills that landed and what was played again because of
them; it fails when there were none. Where a row differs, the first differing token, seed or answer is named.
Exit status: 0 if all rows are equal, 1 if one is not. The table is in RUN_DIR/summary.json.
"""


@dataclass(frozen=True)
class ProveOptions:
    """Prove the promise here: the same run, however it is run and whatever is killed."""

    words: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PART] [key=value ...]")
    ] = ()
    """a part (agents if none is named), and settings of an agent config to change"""
    config_name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """of agent training, see `shoal train --help`; demo if not given"""
    config_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder with your own YAML configs"""
    quick: Flag = False
    """a short run instead of the whole one"""
    no_faults: Flag = False
    """kill nothing"""
    no_ray: Flag = False
    """leave Ray out, also where it is installed"""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """where the runs go; runs/prove-PART, numbered, if not given"""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """of the runs; the config's, or 0, if not given"""
    json: Flag = False
    """print the summary as JSON; the table goes to stderr"""


def prove(options: ProveOptions) -> int:
    """Prove, and print the table; 0 if all is equal."""
    return _prove(_part(options), options)


COMMAND = Command(ProveOptions, prove, MORE)


def _part(options: ProveOptions) -> Any:
    """The part that is asked for."""
    from shoal.core.errors import did_you_mean

    named = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    if len(named) > 1 or (named and named[0] not in PARTS):
        wrong = next((word for word in named if word not in PARTS), named[-1])
        raise ConfigError(
            f"shoal prove takes one part ({', '.join(PARTS)}) and settings as key=value, got {wrong!r}."
            f"{did_you_mean(wrong, PARTS)}"
        )
    part = named[0] if named else "agents"
    if part != "agents" and (overrides or options.config_name or options.config_dir):
        raise ConfigError(f"shoal prove {part} has no agent config: leave --config-name and key=value out")
    given: dict[str, Any] = {
        "quick": options.quick, "faults": not options.no_faults, "ray": False if options.no_ray else None,
    }  # fmt: skip
    if part == "agents":
        from shoal.testing.prove_agents import agents

        if options.seed is not None:
            refuse_twice("seed", overrides)
        seed = [] if options.seed is None else [f"seed={options.seed}"]
        return agents(options.config_name or "demo", [*overrides, *seed], options.config_dir, **given)
    from shoal.testing import prove_commands

    return getattr(prove_commands, part)(seed=options.seed or 0, **given)


def _prove(part: Any, options: ProveOptions) -> int:
    from shoal.core.run_folder import RunFolder
    from shoal.testing.proof import Row
    from shoal.testing.proof import prove as proved

    path = options.run_dir or new_folder(f"prove-{part.name}")
    if (path / "summary.json").exists():
        raise ConfigError(f"{path} holds a run already: pass another --run-dir")
    rows: list[Row] = []
    status = "interrupted"
    with RunFolder(path, "prove", part.seed) as folder:
        print(f"{count_of(len(part.cases), 'run')} of {part.name}, in {path}", flush=True)
        try:
            with Progress("proving") as progress:

                def told(row: Row) -> None:
                    rows.append(row)
                    share, number = len(rows) / len(part.cases), f"{len(rows)}/{len(part.cases)}"
                    progress.at(share, f"{number} {row.name}", f"  {_line(row, part.again)}")

                proved(part, path.absolute(), told)
            status = "completed" if all(row.equal for row in rows) else "failed"
        except Exception:
            status = "failed"
            raise
        finally:  # what was proved until Ctrl-C is kept
            equal = status == "completed"
            metrics = {
                "equal": equal,
                "part": part.name,
                "kills": sum(row.toll.kills for row in rows),
                "played_again": sum(row.toll.again for row in rows),
                "rows": [row.as_dict() for row in rows],
            }
            summary = folder.finish(metrics, status)
    what = list(rows[0].digests) or ["hash"]
    header = ["", *what, "seconds", "kills", "again", "lost", "result"]
    cells = [
        [
            row.name,
            *(row.digests.get(name, "-")[:12] for name in what),
            f"{row.seconds:.1f}",
            *(_fault(row) if row.fault else ("", "", "")),
            "equal" if row.equal else row.problem,
        ]
        for row in rows
    ]
    table("", header, cells, text=(0, *range(1, 1 + len(what)), len(header) - 1))
    faults = [row for row in rows if row.fault]
    again = (
        f"; {count_of(metrics['kills'], 'kill')} landed, {metrics['played_again']} {part.again} played again"
    )
    verdict = (
        f"all {len(rows)} runs are equal"
        if equal
        else f"{sum(not r.equal for r in rows)} of {len(rows)} DIFFER"
    )
    print(f"{verdict}{again if faults else ''}: {path / 'summary.json'}")
    if options.json:
        print_json(summary)
    return 0 if equal else 1


def _line(row: Any, again: str) -> str:
    fault = f", {count_of(row.toll.kills, 'kill')}, {row.toll.again} {again} again" if row.fault else ""
    return f"{row.name}: {'equal' if row.equal else row.problem} ({row.seconds:.1f} s{fault})"


def _fault(row: Any) -> tuple[str, str, str]:
    return str(row.toll.kills), str(row.toll.again), f"{row.toll.seconds or 0.0:.1f} s"
