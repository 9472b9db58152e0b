"""Tools by a model's own chat template: how it writes them, which calls it writes, how it shows their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from shoal.core.errors import ConfigError, EngineError
from shoal.envs.actions import ToolCall
from shoal.envs.calls import Grammar, read_calls, written_result
from shoal.samplers.sampler import Message
from shoal.samplers.tokenizers import TemplateTokenizer, first_difference

_ROLES: tuple[Literal["user", "tool"], ...] = ("user", "tool")
"""In which results of tools may be shown, the first choice first."""
_MARKS = "\ue0000\ue001", "\ue0001\ue001", "\ue0002\ue001"
"""In the place of contents."""


class TemplateTools:
    """Shows the results of tools as a chat template does."""

    def __init__(self, tokenizer: TemplateTokenizer, grammar: Grammar | None = None) -> None:
        self.tokenizer, self.grammar = tokenizer, grammar
        self._role: Literal["tool", "user"] | None = "tool" if grammar else None  # of results

    @classmethod
    def writing(
        cls, tokenizer: TemplateTokenizer, tools: Sequence[Mapping[str, Any]]
    ) -> TemplateTools | None:
        """With a template that writes these tools; None where it writes none, or calls that are not read here.

        Args:
            tokenizer: of the model.
            tools: name, description and parameters (JSON Schema) of each.

        Raises:
            ConfigError: a control token of the model stands in what a tool says of itself.
        """
        for tool in tools:
            if tokenizer.holds_control(json.dumps(tool, ensure_ascii=False)):
                raise ConfigError(
                    f"the description of the tool {tool['name']} holds a control token of this model: leave it out"
                )
        listed = [{"type": "function", "function": dict(tool)} for tool in tools]
        user: Any = {"role": "user", "content": _MARKS[0]}
        call = {"name": tools[0]["name"], "arguments": {"x": "1"}}
        function = {"id": "call00000", "type": "function", "function": call}
        answer: Any = {"role": "assistant", "content": "", "tool_calls": [function]}
        try:
            twin = tokenizer.with_settings(tools=listed)
            asked, whole = twin.render([user]), twin.written([user, answer])
        except EngineError:
            return None
        behind = whole[len(asked) if whole.startswith(asked) else first_difference(whole, asked) :]
        said = twin.decode(twin.tokens(behind))
        wanted = [ToolCall(call["name"], call["arguments"])]
        grammar: Grammar | None = next(
            (kind for kind in get_args(Grammar) if read_calls(said, kind) == wanted), None
        )
        if grammar == "tags" and "<function=" in said:
            grammar = "xml"
        known = grammar is not None and all(tool["name"] in asked for tool in tools)
        return cls(twin, grammar) if known else None

    def extend(self, response_ids: tuple[int, ...], results: Sequence[str]) -> tuple[int, ...]:
        """The end of a response's turn, the results of its calls in order, and the next assistant header.

        Raises:
            EngineError: the template shows no results, or rewrites the answer before them.
        """
        return self.tokenizer.extend(response_ids, *self.messages(results))

    def messages(self, results: Sequence[str]) -> list[Message]:
        """The results of an answer's calls as messages: one of the user, as Hermes has them, or each of role tool.

        A template that writes calls as they are read has role tool for them. Of others the user's turn is taken, unless
        the template takes it for a new question and rewrites the answers before, as those do that show the thoughts
        behind the last question only.

        Raises:
            EngineError: the template shows no results, or rewrites the answer before them.
        """
        self._role = self._role or self._role_of_results()
        if self._role == "tool":
            return [{"role": "tool", "content": text} for text in results]
        return [{"role": "user", "content": "\n".join(map(written_result, results))}]

    def _role_of_results(self) -> Literal["tool", "user"]:
        """The role of results before which answers stay as they are, at best those with thoughts too."""
        reason: EngineError | None = None
        for thoughts in (("", "<think>\nwhy\n</think>\n\n"), ("",)):
            for role in _ROLES:
                try:
                    for thought in thoughts:
                        self._check_answer_stays(role, thought)
                except EngineError as error:
                    reason = reason or error
                else:
                    return role
        raise EngineError(f"tools cannot be used with this model: {reason}; use another one") from reason

    def _check_answer_stays(self, role: str, thought: str) -> None:
        """Raise if the template writes an answer otherwise when a result of this role follows it."""
        answer, result = f"{thought}{_MARKS[1]}", written_result(_MARKS[2]) if role == "user" else _MARKS[2]
        followed = self.tokenizer.around(("user", "assistant", role), [_MARKS[0], answer, result])
        chat: list[Any] = [{"role": "user", "content": _MARKS[0]}, {"role": "assistant", "content": answer}]
        alone = "".join(self.tokenizer.written(chat).rpartition("\ue001")[:2])
        if not followed.startswith((alone, self.tokenizer.around(("user",)) + answer)):
            same = first_difference(alone, followed)
            shown = slice(max(0, same - 20), same + 30)
            raise EngineError(
                f"when a result of a tool follows in role {role}, the chat template writes {followed[shown]!r} "
                f"where it had {alone[shown]!r}"
            )
