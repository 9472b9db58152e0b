"""What the metrics of a run say about how it goes: each piece of advice names the numbers it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal.viewer.runs import is_number

RECENT = 5
"""Rows at the end that a judgement looks at."""


class Advice(NamedTuple):
    """One thing to know about a run."""

    level: Literal["bad", "warn", "note"]
    metric: str  # the curve to look at
    title: str
    text: str


Rows = Sequence[Mapping[str, Any]]
Rule = Callable[[Rows, Mapping[str, Any]], Iterator[Advice]]


def advise(rows: Rows, config: Mapping[str, Any] | None = None) -> list[Advice]:
    """All that is striking in the rows of a run, the worst first.

    Args:
        rows: of `metrics.jsonl`.
        config: of the run, for limits that the rows do not tell.
    """
    found = [advice for rule in _RULES for advice in rule(rows, config or {})]
    return sorted(found, key=lambda advice: ("bad", "warn", "note").index(advice.level))


def _values(rows: Rows, name: str) -> list[float]:
    found = [row.get(name) for row in rows]
    return [float(v) for v in found if is_number(v)]  # type: ignore[arg-type]


def _mean(values: Sequence[float]) -> float:
    return sum(values[-RECENT:]) / len(values[-RECENT:])


def _recent(rows: Rows, name: str, at_least: int = 1) -> float | None:
    """The mean of the last values, None if there are too few to judge."""
    values = _values(rows, name)
    return _mean(values) if len(values) >= at_least else None


def _diverged(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    for name in ("loss", "policy_loss", "grad_norm", "value_loss"):
        if any(name in row and row[name] is None for row in rows[-RECENT:]):
            text = (
                f"{name} is not a finite number in the last rows. Go back to a checkpoint with a lower learning "
                "rate, or a lower limit on the gradient's norm."
            )
            yield Advice("bad", name, "Training diverged", text)
            return


def _no_signal(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    signal = _recent(rows, "groups_with_signal", 2)
    if signal is None or signal >= 0.2:
        return
    solved = _recent(rows, "groups_all_solved", 2) or 0.0
    unsolved = _recent(rows, "groups_none_solved", 2) or 0.0
    if solved > 0.7:
        text = (
            f"{solved:.0%} of the groups are solved by all of their members, so nothing is left to learn from. Stop "
            "here, or make the task harder."
        )
        yield Advice("note", "groups_all_solved", "The task is solved", text)
        return
    if _values(rows, "value_loss"):
        return  # a critic teaches by each episode alone
    why = "no member solves them" if unsolved >= solved else "all members solve them"
    text = (
        f"Only {signal:.0%} of the groups have members with different rewards, and the others teach nothing; in "
        f"{max(solved, unsolved):.0%} {why}. Use larger groups, a higher temperature, an easier task to begin with, "
        "a reward for partial success, or filter_groups."
    )
    yield Advice("bad", "groups_with_signal", "No variance of reward within groups", text)


def _entropy(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _values(rows, "entropy")
    if len(values) < 3 or values[0] <= 0:
        return
    first, now, success = values[0], _mean(values), _recent(rows, "success")
    if now < 0.1 * first and (success is None or success < 0.9):
        rate = "" if success is None else f" while success is {success:.0%}"
        text = (
            f"It fell from {first:.3g} to {now:.3g} nats a token{rate}: the policy hardly tries anything new. Raise "
            "entropy_coef or clip_ratio_high, or lower the learning rate."
        )
        yield Advice("bad", "entropy", "Entropy has collapsed", text)
    elif now > 2 * first and len(values) >= RECENT:
        text = (
            f"It rose from {first:.3g} to {now:.3g} nats: the policy becomes more random. Lower entropy_coef, or look "
            "whether rewards are noise."
        )
        yield Advice("warn", "entropy", "Entropy grows", text)


def _responses(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    proxy = config.get("agent_proxy")
    limit = proxy.get("max_tokens") if isinstance(proxy, Mapping) else None
    tokens, turns = _recent(rows, "response_tokens"), _recent(rows, "turns")
    valid = _recent(rows, "valid_actions")
    if (
        not isinstance(limit, int)
        or limit <= 0
        or not tokens
        or not turns
        or (valid is not None and valid >= 0.9)
    ):
        return
    if tokens / turns > 0.9 * limit:
        text = f"A response has {tokens / turns:.3g} tokens on average, the limit is {limit}. "
        text += "Raise agent_proxy.max_tokens."
        yield Advice("warn", "response_tokens", "Responses end at the limit of tokens", text)


def _mismatch(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    gap = max(_values(rows, "logprob_gap_max")[-RECENT:], default=0.0)
    if gap > 0.5:
        text = (
            f"The log-probability of one token differs by up to {gap:.3g} before the first gradient step. Use the same "
            "precision in both, or algorithm.rollout_correction."
        )
        yield Advice("bad" if gap > 2 else "warn", "logprob_gap_max", "Trainer and engine disagree", text)


def _failures(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    failed, episodes = _recent(rows, "failed_episodes"), _values(rows, "episodes")
    if failed:
        played = f" of {episodes[-1] - episodes[-2]:.0f}" if len(episodes) > 1 else ""
        text = (
            f"{failed:.3g}{played} episodes an iteration end with an error of the environment or the engine. Their "
            "causes are listed under Episodes."
        )
        yield Advice("warn", "failed_episodes", "Episodes break off", text)
    if deaths := sum(_values(rows, "worker_deaths")):
        text = f"{deaths:.0f} so far; their episodes were played again."
        yield Advice("note", "worker_deaths", "Workers were lost", text)


def _values_unexplained(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    explained = _values(rows, "explained_variance")
    if len(explained) >= 10 and _mean(explained) < 0:
        text = (
            "explained_variance is below zero: predicting the mean would be better. Normalise rewards or observations, "
            "or raise vf_coef."
        )
        yield Advice("warn", "explained_variance", "The value function explains nothing", text)


def _generalisation(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    trained, held_out = _recent(rows, "success"), _values(rows, "heldout_success")
    if trained is not None and len(held_out) > 1 and trained - held_out[-1] > 0.25:
        text = f"Success is {trained:.0%} in training and {held_out[-1]:.0%} held out. "
        text += "Train on more different start states."
        yield Advice("warn", "heldout_success", "Held-out episodes lag behind", text)


def _beyond(
    metric: str, limit: float, title: str, text: str, *, below: bool = False, at_least: int = 1
) -> Rule:
    """A rule about a metric whose last values are on the wrong side of a limit on average."""

    def rule(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
        value = _recent(rows, metric, at_least)
        if value is not None and (value < limit if below else value > limit):
            yield Advice("warn", metric, title, text.format(value))

    return rule


_RULES: tuple[Rule, ...] = (
    _diverged,
    _no_signal,
    _entropy,
    _beyond(
        "truncated", 0.5, "Most episodes are cut off",
        "{:.0%} end at a limit of turns or steps, not by the task. Raise the limit, or pay something for progress.",
    ),
    _responses,
    _mismatch,
    _beyond(
        "share_idle", 0.4, "The engine is idle",
        "In {:.0%} of the time neither the engine nor the update computes: environments are waited for. Play more "
        "episodes at once, or use_parallel_rollout with more workers.",
        at_least=2,
    ),
    _failures,
    _beyond(
        "valid_actions", 0.5, "Few valid actions",
        "Only {:.0%} of the turns hold an action that the environment understood. Warm the model up on the format, "
        "show an example in the prompt, or set a format penalty.",
        below=True,
    ),
    _beyond(
        "clip_fraction", 0.4, "Steps are too large",
        "{:.0%} of the samples are clipped. Lower the learning rate or the number of epochs.",
        at_least=2,
    ),
    _beyond(
        "approx_kl", 0.1, "The policy moves fast",
        "approx_kl is {:.3g} an update; 0.01 to 0.05 is usual. Lower the learning rate, or set target_kl.",
        at_least=2,
    ),
    _values_unexplained,
    _generalisation,
)  # fmt: skip
