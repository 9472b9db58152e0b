"""A real language model on a CPU: sampled tokens a second, prompts included, beside a plain `transformers` loop.

    python benchmarks/llm.py [--only WORD] [--runs 3] [--threads 1] [--quick]

Each case is a shipped config with SmolLM2-135M after its warm-up. One rollout is played and the requests of each turn
are kept; then the same requests are answered again, in turns, by shoal's sampler and by `model.generate` on batches
padded on the left, both on the same weights in float32 at temperature 1. Greedy answers of both must agree before a
time is kept. Times are CPU seconds of one thread by default, and medians of the ratios within rounds. `--quick` takes
one turn of the last case, without its warm-up, and saves nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

from shoal.core.files import read_json, write_json  # noqa: E402
from shoal.core.run_folder import installed_versions  # noqa: E402
from shoal.samplers.sampler import Completion, Request  # noqa: E402
from shoal.train.agent.config import compose_config  # noqa: E402
from shoal.train.agent.trainer import AgentTrainer  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "llm.json"
SETTINGS = ("trainer.iterations=1", "trainer.tensorboard=false", "seed=5")
Turns = list[list[Request]]


@dataclass(frozen=True)
class Case:
    """A config and how many episodes of it are played at once."""

    name: str
    config: str
    episodes: int
    overrides: tuple[str, ...] = ()
    goal: float | None = None
    """Sampled tokens a second of wall time to reach."""


WORDS = ("agent_proxy.max_tokens=8", "agent_proxy.prompt.closing=''")
CASES = (
    Case("FrozenLake, 64 episodes", "smollm2-frozen_lake", 64, goal=300),
    Case("FrozenLake, 64 episodes, tags written too", "smollm2-frozen_lake", 64, WORDS),
    Case("Bandit, 64 episodes", "smollm2-bandit", 64),
    Case("Bandit, 16 episodes", "smollm2-bandit", 16),
)


def played(case: Case, folder: Path) -> tuple[Any, Turns]:
    """The sampler after the warm-up of a config, and what one rollout asks of it, turn by turn."""
    overrides = [
        *SETTINGS,
        f"es_manager.val.env_groups={case.episodes}",
        *case.overrides,
        f"run_dir={folder}",
    ]
    turns: Turns = []
    with AgentTrainer(compose_config(case.config, overrides)) as trainer:
        next(iter(trainer.train()))
        answer = trainer.sampler.generate

        def generate(requests: list[Request]) -> list[Completion]:
            turns.append(list(requests))
            return answer(requests)

        trainer.sampler.generate = generate
        trainer.evaluate(greedy=False)
        del trainer.sampler.generate
        return trainer.sampler, turns


def plain(model: Any, pad: int, turn: list[Request], greedy: bool) -> list[tuple[int, ...]]:
    """What `generate` writes for the requests of one turn."""
    longest = max(len(request.prompt_ids) for request in turn)
    ids = torch.tensor([[pad] * (longest - len(r.prompt_ids)) + list(r.prompt_ids) for r in turn])
    mask = torch.tensor([[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in turn])
    settings = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=turn[0].sampling.max_tokens, pad_token_id=pad, **settings
        )  # fmt: skip
    return [tuple(row) for row in out[:, longest:].tolist()]


def agree(sampler: Any, turns: Turns) -> int:
    """How many greedy answers are the same; raises where one is not."""
    compared = 0
    for turn in turns[:3]:
        asked = [structs.replace(r, sampling=greedily(r)) for r in turn]
        written = plain(sampler.model, sampler.pad_id, asked, greedy=True)
        for answer, other in zip(sampler.generate(asked), written, strict=True):
            if other[: len(answer.token_ids)] != tuple(answer.token_ids):
                raise SystemExit(f"greedy answers differ: {answer.token_ids} and {other}")
            compared += 1
    return compared


def greedily(request: Request) -> Any:
    return replace(request.sampling, temperature=0.0)


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What some work gives, its wall and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - wall, time.process_time() - cpu


def measure(case: Case, runs: int) -> list[dict[str, Any]]:
    """The rows of a case."""
    with tempfile.TemporaryDirectory() as folder:
        sampler, turns = played(case, Path(folder) / "run")
    compared = agree(sampler, turns)
    times: dict[str, list[tuple[float, float]]] = {"shoal": [], "transformers generate": []}
    tokens = 0

    def ours() -> int:
        sampler.prefixes.clear()
        return sum(len(answer.token_ids) for turn in turns for answer in sampler.generate(turn))

    def theirs() -> None:
        for turn in turns:
            plain(sampler.model, sampler.pad_id, turn, greedy=False)

    for _ in range(runs):
        tokens, wall, cpu = timed(ours)
        times["shoal"].append((tokens / wall, tokens / cpu))
        _, wall, cpu = timed(theirs)
        times["transformers generate"].append((tokens / wall, tokens / cpu))
    found = []
    for subject, each in times.items():
        walls, cpus = zip(*each, strict=True)
        found.append(
            {
                "case": case.name, "subject": subject, "value": round(statistics.median(walls), 1),
                "unit": "sampled tokens/s", "per_cpu_second": round(statistics.median(cpus), 1),
                "range": [round(min(walls), 1), round(max(walls), 1)], "runs": runs, "tokens": tokens,
                "greedy_answers_equal": compared, "goal": case.goal if subject == "shoal" else None,
            }
        )  # fmt: skip
    ratios = [a[1] / b[1] for a, b in zip(*times.values(), strict=True)]
    found.append(
        {
            "case": case.name, "subject": "shoal / transformers generate", "value": round(statistics.median(ratios), 2),
            "unit": "times, CPU seconds", "range": [round(min(ratios), 2), round(max(ratios), 2)], "runs": runs,
            "goal": 3.0,
        }
    )  # fmt: skip
    return found


def show(found: list[dict[str, Any]]) -> None:
    """Print the rows of a case."""
    for row in found:
        goal = "" if row["goal"] is None else f"  goal {row['goal']:g}"
        print(
            f"{row['case']:<44} {row['subject']:<32} {row['value']:>8} {row['unit']} {row['range']}{goal}",
            flush=True,
        )


def main() -> None:
    """Measure the cases that are asked for, and keep the rows of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one turn of one case, nothing saved")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        show(measure(replace(CASES[-1], overrides=("warmup.steps=0",)), 1))
        return
    kept = read_json(RESULTS)["rows"] if RESULTS.exists() else []
    rows = {(row["case"], row["subject"]): row for row in kept}
    for case in CASES:
        if options.only.lower() not in case.name.lower():
            continue
        found = measure(case, options.runs)
        show(found)
        for row in found:
            rows[row["case"], row["subject"]] = row | {"threads": options.threads}
    order = [case.name for case in CASES]
    write_json(
        RESULTS,
        {
            "name": "llm",
            "machine": {"cpu": platform.processor(), "cores": os.cpu_count()},
            "versions": installed_versions(),
            "date": datetime.date.today().isoformat(),
            "rows": sorted(
                (r for r in rows.values() if r["case"] in order), key=lambda r: order.index(r["case"])
            ),
        },
    )


if __name__ == "__main__":
    main()
