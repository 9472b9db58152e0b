"""What the metrics of a run say about how it goes: `RULES`, whose messages name the numbers that they rest on.

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
FEW = 16
"""Held-out episodes that are too few to see a collapse in."""
HELD = 0.3
"""Coefficient of a KL penalty from which on it brings back what one update took too far."""
STILL = 10
"""Iterations without signal after which a policy that is sure of its answers has collapsed for good."""


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
class Run:
    """What is known of a run. A mean of too few rows is NaN, which is neither above nor below anything."""

    rows: Rows
    config: Mapping[str, Any] = field(default_factory=dict)
    rejected: Rejected | None = None
    name: str = "RUN"  # how commands name its folder

    def setting(self, path: str) -> Any:
        """The value of a dotted name in the config; None where it is not known."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def values(self, metric: str) -> list[float]:
        """The numbers of one metric, those of all rows that have it."""
        found = [row.get(metric) for row in self.rows]
        return [float(v) for v in found if is_number(v)]  # type: ignore[arg-type]

    def recent(self, metric: str, at_least: int = 1) -> float:
        """The mean of the last values."""
        values = self.values(metric)
        return mean(values[-RECENT:]) if len(values) >= at_least else math.nan

    def early(self, metric: str) -> float:
        """The mean of the first values, where as many came after them."""
        values = self.values(metric)
        return mean(values[:RECENT]) if len(values) >= 2 * RECENT else math.nan

    @property
    def solved(self) -> bool:
        """Whether an episode has ever succeeded."""
        return any(self.values("success") + self.values("heldout_success"))


Rule = Callable[[Run], Iterator[Advice]]


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
    known, found = Run(rows, config or {}, rejected, run), dict[str, Advice]()
    holding = itertools.chain.from_iterable(rule(known) for rule in RULES)
    for advice in sorted(holding, key=lambda advice: ("bad", "warn", "note").index(advice.level)):
        found.setdefault(advice.metric, advice)
    return list(found.values())


def has_collapsed(rows: Rows, config: Mapping[str, Any] | None = None) -> bool:
    """Whether the policy is sure of its answers, they do not solve the task, and nothing is left to learn from.

    In the last `STILL` iterations, on average: entropy below a tenth of that at the start, hardly a group with
    different rewards, and success below one half, held out too. False for estimators that do not compare within groups,
    and where no episode has ever succeeded: nothing says then that the env reports success.
    """
    played = [row for row in rows if is_number(row.get("groups_with_signal"))][-STILL:]
    run, last = Run(rows, config or {}), Run(played)
    entropy = run.values("entropy")
    if len(played) < STILL or not entropy or not run.solved or not _compares_within_groups(run):
        return False
    now = last.values("entropy") or entropy[-1:]  # groups that are filtered out have none
    solved = mean(last.values("success") or [1.0]), *last.values("heldout_success")
    sure, signal = mean(now) < 0.1 * entropy[0], mean(last.values("groups_with_signal"))
    return sure and signal < 0.05 and max(solved) < 0.5


def _diverged(run: Run) -> Iterator[Advice]:
    for name in ("loss", "policy_loss", "grad_norm", "value_loss"):
        if any(name in row and row[name] is None for row in run.rows[-RECENT:]):
            text = (
                f"{name} is not a finite number in the last rows. Go back to a checkpoint with a lower learning "
                "rate, or a lower limit on the gradient's norm."
            )
            yield Advice("bad", name, "Training diverged", text)
            return


def _nothing_learned(run: Run) -> Iterator[Advice]:
    """Why nothing is learned: the first cause that holds, since the others follow from it."""
    causes = (_blind, _invalid, _cut_off, _fell_silent, _equal_groups, _never_solved, _flat)
    yield from itertools.islice(itertools.chain.from_iterable(cause(run) for cause in causes), 1)


# --- prompts and answers
def _prompts(run: Run) -> str:
    """All that the templates of prompts say, those of single kinds of env among them."""
    kinds = run.setting("custom_envs")
    own = [kind.get("prompt") for kind in kinds.values() if kind] if isinstance(kinds, Mapping) else []
    templates = [p for p in (run.setting("agent_proxy.prompt"), *own) if isinstance(p, Mapping)]
    return "\n".join(str(p.get(part, "")) for p in templates for part in ("system", "first", "later"))


def _blind(run: Run) -> Iterator[Advice]:
    said = _prompts(run)
    if said.strip() and "{observation}" not in said and run.recent("success", RECENT) < 0.5:
        text = (
            "agent_proxy.prompt.first and .later hold no {observation}, so every state looks the same to the model: "
            "put {observation} into both."
        )
        yield Advice("bad", "success", "The prompt does not show the observation", text)


def _invalid(run: Run) -> Iterator[Advice]:
    values, at_limit, rejected = run.values("valid_actions"), _at_limit(run), run.rejected
    if not values or (len(values) == 1 and values[0] > 0):  # one row may be bad luck, unless none is valid
        return
    valid, most = mean(values[-IN_A_ROW:]), max(values)
    if valid >= (0.9 if at_limit else 0.5):
        return
    text = f"{valid:.0%} of the answers held a valid action."
    if rejected is not None:
        answer = (
            rejected.answer
            if len(rejected.answer) <= 80
            else f"{rejected.answer[:60]}…{rejected.answer[-19:]}"
        )
        text += f" The model wrote {answer!r}; {_allowed(rejected.words)}."  # as repr it commands no terminal
    if most > 0.5 and not at_limit:
        text += (
            f" It was {most:.0%} before: the policy has moved too far. Lower algorithm.learning_rate, or set "
            "agent_proxy.format_penalty or algorithm.kl.coef."
        )
    else:
        form = "Show an answer in the prompt, or raise agent_proxy.format_penalty or warmup.steps."
        text += f" {' '.join([*_of_the_form(run), *filter(None, [at_limit])]) or form}"
    if valid < 0.2:
        yield Advice("bad", "valid_actions", "Hardly any answer is a valid action", text)
    else:
        yield Advice("warn", "valid_actions", "Few valid actions", text)


def _of_the_form(run: Run) -> Iterator[str]:
    """What may keep a model from the form of an answer, the likeliest first."""
    said, free = _prompts(run), run.rejected is not None and not run.rejected.words
    steps = run.setting("warmup.steps")
    if run.setting("engine.name") == "tiny":
        yield f"The tiny model learns the form of an answer in the warm-up alone: raise warmup.steps, which is {steps}."
        return
    if said.strip() and "{actions}" not in said and not free:
        yield "The prompt does not name the actions: put {actions} into agent_proxy.prompt.first and .later."
    if steps == 0:
        yield "There was no warm-up on valid answers: set warmup.steps=20."


def _at_limit(run: Run) -> str:
    """What to do about answers that end at the limit of tokens; empty where they do not."""
    limit, closing = run.setting("agent_proxy.max_tokens"), run.setting("agent_proxy.prompt.closing")
    tokens = run.recent("response_tokens") / (run.recent("turns") or math.nan)
    if not isinstance(limit, int) or not tokens > 0.9 * limit:
        return ""
    if run.rejected is not None and run.rejected.finish != "length":
        return ""
    if limit == 1 if closing else run.setting("engine.name") == "tiny":
        return ""  # room for one action and no more, or for one answer whose form is not known yet
    remedy = "raise agent_proxy.max_tokens."
    if closing:
        remedy = (
            "agent_proxy.prompt.closing is added wherever an answer ends, and the model fills the limit before it. "
            "Lower agent_proxy.max_tokens if the longest action takes fewer tokens, or use another closing."
        )
    return f"Answers have {tokens:.3g} tokens on average, and the limit is {limit}: {remedy}"


def _allowed(words: Sequence[str]) -> str:
    if not words:
        return "the environment takes free text, and did not understand this"
    more = f", and {len(words) - 12} more" if len(words) > 12 else ""
    return f"allowed: {', '.join(words[:12])}{more}"


# --- groups, entropy, success
def _compares_within_groups(run: Run) -> bool:
    """Whether groups of equal reward teach nothing; not of an estimator that is not known here."""
    name = run.setting("algorithm.adv_estimator")
    grouped = name is None or (name in ESTIMATORS and ESTIMATORS[name].grouped)
    return grouped and run.setting("agent_proxy.reward_normalization.grouping") in (None, "state")


def _equal_groups(run: Run) -> Iterator[Advice]:
    played = [row for row in run.rows if is_number(row.get("groups_with_signal"))]
    solved, unsolved = (mean(run.values(f"groups_{of}_solved")[-RECENT:] or [0.0]) for of in ("all", "none"))
    if not _compares_within_groups(run) or solved > 0.7:  # then nothing is left to learn
        return
    # groups that differ by the format alone teach the format, where no filter leaves them out
    idle = [
        row for row in played
        if not row["groups_with_signal"] and not (row.get("groups_shaping_only") and row.get("groups_trained") != 0)
    ]  # fmt: skip
    now = len(idle) >= IN_A_ROW and played[-IN_A_ROW:] == idle[-IN_A_ROW:]
    mostly = len(played) >= 2 * RECENT and 2 * len(idle) > len(played)
    if not now and not (mostly and not run.recent("success") >= 0.5):
        return
    size = run.setting("es_manager.train.group_size")
    why = "no member solved the task" if unsolved >= solved else "all members solved it"
    text = (
        f"In {len(idle)} of {len(played)} iterations all members of each group got the same reward, so nothing was "
        f"learned of the task; lately, in {max(solved, unsolved):.0%} of the groups {why}. Use larger groups "
        f"(es_manager.train.group_size{f' is {size}' if size else ''}), a higher agent_proxy.temperature, an easier "
        "task to begin with, or a reward for partial success."
    )
    yield Advice("bad", "groups_with_signal", "Groups have equal rewards", text)


def _fell_silent(run: Run) -> Iterator[Advice]:
    """A collapse of the entropy, where groups differed before it: that of the rewards follows from it."""
    signal = run.values("groups_with_signal")[:RECENT]
    if signal and mean(signal) >= 0.2:
        yield from _entropy(run)


def _entropy(run: Run) -> Iterator[Advice]:
    """The policy is sure of what it does, and that is not what solves the task."""
    values, now = run.values("entropy"), run.recent("entropy", IN_A_ROW)
    if len(values) < 2 or run.recent("success") >= 0.9:
        return
    rate = f" while success is {run.recent('success'):.0%}" if run.values("success") else ""
    gained = any(run.recent(name) > run.early(name) for name in ("success", "reward"))
    low = len(values) >= 2 * RECENT and now < values[0] / 3 and not gained
    if low or now < 0.1 * values[0]:
        text = f"It fell from {values[0]:.3g} to {now:.3g} nats a token{rate}: the policy hardly tries anything new."
        yield Advice("bad", "entropy", "Entropy has collapsed", f"{text} {_against_collapse(run)}")
    elif not _held(run, HELD) and (step := _halved(run)) and values[-1] <= values[0] / 2:
        before, after, iteration = step
        text = (
            f"The update of iteration {iteration} took it from {before:.3g} to {after:.3g} nats a token{rate}: that "
            "step was too large, and a few more leave one answer for every state."
        )
        yield Advice("bad", "entropy", "One update halved the entropy", f"{text} {_against_collapse(run)}")


def _halved(run: Run) -> tuple[float, float, Any] | None:
    """The first update that halved the entropy of the beginning and did not raise success: before, after, iteration."""
    rows = [row for row in run.rows if is_number(row.get("entropy")) and is_number(row.get("success"))]
    for one, then in itertools.pairwise(rows):
        before, after = one["entropy"], then["entropy"]
        if before >= max(2 * after, rows[0]["entropy"] / 2) and then["success"] < one["success"] + 0.1:
            return before, after, one.get("iteration")
    return None


def _against_collapse(run: Run) -> str:
    """What can act here, in the order in which it was seen to help."""
    if run.values("n_minibatches"):  # PPO
        return "Lower the learning rate, or raise entropy_coef."
    rate = run.setting("algorithm.learning_rate")
    remedies = [f"lower algorithm.learning_rate to a third{_now(rate)}", "play more groups an update"]
    if run.setting("engine.name") in (None, "tiny"):  # a fresh model has nothing to hold on to
        remedies.insert(1, "raise algorithm.entropy_coef")
    elif not _held(run, 1):
        now = _now(run.setting("algorithm.kl.coef"))
        hold = "which hold the policy the more the further it is from its start, so that it goes on trying"
        remedies.insert(0, f"set algorithm.kl.coef=0.3{now} and algorithm.kl.target=0.3, {hold}")
    text = ", or ".join(remedies)
    return f"{text[0].upper()}{text[1:]}."


def _held(run: Run, coef: float) -> bool:
    """Whether a KL penalty holds the policy as much as this, or grows until it does."""
    now = run.setting("algorithm.kl.coef")
    return is_number(now) and bool(now) and (now >= coef or is_number(run.setting("algorithm.kl.target")))


def _now(value: Any) -> str:
    return f" (it is {value:.2g})" if is_number(value) else ""


def _cut_off(run: Run) -> Iterator[Advice]:
    """All episodes end at the limit of turns, and none ever succeeded: success may lie behind it."""
    cut, limit = run.values("truncated"), run.setting("agent_proxy.max_turn")
    if len(run.values("success")) < RECENT or run.solved or not cut or min(cut[-RECENT:]) < 1:
        return
    if isinstance(limit, int) and run.recent("turns") >= limit:
        remedy = f"If the task takes more turns than agent_proxy.max_turn={limit}, raise that."
    else:
        remedy = (
            "If the task takes more, raise the limit: max_steps of the env, max_actions_per_traj of custom_envs or "
            "agent_proxy.max_turn, whichever is smallest."
        )
    text = f"All recent ones end at a limit of turns, and none has ever succeeded. {remedy} Otherwise pay for progress."
    yield Advice("bad", "truncated", "Every episode is cut off", text)


def _never_solved(run: Run) -> Iterator[Advice]:
    n = len(run.values("success"))
    if n < 2 * RECENT or run.solved or run.recent("reward") > run.early("reward"):  # then it gets nearer
        return
    text = (
        f"Success is 0 in all {n} iterations, and the reward does not rise. Begin with an easier task, pay "
        "for partial success, or warm the model up on an expert (warmup.expert)."
    )
    yield Advice("bad", "success", "Nothing is ever solved", text)


def _changed(values: Sequence[float]) -> float:
    """By how much the later rows differ from the first quarter; 0 where that may be chance, or there are few."""
    size = len(values) // 4
    first, later = values[:size], values[size:]
    if size < RECENT:
        return 0.0
    step = mean(later) - mean(first)
    return step if abs(step) > 2 * math.sqrt((variance(first) + variance(later)) / size) else 0.0


def _flat(run: Run) -> Iterator[Advice]:
    """Success did not change by more than chance, and the reward did not rise."""
    name = "success" if run.values("success") else "reward"
    values, used = run.values(name), _now(run.recent("learning_rate"))
    if len(values) < 4 * RECENT or run.recent("success") > 0.9:
        return
    if _changed(values) or _changed(run.values("reward")) > 0:
        return
    kl = "approx_kl" if run.values("approx_kl") else "kl_to_rollout"
    # measured before the step, so of a single one it is 0
    single = 1 in (run.recent("gradient_steps"), run.recent("n_minibatches"))
    if run.recent(kl) < 1e-4 and not single:
        remedy = (
            f"The policy hardly moves ({kl} is {run.recent(kl):.1g} an update; 0.01 is usual): raise the learning rate"
            f"{used} tenfold, or take more gradient steps an update."
        )
    else:
        remedy = (
            f"The policy moves, but not towards it. Read some episodes (shoal view {run.name}): does the right action "
            "follow from what the agent sees, and is it paid soon after? Then begin with an easier task, take more "
            f"episodes an update, or change the learning rate{used}."
        )
    text = f"{name} is {mean(values):.3g} in {len(values)} rows, the first and the last no more than chance apart."
    yield Advice("warn", name, "Nothing has been learned so far", f"{text} {remedy}")


def _rewarded_without_success(run: Run) -> Iterator[Advice]:
    (solved, solves), (paid, pays) = ((run.early(name), run.recent(name)) for name in ("success", "reward"))
    if pays > paid and solves < solved / 2:
        text = (
            f"The reward rose from {paid:.3g} to {pays:.3g} while success fell from {solved:.2f} to {solves:.2f}: the "
            "reward pays for something other than solving the task. A penalty for a move that the task needs has this "
            "effect, as has a reward for waiting. Pay for progress, or for success alone."
        )
        yield Advice("warn", "reward", "The reward rises while success falls", text)


def _success_fell(run: Run) -> Iterator[Advice]:
    sizes = run.setting("es_manager.val.env_groups"), run.setting("es_manager.val.group_size")
    few = all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] < FEW
    # of held-out success two make a mean: a single greedy one swings by itself
    for name, span in (("success", IN_A_ROW), *([] if few else [("heldout_success", 2)])):
        found = [row for row in run.rows if is_number(row.get(name)) and "iteration" in row]
        ends = range(span, len(found) + 1)
        means = [mean(row[name] for row in found[end - span : end]) for end in ends]
        if not means or means[-1] >= max(means) - FALL:
            continue
        best, at = max(means), means.index(max(means)) + span
        fell = next((row for row in found[at:] if row[name] < best - FALL), found[-1])
        best_one = ""
        if held_out := [row for row in run.rows if is_number(row.get("heldout_success"))]:
            top = max(held_out, key=lambda row: row["heldout_success"])  # the first of several
            best_one = (
                f"The best checkpoint is that of iteration {top['iteration']} (held-out success "
                f"{top['heldout_success']:.2f}): shoal eval {run.name} --checkpoint best, "
                f"shoal export {run.name} OUT --checkpoint best. "
            )
        text = (
            f"{name} fell from {best:.2f} to {means[-1]:.2f}; it was first that low at iteration {fell['iteration']}. "
            f"{best_one}Begin anew with a lower algorithm.learning_rate, or hold the policy with algorithm.kl.coef."
        )
        yield Advice("bad", name, "Success collapsed", text)
        return


def _generalisation(run: Run) -> Iterator[Advice]:
    trained, held_out = run.recent("success"), run.values("heldout_success")
    if len(held_out) > 1 and trained - held_out[-1] > 0.25:
        text = f"Success is {trained:.0%} in training and {held_out[-1]:.0%} held out. "
        text += "Train on more different start states."
        yield Advice("warn", "heldout_success", "Held-out episodes lag behind", text)


def _stands_still(run: Run) -> Iterator[Advice]:
    """The same held-out success again and again, as where some start states cannot be solved."""
    values = run.values("heldout_success")
    last = values[-1] if values else 0.0
    same = list(itertools.takewhile(lambda value: value == last, reversed(values)))
    if len(same) < RECENT or not 0.5 <= last < 1:
        return
    wanted = run.setting("trainer.stop_at_success")
    waits = wanted is not None and last < wanted
    awaited = f" The run waits for {wanted:g} (trainer.stop_at_success)." if waits else ""
    text = (
        f"Held-out success was {last:.2f} in each of the last {len(same)} evaluations: it may be the same episodes "
        f"that fail, and such as cannot be solved. shoal show {run.name} --worst shows one.{awaited}"
    )
    yield Advice("bad" if waits else "note", "heldout_success", "Held-out success stands still", text)


def _failures(run: Run) -> Iterator[Advice]:
    failed, episodes = sum(run.values("failed_episodes")), run.values("episodes")
    if failed and episodes:
        text = (
            f"{failed:.0f} of {episodes[-1]:.0f} training episodes failed, by an error of the environment, the "
            "engine or a reward. They are left out, so success is that of the others. Their causes: "
            f"shoal view {run.name}, Episodes. Mend these first: they may be the cause of whatever else is told here."
        )
        yield Advice("bad", "failed_episodes", "Episodes failed", text)


def _entropy_grows(run: Run) -> Iterator[Advice]:
    values = run.values("entropy")
    if len(values) >= RECENT and values[0] > 0 and mean(values[-RECENT:]) > 2 * values[0]:
        text = (
            f"It rose from {values[0]:.3g} to {mean(values[-RECENT:]):.3g} nats: the policy becomes more random. Lower "
            "entropy_coef, or look whether rewards are noise."
        )
        yield Advice("warn", "entropy", "Entropy grows", text)


LIMITS = (
    ("truncated", 0.5, "Most episodes are cut off",
     "{:.0%} end at a limit of turns or steps, not by the task. Raise the limit, or pay something for progress."),
    ("overlong_episodes", 0.5, "Most episodes are left out",
     "{:.0%} hold an answer that was cut off, and algorithm.overlong_filter learns nothing from these. Raise "
     "agent_proxy.max_tokens, or set the filter to false."),
    ("logprob_gap_max", 0.5, "Trainer and engine disagree",
     "The log-probability of one token differs by up to {:.3g} before the first gradient step. Use the same precision "
     "in both, or algorithm.rollout_correction."),
    ("tool_errors", 0.5, "Calls of tools fail",
     "{:.0%} of the calls of tools are answered by an error: a tool raises, or the model writes calls that do not fit. "
     "The errors stand in the episodes."),
    ("program_errors", 0.5, "Programs raise",
     "{:.0%} of the episodes end with an exception of your program, with the reward on_error. The exceptions stand in "
     "the episodes."),
    ("clip_fraction", 0.4, "Steps are too large",
     "{:.0%} of the samples are clipped. Lower the learning rate or the number of epochs."),
    ("approx_kl", 0.1, "The policy moves fast",
     "approx_kl is {:.3g} an update; 0.01 to 0.05 is usual. Lower the learning rate, or set target_kl."),
)  # fmt: skip
"""Metrics whose mean over the last rows is too high above these."""


def _beyond(run: Run) -> Iterator[Advice]:
    for metric, limit, title, text in LIMITS:
        if metric == "logprob_gap_max" and run.setting("trainer.lag"):
            continue  # the engine has older weights
        if (value := run.recent(metric, IN_A_ROW)) > limit:
            yield Advice("warn", metric, title, text.format(value))


RULES: tuple[Rule, ...] = (
    _failures, _diverged, _nothing_learned, _rewarded_without_success, _success_fell, _entropy, _entropy_grows, _beyond,
    _generalisation, _stands_still,
)  # fmt: skip
"""Of the advice about one metric the worst is given, or the first that is as bad."""
