"""What the keys of rows, messages and parts say: which answers are trained, which tools a model had, what is not read.

Known keys are honoured. Keys that change what other programs train, and that mean nothing here, are refused by name.
Any other key is named once for each file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import from_json

MARKS = ("trained", "weight", "loss", "trainable")
"""Keys that say whether an answer is trained: of shoal; of OpenAI, Mistral, Together and Fireworks; of ms-swift; of
tinker."""

REFUSED = frozenset((
    "loss_mask", "loss_scale", "loss_weight", "mask", "masked", "sample_weight", "weights", "train", "train_detail",
    "train_on_input", "train_on_inputs", "train_on_prompt", "training",
    "chosen", "chosen_messages", "kto_tag", "label", "labels", "margin", "negative_messages", "positive_messages",
    "rejected", "rejected_messages", "rejected_response",
    "audios", "chat_template_kwargs", "objects", "videos",
))  # fmt: skip
"""Keys by which other programs mask and weigh tokens, learn from preferences, or change the prompt."""

_MARKS = frozenset(MARKS)
REFUSED_IN_PARTS = REFUSED | _MARKS

Shape = Mapping[str, Any]
"""The keys that are read of an object; each with the shape of the objects in it, or None."""

PART: Shape = dict.fromkeys(("type", "text", "image", "image_url"))
MESSAGE: Shape = {
    **dict.fromkeys((
        "role", "tool_calls", "function_call", "tool_call_id", "reasoning_content", "reasoning", "thinking", *MARKS,
    )),
    "content": PART,
}  # fmt: skip
CHAT: Shape = {
    **dict.fromkeys((
        "id", "task_id", "uid", "reward", "images", "system", "tools", "tool_defs", "functions", *MARKS,
    )),
    "messages": MESSAGE, "prompt": MESSAGE, "completion": MESSAGE,
    "conversations": {**MESSAGE, "from": None, "value": None},
}  # fmt: skip


def is_there(value: Any) -> bool:
    """Whether a key says anything: columns of a table spell one that does not as null, or leave it empty."""
    return value is not None and value not in ("", [], {})


def refuse_unread(value: Mapping[str, Any], where: str, keys: frozenset[str] = REFUSED) -> None:
    """Raise a `DataError` for a key that changes what other programs train."""
    if not keys.isdisjoint(value):
        for key in sorted(keys.intersection(value)):
            if is_there(value[key]):
                raise DataError(
                    f"{where}: {key!r} changes what a model is shown or learns, and is not read here; remove it (an "
                    'answer that is only context is marked by "trained": false on its message)'
                )


def is_trained(value: Mapping[str, Any], where: str, role: str = "assistant") -> bool:
    """Whether the marks of a message, step or row leave it trained; without a mark it is.

    Raises:
        DataError: a mark is neither true (1) nor false (0), two contradict each other, or one wants a message trained
            that is no answer.
    """
    if _MARKS.isdisjoint(value):
        return True
    marks = [(name, value[name]) for name in MARKS if value.get(name) is not None]
    for name, mark in marks:
        if not isinstance(mark, int | float) or mark not in (0, 1):
            wanted = "0 or 1" if name == "weight" else "true or false"
            raise DataError(f"{where}: {name} must be {wanted}, got {mark!r}")
        if mark and role != "assistant":
            raise DataError(
                f"{where}: {name} is {mark!r} on a {role} message, and only answers are trained; remove it"
            )
        if bool(mark) != bool(marks[0][1]):
            raise DataError(
                f"{where}: {marks[0][0]} is {marks[0][1]!r} and {name} is {mark!r}, which contradict each other; "
                "keep one of them"
            )
    return not marks or bool(marks[0][1])


def unread_keys(value: Any, shape: Shape, path: str = "") -> Iterator[str]:
    """The keys in `value` that `shape` has not, such as "source" of a row and "messages.name" of a message."""
    if isinstance(value, list):
        for item in value:
            yield from unread_keys(item, shape, path)
    elif isinstance(value, dict):
        for key, inside in value.items():
            if key not in shape:
                if key not in REFUSED and is_there(inside):
                    yield f"{path}{key}"
            elif shape[key] is not None and isinstance(inside, list | dict):
                yield from unread_keys(inside, shape[key], f"{path}{key}.")


def tools_of(
    row: Mapping[str, Any], where: str, names: tuple[str, ...] = ("tools", "tool_defs", "functions")
) -> Any:
    """The tools beside a chat, in OpenAI's form: a tuple of `{"type": "function", "function": {"name", …}}`.

    They are a list or its JSON text; one that has its name at the top, as in `tool_defs` of verifiers, is wrapped.
    """
    found = [(name, tools) for name in names if (tools := _tools(row.get(name), f"{where}, {name}"))]
    if any(tools != found[0][1] for _, tools in found):
        raise DataError(
            f"{where}: {' and '.join(name for name, _ in found)} hold different tools; keep one of them"
        )
    return found[0][1] if found else ()


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str) and value.strip():
        value = from_json(value, where)
    if not is_there(value):
        return ()
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a list of tools, or one as JSON text, got {type(value).__name__}")
    return tuple(_tool(from_json(tool, where) if isinstance(tool, str) else tool, where) for tool in value)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, dict):
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return tool
        if (
            function is None
            and isinstance(tool.get("name"), str)
            and tool.get("type", "function") == "function"
        ):
            said = {("parameters" if key == "input_schema" else key): item for key, item in tool.items()}
            said.pop("type", None)
            return {"type": "function", "function": said}
    raise DataError(f"{where}: a tool needs a function with a name, got {str(tool)[:80]}")
