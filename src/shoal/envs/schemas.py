"""Arguments as the JSON schema of their tool allows them: models quote numbers, and in tags all arguments are text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.envs.calls import BROKEN, MOST_DEPTH, too_much

Schema = Mapping[str, Any]
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def fitted(value: Any, schema: Any, root: Schema | None = None) -> Any:
    """A value with each text in it that its JSON schema does not allow, and that stands for what it does, as that.

    >>> fitted({"n": "3", "s": "3"}, {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    {'n': 3, 's': '3'}
    """
    if not isinstance(schema, Mapping):
        return value
    root = schema if root is None else root
    schema = _referred(schema, root)
    if isinstance(value, str):
        kinds = _kinds(schema, root)
        if kinds is None or "string" in kinds:
            return value
        found = _read(value)
        fits = _kind(found) in kinds or (_kind(found) == "integer" and "number" in kinds)
        if not fits and isinstance(found, float) and found.is_integer() and "integer" in kinds:
            found, fits = int(found), True  # in JSON Schema 3.0 is an integer
        return fitted(found, schema, root) if fits and too_much(found) is None else value
    if isinstance(value, dict):
        parts = schema.get("properties")
        parts = parts if isinstance(parts, Mapping) else {}
        others = schema.get("additionalProperties")
        return {name: fitted(part, parts.get(name, others), root) for name, part in value.items()}
    if isinstance(value, list):
        return [fitted(part, schema.get("items"), root) for part in value]
    return value


def _read(text: str) -> Any:
    """What a text stands for: JSON, or a truth value or nothing as Python writes them; else the text."""
    word = text.strip()
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        return msgspec.json.decode(word)
    except BROKEN:
        return text


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "other")


def _kinds(schema: Any, root: Schema, depth: int = 0) -> set[str] | None:
    """The types that a schema allows; None where it does not say."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return None
    schema = _referred(schema, root)
    if isinstance(kind := schema.get("type"), str | list):
        return {kind} if isinstance(kind, str) else {*map(str, kind)}
    if isinstance(values := schema.get("enum"), list):
        return {*map(_kind, values)}
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            found = [_kinds(part, root, depth + 1) for part in parts]
            return None if None in found else set().union(*filter(None, found))
    return None


def _referred(schema: Schema, root: Schema) -> Schema:
    """The schema that a schema refers to in the whole, by `#/$defs/NAME`, say; or itself."""
    for _ in range(MOST_DEPTH):
        if not isinstance(place := schema.get("$ref"), str):
            break
        found: Any = root
        for part in place.split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = found
    return schema
