"""Countdown, MetaMathQA and WebShop beside other libraries: scores, puzzles and searches a second.

Answers and rankings are asserted before time is taken; a library that is not installed has a row that says so.
Run by `make bench-text-envs`; results go to `benchmarks/results/text_envs.json`. `--quick`
takes one turn of each, searches in the small shop alone, and saves nothing.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

from shoal.core.files import write_json  # noqa: E402
from shoal.envs import make  # noqa: E402
from shoal.envs.countdown import LEVELS, make_puzzle, score  # noqa: E402
from shoal.envs.metamathqa import is_correct, make_question  # noqa: E402
from shoal.envs.webshop import expert_action, generate_catalogue, make_goals  # noqa: E402
from shoal.envs.webshop.bm25 import K1, STOP_WORDS, B, build_index, terms  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "text_envs.json"
PACKAGES = ("numpy", "reasoning_gym", "math-verify", "bm25s", "rank-bm25", "tantivy")
RUNS = 5
QUERIES = 100
quick = False
rows: list[dict[str, Any]] = []


def measure(case: str, subject: str, work: Callable[[], int], unit: str = "1/s", runs: int = RUNS) -> None:
    """Time `work`, which returns how many things it did; keep the median rate, or the seconds of one."""
    if quick:
        runs = 1
    else:
        work()  # warm
    rates, cpu = [], time.process_time()
    for _ in range(runs):
        start = time.perf_counter()
        count = work()
        seconds = time.perf_counter() - start
        rates.append(count / seconds if unit == "1/s" else seconds)
    add(case, subject, statistics.median(rates), unit, time.process_time() - cpu, runs)


def add(case: str, subject: str, value: float | None, unit: str, cpu: float = 0.0, runs: int = 0) -> None:
    """One row of the table; a value of None is a rival that could not run."""
    row = {"case": case, "subject": subject, "value": value, "unit": unit, "cpu_seconds": cpu, "runs": runs}
    rows.append(row)
    print(
        f"{case:34} {subject:34} {'not installed' if value is None else f'{value:,.4g} {unit}'}", flush=True
    )


def installed(case: str, subject: str, module: str, unit: str = "1/s") -> bool:
    """Whether a rival is there; a row says so if it is not."""
    if importlib.util.find_spec(module) is not None:
        return True
    add(case, subject, None, unit)
    return False


def repeat(function: Callable[..., Any], items: list[tuple[Any, ...]]) -> Callable[[], int]:
    """Work that calls `function` on all items once."""

    def work() -> int:
        for item in items:
            function(*item)
        return len(items)

    return work


def countdown_scores() -> None:
    puzzles = [make_puzzle(np.random.default_rng(seed), LEVELS["hard"]) for seed in range(300)]
    right = [(puzzle.numbers, puzzle.target, str(puzzle.solution)) for puzzle in puzzles]
    assert all(score(*item) == 1.0 for item in right)
    case = "countdown: scores"
    measure(case, "shoal", repeat(score, right * 20))
    measure(case, "ideal: ast.parse alone", repeat(lambda _n, _t, text: ast.parse(text), right * 20))
    if installed(case, "reasoning_gym", "reasoning_gym"):
        import reasoning_gym

        theirs = reasoning_gym.create_dataset("countdown", size=1, seed=0)
        entries = [
            (text, {"metadata": {"numbers": list(numbers), "target": target}})
            for numbers, target, text in right[:40]
        ]
        assert all(theirs.score_answer(*entry) == 1.0 for entry in entries)
        measure(case, "reasoning_gym", repeat(theirs.score_answer, entries))
    hostile = "(" * 5000 + "9**9**9" + ")" * 4000
    assert score([9, 9, 9], 1, hostile) == 0.0
    measure("countdown: 10 kB hostile answer", "shoal", repeat(score, [([9, 9, 9], 1, hostile)] * 2000))


def puzzles_and_questions() -> None:
    case = "countdown: puzzles"
    level = LEVELS["expert"]
    measure(
        case,
        "shoal",
        repeat(lambda s: make_puzzle(np.random.default_rng(s), level), [(i,) for i in range(500)]),
    )
    if installed(case, "reasoning_gym", "reasoning_gym"):
        import reasoning_gym

        theirs = reasoning_gym.create_dataset("countdown", size=10**6, seed=0)
        measure(case, "reasoning_gym", repeat(theirs.__getitem__, [(i,) for i in range(5)]), runs=3)
    case = "metamathqa: word problems"
    measure(
        case,
        "shoal",
        repeat(lambda s: make_question(np.random.default_rng(s), 4), [(i,) for i in range(2000)]),
    )
    if installed(case, "reasoning_gym gsm_symbolic", "reasoning_gym"):
        theirs = reasoning_gym.create_dataset("gsm_symbolic", size=10**6, seed=0)
        measure(case, "reasoning_gym gsm_symbolic", repeat(theirs.__getitem__, [(i,) for i in range(200)]))


def math_answers() -> None:
    case = "metamathqa: answers checked"
    pairs = [(rf"So it is \boxed{{{n}}}", str(n)) for n in range(100)]
    pairs += [(rf"\boxed{{\frac{{{n}}}{{7}}}}", f"{n}/7") for n in range(1, 100)]
    assert all(is_correct(*pair) for pair in pairs)
    assert not any(is_correct(response, "1/3") for response, _ in pairs)
    measure(case, "shoal", repeat(is_correct, pairs * 20))
    if installed(case, "math-verify", "math_verify"):
        import math_verify

        def check(response: str, truth: str) -> bool:
            return bool(math_verify.verify(math_verify.parse(truth), math_verify.parse(response)))

        wrong = [pair for pair in pairs if not check(*pair)]
        print(f"math-verify disagrees on {len(wrong)} of {len(pairs)}", flush=True)
        measure(case, "math-verify", repeat(check, pairs))


def searches(n_products: int) -> None:
    catalogue = generate_catalogue(n_products)
    texts = [product.searched for product in catalogue.products]
    ids = [product.asin for product in catalogue.products]
    queries = [(goal.instruction,) for goal in make_goals(catalogue)[:QUERIES]]
    case, built = f"search: {n_products:,} products", f"index: {n_products:,} products"
    index = build_index(texts, ids)

    def build() -> int:
        return len(build_index(texts, ids))

    measure(built, "shoal", build, "s", runs=3)
    measure(case, "shoal", repeat(index.search, queries))
    scores = np.zeros(n_products, np.float32)

    def gather(query: str) -> None:
        for term in set(terms(query)):
            if term in index._number:
                number = index._number[term]
                part = slice(index.starts[number], index.starts[number + 1])
                scores[index.documents[part]] += index.weights[part]

    measure(case, "ideal: adding up the postings alone", repeat(gather, queries))
    ours = [index.search(*query, 10).tolist() for query in queries]
    tokens = [terms(text) for text in texts]
    if installed(case, "bm25s, shoal's tokens", "bm25s"):
        import bm25s

        def make_theirs() -> Any:
            made = bm25s.BM25(k1=K1, b=B, method="lucene")
            made.index([terms(text) for text in texts], show_progress=False)
            return made

        measure(built, "bm25s, shoal's tokens", lambda: int(make_theirs() is not None), "s", runs=3)
        theirs = make_theirs()

        def ask(query: str, k: int = 50) -> list[int]:
            found = theirs.retrieve([terms(query)], k=k, show_progress=False)
            return found.documents[0].tolist()  # type: ignore[no-any-return]

        overlap = statistics.mean(
            len(set(ask(*query, 10)) & set(mine)) / 10 for query, mine in zip(queries, ours, strict=True)
        )
        assert overlap > 0.8, overlap  # they differ in Lucene's rounded lengths and in the order of ties
        print(f"top 10 shared with bm25s: {overlap:.3f}", flush=True)
        measure(case, "bm25s, shoal's tokens", repeat(ask, queries))
    if n_products <= 1000 and installed(case, "rank_bm25", "rank_bm25"):
        import rank_bm25

        okapi = rank_bm25.BM25Okapi(tokens, k1=K1, b=B)
        measure(
            case, "rank_bm25", repeat(lambda q: np.argsort(-okapi.get_scores(terms(q)))[:50], queries[:20])
        )
    sqlite_fts(case, built, texts, queries)
    tantivy_search(case, built, texts, queries)


def sqlite_fts(case: str, built: str, texts: list[str], queries: list[tuple[str]]) -> None:
    """SQLite's FTS5, in memory, with its Porter tokens; stop words are left out of its queries too."""

    def build() -> sqlite3.Connection:
        base = sqlite3.connect(":memory:")
        base.execute("create virtual table shop using fts5(body, tokenize='porter')")
        base.executemany("insert into shop values (?)", ((text,) for text in texts))
        return base

    measure(built, "SQLite FTS5", lambda: int(build() is not None), "s", runs=3)
    base = build()

    def ask(query: str) -> list[Any]:
        words = [
            "".join(filter(str.isalnum, word)) for word in query.lower().split() if word not in STOP_WORDS
        ]
        wanted = " OR ".join(f'"{word}"' for word in words if word)
        return base.execute(
            "select rowid from shop where shop match ? order by rank limit 50", (wanted,)
        ).fetchall()

    assert len(ask(*queries[0])) > 0
    measure(case, "SQLite FTS5", repeat(ask, queries[: 20 if len(texts) > 10_000 else QUERIES]))


def tantivy_search(case: str, built: str, texts: list[str], queries: list[tuple[str]]) -> None:
    """tantivy, in memory, with its English tokens."""
    if not installed(case, "tantivy", "tantivy"):
        return
    import tantivy

    schema = tantivy.SchemaBuilder().add_text_field("body", tokenizer_name="en_stem").build()

    def build() -> Any:
        made = tantivy.Index(schema)
        writer = made.writer()
        for text in texts:
            writer.add_document(tantivy.Document(body=text))
        writer.commit()
        made.reload()
        return made

    measure(built, "tantivy", lambda: int(build() is not None), "s", runs=3)
    made = build()
    searcher = made.searcher()

    def ask(query: str) -> int:
        words = "".join(letter if letter.isalnum() else " " for letter in query)
        return len(searcher.search(made.parse_query(words, ["body"]), 50).hits)

    assert ask(*queries[0]) > 0
    measure(case, "tantivy", repeat(ask, queries))


def shopping() -> None:
    env = make("webshop")

    def work() -> int:
        steps = 0
        for seed in range(60):
            env.reset(seed=seed)
            over = False
            while not over:
                _, reward, terminated, truncated, _ = env.step(expert_action(env))
                over, steps = terminated or truncated, steps + 1
            assert reward == 1.0
        return steps

    measure("webshop: expert steps", "shoal", work)
    measure("webshop: shop of 3,000 made", "shoal", lambda: len(generate_catalogue(3000)), "s", runs=3)


def main() -> None:
    global quick
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one turn of each, nothing saved")
    options = parser.parse_args()
    quick = options.quick
    countdown_scores()
    puzzles_and_questions()
    math_answers()
    searches(1000)
    if not quick:
        searches(50_000)
    shopping()
    if quick:
        return
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_json(RESULTS, {"machine": machine, "versions": versions, "date": date, "rows": rows})
    print(json.dumps(versions))


if __name__ == "__main__":
    main()
