"""Formats of other programs, and of shoal: its own trajectories, ATIF of Harbor, OSWorld, AgentNet, LiteSample.

Coordinates stay as they were recorded (pixels, parts of 1, parts of 1000): which of them a model writes is its own.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.core.data import Trajectory, decode_trajectory
from shoal.core.errors import DataError, did_you_mean
from shoal.core.files import from_json
from shoal.splitting.readers.keys import (
    CHAT,
    MARKS,
    MESSAGE,
    PART,
    REFUSED_IN_PARTS,
    Shape,
    is_trained,
    refuse_unread,
    tools_of,
    unread_keys,
)
from shoal.splitting.readers.recordings import (
    ImageLocator,
    Message,
    Recording,
    RolloutTokens,
    Unread,
    answer_text,
    encodable,
    finite_reward,
    ordered_results,
    parse_messages,
    read_json_file,
    read_text,
    safe_id,
    short_id,
)
from shoal.splitting.readers.records import (
    Record,
    RecordReader,
    chat_of,
    first_known,
    lines_of,
    row_images,
)


class ShoalReader(RecordReader):
    """shoal's own `trajectories/*.jsonl`: a run folder, its `trajectories` folder, or one file.

    Of a folder that has episodes of training, those that were played held out are left out. Ids are
    `<env>-<iteration>-<group>-<member>`, of held-out ones the file stands first. Episodes that did not end well
    (`status` other than "ok") have none; a broken line has that of its file and number, and reading it says what is
    wrong. Tokens and log-probabilities of each turn come along, so `StepwiseTrajectorySplitter(use_vllm_logp=True)`
    trains on exactly those.
    """

    @staticmethod
    def parsed(line: bytes, where: str) -> Trajectory:
        """The trajectory in a line."""
        try:
            return decode_trajectory(line)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def is_recording(self, value: Any) -> bool:
        """Whether the episode ended well; a broken line tells why it did not when it is read."""
        return value is None or (value.status == "ok" and bool(value.turns))

    def name_of(self, value: Any) -> Any:
        """Its env, iteration, group and member."""
        if value is None:
            return None
        tag = re.sub(r"[^A-Za-z0-9._()-]", "_", value.env)[:40]
        return safe_id(f"{tag}-{value.iteration}-{value.group}-{value.member}")

    def named(self, own: Any, file: Path, number: int) -> str:
        """Its name, behind that of the file where it is held out."""
        named = super().named(own, file, number)
        return short_id(f"{file.stem}-{named}") if own is not None and _held_out(file) else named

    def files(self) -> Iterator[Path]:
        """The files of trajectories: of training, or all where there is none."""
        folder = self.path / "trajectories" if (self.path / "trajectories").is_dir() else self.path
        files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
        if not files:
            raise DataError(f"{self.path} holds no trajectories/*.jsonl; give a run folder or a .jsonl file")
        trained = [file for file in files if not _held_out(file)]
        if trained and len(trained) < len(files):
            first = next(file for file in files if _held_out(file))
            self._tell(folder, f"held-out episodes; give a file, such as {first.name}, to read them")
        yield from trained or files

    def recording(self, record: Record) -> Recording:
        """The trajectory of a line."""
        trajectory, file, source = record.value, record.file, f"{record.file}, {record.id}"
        base = file.parent.parent if file.parent.name == "trajectories" else file.parent
        locate = ImageLocator(base)
        messages: list[Message] = []
        for turn in trajectory.turns:
            if turn.image is None:
                messages.append(Message("user", turn.observation))
            else:
                messages.append(_screen(turn.image, source, locate, turn.observation))
            messages.append(Message("assistant", turn.response))
        steps = tuple(
            RolloutTokens(trajectory.prompt_ids(turn.call), call.response_ids, call.logprobs, source)
            for turn in trajectory.turns
            for call in (trajectory.call_of(turn),)
        )
        return Recording(
            dataset_id=record.id,
            uid=f"{'heldout-' if _held_out(file) else ''}{trajectory.env}-{trajectory.iteration}-{trajectory.group}",
            messages=tuple(messages),
            source=source,
            reward=finite_reward(trajectory.reward, source),
            steps=steps,
            folder=str(base),
        )


def _screen(image: str, where: str, locate: ImageLocator, text: str | None = None) -> Message:
    """What an agent saw: an image, behind a text where one came with it."""
    said = [] if text is None else [{"type": "text", "text": text}]
    return Message("user", (*said, {"type": "image", "image": image}), (locate(image, where),))


def _held_out(file: Path) -> bool:
    """Whether a file holds an evaluation: every one counts its groups from 0, as training does, in other states."""
    return file.name.startswith("heldout-")


def looks_like_own_run(file: Path) -> bool:
    """Whether one of the first lines of a file is one of shoal's trajectories."""
    return any(trajectory is not None for _, trajectory in islice(lines_of(file, ShoalReader.parsed), 3))


ATIF_STEP: Shape = dict.fromkeys((
    "step_id", "timestamp", "source", "model_name", "reasoning_effort", "reasoning_content", "tool_calls",
    "observation", "metrics", "extra", "is_copied_context", "llm_call_count", *MARKS,
)) | {"message": dict.fromkeys(("type", "text", "source"))}  # fmt: skip
ATIF: dict[str, Any] = {
    **dict.fromkeys((
        "schema_version", "session_id", "trajectory_id", "agent", "notes", "final_metrics", "extra",
        "continued_trajectory_ref", *MARKS,
    )),
    "steps": ATIF_STEP,
}  # fmt: skip
ATIF["subagent_trajectories"] = ATIF


class AtifReader(RecordReader):
    """ATIF, Harbor's agent trajectory format (v1.0 to 1.8): files of trajectories, or the folder of a Harbor job.

    In a job's folder each `<trial>/agent/trajectory.json` is one recording, named after its trial, with the task of
    `<trial>/result.json` and the reward of the verifier; so is each `trajectory.<name>.json` beside it, as Harbor
    writes continuations and sub-agents, named after both. Each of the `subagent_trajectories` of a trajectory is a
    recording too: its id is that of the one it stands in with its number behind it, task and reward are the same.

    System steps before the first user step are system messages and later ones user messages; what a tool call or
    another action led to is a message of its own. Steps that were copied from an earlier trajectory, and those that no
    model wrote, are context and not trained. The `tool_definitions` of the agent, and token ids and log-probabilities
    of the metrics where every agent step has them, come along.
    """

    columns = ("trajectory_id", "session_id", "subagent_trajectories")
    shape = ATIF

    def name_of(self, value: Any) -> Any:
        """The trajectory's id, else its session's."""
        if isinstance(value, dict):
            return value.get("trajectory_id") or value.get("session_id")
        return None

    def parts_of(self, value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
        """The trajectories of sub-agents, and those of theirs."""
        inside = value.get("subagent_trajectories") if isinstance(value, dict) else None
        for number, part in enumerate(inside if isinstance(inside, list) else ()):
            yield (number,), part
            yield from (((number, *further), inner) for further, inner in self.parts_of(part))

    def files(self) -> Iterator[Path]:
        """Trajectories of trials, or files of trajectories."""
        trials = sorted(self.path.rglob("agent/trajectory*.json")) if self.path.is_dir() else []
        yield from [file for file in trials if _in_trial(file)] or super().files()

    def sources(self) -> Iterator[Path]:
        """The files that recordings are made of, apart from images."""
        for file in self.files():
            yield file
            if _in_trial(file):
                trial = file.parent.parent
                yield from (path for path in (trial / name for name in TRIAL) if path.is_file())

    def label(self, file: Path) -> str:
        """The name of a trial, with what tells its file from `trajectory.json`; of another file its own name."""
        if not _in_trial(file):
            return super().label(file)
        more = file.stem.removeprefix("trajectory").replace(".", "-")
        return short_id(f"{file.parent.parent.name}{more}")

    def named(self, own: Any, file: Path, number: int) -> str:
        """A trial's name, or that of the trajectory."""
        return self._labels[file] if _in_trial(file) else super().named(own, file, number)

    def recording(self, record: Record) -> Recording:
        """The trajectory of a record."""
        trajectory, outer = record.object(), record.outer or record
        version = trajectory.get("schema_version") or outer.object().get("schema_version", "")
        if not str(version).startswith("ATIF-v1"):
            raise DataError(f"{record.source}: schema_version must be ATIF-v1.x, got {version!r}")
        refuse_unread(trajectory, record.source)
        agent = trajectory.get("agent")
        steps = trajectory.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise DataError(f"{record.source}: steps must be a list of objects")
        messages: list[dict[str, Any]] = []
        tokens: list[RolloutTokens | None] = []
        for number, step in enumerate(steps):
            where = f"{record.source}, step {step.get('step_id', number + 1)}"
            refuse_unread(step, where)
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
        about = {"uid": outer.id} | (_trial(record.file.parent.parent) if _in_trial(record.file) else {})
        recorded = [step for step in tokens if step is not None]
        return record.recording(
            parse_messages(
                messages, record.source, record.locate, trained=is_trained(trajectory, record.source)
            ),
            steps=tuple(recorded) if tokens and len(recorded) == len(tokens) else None,
            tools=tools_of(agent, record.source, ("tool_definitions",)) if isinstance(agent, dict) else (),
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
        "trained": is_trained(step, where)
        and not step.get("is_copied_context")
        and step.get("llm_call_count") != 0,
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
    calls = step.get("tool_calls") if step.get("source") == "agent" else None
    places = [place for place, result in enumerate(results) if result.get("source_call_id") is not None]
    if calls and places:
        named = [(results[place]["source_call_id"], results[place]) for place in places]
        ordered = ordered_results([call.get("tool_call_id") for call in calls], named, where)
        of_place = dict(zip(places, ordered, strict=True))
        results = [of_place.get(place, result) for place, result in enumerate(results)]
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
        refuse_unread(part, where, REFUSED_IN_PARTS)
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
    return RolloutTokens(tuple(prompt), tuple(ids), tuple(logprobs), where)


TRIAL = ("result.json", "verifier/reward.txt")
"""Files that say what a trial of Harbor was, and what it earned."""


def _in_trial(file: Path) -> bool:
    """Whether a file is `trajectory.json` of a trial, or `trajectory.<name>.json` beside it."""
    return file.name.startswith("trajectory.") and file.suffix == ".json" and file.parent.name == "agent"


def _trial(folder: Path) -> dict[str, Any]:
    """Task and reward of a Harbor trial, where they were recorded."""
    about: dict[str, Any] = {}
    result_file, reward_file = (folder / name for name in TRIAL)
    result = read_json_file(result_file) if result_file.is_file() else {}
    if isinstance(result, dict):
        if isinstance(result.get("task_name"), str):
            about["uid"] = result["task_name"]
        verified = result.get("verifier_result")
        rewards = verified.get("rewards") if isinstance(verified, dict) else None
        if isinstance(rewards, dict) and "reward" in rewards:
            return about | {"reward": rewards["reward"]}
    if reward_file.is_file():
        about["reward"] = read_text(reward_file).strip()
    return about


INSTRUCTIONS = ("task_config.json", "task.json", "instruction.txt")
"""Files that may say what a task of OSWorld is."""
OSWORLD_STEP: Shape = dict.fromkeys((
    "step_num", "action", "action_timestamp", "response", "screenshot_file", "reward", "done", "info", *MARKS,
))  # fmt: skip
OSWORLD_START = re.compile(r"initial|step_0+(?!\d)")
"""Names of the screenshot before the first action; `step_01` shows what the first one led to."""


class OSWorldReader:
    """OSWorld results: folders with `traj.jsonl`, the screenshots it names and `result.txt`, at any depth.

    A line's screenshot shows what its action led to, so it is the observation of the next turn; the first
    turn shows `step_0*.png` or `initial*.png` where there is one. Lines of one `step_num` are one turn.

    Args:
        root: a folder above the results.
        instructions: what each task asks, by id; otherwise `instruction` from a `task_config.json`,
            `task.json` or `instruction.txt` in its folder.
        system: a system prompt to put before each trajectory.
    """

    def __init__(
        self, root: Path | str, *, instructions: Mapping[str, str] | None = None, system: str | None = None
    ) -> None:
        self.root = Path(root)
        self.instructions = dict(instructions or {})
        self.system = system
        self._unread = Unread()

    @functools.cached_property
    def _folders(self) -> dict[str, Path]:
        folders: dict[str, Path] = {}
        for file in sorted(self.root.rglob("traj.jsonl")):
            name = short_id(file.parent.name)
            if name in folders:
                raise DataError(
                    f"{file.parent} and {folders[name]} have one id; choose a root above only one"
                )
            folders[name] = file.parent
        return folders

    def ids(self) -> list[str]:
        """Names of the folders that hold a `traj.jsonl`, sorted."""
        return sorted(self._folders)

    def sources(self) -> Iterator[Path]:
        """The files that recordings are made of, apart from images."""
        names = ("traj.jsonl", "result.txt", *INSTRUCTIONS)
        for _, folder in sorted(self._folders.items()):
            yield from (path for path in (folder / name for name in names) if path.is_file())

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The results in the folder of this name, or in `path`."""
        if path is None and dataset_id not in self._folders:
            raise DataError(
                f"{self.root}: no trajectory {dataset_id!r}.{did_you_mean(dataset_id, self._folders)}"
            )
        folder = path if path is not None else self._folders[dataset_id]
        source, locate = folder / "traj.jsonl", ImageLocator(folder)
        messages = [Message("system", self.system)] if self.system else []
        task = self._instruction(dataset_id, folder)
        start = [file for file in sorted(folder.glob("*.png")) if OSWORLD_START.match(file.name)]
        if start:
            messages.append(_screen(start[0].name, str(source), locate, task))
        else:
            messages.append(Message("user", ({"type": "text", "text": task},)))
        steps, unread = _osworld_steps(source)
        self._unread.tell(source, unread)
        for number, step in enumerate(steps):
            messages.append(Message("assistant", step["text"], trained=step["trained"]))
            if step["screenshot"]:
                messages.append(_screen(step["screenshot"], f"{source}, step {number + 1}", locate))
            else:
                messages.append(Message("user", "(no screenshot)"))
        result = folder / "result.txt"
        reward = finite_reward(read_text(result).strip(), str(result)) if result.is_file() else None
        return Recording(
            dataset_id, dataset_id, tuple(messages), str(source), reward=reward, folder=str(folder)
        )

    def _instruction(self, dataset_id: str, folder: Path) -> str:
        if dataset_id in self.instructions:
            return self.instructions[dataset_id]
        for name in INSTRUCTIONS[:2]:
            if (folder / name).is_file():
                value = read_json_file(folder / name)
                if isinstance(value, dict) and isinstance(value.get("instruction"), str):
                    return str(value["instruction"])
        if (folder / INSTRUCTIONS[2]).is_file():
            return read_text(folder / INSTRUCTIONS[2]).strip()
        raise DataError(
            f"{folder}: nothing says what the task was; write instruction.txt there or pass instructions="
        )


def _osworld_steps(source: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """The turns of a file, and the keys of its lines that are not read."""
    steps: dict[Any, dict[str, Any]] = {}
    unread: set[str] = set()
    for line, text in enumerate(read_text(source).split("\n"), 1):  # not at U+2028, which JSON may hold
        if not text.strip():
            continue
        where = f"{source}, line {line}"
        value = from_json(text, where)
        if not isinstance(value, dict):
            raise DataError(f"{where}: expected an object")
        if "Error" in value and "action" not in value:
            continue  # what OSWorld's runner adds when a task fails: nobody said anything
        action = value.get("action", "")
        action = action if isinstance(action, str) else json.dumps(action, ensure_ascii=False)
        refuse_unread(value, where)
        unread.update(unread_keys(value, OSWORLD_STEP))
        step = steps.setdefault(
            value.get("step_num", line), {"response": None, "actions": [], "trained": True}
        )
        step["trained"] &= is_trained(value, where)
        step["actions"].append(action)
        if isinstance(value.get("response"), str):
            step["response"] = value["response"]
        step["screenshot"] = value.get("screenshot_file") or step.get("screenshot")
    if not steps:
        raise DataError(f"{source} is empty; remove the trajectory")
    for step in steps.values():
        step["text"] = step["response"] if step["response"] is not None else "\n".join(step["actions"])
    return list(steps.values()), unread


AGENTNET: Shape = {
    **dict.fromkeys((
        "task_id", "instruction", "task_completed", "alignment_score", "efficiency_score", "task_difficulty",
        "natural_language_task", "actual_task", "reason", "domain", *MARKS,
    )),
    "traj": {
        **dict.fromkeys(("index", "image")),
        "value": dict.fromkeys((
            "observation", "thought", "action", "code", "reflection", "last_step_correct", "last_step_redundant",
            *MARKS,
        )),
    },
}  # fmt: skip


class AgentNetReader(RecordReader):
    """AgentNet of OpenCUA: a JSON line is a task with its `traj` of screenshots, thoughts and PyAutoGUI code.

    Args:
        path: the `.jsonl`, or a folder of such files; `meta_data_merged.jsonl` beside them is left out.
        images: where the screenshots are; otherwise `images` or a `*_images` folder beside the file, or its own.
        parts: what an answer holds, of `observation`, `thought`, `action` and `code`.
        system: a system prompt to put before each trajectory.
        train_mistakes: whether steps that were judged wrong (`last_step_correct` false) are trained.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        images: Path | str | None = None,
        parts: Sequence[str] = ("thought", "action", "code"),
        system: str | None = None,
        train_mistakes: bool = True,
    ) -> None:
        super().__init__(path)
        unknown = set(parts) - {"observation", "thought", "action", "code"}
        if unknown or not parts:
            raise ValueError(f"parts must be of observation, thought, action and code, got {list(parts)}")
        self.images = None if images is None else Path(images)
        self.parts, self.system, self.train_mistakes = tuple(parts), system, train_mistakes

    shape = AGENTNET

    def name_of(self, value: Any) -> Any:
        """The task's id."""
        return value.get("task_id") if isinstance(value, dict) else None

    def files(self) -> Iterator[Path]:
        """Files of trajectories."""
        yield from (file for file in super().files() if not file.name.startswith("meta_data"))

    def recording(self, record: Record) -> Recording:
        """The trajectory of a task."""
        task = record.object()
        if not isinstance(task.get("instruction"), str) or not isinstance(task.get("traj"), list):
            raise DataError(f"{record.source}: a task needs instruction and traj")
        refuse_unread(task, record.source)
        learned = is_trained(task, record.source)
        folders = [self.images] if self.images is not None else [
            *sorted(record.file.parent.glob("*images")), record.file.parent]  # fmt: skip
        messages = [Message("system", self.system)] if self.system else []
        for number, step in enumerate(task["traj"]):
            where = f"{record.source}, step {number}"
            if not isinstance(step, dict) or not isinstance(step.get("value"), dict):
                raise DataError(f"{where}: expected an object with image and value")
            shot = encodable(str(step.get("image") or ""), where)
            if not shot:
                raise DataError(f"{where}: no image")
            folder = next((each for each in folders if os.path.isfile(each / shot)), folders[0])
            said = encodable(task["instruction"], where) if number == 0 else None
            messages.append(_screen(shot, where, ImageLocator(folder), said))
            refuse_unread(step["value"], where)
            trained = self.train_mistakes or step["value"].get("last_step_correct") is not False
            trained &= learned and is_trained(step["value"], where)
            messages.append(Message("assistant", self._answer(step["value"], where), trained=trained))
        done = task.get("task_completed")
        return record.recording(
            messages,
            uid=first_known(task.get("task_id"), record.id),
            reward=float(done) if isinstance(done, bool) else None,
        )

    def _answer(self, value: dict[str, Any], where: str) -> str:
        texts = []
        for part in self.parts:
            text = value.get(part)
            if not isinstance(text, str) or not text:
                if part == "code":
                    raise DataError(f"{where}: no code")
                continue
            text = encodable(text, where)
            texts.append(
                f"## {part.capitalize()}:\n" + (f"```python\n{text}\n```" if part == "code" else text)
            )
        return "\n\n".join(texts)


LITESAMPLE: Shape = {
    **CHAT,
    "messages": {**MESSAGE, "content": {**PART, **dict.fromkeys(("index", "data"))}},
    "metadata": None,
}


class LiteSampleReader(RecordReader):
    """LiteSample rows of cua-lite: `images`, `messages` with parts and `tool_calls`, `metadata`.

    Messages and metadata are JSON text or nested columns; an image part names its image by `index`. Of an answer,
    text, inline reasoning and action descriptions are joined line by line, then tool calls follow; metadata parts are
    notes and left out.
    """

    columns = ("id", "metadata")
    shape = LITESAMPLE
    _TEXTS = ("text", "inline_reasoning", "action_description")

    def name_of(self, value: Any) -> Any:
        """The sample's id among its metadata."""
        others = (
            _metadata(value.get("metadata"), "metadata").get("others") if isinstance(value, dict) else None
        )
        others = others if isinstance(others, dict) else {}
        names = (others.get("id"), others.get("task_id"), super().name_of(value))
        return next((name for name in names if name is not None and name != ""), None)

    def recording(self, record: Record) -> Recording:
        """The chat of a row."""
        row = record.object()
        refuse_unread(row, record.source)
        metadata = _metadata(row.get("metadata"), record.source)
        others = _metadata(metadata.get("others"), record.source)
        images, record = row_images(record, row.get("images") or [])
        raw = row.get("messages")
        raw = from_json(raw, record.source) if isinstance(raw, str) else raw
        if not isinstance(raw, list):
            raise DataError(f"{record.source}: messages must be a list")
        messages = [
            self._message(item, images, f"{record.source}, message {n}") for n, item in enumerate(raw)
        ]
        returned, done = others.get("episode_return"), others.get("task_completed")
        reward = done if returned is None else returned
        uid = first_known(others.get("task_id"), others.get("source_id"), record.id)
        reward = float(reward) if isinstance(reward, bool) else reward
        return chat_of(record, row, messages, uid=uid, reward=reward)

    def _message(self, item: Any, images: Sequence[str], where: str) -> dict[str, Any]:
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected an object with role and content")
        parts = item.get("content") or []
        if not isinstance(parts, list):
            return item
        kept: list[dict[str, Any]] = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            refuse_unread(part if isinstance(part, dict) else {}, where, REFUSED_IN_PARTS)
            if kind == "image":
                index = part.get("index")
                if not isinstance(index, int | float) or not 0 <= int(index) < len(images):
                    raise DataError(f"{where}: image index must be in [0, {len(images) - 1}], got {index!r}")
                kept.append({"type": "image", "image": images[int(index)]})
            elif kind in self._TEXTS:
                kept.append({"type": "text", "text": part.get("text")})
            elif kind != "metadata":
                raise DataError(f"{where}: expected a text, image or metadata part, got {kind!r}")
        message = {key: value for key, value in item.items() if value is not None}
        if item.get("role") == "assistant":
            return message | {
                "content": "\n".join(str(part["text"]) for part in kept if part["type"] == "text")
            }
        return message | {"content": kept}


def _metadata(value: Any, where: str) -> dict[str, Any]:
    value = from_json(value, where) if isinstance(value, str) else value
    return value if isinstance(value, dict) else {}
