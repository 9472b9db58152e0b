"""Tokens as text, by the tokenizer that lies in the run; without one they are shown by their numbers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.core.files import read_json

logger = logging.getLogger(__name__)
Spell = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each."""


def spelling(run: Path) -> Spell | None:
    """How the tokens of a run are written; None if nothing in its folder tells."""
    for folder in _engines(run):
        return _spelling(str(folder), (folder / "engine.json").stat().st_mtime_ns)
    return None


def _engines(run: Path) -> list[Path]:
    """Folders of an engine in a run, those of the newest weights first."""
    places = [run / "engine", *sorted(run.glob("checkpoints/*/engine"), reverse=True)]
    return [place for place in places if (place / "engine.json").is_file()]


@functools.lru_cache(maxsize=16)
def _spelling(folder: str, changed: int) -> Spell | None:
    try:
        described: Any = read_json(Path(folder) / "engine.json")
        if described.get("engine") == "tiny":
            from shoal.rollout.samplers.tokenizers import TinyTokenizer

            return functools.partial(_by_table, TinyTokenizer(described["words"]).tokens)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever lies there, the page is shown, with numbers
        logger.warning("the tokenizer in %s cannot be read (%s); tokens are shown by number", folder, error)
        return None
    return functools.partial(_by_tokenizer, tokenizer)


def _by_table(tokens: Sequence[str], ids: Sequence[int]) -> list[str]:
    return [tokens[i] if 0 <= i < len(tokens) else f"#{i}" for i in ids]


def _by_tokenizer(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([i], skip_special_tokens=False) if i >= 0 else f"#{i}" for i in ids]
