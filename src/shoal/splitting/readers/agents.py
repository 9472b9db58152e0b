"""What agent programs leave behind: shoal's own trajectories, and ATIF as Harbor writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.data import Trajectory, decode_trajectory
from shoal.core.errors import DataError, did_you_mean
from shoal.splitting.readers.recordings import (
    ImageLocator,
    Message,
    Recording,
    RolloutTokens,
    answer_text,
    finite_reward,
    parse_messages,
    read_json_file,
    read_text,
    safe_id,
)
from shoal.splitting.readers.records import Record, RecordReader, short_id


class ShoalReader:
    """shoal's own `trajectories/*.jsonl`: a run folder, its `trajectories` folder, or one file.

    Episodes that did not end well (`status` other than "ok") have no id here. Tokens and log-probabilities of
    each turn come along, so `StepwiseTrajectorySplitter(use_vllm_logp=True)` trains on exactly those.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[Path, int]] | None = None

    def ids(self) -> list[str]:
        """`<env>-<iteration>-<group>-<member>` of each finished trajectory; of held-out ones the file stands first."""
        return list(self._index())

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The trajectory with this id; `path` names another file or folder that holds it."""
        reader = self if path is None else ShoalReader(path)
        places = reader._index()
        if dataset_id not in places:
            raise DataError(f"{reader.path}: no trajectory {dataset_id!r}.{did_you_mean(dataset_id, places)}")
        file, offset = places[dataset_id]
        with file.open("rb") as handle:
            handle.seek(offset)
            trajectory = decode_trajectory(handle.readline())
        source = f"{file}, {dataset_id}"
        base = file.parent.parent if file.parent.name == "trajectories" else file.parent
        locate = ImageLocator(base)
        messages: list[Message] = []
        for turn in trajectory.turns:
            if turn.image is None:
                messages.append(Message("user", turn.observation))
            else:
                parts = ({"type": "text", "text": turn.observation}, {"type": "image", "image": turn.image})
                messages.append(Message("user", parts, (locate(turn.image, source),)))
            messages.append(Message("assistant", turn.response))
        steps = tuple(
            RolloutTokens(turn.prompt_ids, turn.response_ids, turn.logprobs, source)
            for turn in trajectory.turns
        )
        return Recording(
            dataset_id=dataset_id,
            uid=f"{'heldout-' if _held_out(file) else ''}{trajectory.env}-{trajectory.iteration}-{trajectory.group}",
            messages=tuple(messages),
            source=source,
            reward=finite_reward(trajectory.reward, source),
            steps=steps,
            folder=str(base),
        )

    def _index(self) -> dict[str, tuple[Path, int]]:
        if self._places is None:
            self._places = {}
            for file in self._files():
                for offset, trajectory in _trajectories(file):
                    if trajectory.status == "ok" and trajectory.turns:
                        tag = re.sub(r"[^A-Za-z0-9._()-]", "_", trajectory.env)[:40]
                        name = safe_id(f"{tag}-{trajectory.iteration}-{trajectory.group}-{trajectory.member}")
                        name = short_id(f"{file.stem}-{name}") if _held_out(file) else name
                        if name in self._places:
                            raise DataError(
                                f"{file}: id {name!r} is taken by {self._places[name][0]}; give one file at a time, or "
                                "each env a tag of its own"
                            )
                        self._places[name] = (file, offset)
        return self._places

    def _files(self) -> list[Path]:
        folder = self.path / "trajectories" if (self.path / "trajectories").is_dir() else self.path
        files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
        if not files:
            raise DataError(f"{self.path} holds no trajectories/*.jsonl; give a run folder or a .jsonl file")
        return files


def _held_out(file: Path) -> bool:
    """Whether a file holds an evaluation: every one counts its groups from 0, as training does, in other states."""
    return file.name.startswith("heldout-")


def _trajectories(file: Path) -> Iterator[tuple[int, Trajectory]]:
    with file.open("rb") as handle:
        offset = 0
        for number, line in enumerate(handle, 1):
            try:
                yield offset, decode_trajectory(line)
            except DataError as error:
                raise DataError(f"{file}, line {number}: {error}") from error
            offset += len(line)


def looks_like_own_run(file: Path) -> bool:
    """Whether the first line of a file is one of shoal's trajectories."""
    try:
        next(_trajectories(file))
    except (DataError, StopIteration):
        return False
    return True


class AtifReader(RecordReader):
    """ATIF, Harbor's agent trajectory format (v1.0 to 1.8): files of trajectories, or the folder of a Harbor job.

    In a job's folder each `<trial>/agent/trajectory.json` is one recording, named after its trial, with the task of
    `<trial>/result.json` and the reward of the verifier. System steps before the first user step are system
    messages and later ones user messages; what a tool call or another action led to is a message of its own. Steps
    that were copied from an earlier trajectory, and those that no model wrote, are context and not trained. Token
    ids and log-probabilities of the metrics come along where every agent step has them.
    """

    def name_of(self, value: Any) -> Any:
        """The trajectory's id, else its session's."""
        if isinstance(value, dict):
            return value.get("trajectory_id") or value.get("session_id")
        return None

    def files(self) -> Iterator[Path]:
        """Trajectories of trials, or files of trajectories."""
        trials = sorted(self.path.rglob("agent/trajectory.json")) if self.path.is_dir() else []
        yield from trials or super().files()

    def named(self, own: Any, file: Path, number: int) -> str:
        """A trial's name, or that of the trajectory."""
        return short_id(file.parent.parent.name) if _in_trial(file) else super().named(own, file, number)

    def recording(self, record: Record) -> Recording:
        """The trajectory of a record."""
        trajectory = record.object()
        if not str(trajectory.get("schema_version", "")).startswith("ATIF-v1"):
            raise DataError(f"{record.source}: schema_version must be ATIF-v1.x, got "
                            f"{trajectory.get('schema_version')!r}")  # fmt: skip
        steps = trajectory.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise DataError(f"{record.source}: steps must be a list of objects")
        messages: list[dict[str, Any]] = []
        tokens: list[RolloutTokens | None] = []
        for number, step in enumerate(steps):
            where = f"{record.source}, step {step.get('step_id', number + 1)}"
            if step.get("source") == "agent":
                tokens.append(_tokens_of(step, where))
                if messages and messages[-1]["role"] == "assistant":
                    _join_answers(messages[-1], _answer(step, where), where)
                    tokens[-2:] = [None]
                else:
                    messages.append(_answer(step, where))
                messages += _results(step, where)
            elif step.get("source") in ("system", "user"):
                early = all(message["role"] == "system" for message in messages)
                role = "system" if step["source"] == "system" and early else "user"
                messages.append({"role": role, "content": _content(step.get("message"), where)})
                messages += _results(step, where)
            else:
                raise DataError(f"{where}: source must be system, user or agent, got {step.get('source')!r}")
        about = _trial(record.file.parent.parent) if _in_trial(record.file) else {}
        recorded = [step for step in tokens if step is not None]
        return record.recording(
            parse_messages(messages, record.source, record.locate),
            steps=tuple(recorded) if tokens and len(recorded) == len(tokens) else None,
            **about,
        )


def _answer(step: dict[str, Any], where: str) -> dict[str, Any]:
    calls = step.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{where}: tool_calls must be a list of objects")
    named = [{"name": call.get("function_name"), "arguments": call.get("arguments")} for call in calls or ()]
    return {
        "role": "assistant",
        "content": _content(step.get("message"), where),
        "reasoning_content": step.get("reasoning_content"),
        "tool_calls": named or None,
        "trained": not step.get("is_copied_context") and step.get("llm_call_count") != 0,
    }


def _join_answers(last: dict[str, Any], more: dict[str, Any], where: str) -> None:
    """Two agent steps with nothing between them are one answer."""
    if last["trained"] != more["trained"]:
        raise DataError(f"{where}: an agent step follows another, of which only one is to be trained; "
                        "put what the agent saw between them, or leave out the copied one")  # fmt: skip
    texts = [
        answer_text(part["content"], part["reasoning_content"], part["tool_calls"], where)
        if isinstance(part["content"], str)
        else None
        for part in (last, more)
    ]
    if None in texts:
        raise DataError(f"{where}: an agent step with parts follows another; merge them into one")
    last |= {"content": "\n".join(map(str, texts)), "reasoning_content": None, "tool_calls": None}


def _results(step: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """What came back: from tool calls as tool messages, from anything else as user messages."""
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else []
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise DataError(f"{where}: observation must hold a list of results")
    return [
        {
            "role": "tool" if result.get("source_call_id") is not None else "user",
            "content": _content(result.get("content"), where),
        }
        for result in results
    ]


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Text, or parts as chats have them; what a subagent did elsewhere is no text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts: list[dict[str, Any]] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "image"):
            got = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"{where}: expected a text or image part, got {got!r}; convert or remove it")
        source = part.get("source")
        if part["type"] == "image":
            parts.append({"type": "image", "image": source.get("path") if isinstance(source, dict) else ""})
        else:
            parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tokens_of(step: dict[str, Any], where: str) -> RolloutTokens | None:
    metrics = step.get("metrics")
    if not isinstance(metrics, dict):
        return None
    ids, logprobs = metrics.get("completion_token_ids"), metrics.get("logprobs")
    if not ids or not logprobs:
        return None
    prompt = metrics.get("prompt_token_ids") or []
    if len(ids) != len(logprobs):
        raise DataError(f"{where}: {len(ids)} completion_token_ids but {len(logprobs)} logprobs")
    if not all(isinstance(token, int) for token in (*ids, *prompt)):
        raise DataError(f"{where}: token ids must be whole numbers")
    return RolloutTokens(tuple(prompt), tuple(ids), tuple(map(float, logprobs)), where)


def _in_trial(file: Path) -> bool:
    return file.name == "trajectory.json" and file.parent.name == "agent"


def _trial(folder: Path) -> dict[str, Any]:
    """Task and reward of a Harbor trial, where they were recorded."""
    about: dict[str, Any] = {}
    result = read_json_file(folder / "result.json") if (folder / "result.json").is_file() else {}
    if isinstance(result, dict):
        if isinstance(result.get("task_name"), str):
            about["uid"] = result["task_name"]
        verified = result.get("verifier_result")
        rewards = verified.get("rewards") if isinstance(verified, dict) else None
        if isinstance(rewards, dict) and "reward" in rewards:
            return about | {"reward": rewards["reward"]}
    if (folder / "verifier" / "reward.txt").is_file():
        about["reward"] = read_text(folder / "verifier" / "reward.txt").strip()
    return about
