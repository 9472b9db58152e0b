"""Writes two tables: the presets of algorithms into algorithms.md, and the names of TRL and verl into from-trl-verl.md.

python docs/make_presets.py
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from library_names import TRL, VERL, Name

from shoal.core.configuration import to_mapping
from shoal.train.agent.algorithms.presets import leaves, preset_names
from shoal.train.agent.config import compose_config

DOCS = Path(__file__).parent
SHOWN = (
    "algorithm.adv_estimator", "algorithm.policy_loss", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high",
    "algorithm.loss_aggregation", "algorithm.loss_constant", "algorithm.kl.coef", "algorithm.kl.estimator",
    "algorithm.kl.place",
)  # fmt: skip
"""Settings with a column of their own."""


def preset_table() -> str:
    """A row a preset: its paper, and setting by setting what it sets."""
    rows = [
        "| preset | paper | advantage | loss, clips | mean over | KL | other differences from `grpo` |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = settings_of("grpo")
    for name in ["grpo", *(name for name in preset_names() if name != "grpo")]:
        known = settings_of(name)
        other = [f"`{path.removeprefix('algorithm.')}={shown(value)}`" for path, value in known.items()
                 if path not in SHOWN and value != plain[path]]  # fmt: skip
        estimator, loss, low, high, how, constant, coef, kl, place = (known[path] for path in SHOWN)
        clips = {"likelihood": "", "cispo": f" {high:g}"}.get(loss, f" {low:g}, {high:g}")
        over = {"token_mean": "tokens", "sequence_mean": "samples, their tokens"}.get(
            how, "samples, tokens summed" + ("" if constant == 1 else f" / {shown(constant)}")
        )
        held = f"{coef:g} `{kl}`, {place}" if coef else "none"
        cells = [
            f"`{name}`",
            paper_of(name),
            f"`{estimator}`",
            f"`{loss}`{clips}",
            over,
            held,
            ", ".join(other),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def settings_of(name: str) -> dict[str, Any]:
    """What a preset sets, by path."""
    changed = dict(leaves(to_mapping(compose_config("base", [f"algorithm={name}"]))))
    text = resources.files("shoal.configs").joinpath("algorithm", "grpo.yaml").read_text("utf-8")
    return {path: changed[path] for path, _ in leaves(yaml.safe_load(text))}


def paper_of(name: str) -> str:
    """The paper that the file of a preset names first, as a link."""
    text = resources.files("shoal.configs").joinpath("algorithm", f"{name}.yaml").read_text("utf-8")
    found = re.search(r"arXiv:(\d+\.\d+)|doi:([\w./-]+\w)", text)
    assert found, name
    if found[1]:
        return f"[{found[1]}](https://arxiv.org/abs/{found[1]})"
    return f"[Williams 1992](https://doi.org/{found[2]})"


def names_table(names: tuple[Name, ...], title: str) -> str:
    """A row a setting of another library: what does the same here by default, and its default there."""
    rows = [f"| {title} | in shoal | default of {title} | |", "|---|---|---|---|"]
    for name in names:
        theirs = ", ".join(f"`{part}`" for part in name.theirs.split(", "))
        defaults = name.default if isinstance(name.default, list) else [name.default]
        here = ", ".join(f"`{part}`" for part in name.shoal)
        rows.append(f"| {theirs} | {here} | {', '.join(map(shown, defaults))} | {name.note} |")
    return "\n".join(rows)


def shown(value: Any) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def filled(page: str, **tables: str) -> str:
    """A page with tables in the place of those between its marks."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: make settings -->\n", f"\n<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        page = head + begin + table + end + rest.partition(end)[2]
    return page


def pages() -> dict[Path, str]:
    """The pages with their tables."""
    algorithms, names = DOCS / "algorithms.md", DOCS / "how-to" / "from-trl-verl.md"
    trl, verl = names_table(TRL, "TRL"), names_table(VERL, "verl")
    return {
        algorithms: filled(algorithms.read_text("utf-8"), presets=preset_table()),
        names: filled(names.read_text("utf-8"), trl=trl, verl=verl),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
