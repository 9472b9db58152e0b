"""A session: the calls of one program, as a tree of exact tokens.

A call that goes on from a recorded one reuses its tokens as they are: only what is new is put into the chat template.
Anything else begins a new root. The noise of an answer is keyed by the session, the prompt and how often that prompt
was asked before, so programs that ask in parallel get the same answers in any order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec

from shoal.core.data import Call, Counted, Requests
from shoal.core.errors import EngineError
from shoal.gateway.chats import PICKING, Asked, RefusedError, Said, Turn, read_answer
from shoal.rollout.prompts import Prompter
from shoal.rollout.tools.template import TemplateTools
from shoal.samplers.sampler import ChatTokenizer, Completion, Key, Message, Request
from shoal.samplers.sampler import Sampling as Picking
from shoal.samplers.tokenizers import TemplateTokenizer

logger = logging.getLogger(__name__)
Turns = tuple[tuple[str, str], ...]
Budget = Literal["calls", "context"]
MOST_REASONS = 20
"""Different refusals of a session that are recorded in full."""
MOST_BEYOND = 50
"""Requests beyond its budget after which a program is taken to ask for ever."""


class Answers(Protocol):
    """What answers."""

    async def sample(self, request: Request) -> Completion:
        """The completion of a request."""


@dataclass(frozen=True)
class Answer:
    """One choice of an answer."""

    number: int
    said: Said
    completion: Completion
    prompt_tokens: int
    new_tokens: int  # of the prompt, beyond what the parent had
    stop: str | None = None  # the text that ended it; it is part of the tokens, not of what is said

    @property
    def cut(self) -> bool:
        """Whether it ended at the limit of its tokens."""
        return self.completion.finish == "length" and self.stop is None


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call as it is written down, before it is answered."""

    session: str
    number: int
    digest: str  # of the prompt's tokens
    nth: int  # how often the prompt was asked before
    call: Call
    turns: Turns  # what the program sent, as text
    answer: str  # as a program sends it back
    begun: str = ""  # the part of the answer that the program wrote; its tokens end the prompt


class ClosedError(RefusedError):
    """A call after the end of its session."""

    def __init__(self, name: str) -> None:
        super().__init__(f"session {name!r} has ended", status=409)


class SpentError(RefusedError):
    """A request for which a budget has no room left: the calls of a session, or the context of the model."""

    def __init__(self, text: str, budget: Budget, status: int = 400, param: str | None = None) -> None:
        super().__init__(text, status, param)
        self.budget: Budget = budget


class Session:
    """The calls of one program.

    Args:
        name: of the session.
        key: seed and path that name its noise.
        tokenizer: of the model.
        sampler: what answers.
        write: writes a recorded call down; it is answered only afterwards.
        fixed: how tokens are picked, whatever a program asks for; of the limits of an answer the least holds.
        most_calls: further ones are refused.
        prompter: knows how often it is still to be looked whether the chat template writes chats otherwise.
    """

    def __init__(
        self,
        name: str,
        key: Key,
        tokenizer: ChatTokenizer,
        sampler: Answers,
        write: Callable[[Recorded], Awaitable[None]] | None = None,
        *,
        fixed: Picking | None = None,
        most_calls: int | None = None,
        prompter: Prompter | None = None,
    ) -> None:
        self.name, self.key = name, key
        self.calls: list[Recorded] = []
        self.closed = False
        self._fixed, self._most, self._prompter = fixed, most_calls, prompter
        self._tokenizer, self._sampler, self._write = tokenizer, sampler, write
        self._template = TemplateTools(tokenizer) if isinstance(tokenizer, TemplateTokenizer) else None
        self._ends: dict[Turns, list[int]] = {}  # what a continuation begins with, and the calls that end so
        self._prompts: dict[int, tuple[int, ...]] = {}  # of each call
        self._chats: dict[int, tuple[int, ...]] = {}  # of each call: the path of the noise of its first one
        self._asked: defaultdict[str, set[int]] = defaultdict(set)  # by prompt: which of its noises were used
        self._failed: dict[str, EngineError] = {}  # by prompt, until it is answered
        self._begun = self._under_way = 0
        self.at_once = False
        """Whether a call came while another one was being answered."""
        self.exhausted = asyncio.Event()
        """Set when the program asks on and on though a budget is used up."""
        self._refused, self._overridden = Counter[str](), Counter[str]()
        self._spent: list[Budget] = []  # of each request that was refused for a budget
        self._answered_at = 0  # how many of these there were at the last answer
        self._answers: dict[str, asyncio.Task[list[Answer]]] = {}  # by the digest of the request

    @property
    def failed(self) -> EngineError | None:
        """Why a prompt has no answer; None if all have one."""
        return next(iter(self._failed.values()), None)

    @property
    def requests(self) -> Requests | None:
        """Those that were refused, and the settings that were not taken; None if there are none."""
        refused, overridden = (
            tuple(Counted(what, count) for what, count in sorted(counts.items()))
            for counts in (self._refused, self._overridden)
        )
        return Requests(refused, overridden) if refused or overridden else None

    def spent(self, *, in_time: bool = False) -> Budget | None:
        """The budget that ended the session: a request was refused for it, and none was answered after that.

        Args:
            in_time: whether the calls have an order in time; without one, or where some came while others were being
                answered, a refusal counts whatever was answered when.
        """
        ended = self._spent[self._answered_at if in_time and not self.at_once else 0 :]
        return min(ended, default=None)

    def refuse(self, error: RefusedError) -> None:
        """Note a request that was refused."""
        why = f"{error.status}: {error}"
        known = why in self._refused or len(self._refused) < MOST_REASONS
        self._refused[why if known else "others"] += 1
        if isinstance(error, SpentError):
            self._spent.append(error.budget)
            if len(self._spent) - self._answered_at >= MOST_BEYOND:
                self.exhausted.set()

    async def answer(self, asked: Asked, body: bytes = b"", *, retried: bool = False) -> list[Answer]:
        """The choices of an answer; a request that is sent again because its answer was lost gets that one.

        Args:
            asked: the request.
            body: its bytes, by which a retry is known.
            retried: whether the client says that it sent it before.
        """
        if self.closed:
            raise ClosedError(self.name)
        digest = hashlib.sha256(body).hexdigest()
        task = self._answers.get(digest) if retried else None
        if task is None or (task.done() and task.exception() is not None):
            task = self._answers[digest] = asyncio.ensure_future(self._answer(asked))
        return await asyncio.shield(task)

    async def _answer(self, asked: Asked) -> list[Answer]:
        if self._most is not None and self._begun + asked.choices > self._most:
            raise SpentError(f"this session has had its {self._most} calls (max_steps)", "calls", 403)
        self._begun += asked.choices
        self.at_once |= self._under_way > 0
        self._under_way += 1
        try:
            return await self._sampled(asked)
        except Exception:
            self._begun -= asked.choices
            raise
        finally:
            self._under_way -= 1

    async def _sampled(self, asked: Asked) -> list[Answer]:
        sampling = self._sampling(asked.sampling)
        prompt, parent = self._prompt(asked.chat, asked.turns)
        prompt += self._tokenizer.encode(asked.begun)
        digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
        used = self._asked[digest]
        free = (nth for nth in itertools.count() if nth not in used)
        places = list(itertools.islice(free, asked.choices))
        used.update(places)
        paths = [(*self.key.path, int(digest, 16) >> 1, nth) for nth in places]
        chats = paths if parent is None else [self._chats[parent]] * len(paths)
        requests = [
            Request(prompt, Key(self.key.seed, path), sampling, chat=chat)
            for path, chat in zip(paths, chats, strict=True)
        ]
        try:
            done = await asyncio.gather(*map(self._sampler.sample, requests))
            if self.closed:
                raise ClosedError(self.name)
            if done[0].finish == "context":
                raise SpentError(
                    f"the prompt of {len(prompt)} tokens leaves no room in the context of the model",
                    "context",
                    param="messages",
                )
        except Exception as error:  # nothing was answered: who asks again gets what would have been said
            used.difference_update(places)
            if isinstance(error, EngineError | TimeoutError):
                self._failed[digest] = error if isinstance(error, EngineError) else EngineError(str(error))
            raise
        self._failed.pop(digest, None)
        answers = [
            self._record(asked, prompt, parent, digest, nth, one)
            for nth, one in zip(places, done, strict=True)
        ]
        self._chats |= {answer.number: chat for answer, chat in zip(answers, chats, strict=True)}
        self._overridden.update(self._not_taken(asked))
        if self._write is not None:
            await asyncio.gather(*(self._write(self.calls[answer.number]) for answer in answers))
        return answers

    def _sampling(self, asked: Picking) -> Picking:
        """How tokens are picked: as asked, within what the run says."""
        fixed = self._fixed
        if fixed is None:
            return asked
        return replace(fixed, max_tokens=min(fixed.max_tokens, asked.max_tokens), stop=asked.stop)

    def _not_taken(self, asked: Asked) -> Iterator[str]:
        """The settings that a request names and the run decides otherwise."""
        if self._fixed is None:
            return
        for parameter, value in asked.settings.items():
            name = PICKING[parameter]
            own = getattr(self._fixed, name)
            taken = value <= own if name == "max_tokens" else max(value, 0) == max(own, 0)  # top_k=-1 is 0
            if not taken:
                yield f"{name}={value}"

    def _prompt(self, chat: Sequence[Turn], turns: Turns) -> tuple[tuple[int, ...], int | None]:
        """The tokens of a prompt, and the call that it goes on from."""
        ends = self._ends.get(_stripped(turns[:-1]))
        if ends:  # several end so if they differ in blanks or tokens alone
            last = turns[-2][1]
            parent = min(
                ends, key=lambda n: (self.calls[n].answer != last, self.calls[n].digest, self.calls[n].nth)
            )
            try:
                prompt = self._continued(parent, chat[-1])
            except EngineError as error:  # the template writes earlier turns anew
                logger.warning("session %s: this call is a prompt of its own: %s", self.name, error)
            else:
                self._check_drift(parent, chat, prompt)
                return prompt, parent
        try:
            return self._tokenizer.start([one for turn in chat for one in self._messages(turn)]), None
        except EngineError as error:
            raise RefusedError(str(error), param="messages") from error

    def _continued(self, parent: int, turn: Turn) -> tuple[int, ...]:
        """The tokens of a prompt that goes on from a call by one turn."""
        said, tokenizer = self.calls[parent].call.response_ids, self._tokenizer
        if turn.results and self._template is not None:
            new = self._template.extend(said, turn.results)
        else:
            new = tokenizer.extend(said, {"role": "user", "content": turn.text})
        return self._prompts[parent] + said + new

    def _messages(self, turn: Turn) -> list[Message]:
        """A turn as the messages of a chat."""
        if turn.results and self._template is not None:
            with contextlib.suppress(EngineError):  # a template that has no place for results
                return self._template.messages(turn.results)
        return [{"role": turn.role, "content": turn.text}]

    def _check_drift(self, parent: int, chat: Sequence[Turn], prompt: tuple[int, ...]) -> None:
        """Warn, the first few times, if the chat template writes a chat otherwise than the model sees it."""
        if self._prompter is None or not self._prompter.checks_drift:
            return
        shown = list(map(self._messages, chat))
        number: int | None = parent
        while number is not None:  # answers as they were said, whatever a program made of them
            recorded = self.calls[number]
            said = self._tokenizer.decode(recorded.call.response_ids)
            shown[len(recorded.turns)] = [{"role": "assistant", "content": recorded.begun + said}]
            number = recorded.call.parent
        self._prompter.check_drift([message for turn in shown for message in turn], prompt)

    def _record(
        self,
        asked: Asked,
        prompt: tuple[int, ...],
        parent: int | None,
        digest: str,
        nth: int,
        done: Completion,
    ) -> Answer:
        text = self._tokenizer.decode(done.token_ids)
        end, stop = min(
            ((text.find(one), one) for one in asked.sampling.stop if one in text), default=(None, None)
        )
        said = read_answer(text[:end], asked.tools)
        known = (
            0 if parent is None else len(self._prompts[parent]) + len(self.calls[parent].call.response_ids)
        )
        call = Call(prompt[known:], parent, done.token_ids, done.logprobs, done.weights_version, done.finish)
        number = len(self.calls)
        self._answered_at = len(self._spent)
        whole = read_answer(f"{asked.begun}{text[:end]}", asked.tools).canonical()
        recorded = Recorded(self.name, number, digest, nth, call, asked.turns, whole, asked.begun)
        self.calls.append(recorded)
        self._prompts[number] = prompt
        ways = [recorded.answer]
        if stop is not None and text == f"{text[:end]}{stop}":
            # Programs may put the stop text back.
            ways.append(read_answer(f"{asked.begun}{text}", asked.tools).canonical())
        for way in dict.fromkeys(_stripped((*asked.turns, ("assistant", way))) for way in ways):
            self._ends.setdefault(way, []).append(number)
        return Answer(number, said, done, len(prompt), len(prompt) - known, stop)

    def close(self, *, in_time: bool = False) -> list[tuple[Recorded, Call]]:
        """End the session; its calls, each behind its parent.

        Args:
            in_time: in the order in which they were asked, which is only known where none came while another one was
                being answered; else in an order that does not depend on who asked first.
        """
        self.closed = True
        order = self.calls
        if not in_time or self.at_once:
            order = sorted(order, key=lambda r: (len(self._prompts[r.number]), r.digest, r.nth))
        ends: dict[tuple[int, ...], int] = {}  # the first call that a prompt may go on from
        found: list[tuple[Recorded, Call]] = []
        for recorded in order:
            call, prompt = recorded.call, self._prompts[recorded.number]
            known = prompt[: len(prompt) - len(call.new_prompt_ids)]
            parent = None if call.parent is None else ends[known]
            ends.setdefault(prompt + call.response_ids, len(found))
            found.append((recorded, replace(call, parent=parent)))
        return found


def _stripped(turns: Turns) -> Turns:
    """Turns without the blanks around what the model said, which programs often drop."""
    return tuple((role, text.strip() if role == "assistant" else text) for role, text in turns)
