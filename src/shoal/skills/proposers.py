"""Where skills come from: a knowledge base, or a language model that returns specs as checked JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import ConfigError, EngineError
from shoal.core.files import append_line
from shoal.core.run_folder import whole_rows
from shoal.samplers.asking import RetryPolicy
from shoal.samplers.servers.http import HttpClient
from shoal.skills.plan import covering_plan, dependencies, plan_for
from shoal.skills.spec import (
    Features,
    Skill,
    check_skill,
    check_skills,
    load_skills,
    parse_skill,
    slug,
)

logger = logging.getLogger(__name__)
MAX_REPLY = 20_000  # characters of a model's reply that are looked at


class Proposer(Protocol):
    """Names the next skill to train."""

    def next_skill(
        self, known: Sequence[Skill], completed: Sequence[str], failed: Mapping[str, str]
    ) -> Skill | None:
        """A skill that is not in `known`, or None when there are no more."""


def knowledge_base(world: str) -> Path:
    """The skills that come with shoal for a world."""
    path = Path(str(resources.files("shoal") / "configs" / "skills" / f"{world}.yaml"))
    if not path.exists():
        raise ConfigError(f"no skills come with the world {world!r}; name a YAML file of them with --skills")
    return path


class KnowledgeBase:
    """Skills from a file, in its order, each after those it needs; one that can be trained now goes first.

    All of them are known beforehand, so the graph is whole from the start and the longest way in it goes first.

    Args:
        path: a YAML file of skills.
        features: of the world.
        max_nodes: use the first so many skills.
        target: use only this skill and what its plan needs.
    """

    foresees = True

    def __init__(
        self, path: Path | str, features: Features, max_nodes: int | None = None, target: str | None = None
    ) -> None:
        if max_nodes is not None and max_nodes < 0:
            raise ConfigError(f"max_nodes must be at least 0, got {max_nodes}")
        skills = load_skills(path, features)
        if not skills:
            raise ConfigError(f"{path} has no skills, and nothing would be trained: describe at least one")
        if target is not None:
            needed = {step.skill for step in plan_for(target, skills, features)}
            skills = [skill for skill in skills if skill.name in needed]
            if max_nodes is not None and len(skills) > max_nodes:
                raise ConfigError(
                    f"{target!r} and what it needs are {len(skills)} skills, and max_nodes={max_nodes} would leave it "
                    f"out: raise max_nodes to {len(skills)}"
                )
        self.skills, self.features = skills[:max_nodes], features
        covering_plan(self.skills, features)  # a cycle, an item nobody gains: an error now, not in an hour

    def next_skill(
        self, known: Sequence[Skill], completed: Sequence[str], failed: Mapping[str, str]
    ) -> Skill | None:
        """The next skill of the file."""
        names = {skill.name for skill in known}
        left = [skill for skill in self.skills if skill.name not in names]
        for there in (set(completed), names):  # else one that can be planned with what is known
            for skill in left:
                if set(dependencies(skill, self.skills, self.features)) <= there:
                    return skill
        return left[0] if left else None


class LanguageModel:
    """Asks a chat model behind an OpenAI-compatible server for the next skill; needs the extra "llm".

    Its reply is data: the first JSON object in it, checked like a skill from a file. What is wrong with a reply
    is told to the model, `tries` times; then the error is raised. Nothing it writes is run.

    Args:
        model: name of the model.
        base_url: of the server, up to `/v1`.
        features: of the world.
        api_key: sent as a bearer token.
        tries: replies asked for per skill.
        timeout: seconds to wait for one reply; a server that is busy or gone is asked `tries` times.
        examples: skills shown to the model.
        record: a file to which every reply is added, with what became of it; `Replay` proposes from it.
        patience: seconds before the second request to such a server, doubled each time.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        features: Features,
        *,
        api_key: str = "none",
        tries: int = 3,
        timeout: float = 120.0,
        examples: Sequence[Skill] = (),
        record: Path | str | None = None,
        patience: float = 1.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the model's base_url must start with http:// or https://, got {base_url!r}")
        self.model, self.base_url, self.features = model, base_url.rstrip("/"), features
        self.api_key, self.tries, self.timeout, self.examples = api_key, tries, timeout, examples
        self.record, self.patience = Path(record) if record else None, patience

    def next_skill(
        self, known: Sequence[Skill], completed: Sequence[str], failed: Mapping[str, str]
    ) -> Skill | None:
        """Ask for one more skill; None when the model says there is none."""
        messages = [
            {"role": "system", "content": self._instructions()},
            {"role": "user", "content": self._situation(known, completed, failed)},
        ]
        problem = ""
        for _ in range(self.tries):
            reply = self._ask(messages)
            try:
                skill = self._read(reply, known)
                self._save(reply, skill)
                return skill
            except (ConfigError, ValueError) as error:
                problem = str(error)
                self._save(reply, problem)
                logger.warning("the model's skill was refused: %s", problem)
                messages += [
                    {"role": "assistant", "content": reply[:MAX_REPLY]},
                    {
                        "role": "user",
                        "content": f"That skill is refused: {problem}\nReply with a corrected JSON object.",
                    },
                ]
        raise EngineError(
            f"{self.model} gave no usable skill in {self.tries} replies; the last problem: {problem}"
        )

    def _instructions(self) -> str:
        counters = ", ".join(
            f"{name} (0-{self.features.holds(name)})" for name in sorted(self.features.counters)
        )
        places = ", ".join(sorted(self.features.places))
        others = ", ".join(
            name for name in self.features.names if name not in self.features.counters | self.features.places
        )
        example = json.dumps((self.examples[0] if self.examples else _EXAMPLE).as_dict())
        return (
            f"You extend a tree of skills for an agent in the world {self.features.world}.\n"
            f"Counters: {counters}.\nTools and achievements (had or not): {others}.\n"
            + (f"Places (left by every skill that does not name them): {places}.\n" if places else "")
            + "Reply with one JSON object and nothing else. Keys: name, requirements, consumption, gain (each an "
            "object from the names above to amounts per application; requirements include what is consumed), done "
            '({"feature", "count", "op": ">=" or "<="}), horizon (steps allowed), practice (applications in a row '
            "per training episode), reward ({weights, bonus, step_cost}, optional).\n"
            f"Example: {example}\n"
            'When there is nothing useful left to learn reply {"name": null}.'
        )

    def _situation(self, known: Sequence[Skill], completed: Sequence[str], failed: Mapping[str, str]) -> str:
        lines = ["Skills so far:"] if known else ["There are no skills yet."]
        for skill in known:
            state = "learned" if skill.name in completed else "in training"
            if skill.name in failed:
                state = f"failed: {failed[skill.name]}"
            lines.append(
                f"- {skill.name} ({state}): requires {dict(skill.requirements)}, uses up {dict(skill.consumption)}, "
                f"gains {dict(skill.gain)}"
            )
        lines.append("Propose the next skill: new, and possible with what the skills above gain.")
        return "\n".join(lines)

    def _read(self, reply: str, known: Sequence[Skill]) -> Skill | None:
        data = first_object(reply[:MAX_REPLY])
        if data.get("name", "") is None:
            return None
        skill = check_skill(parse_skill(data), self.features)
        if slug(skill.name) in {slug(other.name) for other in known}:
            raise ConfigError(f"there is a skill named {skill.name!r} already")
        plan_for(skill.name, [*known, skill], self.features)
        return skill

    def _ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": 0.2,
            "response_format": {"type": "json_object"},
        }
        patience = RetryPolicy(self.timeout, self.tries - 1, self.patience, max(self.patience, 60.0))
        with HttpClient(self.base_url, patience, self.api_key) as client:
            answer = client.post("/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (LookupError, TypeError) as error:
            raise EngineError(f"{self.base_url} returned no chat completion: {str(answer)[:80]}") from error

    def _save(self, reply: str, became: Skill | str | None) -> None:
        """Add a reply to the record, durably before it is used."""
        if self.record is None:
            return
        row = {
            "time": time.time(),
            "model": self.model,
            "reply": reply[:MAX_REPLY],
            "refused": became if isinstance(became, str) else None,
            "skill": became.as_dict() if isinstance(became, Skill) else None,
        }
        append_line(self.record, json.dumps(row).encode() + b"\n", durable=True)


class Replay:
    """Proposes again what a language model proposed before, in its order and without it.

    Args:
        path: the record that a run left, `proposals.jsonl`.
        features: of the world; every skill is checked as if it were new.
    """

    foresees = True

    def __init__(self, path: Path | str, features: Features) -> None:
        skills: dict[str, Skill] = {}
        rows = whole_rows(Path(path).read_bytes() + b"\n")  # a kill may have cut the last one short
        if not rows or not all(isinstance(row.get("skill"), dict | None) for row in rows):
            raise ConfigError(f"{path} is no record of proposals: name the proposals.jsonl that a run left")
        for row in rows:
            if row.get("skill"):
                skill = parse_skill(row["skill"])
                # Proposed before, its run was ended before it was used, and it was asked for again.
                skills.pop(skill.name, None)
                skills[skill.name] = skill
        self.skills = check_skills(skills.values(), features)

    def next_skill(
        self, known: Sequence[Skill], completed: Sequence[str], failed: Mapping[str, str]
    ) -> Skill | None:
        """The next skill of the record."""
        names = {skill.name for skill in known}
        return next((skill for skill in self.skills if skill.name not in names), None)


def first_object(text: str) -> dict[str, Any]:
    """The first JSON object in a text, whatever stands around it."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        with contextlib.suppress(ValueError, RecursionError):
            value, _ = decoder.raw_decode(text, at)
            if isinstance(value, dict):
                return value
        at = text.find("{", at + 1)
    raise ConfigError("the reply holds no JSON object")


_EXAMPLE = parse_skill(
    {"name": "Collect Wood", "gain": {"wood": 1}, "done": {"feature": "wood"}, "horizon": 60}
)
