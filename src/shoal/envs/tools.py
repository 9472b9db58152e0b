"""Tools as a model is shown them; typed Python functions become tools by their signature and docstring.

Arguments are checked against the signature; a tool of somebody else checks its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from shoal.core.errors import ConfigError, EnvError, whole_characters
from shoal.envs.actions import ToolCall

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z", re.ASCII)


@dataclass(frozen=True)
class Tool:
    """A tool as a model is shown it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON Schema of an object
    timeout: float = 10.0  # seconds of one call
    max_chars: int = 4096  # of a result; the rest is cut
    function: Callable[..., Any] | None = None
    """Its arguments are checked against its signature; None of a server's, which checks them itself."""

    @property
    def in_hosts(self) -> bool:
        """Whether it runs where episodes are played; other tools run beside the driver."""
        return self.function is not None and not inspect.iscoroutinefunction(self.function)

    @property
    def schema(self) -> dict[str, Any]:
        """What is recorded of it, and put into prompts."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with these arguments."""
        try:
            self.converted(arguments)
        except (msgspec.ValidationError, ValueError) as error:
            return str(error).replace(" - at `$.", " - at `").replace(" - at `$`", "")
        return None

    def converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the types of the function, and those alone that were given."""
        if self.function is None:
            return dict(arguments)
        whole: Any = msgspec.convert(dict(arguments), _checks(self.function))
        return {name: getattr(whole, name) for name in arguments}

    def result(self, value: Any) -> str:
        """What a tool returned as text: JSON if it is none, cut to `max_chars`."""
        text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
        text = whole_characters(text)
        if len(text) > self.max_chars:
            text = f"{text[: self.max_chars]}… (cut: {len(text)} characters)"
        return text


def function_tool(
    function: Callable[..., Any], timeout: float = Tool.timeout, max_chars: int = Tool.max_chars
) -> Tool:
    """A typed function as a tool.

    Raises:
        ConfigError: a parameter without a type, or with one that JSON has not; it names function and parameter.
    """
    name = getattr(function, "__name__", "")
    if not NAME.match(name):
        raise ConfigError(f"a tool must be a function with a name, got {function!r:.80}: use def")
    try:
        (_,), parts = msgspec.json.schema_components([_checks(function)])
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"tool {name}: {error}; use types that JSON has, or dataclasses of them") from error
    schema = {key: value for key, value in parts.pop(name).items() if key != "title"}
    schema.pop("additionalProperties", None)
    if parts:
        schema["$defs"] = parts
    description, _ = _docstring(inspect.getdoc(function) or "")
    return Tool(name, description, schema, timeout, max_chars, function)


def _checks(function: Callable[..., Any]) -> type:
    """A struct with the parameters of a function, or of a method without its object, which its arguments must fit."""
    method = getattr(function, "__func__", None)
    return _struct(function, 0) if method is None else _struct(method, 1)


@lru_cache(maxsize=256)
def _struct(function: Callable[..., Any], skipped: int) -> type:
    """A struct with the parameters of a function behind the first few.

    Raises:
        TypeError: a parameter without a type or name, or a type that msgspec does not know.
    """
    _, notes = _docstring(inspect.getdoc(function) or "")
    fields: list[Any] = []
    for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[skipped:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} cannot be given by name: list the parameters")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"parameter {parameter.name} has no type")
        kind = parameter.annotation
        if note := notes.get(parameter.name):
            kind = Annotated[kind, msgspec.Meta(description=note)]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, kind, *default))
    return msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before `Args:`, and of each parameter there (Google's form)."""
    head, _, rest = text.partition("\nArgs:\n")
    notes: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if found := re.match(r"    (\w+)(?: \([^)]*\))?: (.*)", line):
            last = found[1]
            notes[last] = found[2].strip()
        elif line.startswith("     ") and last:
            notes[last] += f" {line.strip()}"
        elif line.strip():
            break
    head = re.split(r"\n(?:Returns|Raises|Yields|Example|Examples):\n", head)[0]
    return " ".join(head.split()), notes


# --- tools of an episode
def tools_of(info: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tools that an env names in the info of its reset.

    Raises:
        EnvError: there are none, two have one name, or one is not described by name, description and parameters.
    """
    listed = info.get("tools")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise EnvError(f"info['tools'] of a reset must list the tools of the episode, got {listed!r:.80}")
    try:
        tools = tuple(msgspec.convert(dict(schema), _Described).tool for schema in listed)
    except (TypeError, ValueError) as error:
        raise EnvError(
            f"each of info['tools'] must have name, description and parameters (a JSON schema): {error}"
        ) from error
    check_names(tools)
    return tools


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    """A tool as an env describes it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters or {"type": "object", "properties": {}})


def check_names(tools: Sequence[Tool]) -> None:
    """Refuse names that templates and servers do not take, and two of one name."""
    names = [tool.name for tool in tools]
    for name in names:
        if not NAME.match(name):
            raise EnvError(f"the name of a tool must match {NAME.pattern}, got {name!r:.80}")
        if names.count(name) > 1:
            raise EnvError(f"an env has two tools named {name!r}: rename one")


def checked(call: ToolCall, tools: Mapping[str, Tool]) -> ToolCall:
    """A call with what is wrong with it, if anything is."""
    if call.error is not None:
        return call
    if (tool := tools.get(call.name)) is None:
        return replace(call, error=f"there is no tool {call.name[:64]!r}; there are: {', '.join(tools)}")
    return replace(call, error=tool.problem(call.arguments))


def random_call(tool: Tool, rng: np.random.Generator) -> ToolCall | None:
    """A call with random values of the parameters that must be given; None where one of them is no choice or number."""
    properties, values = tool.parameters.get("properties", {}), {}
    for name in tool.parameters.get("required", ()):
        choices = _choices(properties.get(name, {}))
        if not choices:
            return None
        values[name] = choices[int(rng.integers(len(choices)))]
    return ToolCall(tool.name, values)


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Values that a schema allows: those that it lists, or numbers of its range, of which ten at most are taken."""
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return (False, True)
    if schema.get("type") not in ("integer", "number"):
        return ()
    least = int(schema.get("minimum", 0))
    return range(least, min(int(schema.get("maximum", least + 9)), least + 9) + 1)
