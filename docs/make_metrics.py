"""Writes the sentences about metrics that `shoal view` shows, from the pages that define metrics.

python docs/make_metrics.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
FILE = DOCS.parent / "src" / "shoal" / "viewer" / "static" / "metrics.json"
PAGES = {"agent": "metrics.md", "ppo": "ppo.md"}


def sentences(page: Path) -> dict[str, dict[str, str]]:
    """The meaning of each metric, under the heading of its table."""
    found: dict[str, dict[str, str]] = {}
    heading, within = "", False
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        within = line.startswith("| metric |") or (within and line.startswith("|"))
        if within and line.startswith("| `"):
            names, meaning = re.split(r"(?<!\\)\|", line)[1:3]
            plain = (
                re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", meaning).replace("`", "").replace("\\|", "|").strip()
            )
            found.setdefault(heading, {}).update(dict.fromkeys(re.findall(r"`([^`]+)`", names), plain))
    return found


def text() -> str:
    """The whole file."""
    told = {kind: sentences(DOCS / page) for kind, page in PAGES.items()}
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
