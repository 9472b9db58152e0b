"""What the metrics of a run say about how it goes: each piece of advice names the numbers it rests on.

`shoal train` prints the worst of it while a run goes on, and `shoal view` shows all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, variance
from typing import Any, Literal, NamedTuple

from shoal.core.run_folder import is_number
from shoal.train.agent.algorithms.advantages import ESTIMATORS

RECENT = 5
"""Rows at the end that a judgement looks at."""
IN_A_ROW = 3
"""Iterations after which it is no chance that nothing is learned, and over which a rate of success is a mean."""
FALL = 0.3
"""A rate of success that is so much below its best has collapsed."""
EVALUATIONS = 2
"""Of which held-out success is a mean: a single greedy one swings by itself."""
FEW = 16
"""Held-out episodes that are too few to see a collapse in."""
STILL = 5
"""Held-out evaluations of one and the same success, after which it is no chance that it does not change."""


class Advice(NamedTuple):
    """One thing to know about a run."""

    level: Literal["bad", "warn", "note"]
    metric: str  # the curve to look at
    title: str  # the same for every run
    text: str


class Rejected(NamedTuple):
    """An answer of the model that held no valid action."""

    answer: str
    finish: str | None = None  # "length" where it ended at the limit of tokens
    words: Sequence[str] = ()  # that would have been actions; none where any text may be one


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Known:
    """What is known of a run beside its metrics."""

    config: Mapping[str, Any] = field(default_factory=dict)
    rejected: Rejected | None = None
    run: str = "RUN"  # how commands name its folder

    def setting(self, name: str) -> Any:
        """The value of a dotted name in the config; None where it is not known."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


Rule = Callable[[Rows, Known], Iterator[Advice]]


def advise(
    rows: Rows,
    config: Mapping[str, Any] | None = None,
    rejected: Rejected | None = None,
    run: str = "RUN",
) -> list[Advice]:
    """All that is striking in the rows of a run, the worst first, and a cause before what follows from it.

    Args:
        rows: of `metrics.jsonl`.
        config: of the run, for limits and settings that rows do not hold.
        rejected: a recent answer without a valid action, to show.
        run: the run folder as commands name it.
    """
    known = Known(config or {}, rejected, run)
    found: dict[str, Advice] = {}
    for rule in _RULES:
        for advice in rule(rows, known):
            found.setdefault(advice.title, advice)
    return sorted(found.values(), key=lambda advice: ("bad", "warn", "note").index(advice.level))


def _values(rows: Rows, name: str) -> list[float]:
    found = [row.get(name) for row in rows]
    return [float(v) for v in found if is_number(v)]  # type: ignore[arg-type]


def _mean(values: Sequence[float]) -> float:
    return sum(values[-RECENT:]) / len(values[-RECENT:])


def _recent(rows: Rows, name: str, at_least: int = 1) -> float | None:
    """The mean of the last values, None if there are too few to judge."""
    values = _values(rows, name)
    return _mean(values) if len(values) >= at_least else None


def _all_zero(rows: Rows, name: str) -> bool:
    """Whether the last values, enough to judge by, are all 0."""
    last = _values(rows, name)[-IN_A_ROW:]
    return len(last) == IN_A_ROW and not any(last)


def _diverged(rows: Rows, known: Known) -> Iterator[Advice]:
    for name in ("loss", "policy_loss", "grad_norm", "value_loss"):
        if any(name in row and row[name] is None for row in rows[-RECENT:]):
            text = (
                f"{name} is not a finite number in the last rows. Go back to a checkpoint with a lower learning "
                "rate, or a lower limit on the gradient's norm."
            )
            yield Advice("bad", name, "Training diverged", text)
            return


def _nothing_learned(rows: Rows, known: Known) -> Iterator[Advice]:
    """Why nothing is learned: the first cause that holds, since the others follow from it."""
    for cause in (
        _blind, _no_valid_answer, _all_cut_off, _fell_silent, _no_signal, _no_gradient, _never_solved, _flat,
    ):  # fmt: skip
        for advice in cause(rows, known):
            yield advice
            return


def _prompts(known: Known) -> str:
    """All that the templates of prompts say, those of single kinds of env among them."""
    kinds = known.setting("custom_envs")
    own = [kind.get("prompt") for kind in kinds.values() if kind] if isinstance(kinds, Mapping) else []
    templates = [
        prompt for prompt in (known.setting("agent_proxy.prompt"), *own) if isinstance(prompt, Mapping)
    ]
    return "\n".join(
        str(prompt.get(part, "")) for prompt in templates for part in ("system", "first", "later")
    )


def _blind(rows: Rows, known: Known) -> Iterator[Advice]:
    said, success = _prompts(known), _recent(rows, "success", RECENT)
    if said.strip() and "{observation}" not in said and success is not None and success < 0.5:
        text = (
            "agent_proxy.prompt.first and .later hold no {observation}, so every state looks the same to the model: "
            "put {observation} into both."
        )
        yield Advice("bad", "success", "The prompt does not show the observation", text)


def _no_valid_answer(rows: Rows, known: Known) -> Iterator[Advice]:
    values = _values(rows, "valid_actions")
    if not values or (
        len(values) == 1 and values[0] > 0
    ):  # one row may be bad luck, unless there is none at all
        return
    valid = sum(values[-IN_A_ROW:]) / len(values[-IN_A_ROW:])
    if valid >= 0.2:
        return
    said = f"{valid:.0%} of the answers held a valid action."
    if known.rejected is not None:
        said += f" The model wrote {_shortened(known.rejected.answer)}; {_allowed(known.rejected.words)}."
    if max(values) > 0.5:
        remedy = (
            f"It was {max(values):.0%} before: the policy has moved too far. Lower algorithm.learning_rate, or set "
            "agent_proxy.format_penalty or algorithm.kl.coef."
        )
    else:
        remedy = " ".join(_remedies(rows, known)) or (
            "Show an answer in the prompt, or raise agent_proxy.format_penalty or warmup.steps."
        )
    yield Advice("bad", "valid_actions", "Hardly any answer is a valid action", f"{said} {remedy}")


def _remedies(rows: Rows, known: Known) -> Iterator[str]:
    """What may keep a model from valid answers, the likeliest first."""
    said, free = _prompts(known), known.rejected is not None and not known.rejected.words
    steps = known.setting("warmup.steps")
    if known.setting("engine.name") == "tiny":
        yield f"The tiny model learns the form of an answer in the warm-up alone: raise warmup.steps, which is {steps}."
    else:
        if said.strip() and "{actions}" not in said and not free:
            yield "The prompt does not name the actions: put {actions} into agent_proxy.prompt.first and .later."
        if steps == 0:
            yield "There was no warm-up on valid answers: set warmup.steps=20."
    if at_limit := _at_limit(rows, known):
        yield at_limit


def _at_limit(rows: Rows, known: Known) -> str:
    """What to do about answers that end at the limit of tokens; empty where they do not."""
    limit = known.setting("agent_proxy.max_tokens")
    tokens, turns = _recent(rows, "response_tokens"), _recent(rows, "turns")
    if not isinstance(limit, int) or not tokens or not turns or tokens / turns <= 0.9 * limit:
        return ""
    if known.rejected is not None and known.rejected.finish != "length":
        return ""
    said = f"Answers have {tokens / turns:.3g} tokens on average, and the limit is {limit}:"
    closing = known.setting("agent_proxy.prompt.closing")
    if known.setting("engine.name") == "tiny" and not closing:
        return ""  # the limit is as long as one answer, and what knows no form of answers fills it
    if limit == 1 and closing:
        return ""  # which leaves room for one action and no more
    if closing:
        return (
            f"{said} agent_proxy.prompt.closing is added wherever an answer ends, and the model fills the limit before "
            "it. Lower agent_proxy.max_tokens to the tokens of one action, or use another closing."
        )
    return f"{said} raise agent_proxy.max_tokens."


def _shortened(answer: str) -> str:
    """An answer in quotes, on one line, without characters that command a terminal."""
    return repr(answer if len(answer) <= 80 else f"{answer[:60]}…{answer[-19:]}")


def _allowed(words: Sequence[str]) -> str:
    if not words:
        return "the environment takes free text, and did not understand this"
    more = f", and {len(words) - 12} more" if len(words) > 12 else ""
    return f"allowed: {', '.join(words[:12])}{more}"


def _teaches_form(row: Mapping[str, Any]) -> bool:
    """Whether groups that differ by the format penalty alone were learned from, which a filter of groups prevents."""
    return bool(row.get("groups_shaping_only")) and row.get("groups_trained") != 0


def _compares_within_groups(rows: Rows, known: Known) -> bool:
    """Whether groups of equal reward teach nothing; not of an estimator that is not known here."""
    if known.setting("agent_proxy.reward_normalization.grouping") not in (None, "state"):
        return False
    name = known.setting("algorithm.adv_estimator") or "grpo"
    return name in ESTIMATORS and ESTIMATORS[name].grouped and not _values(rows, "value_loss")


def _no_signal(rows: Rows, known: Known) -> Iterator[Advice]:
    signal = _recent(rows, "groups_with_signal", 2)
    if signal is None:
        return
    solved = _recent(rows, "groups_all_solved", 2) or 0.0
    unsolved = _recent(rows, "groups_none_solved", 2) or 0.0
    if signal < 0.2 and solved > 0.7:
        text = (
            f"{solved:.0%} of the groups are solved by all of their members, so nothing is left to learn from. Stop "
            "here, or make the task harder."
        )
        yield Advice("note", "groups_all_solved", "The task is solved", text)
        return
    if not _compares_within_groups(rows, known):
        return
    size = known.setting("es_manager.train.group_size")
    remedy = (
        f"Use larger groups (es_manager.train.group_size{f' is {size}' if size else ''}), a higher "
        "agent_proxy.temperature, an easier task to begin with, or a reward for partial success."
    )
    played = [row for row in rows if is_number(row.get("groups_with_signal"))]
    idle = [row for row in played if not row["groups_with_signal"] and not _teaches_form(row)]
    now = played[-IN_A_ROW:] == idle[-IN_A_ROW:] and len(idle) >= IN_A_ROW
    mostly = (
        len(played) >= 2 * RECENT and 2 * len(idle) > len(played) and (_recent(rows, "success") or 0.0) < 0.5
    )
    why = "no member solved the task" if unsolved >= solved else "all members solved it"
    if now or mostly:
        text = (
            f"In {len(idle)} of {len(played)} iterations all members of each group got the same reward, so nothing was "
            f"learned of the task; of late in {max(solved, unsolved):.0%} of the groups {why}. {remedy}"
        )
        yield Advice("bad", "groups_with_signal", "Groups have equal rewards", text)
    elif signal < 0.2:
        text = (
            f"Only {signal:.0%} of the groups have members with different rewards, and the others teach nothing; in "
            f"{max(solved, unsolved):.0%} of all groups {why}. {remedy}"
        )
        yield Advice("warn", "groups_with_signal", "Few groups have different rewards", text)


def _all_cut_off(rows: Rows, known: Known) -> Iterator[Advice]:
    """All episodes end at the limit of turns, and none ever succeeded: success may lie behind it."""
    cut, success = _values(rows, "truncated"), _values(rows, "success")
    solved = any(success) or any(_values(rows, "heldout_success"))
    if len(success) < RECENT or solved or not cut or min(cut[-RECENT:]) < 1:
        return
    limit, turns = known.setting("agent_proxy.max_turn"), _recent(rows, "turns")
    ends = isinstance(limit, int) and turns is not None and turns >= limit
    remedy = (
        f"If the task takes more turns than agent_proxy.max_turn={limit}, raise that."
        if ends
        else "If the task takes more, raise the limit: max_steps of the env, max_actions_per_traj of custom_envs or "
        "agent_proxy.max_turn, whichever is smallest."
    )
    text = (
        f"All episodes of the last {RECENT} iterations end at a limit of turns, and none has succeeded in any "
        f"iteration. {remedy} Otherwise pay something for progress."
    )
    yield Advice("bad", "truncated", "Every episode is cut off", text)


def _mostly_cut_off(rows: Rows, known: Known) -> Iterator[Advice]:
    share = _recent(rows, "truncated")
    if share is not None and share > 0.5 and not any(_all_cut_off(rows, known)):
        text = (
            f"{share:.0%} end at a limit of turns or steps, not by the task. Raise the limit, or pay something for "
            "progress."
        )
        yield Advice("warn", "truncated", "Most episodes are cut off", text)


def _no_gradient(rows: Rows, known: Known) -> Iterator[Advice]:
    if _all_zero(rows, "grad_norm"):
        text = (
            f"grad_norm is 0 in the last {IN_A_ROW} iterations: advantages and penalties of all tokens are 0, and the "
            "weights stay as they are. Look at groups_with_signal and at algorithm.adv_estimator."
        )
        yield Advice("bad", "grad_norm", "The gradient is zero", text)


def _never_solved(rows: Rows, known: Known) -> Iterator[Advice]:
    success, reward = _values(rows, "success"), _values(rows, "reward")
    if len(success) < 2 * RECENT or any(success) or any(_values(rows, "heldout_success")):
        return
    if len(reward) >= 2 * RECENT and _mean(reward) > sum(reward[:RECENT]) / RECENT:
        return  # it gets nearer
    text = (
        f"Success is 0 in all {len(success)} iterations, and the reward does not rise. Begin with an easier task, pay "
        "for partial success, or warm the model up on an expert (warmup.expert)."
    )
    yield Advice("bad", "success", "Nothing is ever solved", text)


def _changes(values: Sequence[float]) -> list[float]:
    """By how much each later quarter differs from the first; 0 where that may be chance, nothing of a short run."""
    size = len(values) // 4
    if size < RECENT:
        return []
    first, *others = [values[at * size : (at + 1) * size] for at in range(4)]
    chances = [2 * math.sqrt((variance(first) + variance(other)) / size) for other in others]
    steps = [mean(other) - mean(first) for other in others]
    return [step if abs(step) > chance else 0.0 for step, chance in zip(steps, chances, strict=True)]


def _flat(rows: Rows, known: Known) -> Iterator[Advice]:
    """Success did not change between the quarters of a run by more than chance, and the reward did not rise."""
    name = "success" if _values(rows, "success") else "reward"
    values = _values(rows, name)
    if len(values) < 4 * RECENT or (name == "success" and _mean(values) > 0.9):
        return
    reward = _changes(_values(rows, "reward"))
    if any(_changes(values)) or max(reward, default=0.0) > 0:
        return
    size = len(values) // 4
    first, last = mean(values[:size]), mean(values[3 * size : 4 * size])
    kl = "approx_kl" if _values(rows, "approx_kl") else "kl_to_rollout"
    steps = _recent(rows, "gradient_steps") or _recent(rows, "n_minibatches")
    moved = None if steps == 1 else _recent(rows, kl)  # measured before the step, so of a single one it is 0
    rate = _recent(rows, "learning_rate")
    used = "" if rate is None else f" (it is {rate:.2g})"
    if moved is not None and moved < 1e-4:
        remedy = (
            f"The policy hardly moves ({kl} is {moved:.1g} an update; 0.01 is usual): raise the learning rate"
            f"{used} tenfold, or take more gradient steps an update."
        )
    else:
        remedy = (
            f"The policy moves, but not towards it. Read some episodes (shoal view {known.run}): is there anything in "
            "what the agent sees from which the right action follows, and is it paid soon after? Then begin with an "
            f"easier task, take more episodes an update, or change the learning rate{used}."
        )
    text = (
        f"{name} was {first:.3g} in the first quarter of {len(values)} rows and is {last:.3g} in the "
        f"last, no more than chance apart. {remedy}"
    )
    yield Advice("warn", name, "Nothing has been learned so far", text)


def _rewarded_without_success(rows: Rows, known: Known) -> Iterator[Advice]:
    success, reward = _values(rows, "success"), _values(rows, "reward")
    if min(len(success), len(reward)) < 2 * RECENT:
        return
    solved, paid = _mean(success[:RECENT]), _mean(reward[:RECENT])
    solves, pays = _mean(success), _mean(reward)
    if pays > paid and solves < solved / 2:
        text = (
            f"The reward rose from {paid:.3g} to {pays:.3g} while success fell from {solved:.2f} to {solves:.2f}: the "
            "reward pays for something other than solving the task. A penalty for a move that the task needs has this "
            "effect, as has a reward for waiting. Pay for progress, or for success alone."
        )
        yield Advice("warn", "reward", "The reward rises while success falls", text)


def _collapsed(rows: Rows, known: Known) -> Iterator[Advice]:
    held_out = known.setting("es_manager.val.env_groups"), known.setting("es_manager.val.group_size")
    few = all(isinstance(count, int) for count in held_out) and held_out[0] * held_out[1] < FEW
    for name, span in (("success", IN_A_ROW), *([] if few else [("heldout_success", EVALUATIONS)])):
        found = [row for row in rows if is_number(row.get(name)) and "iteration" in row]
        means = [
            sum(row[name] for row in found[end - span : end]) / span for end in range(span, len(found) + 1)
        ]
        if not means or means[-1] >= max(means) - FALL:
            continue
        best, at = max(means), means.index(max(means)) + span
        fell = next((row for row in found[at:] if row[name] < best - FALL), found[-1])
        text = (
            f"{name} fell from {best:.2f} to {means[-1]:.2f}; it was first that low at iteration {fell['iteration']}. "
            f"{_best_checkpoint(rows, known.run)}Begin anew with a lower algorithm.learning_rate, or hold the policy "
            "with algorithm.kl.coef."
        )
        yield Advice("bad", name, "Success collapsed", text)
        return


def _best_checkpoint(rows: Rows, run: str) -> str:
    held_out = [row for row in rows if is_number(row.get("heldout_success"))]
    if not held_out:
        return ""
    best = max(held_out, key=lambda row: row["heldout_success"])  # the first of several
    return (
        f"The best checkpoint is that of iteration {best['iteration']} (held-out success "
        f"{best['heldout_success']:.2f}): shoal eval {run} --checkpoint best, "
        f"shoal export {run} OUT --checkpoint best. "
    )


def _fell_silent(rows: Rows, known: Known) -> Iterator[Advice]:
    """A collapse of the entropy, where groups differed before it: that of the rewards follows from it."""
    signal = _values(rows, "groups_with_signal")[:RECENT]
    if signal and mean(signal) >= 0.2:
        yield from _entropy_collapsed(rows, known)


def _entropy_collapsed(rows: Rows, known: Known) -> Iterator[Advice]:
    """The policy is sure of what it does, and that is not what solves the task."""
    values = _values(rows, "entropy")
    if len(values) < 3 or values[0] <= 0:
        return
    first, now, success = values[0], _mean(values), _recent(rows, "success")
    small = now < 0.1 * first and (success is None or success < 0.9)
    if small or (now < first / 3 and len(values) >= 2 * RECENT and not _gained(rows)):
        rate = "" if success is None else f" while success is {success:.0%}"
        text = (
            f"It fell from {first:.3g} to {now:.3g} nats a token{rate}: the policy hardly tries anything new. "
            f"{_against_collapse(rows, known)}"
        )
        yield Advice("bad", "entropy", "Entropy has collapsed", text)


def _gained(rows: Rows) -> bool:
    """Whether success or reward is higher in the last rows than in the first, be it by chance."""
    gains = [(values[:RECENT], values) for name in ("success", "reward") if (values := _values(rows, name))]
    return any(_mean(values) > mean(first) for first, values in gains)


def _against_collapse(rows: Rows, known: Known) -> str:
    """What can act here: an entropy bonus for a small vocabulary, wider clipping for several steps an update."""
    if _values(rows, "n_minibatches"):  # PPO
        return "Lower the learning rate, or raise entropy_coef."
    rate, held = known.setting("algorithm.learning_rate"), known.setting("algorithm.kl.coef")
    advice = "Lower algorithm.learning_rate" + ("" if rate is None else f" (it is {rate:.2g})")
    advice += ", or hold the policy with a higher algorithm.kl.coef" + (
        "" if held is None else f" (it is {held:.2g})"
    )
    if known.setting("engine.name") in (None, "tiny"):
        advice += ", or raise algorithm.entropy_coef"
    if (_recent(rows, "gradient_steps") or 0) > 1:
        advice += ", or raise algorithm.clip_ratio_high"
    return f"{advice}."


def _entropy_grows(rows: Rows, known: Known) -> Iterator[Advice]:
    values = _values(rows, "entropy")
    if len(values) >= RECENT and values[0] > 0 and _mean(values) > 2 * values[0]:
        text = (
            f"It rose from {values[0]:.3g} to {_mean(values):.3g} nats: the policy becomes more random. Lower "
            "entropy_coef, or look whether rewards are noise."
        )
        yield Advice("warn", "entropy", "Entropy grows", text)


def _some_invalid(rows: Rows, known: Known) -> Iterator[Advice]:
    valid = _recent(rows, "valid_actions")
    if valid is None or not 0.2 <= valid < 0.9:
        return
    if at_limit := _at_limit(rows, known):
        yield Advice("warn", "response_tokens", "Answers end at the limit of tokens", at_limit)
    elif valid < 0.5:
        text = (
            f"Only {valid:.0%} of the turns hold an action that the environment understood. Warm the model up on the "
            "format, show an example in the prompt, or set a format penalty."
        )
        yield Advice("warn", "valid_actions", "Few valid actions", text)


def _mismatch(rows: Rows, known: Known) -> Iterator[Advice]:
    gap = max(_values(rows, "logprob_gap_max")[-RECENT:], default=0.0)
    if gap > 0.5:
        text = (
            f"The log-probability of one token differs by up to {gap:.3g} before the first gradient step. Use the same "
            "precision in both, or algorithm.rollout_correction."
        )
        yield Advice("bad" if gap > 2 else "warn", "logprob_gap_max", "Trainer and engine disagree", text)


def _failures(rows: Rows, known: Known) -> Iterator[Advice]:
    failed, episodes = sum(_values(rows, "failed_episodes")), _values(rows, "episodes")
    if failed and episodes:
        text = (
            f"{failed:.0f} of {episodes[-1]:.0f} training episodes failed, by an error of the environment, the "
            "engine or a reward. They are left out, so success is that of the others. Their causes: "
            f"shoal view {known.run}, Episodes."
        )
        yield Advice("bad", "failed_episodes", "Episodes failed", text)
    if deaths := sum(_values(rows, "worker_deaths")):
        text = f"{deaths:.0f} so far; their episodes were played again."
        yield Advice("note", "worker_deaths", "Workers were lost", text)


def _values_unexplained(rows: Rows, known: Known) -> Iterator[Advice]:
    explained = _values(rows, "explained_variance")
    if len(explained) >= 10 and _mean(explained) < 0:
        text = (
            "explained_variance is below zero: predicting the mean would be better. Normalise rewards or observations, "
            "or raise vf_coef."
        )
        yield Advice("warn", "explained_variance", "The value function explains nothing", text)


def _generalisation(rows: Rows, known: Known) -> Iterator[Advice]:
    trained, held_out = _recent(rows, "success"), _values(rows, "heldout_success")
    if trained is not None and len(held_out) > 1 and trained - held_out[-1] > 0.25:
        text = f"Success is {trained:.0%} in training and {held_out[-1]:.0%} held out. "
        text += "Train on more different start states."
        yield Advice("warn", "heldout_success", "Held-out episodes lag behind", text)


def _stands_still(rows: Rows, known: Known) -> Iterator[Advice]:
    """The same held-out success again and again, as where some start states cannot be solved."""
    values = _values(rows, "heldout_success")
    last = values[-1] if values else 0.0
    same = list(itertools.takewhile(lambda value: value == last, reversed(values)))
    if len(same) < STILL or not 0.5 <= last < 1:
        return
    wanted = known.setting("trainer.stop_at_success")
    waits = wanted is not None and last < wanted
    awaited = f" The run waits for {wanted:g} (trainer.stop_at_success)." if waits else ""
    text = (
        f"Held-out success was {last:.2f} in each of the last {len(same)} evaluations: it may be the same episodes "
        f"that fail, and such as cannot be solved. shoal show {known.run} --worst shows one.{awaited}"
    )
    yield Advice("bad" if waits else "note", "heldout_success", "Held-out success stands still", text)


def _beyond(metric: str, limit: float, title: str, text: str, *, at_least: int = 1) -> Rule:
    """A rule about a metric whose last values are above a limit on average."""

    def rule(rows: Rows, known: Known) -> Iterator[Advice]:
        value = _recent(rows, metric, at_least)
        if value is not None and value > limit:
            yield Advice("warn", metric, title, text.format(value))

    return rule


_RULES: tuple[Rule, ...] = (
    _diverged,
    _nothing_learned,
    _rewarded_without_success,
    _collapsed,
    _entropy_collapsed,
    _entropy_grows,
    _mostly_cut_off,
    _some_invalid,
    _mismatch,
    _beyond(
        "share_idle", 0.4, "The engine is idle",
        "In {:.0%} of the time neither the engine nor the update computes: environments are waited for. Play more "
        "episodes at once, or use_parallel_rollout with more workers.",
        at_least=2,
    ),
    _failures,
    _beyond(
        "tool_errors", 0.5, "Calls of tools fail",
        "{:.0%} of the calls of tools are answered by an error: a tool raises, or the model writes calls that do not "
        "fit. The errors stand in the episodes.",
    ),
    _beyond(
        "program_errors", 0.5, "Programs raise",
        "{:.0%} of the episodes end with an exception of your program, with the reward on_error. Is that the model's "
        "doing, or a mistake in the program? The exceptions stand in the episodes.",
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
    _stands_still,
)  # fmt: skip
