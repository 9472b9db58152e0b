"""A recorded trajectory as the splitters see it, the checks that every reader applies, and the plainest reader.

What is wrong with a file is a `DataError` with its name; an image that is read stays inside its folder.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import numpy as np

from shoal.core.data import MOST_REWARD
from shoal.core.errors import DataError, reading
from shoal.core.files import from_json, read_json, write_bytes
from shoal.core.registry import SAFE_NAME, check_name
from shoal.envs.calls import in_order_of_calls
from shoal.splitting.readers.keys import (
    MARKS,
    MESSAGE,
    REFUSED_IN_PARTS,
    Shape,
    is_trained,
    refuse_unread,
    tools_of,
    unread_keys,
)

logger = logging.getLogger(__name__)
Part = dict[str, str]
"""`{"type": "text", "text": …}` or `{"type": "image", "image": …}`"""

R = TypeVar("R")
ROLES = ("system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `content` keeps its recorded form, since templates may tell text from parts."""

    role: str
    content: str | tuple[Part, ...]
    # where the images are, in the order of the image parts: a path or a data URL
    images: tuple[str, ...] = ()
    trained: bool = True  # whether an answer is learned from; one that is not is context

    @property
    def parts(self) -> tuple[Part, ...]:
        """The content as parts, also when it was recorded as one string."""
        return ({"type": "text", "text": self.content},) if isinstance(self.content, str) else self.content

    def kept(self, keep: tuple[int, ...] | None) -> tuple[Part, ...]:
        """The parts with these indices (None: all parts)."""
        return self.parts if keep is None else tuple(self.parts[index] for index in keep)

    def shown(self, keep: tuple[int, ...] | None) -> tuple[str, ...]:
        """Where the images are among the parts with these indices (None: all parts)."""
        if keep is None or not self.images:
            return self.images
        places = [index for index, part in enumerate(self.parts) if part["type"] == "image"]
        image_of = dict(zip(places, self.images, strict=True))
        return tuple(image_of[index] for index in keep if index in image_of)

    @property
    def text(self) -> str:
        """All text of the message."""
        return "".join(part["text"] for part in self.parts if part["type"] == "text")


@dataclass(frozen=True, slots=True)
class RolloutTokens:
    """What the sampler saw and wrote at one step: the truth about tokens, where it was recorded."""

    prompt_ids: tuple[int, ...]  # () when only the response was recorded
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of `response_ids`
    source: str  # the file, for messages


@dataclass(frozen=True, slots=True)
class Recording:
    """One trajectory: its messages, and what else was recorded with them."""

    dataset_id: str
    uid: str  # equal for trajectories of one task
    messages: tuple[Message, ...]
    source: str  # the file it came from, for messages
    reward: float | None = None  # used where the caller gives no rewards
    steps: tuple[RolloutTokens, ...] | None = None  # one per assistant message
    folder: str | None = None  # where files beside the messages are
    tools: tuple[dict[str, Any], ...] = ()  # what the model could call, as OpenAI's API takes it


class Reader(Protocol):
    """Finds recordings by id. Readers travel to worker processes, so they must be picklable."""

    def ids(self) -> list[str]:
        """The ids of all recordings, in a fixed order."""

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The recording, from `path` where one is given; `DataError` names the file that is wrong and why."""


def parse_messages(raw: Any, source: str, locate: Any, *, trained: bool = True) -> tuple[Message, ...]:
    """Messages from JSON values of OpenAI's or Qwen's form; `locate(reference, where)` says where an image is.

    A part `{"type": "image_url", "image_url": …}` and a part `{"type": "image", "image": …}` are the same;
    the reference is a string or `{"url": string}`. Reasoning and tool calls beside the content of an answer
    become part of its text, see `answer_text`. A mark such as `"weight": 0` makes an answer mere context (see
    `is_trained`), and `trained=False` makes all of them that.
    """
    if not isinstance(raw, list) or not raw:
        raise DataError(f"{source} must hold a list of messages, got {_kind(raw)}")
    messages = []
    for number, item in enumerate(raw):
        where = f"{source}, message {number}"
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected an object with role and content, got {_kind(item)}")
        role, content = item.get("role"), item.get("content")
        role = {"developer": "system", "function": "tool"}.get(str(role), role)
        if role not in ROLES:
            raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}")
        refuse_unread(item, where)
        calls, thought = item.get("tool_calls"), _thought(item, where)
        if not calls and item.get("function_call"):  # as OpenAI had it before
            calls = [item["function_call"]]
        if role == "assistant" and (calls or thought is not None):
            content = _with_calls(content, calls, thought, where)
        elif calls or thought:
            raise DataError(
                f"{where}: a {role} message has tool_calls or reasoning, which only answers can have"
            )
        learned = is_trained(item, where, role) and trained
        if isinstance(content, str):
            messages.append(Message(role, encodable(content, where), trained=learned))
        elif isinstance(content, list):
            parts = tuple(_part(part, where) for part in content)
            references = [part["image"] for part in parts if part["type"] == "image"]
            if references and role == "assistant":
                raise DataError(f"{where}: an assistant message cannot hold an image")
            images = tuple(locate(reference, where) for reference in references)
            messages.append(Message(role, parts, images, learned))
        else:
            raise DataError(f"{where}: content must be text or a list of parts, got {_kind(content)}")
    return _with_ordered_results(messages, raw, source)


def _with_ordered_results(
    messages: Sequence[Message], raw: Sequence[Any], source: str
) -> tuple[Message, ...]:
    """The messages, with the results behind each answer in the order of its calls; `raw` has the ids of both."""
    found = list(messages)
    calls: list[Any] = []
    for is_answer, group in itertools.groupby(range(len(found)), key=lambda n: found[n].role == "assistant"):
        places = list(group)
        if is_answer:
            calls = [call.get("id") for n in places for call in raw[n].get("tool_calls") or ()]
        elif places := [n for n in places if found[n].role == "tool"]:
            named = [(raw[n].get("tool_call_id"), found[n]) for n in places]
            ordered = ordered_results(calls, named, f"{source}, message {places[0]}")
            for n, message in zip(places, ordered, strict=True):
                found[n] = message
    return tuple(found)


def ordered_results(calls: Sequence[Any], results: Sequence[tuple[Any, R]], where: str) -> list[R]:
    """What came of the calls of an answer in their order, by the ids of both; as it came, where there are none."""
    if not calls:
        return [result for _, result in results]
    try:
        named = [(_id(call), result) for call, result in results]
        return in_order_of_calls([_id(call) for call in calls], named)
    except ValueError as error:
        raise DataError(f"{where}: {error}; the results of parallel calls need the ids of these") from None


def _id(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _thought(item: dict[str, Any], where: str) -> str | None:
    """The reasoning beside a message's content, by any of its names; None without one."""
    said = {name: item[name] for name in REASONING if name in item and item[name] not in (None, [], {})}
    for name, thought in said.items():
        if not isinstance(thought, str):
            raise DataError(f"{where}: {name} must be text, got {_kind(thought)}")
    texts = set(said.values()) - {""}
    if len(texts) > 1:
        raise DataError(f"{where}: {' and '.join(said)} differ; keep one of them")
    return next(iter(texts), "") if said else None


def _with_calls(content: Any, calls: Any, thought: Any, where: str) -> Any:
    """The content of an answer with its reasoning before it and its tool calls behind."""
    if not isinstance(content, list):
        return answer_text(content if isinstance(content, str) else "", thought, calls, where)
    before, behind = _reasoning(thought), "".join(f"\n{call}" for call in _written(calls, where))
    first, last = ({"type": "text", "text": text} for text in (before, behind))
    return [*([first] if before else []), *content, *([last] if behind else [])]


def answer_text(content: str, thought: Any, calls: Any, where: str) -> str:
    """What a model wrote, as one text: `<think>` reasoning, content, and `<tool_call>`s in the form of Qwen models.

    Args:
        content: what it said.
        thought: its reasoning, where that was recorded apart.
        calls: OpenAI's `tool_calls`; arguments are an object, or one as JSON text, and none is `{}`.
        where: the message, for errors.
    """
    return _reasoning(thought) + "\n".join([*([content] if content else []), *_written(calls, where)])


def _reasoning(thought: Any) -> str:
    return f"<think>\n{thought}\n</think>\n\n" if isinstance(thought, str) and thought else ""


def _written(calls: Any, where: str) -> Iterator[str]:
    if calls is not None and not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls must be a list, got {_kind(calls)}")
    for call in calls or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call needs a function with a name, got {str(call)[:80]}")
        arguments, named = function.get("arguments"), f"{where}: arguments of {function['name']!r}"
        if isinstance(arguments, str):
            arguments = from_json(arguments, named) if arguments.strip() else {}
        if not isinstance(arguments, dict | None):
            raise DataError(f"{named} must be an object, got {_kind(arguments)}")
        said = {"name": function["name"], "arguments": arguments or {}}
        yield f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _part(part: Any, where: str) -> Part:
    if isinstance(part, dict):
        refuse_unread(part, where, REFUSED_IN_PARTS)
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            return {"type": "text", "text": encodable(part["text"], where)}
        if kind in ("image", "image_url", "input_image"):
            value = part.get("image_url", part.get("image"))
            value = value.get("url") if isinstance(value, dict) else value
            if isinstance(value, str) and value:
                return {"type": "image", "image": value}
    got = part.get("type") if isinstance(part, dict) else _kind(part)
    raise DataError(f"{where}: expected a text or image part, got {got!r}; convert or remove it")


def encodable(text: str, where: str) -> str:
    """`text` if it is valid Unicode: JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text is not valid Unicode ({error.reason}); record it again") from None
    return text


def check_order(recording: Recording) -> None:
    """Refuse role orders that cannot be cut into turns; any run of messages may come before an answer."""
    problem = _turn_problem([message.role for message in recording.messages])
    if problem:
        raise DataError(f"{recording.source}: {problem}")


def _turn_problem(roles: Sequence[str]) -> str | None:
    if "assistant" not in roles:
        return "there is no assistant message, so nothing to learn from; remove the trajectory"
    if "user" not in roles[: roles.index("assistant")]:
        return "an assistant message comes before the first user message; add the instruction it answers"
    for index in range(1, len(roles)):
        if roles[index] == roles[index - 1] == "assistant":
            return f"messages {index - 1} and {index} are both from the assistant; merge them into one"
    late = [index for index in range(roles.index("assistant"), len(roles)) if roles[index] == "system"]
    if late:
        return f"message {late[0]} is a system message after the first answer; move it to the front"
    return None


def finite_reward(value: Any, where: str) -> float:
    """`value` as a float that float32 has room for, or a `DataError` that says where it came from."""
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    except (TypeError, ValueError):
        raise DataError(f"{where}: reward must be a number, got {value!r}") from None
    if not abs(reward) <= MOST_REWARD:
        beyond = ", for which float32 has no room" if math.isfinite(reward) else ""
        raise DataError(
            f"{where}: reward must be finite, got {reward}{beyond}; score the trajectory again or remove it"
        )
    return reward


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "nothing"}.get(
        type(value), type(value).__name__
    )


# --- files
MOST_OF_FILE = 512 * 2**20
"""Bytes of a file that is read as a whole; more is a mistake or an attack."""


def plain_file(file: Path, folder: Path | None = None, most: int | None = MOST_OF_FILE) -> Path:
    """`file` if it is one that ends: no device or pipe, not too large, and inside `folder` wherever links lead."""
    try:
        about = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{file} is missing; restore it or remove the trajectory") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error})") from error
    if folder is not None and not file.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{file} is a link out of {folder}; put the file itself there")
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"{file} is no plain file; restore it or remove the trajectory")
    if most is not None and about.st_size > most:
        raise DataError(
            f"{file} has {about.st_size:,} bytes, more than {most:,}; keep images in files beside it"
        )
    return file


def read_text(file: Path) -> str:
    """The file's text."""
    with reading(file, "cannot be read"):
        return plain_file(file).read_text("utf-8-sig")


def read_json_file(file: Path, folder: Path | None = None) -> Any:
    """The value in a JSON file, which lies in `folder` where one is given."""
    return read_json(plain_file(file, folder))


SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


def shortage(error: BaseException | None) -> OSError | None:
    """What lies behind an error where the machine ran short of something, so that no recording is to blame for it."""
    while error is not None and not (isinstance(error, OSError) and error.errno in SHORTAGES):
        error = error.__cause__ or error.__context__
    return error


def safe_id(name: str) -> str:
    """`name` if it may be a trajectory's id and part of a path."""
    try:
        return check_name("dataset", name)
    except ValueError as error:
        raise DataError(str(error)) from error


def short_id(name: str) -> str:
    """`name` if it is safe in a path, else its safe letters and a digest.

    >>> short_id("task-7"), short_id("2024_me@here.org")
    ('task-7', '2024_me_here.org-0e2e2b6a')
    """
    if SAFE_NAME.fullmatch(name) and not name.endswith((" ", ".")):
        return name
    letters = re.sub(r"[^A-Za-z0-9._()-]", "_", name)[:50].lstrip("._(-") or "x"
    return f"{letters}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


class ImageLocator:
    """Turns image references into absolute paths or data URLs; never leaves `folder`.

    "x" means "x.png", as in the original; names with another image suffix stay as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inside = folder.resolve()

    def __call__(self, reference: str, where: str) -> str:
        """The place of `reference`; `where` is the message it stands in, for errors."""
        if reference.startswith("data:"):
            return reference
        if reference.startswith(("http://", "https://")):
            raise DataError(
                f"{where}: image {reference[:80]!r} is on the web; download it beside the messages"
            )
        name = unquote(reference.removeprefix("file://")) if reference.startswith("file://") else reference
        if not name.lower().endswith(IMAGE_SUFFIXES):
            name += ".png"
        if "\x00" in name:
            raise DataError(f"{where}: image {reference[:80]!r} is not a file name")
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self._inside):
            raise DataError(f"{where}: image {reference[:80]!r} leaves {self.folder}; put it inside")
        try:
            there = path.is_file()
        except OSError as error:  # too long for a name: the bytes of an image, say
            raise DataError(
                f"{where}: image {reference[:80]!r} is no file ({error.strerror}); name one, or write a data: URL"
            ) from None
        if not there:
            raise DataError(f"{where}: image {path} is missing; restore it or remove the trajectory")
        return str(path)


# --- the reader of folders
MESSAGES, TASK = "final_messages.json", "task_config.json"


TASK_CONFIG: Shape = dict.fromkeys((
    "id", "reward", "tools", "instruction", "snapshot", "source", "config", "evaluator", "trajectory", "related_apps",
    "proxy", "fixed_ip", "possibility_of_env_change", *MARKS,
))  # fmt: skip
"""What is read of a `task_config.json`, and what OSWorld keeps there to set a task up and to judge it."""


class Unread:
    """The keys that a reader of folders did not read and has told of."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, source: Path, keys: Iterable[str]) -> None:
        """Name those that are new."""
        if unread := sorted(set(keys) - self._told):
            self._told |= set(unread)
            logger.warning("%s: not read, here and in other recordings: %s", source, ", ".join(unread))


class FolderReader:
    """`<root>/<id>/final_messages.json` with the images beside them, and a `task_config.json` where there is one.

    The config has, where known, `id`, the task (without it the folder's name), `reward` and `tools`. An id is the name
    of the folder; one that is not safe in a path gets its safe letters and a digest.

    Args:
        root: the folder of trajectory folders, or one trajectory folder.
        rollout_tokens: also read `data_for_step_<k>` files (see `read_rollout`).
    """

    def __init__(self, root: Path | str, *, rollout_tokens: bool = False) -> None:
        self.root = Path(root)
        self.rollout_tokens = rollout_tokens
        self._unread = Unread()
        self._odd: dict[str, str] = {}  # names of folders by their ids, where these differ

    def ids(self) -> list[str]:
        """Ids of the folders that hold messages, sorted."""
        if (self.root / MESSAGES).is_file():
            return [self._own_id()]
        return sorted(self._folders())

    def sources(self) -> Iterator[Path]:
        """The files that recordings are made of, apart from images."""
        for one in self.ids():
            folder = self._folder(one)
            names = (MESSAGES, TASK, "data_for_step_*") if self.rollout_tokens else (MESSAGES, TASK)
            yield from (file for name in names for file in sorted(folder.glob(name)))

    def _folders(self) -> dict[str, str]:
        """The names of the folders that hold messages, by their ids."""
        folders = {short_id(name): name for name in (p.parent.name for p in self.root.glob(f"*/{MESSAGES}"))}
        self._odd = {own: name for own, name in folders.items() if own != name}
        return folders

    def _own_id(self) -> str:
        return short_id(self.root.resolve().name)

    def read(self, dataset_id: str, path: Path | None = None) -> Recording:
        """The recording in its folder, or in `path` if that is given."""
        folder = path if path is not None else self._folder(dataset_id)
        source, config_file = folder / MESSAGES, folder / TASK
        raw = read_json_file(source, folder)
        config = read_json_file(config_file, folder) if os.path.lexists(config_file) else {}
        task = config.get("id", folder.resolve().name) if isinstance(config, dict) else None
        if not isinstance(task, str | int):
            raise DataError(f"{config_file} must be an object; its 'id' is the name of the task")
        refuse_unread(config, str(config_file))
        trained, reward = is_trained(config, str(config_file)), config.get("reward")
        messages = parse_messages(raw, str(source), ImageLocator(folder), trained=trained)
        self._unread.tell(source, unread_keys(raw, MESSAGE, "messages."))
        self._unread.tell(config_file, unread_keys(config, TASK_CONFIG))
        return Recording(
            dataset_id,
            str(task),
            messages,
            str(source),
            reward=None if reward is None else finite_reward(reward, str(config_file)),
            steps=read_rollout(folder) if self.rollout_tokens else None,
            folder=str(folder),
            tools=tools_of(config, str(config_file), ("tools",)),
        )

    def _folder(self, dataset_id: str) -> Path:
        """The folder of a recording, by its id or by its name."""
        if dataset_id == self._own_id() and (self.root / MESSAGES).is_file():
            return self.root
        own = short_id(dataset_id)
        if own != dataset_id or not (self.root / own / MESSAGES).is_file():
            name = self._odd.get(own) or self._folders().get(own)
            if name is not None:
                return self.root / name
        return self.root / safe_id(dataset_id)


# --- recorded tokens
_NAME = re.compile(r"data_for_step_(\d+)\.(pt|safetensors)")


def read_rollout(folder: Path) -> tuple[RolloutTokens, ...]:
    """The recorded steps in order; a gap, a broken file or a length that does not match is a `DataError`."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            number = int(match[1])
            if number in found:
                raise DataError(f"{path} and {found[number].name} are both step {number}; remove one")
            found[number] = path
    if not found:
        raise DataError(f"{folder} has no data_for_step_<k>.pt or .safetensors, which use_vllm_logp reads")
    first = min(found)
    if first > 1 or sorted(found) != list(range(first, first + len(found))):
        raise DataError(f"{folder}: data_for_step files must count up from 0 or 1, got {sorted(found)}")
    return tuple(_read_step(found[number]) for number in sorted(found))


def write_rollout(folder: Path, steps: Sequence[RolloutTokens]) -> None:
    """Write `data_for_step_<k>.safetensors`, k from 0; only the arrays, no pickle."""
    from safetensors.numpy import save

    for number, step in enumerate(steps):
        tensors = {
            "token_ids": np.asarray(step.response_ids, np.int64),
            "logp": np.asarray(step.logprobs, np.float32),
            "prompt_token_ids": np.asarray(step.prompt_ids, np.int64),
        }
        write_bytes(folder / f"data_for_step_{number}.safetensors", save(tensors))


def _read_step(path: Path) -> RolloutTokens:
    values = _load(path)
    if not isinstance(values, dict):
        raise DataError(f"{path} must hold token_ids and logp by name, got {type(values).__name__}")
    for name in ("token_ids", "logp"):
        if name not in values:
            raise DataError(f"{path} has no {name!r}, only {sorted(map(str, values))}")
    token_ids, logp, prompt_ids = (
        _flat(values.get(name, ()), path) for name in ("token_ids", "logp", "prompt_token_ids")
    )
    check_tokens(RolloutTokens(prompt_ids, token_ids, logp, str(path)))
    return RolloutTokens(tuple(map(int, prompt_ids)), tuple(map(int, token_ids)), logp, str(path))


def check_tokens(step: RolloutTokens) -> None:
    """Refuse a step in which not every token is one, or has not its log-probability."""
    ids, logprobs = np.asarray((*step.prompt_ids, *step.response_ids)), np.asarray(step.logprobs)
    if len(step.response_ids) != len(logprobs):
        raise DataError(
            f"{step.source}: {len(step.response_ids)} token_ids but {len(logprobs)} logp; record the step again, "
            "since a missing log-probability cannot be made up"
        )
    if not step.response_ids:
        raise DataError(f"{step.source}: the step has no tokens; remove it")
    if ids.dtype.kind not in "iuf" or not ((ids >= 0) & (ids < 2**31) & (ids % 1 == 0)).all():
        raise DataError(f"{step.source}: token ids must be whole numbers, none below 0")
    # Sampling kernels round slightly above 0.
    if logprobs.dtype.kind not in "iuf" or not (np.isfinite(logprobs) & (logprobs <= 1e-3)).all():
        raise DataError(f"{step.source}: logp must be finite log-probabilities, at most 0")


def _load(path: Path) -> Any:
    import torch

    advice = "; write token ids and log-probabilities as tensors, without Python objects"
    with reading(path, "cannot be read as plain tensors", advice):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)


def _flat(value: Any, path: Path) -> tuple[Any, ...]:
    import torch

    values = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, int | float) for item in values):
        raise DataError(
            f"{path}: token_ids, logp and prompt_token_ids must be flat lists or tensors of numbers"
        )
    return tuple(values)
