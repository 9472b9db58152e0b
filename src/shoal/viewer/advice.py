"""What the metrics of a run say about how it goes: each piece of advice names the numbers it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.viewer.runs import is_number

RECENT = 5
"""Rows at the end that a judgement looks at."""


@dataclass(frozen=True)
class Advice:
    """One thing to know about a run."""

    level: Literal["bad", "warn", "note"]
    title: str
    text: str
    metric: str  # the curve to look at


def advise(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> list[Advice]:
    """All that is striking in the rows of a run, the worst first.

    Args:
        rows: of `metrics.jsonl`.
        config: of the run, for limits that the rows do not tell.
    """
    found = [advice for rule in _RULES for advice in rule(rows, config or {})]
    return sorted(found, key=lambda advice: ("bad", "warn", "note").index(advice.level))


Rows = Sequence[Mapping[str, Any]]
Rule = Callable[[Rows, Mapping[str, Any]], Iterator[Advice]]


def _values(rows: Rows, name: str) -> list[float]:
    found = [row.get(name) for row in rows]
    return [float(v) for v in found if is_number(v)]  # type: ignore[arg-type]


def _recent(rows: Rows, name: str, at_least: int = 2) -> float | None:
    """The mean of the last values, None if there are too few to judge."""
    values = _values(rows, name)
    return sum(values[-RECENT:]) / len(values[-RECENT:]) if len(values) >= at_least else None


def _diverged(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    for name in ("loss", "policy_loss", "grad_norm", "value_loss"):
        torn = [row for row in rows[-RECENT:] if name in row and row[name] is None]
        if torn:
            yield Advice(
                "bad",
                "Training diverged",
                f"{name} is not a finite number in the last rows. Go back to a checkpoint "
                "with a lower learning rate, or a lower limit on the gradient's norm.",
                name,
            )
            return


def _no_signal(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    signal = _recent(rows, "groups_with_signal")
    if signal is None or signal >= 0.2:
        return
    solved, unsolved = _recent(rows, "groups_all_solved") or 0.0, _recent(rows, "groups_none_solved") or 0.0
    if solved > 0.7:
        yield Advice(
            "note",
            "The task is solved",
            f"{solved:.0%} of the groups are solved by all of their members, so nothing "
            "is left to learn from. Stop here, or make the task harder.",
            "groups_all_solved",
        )
        return
    why = "no member solves them" if unsolved >= solved else "all members solve them"
    share = max(solved, unsolved)
    yield Advice(
        "bad",
        "No variance of reward within groups",
        f"Only {signal:.0%} of the groups have members with different "
        f"rewards, and the others teach nothing; in {share:.0%} {why}. Use larger groups, a higher temperature, an "
        "easier task to begin with, a reward for partial success, or filter_groups.",
        "groups_with_signal",
    )


def _entropy(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _values(rows, "entropy")
    if len(values) < 3:
        return
    first, now = values[0], sum(values[-RECENT:]) / len(values[-RECENT:])
    success = _recent(rows, "success", 1)
    if first > 0 and now < 0.1 * first and (success is None or success < 0.9):
        rate = "" if success is None else f" while success is {success:.0%}"
        yield Advice(
            "bad",
            "Entropy has collapsed",
            f"It fell from {first:.3g} to {now:.3g} nats a token{rate}: the policy hardly "
            "tries anything new. Raise entropy_coef or clip_ratio_high, or lower the learning rate.",
            "entropy",
        )
    elif first > 0 and now > 2 * first and len(values) >= RECENT:
        yield Advice(
            "warn",
            "Entropy grows",
            f"It rose from {first:.3g} to {now:.3g} nats: the policy becomes more random. Lower "
            "entropy_coef, or look whether rewards are noise.",
            "entropy",
        )


def _truncation(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    share = _recent(rows, "truncated", 1)
    if share is not None and share > 0.5:
        yield Advice(
            "warn",
            "Most episodes are cut off",
            f"{share:.0%} end at a limit of turns or steps, not by the task. Raise "
            "the limit, or pay something for progress.",
            "truncated",
        )
    proxy = config.get("agent_proxy")
    limit = proxy.get("max_tokens") if isinstance(proxy, Mapping) else None
    tokens, turns = _recent(rows, "response_tokens", 1), _recent(rows, "turns", 1)
    if isinstance(limit, int) and limit > 0 and tokens and turns and tokens / turns > 0.9 * limit:
        valid = _recent(rows, "valid_actions", 1)
        if valid is None or valid < 0.9:
            yield Advice(
                "warn",
                "Responses end at the limit of tokens",
                f"A response has {tokens / turns:.3g} tokens on average, "
                f"the limit is {limit}. Raise agent_proxy.max_tokens.",
                "response_tokens",
            )


def _mismatch(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    gaps = _values(rows, "logprob_gap_max")[-RECENT:]
    if gaps and max(gaps) > 0.5:
        yield Advice(
            "bad" if max(gaps) > 2 else "warn",
            "Trainer and engine disagree",
            f"The log-probability of one token differs "
            f"by up to {max(gaps):.3g} before the first gradient step. Use the same precision in both, or "
            "algorithm.rollout_correction.",
            "logprob_gap_max",
        )


def _idle(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    idle = _recent(rows, "share_idle")
    if idle is not None and idle > 0.4:
        yield Advice(
            "warn",
            "The engine is idle",
            f"In {idle:.0%} of the time neither the engine nor the update computes: "
            "environments are waited for. Play more episodes at once, or use_parallel_rollout with more workers.",
            "share_idle",
        )


def _failures(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    failed, episodes = _recent(rows, "failed_episodes", 1), _values(rows, "episodes")
    if failed:
        played = f" of {episodes[-1] - episodes[-2]:.0f}" if len(episodes) > 1 else ""
        yield Advice(
            "warn",
            "Episodes break off",
            f"{failed:.3g}{played} episodes an iteration end with an error of the "
            "environment or the engine. Their causes are listed under Episodes.",
            "failed_episodes",
        )
    valid = _recent(rows, "valid_actions", 1)
    if valid is not None and valid < 0.5:
        yield Advice(
            "warn",
            "Few valid actions",
            f"Only {valid:.0%} of the turns hold an action that the environment understood. "
            "Warm the model up on the format, show an example in the prompt, or set a format penalty.",
            "valid_actions",
        )
    deaths = sum(_values(rows, "worker_deaths"))
    if deaths:
        yield Advice(
            "note",
            "Workers were lost",
            f"{deaths:.0f} so far; their episodes were played again.",
            "worker_deaths",
        )


def _steps(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    clipped = _recent(rows, "clip_fraction")
    if clipped is not None and clipped > 0.4:
        yield Advice(
            "warn",
            "Steps are too large",
            f"{clipped:.0%} of the samples are clipped. Lower the learning rate or the number of epochs.",
            "clip_fraction",
        )
    kl = _recent(rows, "approx_kl")
    if kl is not None and kl > 0.1:
        yield Advice(
            "warn",
            "The policy moves fast",
            f"approx_kl is {kl:.3g} an update; 0.01 to 0.05 is usual. Lower the learning "
            "rate, or set target_kl.",
            "approx_kl",
        )
    explained = _values(rows, "explained_variance")
    if len(explained) >= 10 and sum(explained[-RECENT:]) / RECENT < 0:
        yield Advice(
            "warn",
            "The value function explains nothing",
            "explained_variance is below zero: predicting the mean would "
            "be better. Normalise rewards or observations, or raise vf_coef.",
            "explained_variance",
        )


def _generalisation(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    trained, held_out = _recent(rows, "success", 1), _values(rows, "heldout_success")
    if trained is not None and len(held_out) > 1 and trained - held_out[-1] > 0.25:
        yield Advice(
            "warn",
            "Held-out episodes lag behind",
            f"Success is {trained:.0%} in training and {held_out[-1]:.0%} held "
            "out. Train on more different start states.",
            "heldout_success",
        )


_RULES: tuple[Rule, ...] = (
    _diverged,
    _no_signal,
    _entropy,
    _truncation,
    _mismatch,
    _idle,
    _failures,
    _steps,
    _generalisation,
)
