"""Splitting recordings with each image and message done once, beside doing every window anew.

Subjects, in one process on the same images: the plain program of the tests; shoal keeping pixels
8-bit, as float32, and with two threads; and the floor, which is decoding and resizing every image once with
Pillow. All tensors are asserted equal before time is taken. `--peak` runs subjects in processes of their own.
`--quick` takes one case with fewer turns and saves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests" / "splitting")]
RESULTS = REPO / "benchmarks" / "results" / "split.json"
CASES = {  # name: (kind, steps, size)
    "stepwise 720p": ("stepwise", 20, (1280, 720)),
    "stepwise 1080p": ("stepwise", 12, (1920, 1080)),
    "window 5/5 720p": ("window", 20, (1280, 720)),
}
MODULES = {"pillow": "PIL"}


def splitter(processor, root, kind, **options):
    from shoal.splitting import StepwiseTrajectorySplitter, TrajectorySplitter

    cls = StepwiseTrajectorySplitter if kind == "stepwise" else TrajectorySplitter
    return cls(processor, root, **options)


def plain_split(processor, root, ids, kind):
    """Every sample written, encoded and pictured anew."""
    from plain_program import plain_samples

    samples = []
    for name in ids:
        chat = json.loads((root / name / "final_messages.json").read_text())
        for message in chat:
            for part in message["content"]:
                if part["type"] == "image_url":
                    part |= {"type": "image", "image": part.pop("image_url") + ".png"}
        samples += plain_samples(processor, root / name, chat, kind, 5, 5, 5, 35)
    return samples


def floor(processor, root, ids):
    """Decode and resize every image that is used, once, in one thread."""
    from PIL import Image

    from shoal.splitting.images import fitted_size

    edges = processor.image_processor.size
    for name in ids:
        for path in sorted((root / name).glob("*.png")):
            image = Image.open(path).convert("RGB")
            image.resize(
                fitted_size(*image.size, 28, edges["shortest_edge"], edges["longest_edge"]), 3
            ).load()


def floor_float32(processor, root, ids, size):
    """The floor, and writing as many fresh bytes as float32 pixels take."""
    import numpy as np

    kept = np.empty(size, np.uint8)
    floor(processor, root, ids)
    kept.fill(1)


def subjects(processor, root, ids, kind):
    rewards = [1.0] * len(ids)
    made = {
        name: splitter(processor, root, kind, **options)
        for name, options in {
            "shoal u8": {"store": "u8"},
            "shoal float32": {"store": "float32"},
            "shoal u8, 2 threads": {"store": "u8", "image_threads": 2},
            "shoal float32, 2 threads": {"store": "float32", "image_threads": 2},
        }.items()
    }
    return {
        "floor": lambda: floor(processor, root, ids),
        "reference": lambda: plain_split(processor, root, ids, kind),
        **{name: (lambda one=one: one.split(ids, rewards)) for name, one in made.items()},
    }


def assert_plain(batch, wanted):
    """The batch has the tokens, masks, positions and pixels of the plain samples."""
    import torch

    for sample, (ids, border, mask, positions, pixels) in zip(batch.samples(), wanted, strict=True):
        assert sample.input_ids.tolist() == ids
        assert len(sample.prompt_ids) == border
        assert sample.response_mask.tolist() == mask[border:]
        assert sample.position_ids.tolist() == positions.tolist()
        assert set(sample.inputs) == set(pixels)
        assert all(torch.equal(sample.inputs[name], pixels[name]) for name in pixels)


def assert_equal(batch, wanted):
    import torch

    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(batch[name], value), name
    for got, want in zip(batch["multi_modal_inputs"], wanted["multi_modal_inputs"], strict=True):
        assert set(got) == set(want)
        assert all(torch.equal(got[name], want[name]) for name in want)


def touch(size):
    """Use `size` bytes and free them.

    A virtual machine gives memory that lay idle back to its host, and whoever is first to want it again
    pays for that, 408 MiB by up to a second.
    """
    import numpy as np

    np.empty(size, np.uint8).fill(1)


def timed_once(action):
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def timed(action, runs):
    wall, cpu = (
        statistics.median(column) for column in zip(*(timed_once(action) for _ in range(runs)), strict=True)
    )
    return wall, cpu, runs


def recordings(work, steps, size):
    from shoal.splitting.synthetic import write_gui_recordings

    root = work / f"{size[1]}p-{steps}"
    return root, write_gui_recordings(root, 1, steps=steps, size=size, words=(25, 70))


def measure_cases(processor, work, rows, cases, turns):
    for case, (kind, steps, size) in cases.items():
        root, ids = recordings(work, steps, size)
        todo = subjects(processor, root, ids, kind)
        wanted = todo["reference"]()
        pixels = {"reference": sum(pixels["pixel_values"].nbytes for *_, pixels in wanted)}
        for name in ("shoal u8", "shoal float32", "shoal u8, 2 threads", "shoal float32, 2 threads"):
            batch = todo[name]()
            assert_plain(batch, wanted)
            pixels[name] = batch.summary()["pixel_bytes"]
        size = pixels["shoal float32"]
        todo["floor with float32 memory"] = lambda: floor_float32(processor, root, ids, size)  # noqa: B023
        del batch, wanted
        seconds = {}
        times = {name: [] for name in todo}
        for turn in range(
            turns
        ):  # subject after subject, so that a slow moment of the machine meets them all
            for name, action in todo.items():
                if name != "reference" or turn < 3:
                    touch(pixels["reference"])
                    times[name].append(timed_once(action))
        for name, taken in times.items():
            wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
            seconds[name] = wall
            rows.append(row(case, name, wall, "s", cpu, len(taken)))
        for name in pixels:
            rows.append(row(case, name, pixels[name] / 2**20, "MiB of pixels"))
            if name != "reference":
                rows.append(
                    row(case, name, seconds["reference"] / seconds[name], "x faster than the reference")
                )
                rows.append(row(case, name, seconds[name] / seconds["floor"], "x the floor"))
                if name == "shoal float32":
                    ideal = seconds["floor with float32 memory"]
                    rows.append(row(case, name, seconds[name] / ideal, "x the floor with float32 memory"))
                rows.append(row(case, name, pixels["reference"] / pixels[name], "x less pixel memory"))


def measure_scaling(processor, work, rows, count, turns, workers=2):
    """Warm workers on more trajectories than workers, in turns; all is asserted equal to serial."""
    from shoal.core.executors import SerialExecutor
    from shoal.splitting.synthetic import write_gui_recordings

    root = work / "many"
    ids = write_gui_recordings(root, count, steps=6, size=(1280, 720), words=(25, 70))
    one = splitter(processor, root, "stepwise", store="u8")
    wanted = one.split(ids)
    case = f"{count} x 6 steps 720p, {workers} workers"
    makers = {
        "serial": SerialExecutor,
        "threads": lambda: ThreadPoolExecutor(workers),
    }
    try:
        import ray
    except ImportError:
        rows.append(row(case, "Ray, warm", None, "not installed"))
    else:
        makers["Ray, warm"] = None
    with contextlib.ExitStack() as stack:
        splits = {}
        for name, make in makers.items():
            executor = None if make is None else stack.enter_context(make())

            def split(executor=executor):
                return (
                    one.split_parallel(ids, num_cpus=workers)
                    if executor is None
                    else one.split(ids, executor=executor)
                )

            for _ in range(2):  # start workers, load the processor and the compiled loops in each
                assert_equal(split(), wanted)
            splits[name] = split
        rounds = [{name: timed_once(split) for name, split in splits.items()} for _ in range(turns)]
    for name in splits:
        wall, cpu = (statistics.median(times[name][k] for times in rounds) for k in (0, 1))
        ratios = [times["serial"][0] / times[name][0] for times in rounds]
        rows.append(row(case, name, wall, "s", cpu, len(rounds)))
        if name != "serial":
            rows.append(row(case, name, statistics.median(ratios), "x faster than serial", runs=len(rounds)))
            rows[-1] |= {"min": round(min(ratios), 4), "max": round(max(ratios), 4)}
    if "Ray, warm" in makers:
        ray.shutdown()


def measure_peaks(processor_folder, work, rows, cases):
    """How far memory rises above the ready process while one subject works and its result is kept."""
    for case, (kind, steps, size) in cases.items():
        root, _ = recordings(work, steps, size)
        for name in ("reference", "shoal u8", "shoal float32"):
            command = [sys.executable, __file__, "--peak", str(processor_folder), str(root), kind, name]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            before, highest = (int(number) / 1024 for number in out.split())
            rows.append(row(case, name, highest, "MiB peak of the process"))
            rows.append(row(case, name, highest - before, "MiB peak above start"))


def peak(processor_folder, root, kind, name):
    from shoal.splitting import load_processor

    processor, root = load_processor(processor_folder), Path(root)
    todo = subjects(processor, root, sorted(path.name for path in root.iterdir()), kind)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of getting ready
    before = memory("VmRSS")
    kept = todo[name]()
    print(before, memory("VmHWM"))
    del kept


def memory(name):
    """A line of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def row(case, subject, value, unit, cpu=None, runs=1):
    rounded = None if value is None else round(value, 4)
    cpu = None if cpu is None else round(cpu, 4)
    print(f"{case:<34} {subject:<26} {rounded!s:>10} {unit}", flush=True)
    return {
        "case": case,
        "subject": subject,
        "value": rounded,
        "unit": unit,
        "cpu_seconds": cpu,
        "runs": runs,
    }


def part(item):
    """Which part of the benchmark a row is from."""
    if "peak" in item["unit"]:
        return "peaks"
    return "scaling" if "workers" in item["case"] else "cases"


def machine():
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": names[0].split(":")[1].strip(), "cores": os.cpu_count(), "system": platform.platform()}


def main():
    from shoal.splitting import build_qwen_processor, load_processor

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=["cases", "peaks", "scaling"])
    parser.add_argument("--quick", action="store_true", help="one case with fewer turns, nothing saved")
    options = parser.parse_args()
    cases = {"stepwise 720p": ("stepwise", 6, (1280, 720))} if options.quick else CASES
    turns, count = (2, 4) if options.quick else (9, 12)
    rows: list[dict] = []
    if options.only and options.out.exists():
        rows = [item for item in json.loads(options.out.read_text())["rows"] if part(item) != options.only]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        processor_folder = build_qwen_processor(work / "processor")
        processor = load_processor(processor_folder)
        if options.only in (None, "cases"):
            measure_cases(processor, work, rows, cases, turns)
        if options.only in (None, "peaks"):
            measure_peaks(processor_folder, work, rows, cases)
        if options.only in (None, "scaling"):
            measure_scaling(processor, work, rows, count, turns)
    if options.quick:
        return
    packages = ("numpy", "torch", "transformers", "pillow", "numba", "ray")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": "split",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages if find_spec(MODULES.get(name, name))},
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        peak(*sys.argv[2:])
    else:
        main()
