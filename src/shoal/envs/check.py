"""Play an env and say which promise it breaks: `shoal envs check`, `check_text_env`, and a short check before training.

The commands play it in a process of its own, where it may exit or hang. A fault is one message with the class, the
method and the line.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, Text

from shoal.core.errors import (
    MOST_FRAMES,
    ConfigError,
    EnvError,
    ShoalError,
    format_error,
    frames_of,
    in_one_line,
    of_the_user,
    place_of,
)
from shoal.core.workers import WorkerProcess, describe_exit, dumps
from shoal.envs.adapters.gymnasium import are_messages
from shoal.envs.catalogue import BUILT_IN, EnvFn, Source, env_class, name_of, resolve_text
from shoal.envs.program import ProgramEnv
from shoal.envs.spaces import free_text, why_not_in
from shoal.envs.text import MOST_SECONDS, TextEnv

Env = gymnasium.Env[Any, Any]
MOST_STEPS = 300
"""Steps after which an episode that is played at random may go on for ever."""
INVALID_EPISODES = 5
"""Episodes in which every action is invalid."""
QUICK_SECONDS = 10.0
"""After which `quick_check` begins nothing more."""
MAKING_SECONDS = 600.0
"""That making an env may take: it may load data or a model."""
WHOLE = -1


@contextlib.contextmanager
def blaming(name: str) -> Iterator[None]:
    """What an env raises while it is made or tried becomes an `EnvError` that names it."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # an env may raise whatever it likes
        raise EnvError(f"{name} failed when it was tried: {type(error).__name__}: {error}") from error


def expect(holds: Any, promise: str) -> None:
    """Raise an `AssertionError` that states the promise unless it holds."""
    if not holds:
        raise AssertionError(promise)


# --- what is called from elsewhere
def check_text_env(make: Callable[[], TextEnv[Any]], *, seeds: Iterable[int] = range(5)) -> None:
    """Play a text env and compare what it does with what `TextEnv` promises.

    Args:
        make: makes a fresh env each time it is called; a class without needed arguments will do.
        seeds: episodes to play.

    Raises:
        AssertionError: says which promise broke, and where. What the env itself raises is raised on.
    """
    at = Place()
    try:
        _play(make, list(seeds), at)
    except (AssertionError, EnvError) as error:
        if frames_of(error):
            raise
        raise AssertionError(at.message(error)) from error


def quick_check(
    env_type: Source, env_config: Mapping[str, Any] | None = None, *, seeds: int = 8, seconds: float = 60.0
) -> None:
    """Play a few episodes in a process of their own, so that a fault of an env shows before anything else begins.

    It takes at most about ten seconds, unless a single call of the env takes longer; shoal's own envs take none. Of a
    program, which plays by itself, only the tasks are read.

    Args:
        env_type: as in `custom_envs`.
        env_config: its settings.
        seeds: episodes to play.
        seconds: that one call of the env may take.

    Raises:
        EnvError: one message with the class, the method, file and line.
        ConfigError: the env cannot be made with these settings.
    """
    if env_type in BUILT_IN:
        return
    if env_type == "program":
        ProgramEnv(**(env_config or {})).task(0)
        return
    job = Job(resolve_text(env_type, env_config), name_of(env_type), seeds, quick=True)
    report = run_apart(job, seconds)
    if report.broken:
        raise EnvError(report.broken)


@dataclass(frozen=True)
class Job:
    """What is to be played."""

    make: EnvFn
    name: str
    seeds: int
    quick: bool = False
    wrapped: bool = False


@dataclass
class Report:
    """What came of it: lines about what was tried, and the fault if there is one."""

    lines: list[str] = field(default_factory=list)
    broken: str = ""


# --- the process beside
def run_apart(job: Job, seconds: float) -> Report:
    """Play in a process of its own; one call of the env may take so many seconds.

    Raises:
        ConfigError: the env refuses its settings.
        EnvError: it cannot be made.
    """
    report, name, where, limit = Report(), job.name, "", MAKING_SECONDS
    process = WorkerProcess(_serve, (job.name, dumps(job)))
    try:
        while process.pipe.poll(limit if limit < MOST_SECONDS else None):
            kind, message = process.pipe.recv()
            if kind == "at":
                name, where, making = message
                limit = max(seconds, MAKING_SECONDS) if making else seconds
            elif kind == "line":
                report.lines.append(message)
            elif kind == "refused":
                raise message
            else:
                report.broken = message
                return report
        how, frames = f"did not return within {seconds:g} s", _where_it_hangs(process)
    except (EOFError, ConnectionError):
        process.wait()
        how = f"ended its process, which {describe_exit(process.exit_code)}"
        frames = _frames_in(process.stack())
    finally:
        process.close()
    report.broken = _ended(name, where, how, frames)
    return report


def _serve(pipe: Any, name: str, packed: bytes) -> None:
    """The child process: plays, and reports its position and results."""
    at = Place(name, pipe=pipe)
    at.goes_to(None, doing="while it was made")
    end: tuple[str, Any] = "end", ""
    try:
        _examine(pickle.loads(packed), at, lambda line: pipe.send(("line", line)))
    except BaseException as error:  # an env may raise whatever it likes
        if at.kind is not None:
            end = "end", at.message(error)
        elif isinstance(error, ShoalError):
            end = "refused", type(error)(str(error))
        else:
            end = "refused", EnvError(at.message(error))
    pipe.send(end)


def _where_it_hangs(process: WorkerProcess) -> list[traceback.FrameSummary]:
    """The user's frames in a process that does not answer; it writes them a moment after it was asked."""
    process.ask_for_stack()
    for _ in range(40):
        if (frames := _frames_in(process.stack())) or process.wait(0.05):
            return frames
    return []


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)


def _frames_in(log: str) -> list[traceback.FrameSummary]:
    """The user's frames in what `faulthandler` wrote of the thread that plays, below this module."""
    for thread in re.split(r"\n\s*\n", log):
        if __file__ in thread:
            frames = itertools.dropwhile(lambda frame: frame[0] == __file__, _FRAME.findall(thread))
            found = list(itertools.takewhile(lambda frame: frame[0] != __file__, frames))
            return of_the_user(
                [traceback.FrameSummary(file, int(line), name) for file, line, name in found[::-1]]
            )
    return []


@dataclass
class Place:
    """Where a check is: of which env, in which episode, in which step."""

    name: str = "the env"
    kind: type | None = None
    seed: int | None = None
    step: int = 0
    doing: str = ""
    pipe: Any = None
    """The position, sent from a child process."""

    def goes_to(self, seed: int | None, step: int = 0, doing: str = "") -> None:
        """Another step begins; step 0 is the reset, `WHOLE` the episode."""
        self.seed, self.step, self.doing = seed, step, doing
        if self.pipe is not None:
            self.pipe.send(("at", (self.name, str(self), seed is None)))

    def __str__(self) -> str:
        if self.seed is None:
            return self.doing
        if self.step == WHOLE:
            return f"with seed {self.seed}"
        return f"in {f'step {self.step}' if self.step else 'the reset'} of seed {self.seed}"

    def message(self, error: BaseException) -> str:
        """One message about what was raised, with the user's own lines below."""
        frames = frames_of(error)
        if not frames:
            promise = isinstance(error, AssertionError | EnvError | ConfigError)
            first, *lines = (str(error) if promise else f"{self.name}: {format_error(error)}").split("\n")
            return "\n".join([f"{first}, {self}", *lines])
        return _ended(self.name, self, f"raised {format_error(error)}", frames)


def _ended(name: str, where: object, how: str, frames: list[traceback.FrameSummary]) -> str:
    """What became of a call of the env, and the lines of the user that it was in."""
    lines = [f"  {in_one_line(frame)}" for frame in frames[-MOST_FRAMES:]]
    return "\n".join([f"{name}{f'.{frames[0].name}()' if frames else ''} {how}, {where}", *lines])


# --- what is tried
def _examine(job: Job, at: Place, emit: Callable[[str], None]) -> None:
    env = job.make()
    at.kind = type(env.unwrapped)
    at.name = at.kind.__name__
    seeds = list(range(job.seeds))
    make_text = _as_text(job, env)
    if make_text is not None:
        seen = _play(make_text, seeds, at, QUICK_SECONDS if job.quick else math.inf)
        emit(f"ok      shoal's check_text_env: {seen}")
    if job.quick:
        env.close()
        return
    masked = False
    if make_text is None:
        masked = _play_at_random(env, seeds, at, emit)
    at.goes_to(None, doing="in gymnasium's check_env")
    asked = env if job.wrapped else env.unwrapped
    _ask_gymnasium(_OnlyAllowed(asked) if masked else asked, at, emit)
    env.close()


def _as_text(job: Job, env: Env) -> Callable[[], TextEnv[Any]] | None:
    """What makes the env as agents see it; None for one of numbers, which PPO sees as it is."""
    if isinstance(env, TextEnv):
        return job.make  # type: ignore[return-value]
    space = getattr(env, "observation_space", None)
    if isinstance(space, gymnasium.Space) and not isinstance(space, Text | gymnasium.spaces.Sequence):
        return None
    return lambda: env_class("gymnasium")(id=job.name, make=job.make)


def _ask_gymnasium(env: Env, at: Place, emit: Callable[[str], None]) -> None:
    from gymnasium.utils.env_checker import check_env

    spaces = [getattr(env, name, None) for name in ("observation_space", "action_space")]
    if not all(isinstance(space, gymnasium.Space) for space in spaces):
        emit("skipped gymnasium's check_env: the env states no spaces")
        return
    if isinstance(spaces[0], Text | gymnasium.spaces.Sequence):
        seen = env.reset(seed=0)[0]
        if are_messages(seen):
            emit("skipped gymnasium's check_env: observations are chat messages")
            return
    if isinstance(spaces[0], Text):
        if free_text(spaces[0]) is not spaces[0]:
            env.observation_space = free_text(spaces[0])
            emit(
                f"  note  Text({spaces[0].max_length}) is read as FreeText: observations may hold any character",
            )
        elif isinstance(seen, str) and not spaces[0].contains(seen):
            raise AssertionError(f"{at.name}.reset() gave {seen!r:.80}, but {why_not_in(spaces[0], seen)}")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    emit("ok      gymnasium's check_env")
    for note in dict.fromkeys(re.sub(r"\x1b\[\d*m", "", str(note.message)) for note in notes):
        if not (isinstance(env, _OnlyAllowed) and "different from the unwrapped version" in note):
            emit(f"  note  {note}")


def _play_at_random(env: Env, seeds: list[int], at: Place, emit: Callable[[str], None]) -> bool:
    """Whole episodes of an env that is no text, which Gymnasium's check does not play; whether it has action masks."""
    total, masked = 0, False
    for seed in seeds:
        env.action_space.seed(seed)
        at.goes_to(seed, 0)
        _, info = env.reset(seed=seed)
        for step in range(1, MOST_STEPS + 1):
            mask = _mask(env, info, at)
            masked = masked or mask is not None
            at.goes_to(seed, step)
            _, reward, terminated, truncated, info = env.step(env.action_space.sample(mask))
            total += 1
            finite = np.isfinite(float(reward))
            expect(finite, f"{at.name}.step(): a reward must be a finite number, got {reward!r}")
            if terminated or truncated:
                break
    emit("skipped check_text_env: it is no TextEnv, so agents see it through the gymnasium adapter")
    which = "random actions that its masks allow" if masked else "random actions"
    emit(f"ok      {len(seeds)} episodes of {which}, {total} steps without a fault")
    return masked


def _mask(env: Env, info: dict[str, Any], at: Place) -> Any:
    """Which actions an env of one action allows now, as `sample` takes it; None if it has no masks."""
    mask, said = info.get("action_mask"), "info['action_mask']"
    if mask is None and hasattr(env.unwrapped, "action_masks"):
        mask, said = env.unwrapped.action_masks(), "action_masks()"
    if mask is None or not isinstance(env.action_space, Discrete):
        return None
    mask, n = np.asarray(mask), env.action_space.n
    fits = mask.shape == (n,) and bool(np.isin(mask, (0, 1)).all())
    expect(fits, f"{at.name}: {said} must be {n} values of 0 or 1, one an action, got {mask.tolist()!r:.80}")
    expect(mask.any(), f"{at.name}: {said} must allow at least one action, got {mask.tolist()!r:.80}")
    return mask.astype(np.int8)


class _OnlyAllowed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Plays an allowed action for one that the mask forbids: Gymnasium's check draws actions without masks."""

    def reset(self, **kwargs: Any) -> Any:  # by this name, which Gymnasium looks for
        observation, self._info = self.env.reset(**kwargs)
        return observation, self._info

    def step(self, action: Any) -> Any:
        mask, start = _mask(self.env, self._info, Place()), getattr(self.env.action_space, "start", 0)
        allowed = action if mask is None or mask[action - start] else start + int(mask.argmax())
        observation, reward, terminated, truncated, self._info = self.env.step(allowed)
        return observation, reward, terminated, truncated, self._info


# --- text envs
def _play(make: Callable[[], TextEnv[Any]], seeds: list[int], at: Place, seconds: float = math.inf) -> str:
    """Each seed in two envs, in one that has played before, and a few with invalid actions only; what was seen."""
    expect(seeds, "seeds must name at least one episode")
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as opened:

        def fresh() -> TextEnv[Any]:
            env = make()
            opened.callback(env.close)
            return env

        env = fresh()
        inner = getattr(env, "inner", None)  # of an adapter
        at.kind = type((inner if isinstance(inner, gymnasium.Env) else env).unwrapped)
        at.name = at.kind.__name__
        _check_declarations(env, at)
        episodes: list[list[dict[str, Any]]] = []
        success_is_known = False
        for seed in seeds:
            if episodes and time.monotonic() > until:
                break
            before = _global_state()
            first = _episode(fresh(), seed, at, until)
            if before != _global_state():
                _refuse_seed(seed, at, "the global state of random or numpy.random was changed")
            second = _episode(fresh(), seed, at, until)
            if difference := _first_difference(first, second):
                _refuse_seed(seed, at, f"two envs gave different episodes from one seed: {difference}")
            used = fresh()
            at.goes_to(seed + 1, 0)
            used.reset(seed=seed + 1)
            third = _episode(used, seed, at, until)
            if difference := _first_difference(first, third):
                at.goes_to(seed, WHOLE)
                raise AssertionError(
                    f"{at.name}: the episode before changed the episode after reset(): {difference}; set all that "
                    f"changes in {_beginning(at)[0]}"
                )
            episodes.append(first)
            success_is_known = success_is_known or getattr(used, "success_is_known", True)
            opened.close()
        for seed in seeds[:INVALID_EPISODES]:
            if time.monotonic() < until:
                _play_invalid_actions(fresh(), seed, at, until)
    solved = sum(bool(episode[-1]["info['success']"]) for episode in episodes)
    longest = max(len(shown["observation"]) for episode in episodes for shown in episode)
    steps = max(len(episode) - 1 for episode in episodes)
    seen = (
        f"{len(episodes)} episodes of at most {steps} steps, observations of at most {longest:,} characters"
    )
    notes = []
    if not any(shown.get("reward") for episode in episodes for shown in episode):
        notes.append("random actions were never rewarded: see that a reward can be reached")
    if not success_is_known:
        notes.append("nothing says when an episode is solved: put 'success' into the info of step()")
    solved_by_chance = f"; random actions solved {solved}" if success_is_known else ""
    return "\n  note  ".join([seen + solved_by_chance, *notes])


def _check_declarations(env: TextEnv[Any], at: Place) -> None:
    name = at.name
    expect(isinstance(env, TextEnv), f"{name} must be a TextEnv")
    expect(
        isinstance(getattr(env, "instructions", None), str) and env.instructions, f"{name} needs instructions"
    )
    for word in env.projection.words():
        projected = env.projection(f"<{env.projection.tags[0]}>{word}</{env.projection.tags[0]}>")
        fits = projected.valid and all(env.action_space.contains(action) for action in projected.actions)
        expect(fits, f"{name}: the word {word!r} is projected to {projected}, not into {env.action_space}")
    nothing = env.projection("")
    expect(
        not nothing.valid and nothing.actions == (env.invalid_action,),
        f"{name}: text without an action must give invalid_action {env.invalid_action!r}, got {nothing}",
    )
    closed = env.projection.lookup.values()
    expect(
        env.invalid_action not in closed,
        f"{name}: {env.invalid_action!r} means 'invalid action' and is the action of a word too. Number the actions "
        "from 1, or state another invalid_action",
    )


def _episode(env: TextEnv[Any], seed: int, at: Place, until: float = math.inf) -> list[dict[str, Any]]:
    """Everything that one episode of random words shows."""
    choose = random.Random(seed)
    env.action_space.seed(seed)  # for envs of free text, whose words are patterns
    at.goes_to(seed, 0)
    observation, info = env.reset(seed=seed)
    shown = [_shown(env, observation, info)]
    over, step = False, 0
    while not over and step < MOST_STEPS and time.monotonic() < until:
        expect(isinstance(env.observe(), str), f"{at.name}.observe() must return text")
        space = env.observation_space
        if not space.contains(observation):
            why = why_not_in(space, observation) if isinstance(space, Text) else f"that is not in {space}"
            raise AssertionError(f"{at.name}.observe() gave {observation!r:.80}, but {why}")
        expect(env.observe() == env.observe(), f"{at.name}.observe() must not change the env")
        words = [word for word in info["available_actions"] if "<" not in word]
        action = _action(env, choose.choice(words), at) if words else _free_action(env, choose)
        step += 1
        at.goes_to(seed, step)
        observation, reward, terminated, truncated, info = env.step(action)
        over = terminated or truncated
        shown.append(
            _shown(env, observation, info, reward=reward, terminated=terminated, truncated=truncated)
        )
    return shown


def _shown(env: TextEnv[Any], observation: Any, info: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a step shows, by names, without the infos of an env inside; arrays as bytes, to be compared as a whole."""
    inside = getattr(env, "inner_info", ())
    seen = observation.tobytes() if isinstance(observation, np.ndarray) else observation
    infos = {f"info[{key!r}]": value for key, value in info.items() if key not in inside}
    return {"observation": seen, **more, **infos}


def _free_action(env: TextEnv[Any], choose: random.Random) -> Any:
    """A random call of a tool, or text."""
    calls = env.random_action(np.random.default_rng(choose.getrandbits(63))) if env.calls_tools else None
    return env.action_space.sample() if calls is None else calls


def _action(env: TextEnv[Any], word: str, at: Place) -> Any:
    projected = env.projection(f"<{env.projection.tags[0]}>{word}</{env.projection.tags[0]}>")
    expect(projected.valid, f"{at.name}.available_actions() offers {word!r}, which the projection refuses")
    return projected.actions[0]


def _play_invalid_actions(env: TextEnv[Any], seed: int, at: Place, until: float) -> None:
    at.goes_to(seed, 0)
    env.reset(seed=seed)
    for step in range(1, min(env.max_steps, MOST_STEPS) + 1):
        if time.monotonic() > until:
            return
        at.goes_to(seed, step)
        _, _, terminated, truncated, _ = env.step(env.invalid_action)
        if terminated or truncated:
            return


# --- episodes that differ though their seed is one
def _first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Where two episodes differ, in words; empty if they do not, as far as both were played."""
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        for name in {**a, **b}:
            if repr(a.get(name)) != repr(b.get(name)):
                place = f"of step {step}" if step else "at reset"
                return f"{name} {place} is {a.get(name)!r:.60} or {b.get(name)!r:.60}"
    return ""


def _refuse_seed(seed: int, at: Place, problem: str) -> None:
    """Raise for a seed that does not fix its episode."""
    at.goes_to(seed, WHOLE)
    begin, generator = _beginning(at)
    start = place_of(getattr(at.kind, begin.removesuffix("()")))
    raise AssertionError(
        f"{at.name}: {problem}; draw all that is random from {generator}, and set all that changes in "
        f"{begin} ({start}): what stands in the class or module is shared by all envs"
    )


def _beginning(at: Place) -> tuple[str, str]:
    """The method in which an episode begins, and the generator that it has."""
    if at.kind is not None and issubclass(at.kind, TextEnv):
        return "_start()", "the rng that _start(self, rng) is given"
    return "reset()", "self.np_random, which super().reset(seed=seed) makes"


def _global_state() -> tuple[Any, bytes]:
    """Of the generators that no env may use."""
    return random.getstate(), pickle.dumps(np.random.get_state())
