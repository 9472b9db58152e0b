"""A recorded episode again, in a plain loop in this process, checked token for token and answer for answer.

Its tokens are sampled again where the weights that wrote them are there, and replayed where they are not (a server's,
a checkpoint that is gone): then prompts, env answers and rewards are what is compared.
"""

from __future__ import annotations

import difflib
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.data import ToolUse, Trajectory, read_trajectories
from shoal.core.errors import ConfigError, DataError, EngineError
from shoal.core.executors import Closing
from shoal.core.seeding import derive_seed
from shoal.envs.actions import ToolCall
from shoal.envs.catalogue import resolve_text
from shoal.envs.text import TextEnv
from shoal.rollout.episode import Episode, EpisodeId, Role
from shoal.rollout.factory import make_roles, words_of
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.tools.chat import ToolChat
from shoal.rollout.tools.toolbox import recorded_tools
from shoal.samplers.asking import generate
from shoal.samplers.sampler import ChatTokenizer, Completion, Request
from shoal.train.records.compare import Difference, difference_of, same_turn, with_calls
from shoal.train.records.read import Recording, agent_config_of, recordings_of

Step = Callable[[int, Any, int | str], tuple[Any, Any, Any, Any, Any]]
"""`(turn from 1, env, action) -> what env.step gives`: how a step is made, a debugger's for one."""
OF_ITS_END = ("status", "error", "truncated", "terminated", "ended", "last", "the number of turns")
"""In these a failed episode may differ from its replay: what ended it was no part of it."""


@dataclass(frozen=True)
class Found:
    """An episode of a run."""

    run: Path
    recording: Recording
    number: int  # in its file, from 0
    trajectory: Trajectory

    @property
    def name(self) -> str:
        """How the command line calls it."""
        return f"{self.recording.name}:{self.number}"


@dataclass(frozen=True)
class Replayed:
    """What came of playing an episode again."""

    trajectory: Trajectory
    difference: Difference | None
    """Where it first differs from the record; None if nowhere, or if it was forked."""
    source: str
    """Where its tokens came from, in words."""


def find_episode(run: Path, name: str = "") -> Found:
    """An episode by its name.

    Args:
        run: a run folder.
        name: `FILE:N`, the N-th episode (from 0) of `trajectories/FILE.jsonl`; `N` alone of the newest held-out file,
            or the newest there is; `FILE` alone is its first.
    """
    if not run.is_dir():
        raise DataError(f"{run} is not a run folder; `shoal runs` lists them")
    recordings = recordings_of(run)
    if not recordings:
        raise DataError(f"{run} recorded no episodes: there is no trajectories/*.jsonl in it")
    file, _, number = name.rpartition(":") if ":" in name else ("", "", name)
    if number and not number.isdecimal():
        file, number = name, ""
    newest = [recording for recording in recordings if recording.held_out] or recordings
    chosen = newest[-1]
    if file:
        named = [recording for recording in recordings if file in (recording.name, recording.file.name)]
        if not named:
            have = ", ".join(recording.name for recording in recordings)
            raise DataError(f"{run} has no file of episodes {file!r}; there are: {have}")
        chosen = named[0]
    trajectories = list(read_trajectories(chosen.file))
    at = int(number or 0)
    if at >= len(trajectories):
        raise DataError(f"{chosen.file} has episodes 0 to {len(trajectories) - 1}, got {at}")
    return Found(run, chosen, at, trajectories[at])


class Replay(Closing):
    """Plays the episodes of a run again.

    Args:
        run: its folder, with `config.yaml`.
        sampler: what writes the tokens: "auto" the weights that wrote them if the run has them, else the record;
            "checkpoint" or "recorded" one of these; or any `Sampler`.
        device: where weights are loaded; as the run says if not given.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, run: Path, sampler: Any = "auto", device: str | None = None) -> None:
        if not (run / "config.yaml").exists():
            raise DataError(f"{run} has no config.yaml, which says what its episodes were played with")
        self.run, self.config, self.sampler = run, agent_config_of(run), sampler
        self.device = device or self.config.engine.device
        self.tools = recorded_tools(run)
        self._ending = ExitStack()
        self._loaded: dict[Path, Any] = {}

    def close(self) -> None:
        """End what was started; may be called twice."""
        self._ending.close()

    def play(
        self,
        found: Found,
        *,
        fork: tuple[int, str] | None = None,
        step: Step | None = None,
        told: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> Replayed:
        """Play an episode again, up to the first turn that differs from its record.

        Args:
            found: which.
            fork: `(turn, action)`: from this turn (from 1) on it is another episode, which begins with this action,
                an env's word or a whole response, and is then played on by the sampler.
            step: makes the steps of the env.
            told: gets the episode so far after each turn.

        Raises:
            ConfigError: a fork that nobody can play on, an action that the env does not know, or a program's episode.
        """
        record = found.trajectory.as_played  # its scores are in the record
        if self._kind(record.env)[0] == "program":
            raise ConfigError(
                f"{found.name} was played by a program, which is not played again: shoal show has its turns"
            )
        role = make_roles(self.config.custom_envs, [record.env], self.config.agent_proxy.max_turn)[record.env]
        sampler, tokenizer, source = self._source(found)
        proxy = self.config.agent_proxy
        tools = ToolChat(tokenizer, self.tools, proxy.max_tool_turns) if self.tools else None
        if fork is not None and sampler is None:
            raise ConfigError(
                f"nothing can play on after the fork, since the weights that wrote {found.name} are not in {self.run}: "
                f"pass --sampler with a run, a model or openai:MODEL"
            )
        if fork is not None and not 1 <= fork[0] <= max(1, len(record.turns)):
            raise ConfigError(f"{found.name} has turns 1 to {len(record.turns)}, got {fork[0]}")
        exact = fork is None and (sampler is None or self.sampler in ("auto", "checkpoint"))
        sampling = proxy.sampling(greedy=found.recording.held_out)
        episode = Episode(self._place(found), role, Prompter(proxy.prompt, tokenizer, tools), sampling)
        prompt = replace(proxy.prompt, **role.prompt)
        writer = _Writer(record, role, tokenizer, sampler, fork, prompt)
        env = resolve_text(*self._kind(record.env))()
        try:
            self._loop(env, episode, writer, step or _plain_step, told, record, exact=exact)
        except BdbQuit:
            raise
        except Exception as error:  # whatever an env raises now: once it did not
            if not exact:
                raise
            return Replayed(
                episode.trajectory("env_error", str(error)), _broke(record, episode, error), source
            )
        finally:
            env.close()
        again = episode.trajectory()
        if writer.forked_at is not None:
            source += f"; forked at turn {writer.forked_at}"
        return Replayed(again, self._difference(record, again) if exact else None, source)

    def _loop(
        self, env: Any, episode: Episode, writer: _Writer, step: Step, told: Callable[[Trajectory], None],
        record_of: Trajectory, *, exact: bool,
    ) -> None:  # fmt: skip
        """The plain loop: no workers, no batches, one env, and the results of tools from the record."""
        record = record_of if exact else None
        observation, info = env.reset(seed=episode.place.env_seed)
        episode.begin(observation, info)
        number = 0
        while not episode.over:
            number += 1
            request = episode.request()
            completion = writer.answer(number, request)
            if completion is None:  # the record ends here, and the env would go on
                return
            actions = episode.respond(completion)
            if episode.calls:
                episode.use(_recorded_uses(record_of, number, episode.calls))
            for action in actions:
                observation, reward, terminated, truncated, info = step(number, env, action)
                episode.observe(observation, reward, terminated, truncated, info)
                if terminated or truncated:
                    break
            episode.end_turn()
            again = episode.trajectory()
            if len(again.turns) < number:
                return
            told(again)
            if record and number <= len(record.turns) and not same_turn(again, record, number - 1):
                return

    def _difference(self, record: Trajectory, again: Trajectory) -> Difference | None:
        """Where it first differs, of what is promised: log-probabilities only by an engine that is exact to the bit."""
        level = "L2" if self.config.engine.name == "tiny" and self.device == "cpu" else "L1"
        one, other = (with_calls(episode, weights_version=0) for episode in (record, again))
        found = difference_of(one, other, tokens_only=level != "L2")
        if record.status != "ok" and found is not None and found.what in OF_ITS_END:
            return None
        return found

    def tokenizer(self) -> ChatTokenizer:
        """What reads the run's tokens."""
        kept = sorted((self.run / "checkpoints").glob("step-*"))
        own = self.run / "engine"
        folder = own if own.is_dir() else kept[-1] if kept else None
        tokenizer: ChatTokenizer = self._tokenizer() if folder is None else self.engine_of(folder).tokenizer
        return tokenizer

    # --- what an episode is made of
    def _kind(self, tag: str) -> tuple[Any, Any]:
        kinds = self.config.custom_envs
        if tag not in kinds or kinds[tag] is None:
            raise DataError(f"{self.run}/config.yaml has no env {tag!r}, which the episode was played in")
        return kinds[tag].env_type, kinds[tag].env_config

    def _place(self, found: Found) -> EpisodeId:
        seed, record = self.config.seed, found.trajectory
        named = {"heldout": "held-out", "eval": "evaluation"}.get(found.recording.kind)
        seed = seed if named is None else derive_seed(seed, named)
        return EpisodeId(seed, record.iteration, record.group, record.member, record.env_seed)

    def _source(self, found: Found) -> tuple[Any, ChatTokenizer, str]:
        """What writes the tokens (None: the record does), its tokenizer, and how it is called."""
        if not isinstance(self.sampler, str):
            return self.sampler, self.sampler.tokenizer, "played by the sampler that was named"
        folder = self.weights_of(found.recording)
        if folder is None and self.sampler == "checkpoint":
            raise DataError(
                f"the weights that wrote {found.name} are not in {self.run}: keep more checkpoints "
                f"(trainer.keep_checkpoints), or replay with --sampler recorded"
            )
        if folder is not None:
            engine, settings = self.engine_of(folder), self.config.engine
            elsewhere = settings.played_by in ("vllm", "openai")
            if self.sampler == "checkpoint" or (self.sampler == "auto" and not elsewhere):
                return engine, engine.tokenizer, f"sampled again with {folder.relative_to(self.run)}"
            writer = "a server" if settings.name == "openai" else "vLLM"
            why = f": {writer} wrote them, whose batches decide its rounding" if elsewhere else ""
            return None, engine.tokenizer, f"the recorded tokens are replayed{why}"
        why = "The weights that wrote these episodes are not in this run"
        if found.recording.kind in ("train", "heldout"):
            why = f"Checkpoint {found.recording.weights} was not kept"
        said = f"{why}, so nothing is sampled again; the recorded tokens are replayed"
        return None, self._tokenizer(), said

    def weights_of(self, recording: Recording) -> Path | None:
        """The folder of the weights that wrote these episodes, if the run has it and they can be asked here."""
        if recording.kind == "eval":
            return None
        folder = self.run / "engine"
        if recording.kind in ("train", "heldout"):
            folder = self.run / "checkpoints" / f"step-{recording.weights:06d}"
        return folder if folder.is_dir() else None

    def engine_of(self, folder: Path) -> Any:
        """The sampler of a checkpoint, loaded once."""
        import torch

        from shoal.core.files import read_json, verify_folder
        from shoal.train.agent.policies.loading import load_engine

        if folder not in self._loaded:
            torch.set_num_threads(self.config.engine.threads)
            inner = folder if folder.name == "engine" else verify_folder(folder) / "engine"
            self._loaded[folder] = engine = load_engine(inner, device=self.device, config=self.config.engine)
            if (folder / "state.json").exists():
                engine.weights_version = int(read_json(folder / "state.json")["weights_version"])
        return self._loaded[folder]

    def _tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the run, without its weights."""
        from shoal.samplers.registry import load_tokenizer
        from shoal.samplers.tokenizers import ChatCodec, TinyTokenizer

        engine = self.config.engine
        if engine.name == "openai":
            named = engine.server.tokenizer
            return ChatCodec() if named is None else load_tokenizer(named, **engine.template)
        if engine.played_by == "tiny":
            return TinyTokenizer(words_of(self.config, self.tools))
        if engine.model is None:
            raise DataError(f"{self.run}/config.yaml names no model whose tokenizer could read the record")
        return load_tokenizer(engine.model, **engine.template)


def _recorded_uses(record: Trajectory, number: int, calls: Sequence[ToolCall]) -> tuple[ToolUse, ...]:
    """The recorded results of the calls of a turn (from 1)."""
    uses = record.turns[number - 1].tools if number <= len(record.turns) else ()
    if [(use.name, use.arguments) for use in uses] != [(call.name, call.arguments) for call in calls]:
        names = ", ".join(call.name for call in calls)
        raise EngineError(
            f"turn {number} calls {names}, of which the record has no result: no tool is called here"
        )
    return uses


class _Writer:
    """What answers the requests of a replay: the record, a sampler, and at a fork what was said."""

    def __init__(
        self, record: Trajectory, role: Role, tokenizer: ChatTokenizer, sampler: Any, fork: tuple[int, str] | None,
        prompt: PromptConfig,
    ) -> None:  # fmt: skip
        self.record, self.role, self.tokenizer, self.sampler = record, role, tokenizer, sampler
        self.fork, self.prompt = fork, prompt
        self.forked_at: int | None = None

    def answer(self, number: int, request: Request) -> Completion | None:
        """The completion of a turn; None where the record has no more."""
        if self.fork is not None and number <= self.fork[0]:
            if number == self.fork[0]:
                self.forked_at = number
                return self._said(self.fork[1])
            return self._recorded(number)
        if self.sampler is None:
            return self._recorded(number)
        answer = generate(self.sampler, [request])[0]
        if not isinstance(answer, Completion):
            raise EngineError(f"the sampler answered with {answer!r}")
        return answer

    def _recorded(self, number: int) -> Completion | None:
        if number > len(self.record.turns):
            if self.record.ended != "context":
                return None
            return Completion((), (), "context")
        turn = self.record.turns[number - 1]
        call = self.record.call_of(turn)
        ids, finish = call.response_ids, call.finish or "stop"
        written = self.prompt.written(turn.response)
        if self.sampler is not None and self.tokenizer.decode(ids) != written:
            ids = self.tokenizer.encode(written)  # another model's tokens
        return Completion(ids, call.logprobs, finish, call.weights_version)  # type: ignore[arg-type]

    def _said(self, action: str) -> Completion:
        wrapped = (
            [action]
            if "<" in action
            else [f"<action>{action}</action>", f"<answer>{action}</answer>", action]
        )
        for response in wrapped:
            if self.role.projection(self.prompt.response(response)).valid:
                ids = self.tokenizer.encode(response)
                return Completion(ids, (0.0,) * len(ids), "stop")
        words = ", ".join(self.role.projection.words()) or "free text in <action>…</action>"
        raise ConfigError(f"{action!r} is no action of {self.role.tag}; there are: {words}")


def _plain_step(number: int, env: Any, action: int | str) -> tuple[Any, Any, Any, Any, Any]:
    del number
    found: tuple[Any, Any, Any, Any, Any] = env.step(action)
    return found


def _broke(record: Trajectory, episode: Episode, error: Exception) -> Difference:
    """The replay could not go on: the env or the prompt refused what it once took."""
    number = len(episode.trajectory().turns) + 1
    was = "went on" if number <= len(record.turns) else record.error or record.status
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return Difference("the turn", was, f"{type(error).__name__}: {error}{where}", "", record.iteration, record.group,
                      record.member, number)  # fmt: skip


def stops_in_pdb(turn: int, debugger: Any) -> Step:
    """A step that stops a `pdb.Pdb`, once, in the env's own code of a turn: `_advance` of a text env, or `step`."""
    stopped = False

    def step(number: int, env: Any, action: int | str) -> tuple[Any, Any, Any, Any, Any]:
        nonlocal stopped
        if number < turn or stopped:
            return _plain_step(number, env, action)
        stopped = True
        inner = getattr(env, "unwrapped", env)
        inner = getattr(getattr(inner, "env", None), "unwrapped", inner)  # of an adapter: what it adapts
        name = "_advance" if isinstance(inner, TextEnv) else "step"
        own = getattr(inner, name)

        def stopping(*words: Any, **named: Any) -> Any:
            answer = debugger.runcall(own, *words, **named)
            if answer is None:  # it swallows its own end
                raise BdbQuit
            return answer

        setattr(inner, name, stopping)
        try:
            return _plain_step(number, env, action)
        finally:
            delattr(inner, name)

    return step


def explain(difference: Difference) -> list[str]:
    """What a difference between a record and its replay means, and how the two texts differ."""
    lines = []
    reasons = {
        "observation|reward|anchor|action_is_valid|picture|the number of turns|terminated|truncated|success|the turn":
            "the env answered otherwise than when the episode was recorded: its code, its data or its package changed",
        "prompt token": "the prompt is written otherwise: the tokenizer, its template or the prompt settings changed",
        "response token|log-probability|response|finish":
            "the sampler wrote something else: these are not the weights that wrote the record, or another machine",
        "action": "the response is read otherwise: the env's projection changed",
        "seed|env": "it is another episode",
    }  # fmt: skip
    for names, reason in reasons.items():
        if difference.what in names.split("|"):
            lines.append(reason)
    if isinstance(difference.one, str) and isinstance(difference.other, str) and difference.what in (
        "observation", "response"):  # fmt: skip
        one, other = difference.one.splitlines(), difference.other.splitlines()
        lines += [line for line in difflib.unified_diff(one, other, "recorded", "now", lineterm="", n=2)][:40]
    return lines
