"""A session: the calls of one program, as a tree of exact tokens.

A call that goes on from a recorded one reuses its tokens as they are: only what is new is put into the chat template.
Anything else begins a new root. The noise of an answer is keyed by the session, the prompt and how often that prompt
was asked before, so programs that ask in parallel get the same answers in any order of arrival. Long texts are
tokenized in threads, while the event loop answers other sessions.
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
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from shoal.core.data import INVALID_JSON, Call, Counted, Requests
from shoal.core.errors import ConfigError, EngineError
from shoal.core.executors import in_own_thread
from shoal.envs.actions import ToolCall
from shoal.envs.tools import Tool
from shoal.gateway.chats import PICKING, ChatRequest, Part, RefusedError, Turn, from_json
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.tools.chat import ToolChat
from shoal.samplers.sampler import ChatTokenizer, Completion, Key, Message, Request, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")
Turns = tuple[tuple[str, str], ...]
Budget = Literal["calls", "context"]
MOST_REASONS = 20
"""Different refusals of a session that are recorded in full."""
MOST_BEYOND = 50
"""Requests beyond its budget after which a program is taken to ask for ever."""
SHORT = 1024
"""Characters or tokens of what is tokenized at once: a third of a millisecond at most."""
MOST_ANSWERS = 64
"""Answers of a session, the latest, that a client which lost one gets again."""
MOST_TOOLS = 16
"""Lists of tools for which it is kept how the model is shown them."""


@dataclass(frozen=True)
class Choice:
    """One choice of an answer."""

    number: int
    text: str
    calls: tuple[ToolCall, ...]
    completion: Completion
    prompt_ids: tuple[int, ...]
    new_tokens: int  # of the prompt, beyond what the parent had
    stop: str | None = None  # the text that ended it; it is part of the tokens, not of what is said
    pieces: tuple[str, ...] = ()  # the text of each token, where log-probabilities were asked for

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

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
    turns: Turns  # what the program sent, as text, beyond what its parent was sent and said
    answer: str  # as a program sends it back
    begun: str = ""  # the part of the answer that the program wrote; its tokens end the prompt


class ClosedError(RefusedError):
    """A call after the end of its session."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"session {name!r} has ended{why}", status=409)


class SpentError(RefusedError):
    """A request for which a budget has no room left: the calls of a session, or the context of the model."""

    def __init__(self, text: str, budget: Budget, status: int = 400, param: str | None = None) -> None:
        super().__init__(text, status, param)
        self.budget: Budget = budget


class ChatFormat(NamedTuple):
    """How chats with some tools are written for the model."""

    tools: ToolChat
    prompter: Prompter
    """Knows how often it is still to be looked whether the chat template writes chats otherwise."""


class Tokens:
    """The tokenizer of all sessions: what is long is done in a thread, and no session waits for another one's text.

    What is short is done at once, unless the tokenizer is at work in a thread: it serves one at a time.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._in_threads = 0
        nothing: tuple[bytes, ...] = ()
        self._formats = {nothing: self._make(())}  # by the schemas of the tools; the oldest first

    async def of(self, asked: ChatRequest) -> ChatFormat:
        """How chats with the tools of a request are written.

        Raises:
            RefusedError: the model cannot be shown these tools.
        """
        key = tuple(msgspec.json.encode(tool.schema) for tool in asked.tools)
        if key not in self._formats:
            made = await self.work(partial(self._make, asked.tools), SHORT + 1)
            if len(self._formats) >= MOST_TOOLS:
                self._formats.pop(next(filter(None, self._formats)))
            self._formats[key] = made
        return self._formats[key]

    def _make(self, tools: Sequence[Tool]) -> ChatFormat:
        try:
            chat = ToolChat(self.tokenizer, tools, in_full=True)
        except ConfigError as error:
            raise RefusedError(f"tools: {error}", param="tools") from error
        return ChatFormat(chat, Prompter(PromptConfig(), self.tokenizer, chat))

    async def work(self, call: Callable[[], T], size: int) -> T:
        """What a call with the tokenizer returns that reads or writes so many characters or tokens."""
        if size <= SHORT and not self._in_threads:
            return call()
        self._in_threads += 1
        try:
            return await asyncio.wrap_future(in_own_thread(call, "shoal-tokenizer"))
        finally:
            self._in_threads -= 1


class Prompt(NamedTuple):
    """A prompt in tokens."""

    ids: tuple[int, ...]
    parent: int | None  # the call that it goes on from
    digest: str  # of the tokens


class Written(NamedTuple):
    """What a choice of an answer says."""

    text: str
    calls: tuple[ToolCall, ...]
    stop: str | None  # the text that ended it
    sent_back: tuple[str, ...]  # how programs send it back; as it was said first
    pieces: tuple[str, ...]  # the text of each token, where log-probabilities were asked for


class Session:
    """The calls of one program.

    Args:
        name: of the session.
        key: seed and path that name its noise.
        tokens: the tokenizer.
        sampler: what answers; it has `async sample(request)`.
        write: writes a recorded call down; it is answered only afterwards.
        fixed: how tokens are picked, whatever a program asks for; of the limits of an answer the least holds.
        most_calls: further ones are refused.
    """

    def __init__(
        self,
        name: str,
        key: Key,
        tokens: Tokens,
        sampler: Any,
        write: Callable[[Recorded], Awaitable[None]] | None = None,
        *,
        fixed: Sampling | None = None,
        most_calls: int | None = None,
    ) -> None:
        self.name, self.key = name, key
        self.calls: list[Recorded] = []
        self.closed = False
        self._fixed, self._most = fixed, most_calls
        self._tokens, self._sampler, self._write = tokens, sampler, write
        self._order = asyncio.Lock()  # prompts are made in the order in which they came
        self._ends: dict[bytes, list[int]] = {}  # what a continuation begins with, and the calls that end so
        self._chats: dict[int, tuple[int, ...]] = {}  # of each call: the path of the noise of its first one
        self._asked: defaultdict[str, set[int]] = defaultdict(set)  # by prompt: which of its noises were used
        self._failed: dict[str, EngineError] = {}  # by prompt, until it is answered
        self._begun = self._under_way = 0
        self.size = 0
        """Bytes that its record holds in memory, roughly."""
        self.at_once = False
        """Whether a call came while another one was being answered."""
        self.exhausted = asyncio.Event()
        """Set when the program asks on and on though a budget is used up."""
        self._refused, self._overridden, self._unenforced = Counter[str](), Counter[str](), Counter[str]()
        self._spent: list[Budget] = []  # of each request that was refused for a budget
        self._answered_at = 0  # how many of these there were at the last answer
        self._answers: dict[str, asyncio.Task[list[Choice]]] = {}  # by the digest of the request
        self._unwritten: dict[
            str, tuple[list[Choice], list[int]]
        ] = {}  # by that: answers, and calls to write down

    @property
    def idle(self) -> bool:
        """Whether no call is being answered, and all answers are on disk."""
        return not self._under_way and not self._unwritten

    @property
    def failed(self) -> EngineError | None:
        """Why a prompt has no answer; None if all have one."""
        return next(iter(self._failed.values()), None)

    @property
    def requests(self) -> Requests | None:
        """Those that were refused, or answered otherwise than they asked; None if there are none."""
        found = Requests(*(
            tuple(Counted(what, count) for what, count in sorted(counts.items()))
            for counts in (self._refused, self._overridden, self._unenforced)
        ))  # fmt: skip
        return found if found != Requests((), ()) else None

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

    async def answer(self, asked: ChatRequest, body: bytes = b"", *, retried: bool = False) -> list[Choice]:
        """The choices of an answer; a request that is sent again because its answer was lost gets that one.

        Args:
            asked: the request.
            body: its bytes, by which a retry is known.
            retried: whether the client says that it sent it before.
        """
        self._check_open()
        digest = hashlib.sha256(body).hexdigest()
        task = self._answers.get(digest) if retried else None
        if task is None or (task.done() and task.exception() is not None):
            self._forget_answers()
            task = self._answers[digest] = asyncio.ensure_future(self._answer(asked, digest))
        return await asyncio.shield(task)

    def _forget_answers(self) -> None:
        """Keep the latest answers alone, and all that are under way."""
        done = [digest for digest, task in self._answers.items() if task.done()]
        for digest in done[: max(0, len(done) - MOST_ANSWERS)]:
            del self._answers[digest]

    async def _answer(self, asked: ChatRequest, digest: str) -> list[Choice]:
        if digest in self._unwritten:
            return await self._written(digest)
        if self._most is not None and self._begun + asked.choices > self._most:
            raise SpentError(f"this session has had its {self._most} calls (max_steps)", "calls", 403)
        self._begun += asked.choices
        self.at_once |= self._under_way > 0
        self._under_way += 1
        try:
            answers = await self._sampled(asked)
        except Exception:
            self._begun -= asked.choices
            raise
        finally:
            self._under_way -= 1
        self._unwritten[digest] = answers, [answer.number for answer in answers]
        return await self._written(digest)

    async def _written(self, digest: str) -> list[Choice]:
        """The answers to a request, once their calls are written down; on a full disk they wait to be asked for again.

        Raises:
            OSError: a call cannot be written.
        """
        answers, left = self._unwritten[digest]
        write = self._write
        if write is not None:
            done = await asyncio.gather(*(write(self.calls[n]) for n in left), return_exceptions=True)
            failed = [(n, error) for n, error in zip(left, done, strict=True) if error is not None]
            if failed:
                self._unwritten[digest] = answers, [n for n, _ in failed]
                raise failed[0][1]
        self._unwritten.pop(digest, None)
        return answers

    async def _sampled(self, asked: ChatRequest) -> list[Choice]:
        sampling = self._sampling(asked.sampling)
        async with self._order:
            form, prompt = await self._prompted(asked)
            used = self._asked[prompt.digest]
            free = (nth for nth in itertools.count() if nth not in used)
            numbers = list(itertools.islice(free, asked.choices))
            used.update(numbers)
        paths = [(*self.key.path, int(prompt.digest, 16) >> 1, nth) for nth in numbers]
        begun = paths if prompt.parent is None else [self._chats[prompt.parent]] * len(paths)
        requests = [
            Request(prompt.ids, Key(self.key.seed, path), sampling, chat=chat)
            for path, chat in zip(paths, begun, strict=True)
        ]
        try:
            self._check_open()
            asking = list(map(self._sampler.sample, requests))
            done = await asyncio.gather(*asking) if len(asking) > 1 else [await asking[0]]
            if done[0].finish == "context":
                raise SpentError(
                    f"the prompt of {len(prompt.ids)} tokens leaves no room in the context of the model",
                    "context",
                    param="messages",
                )
            texts = await self._tokens.work(
                partial(self._read, asked, form.tools, done), sum(len(one.token_ids) for one in done)
            )
            self._check_open()
        except Exception as error:  # nothing was answered: who asks again gets what would have been said
            used.difference_update(numbers)
            if isinstance(error, EngineError | TimeoutError):
                self._failed[prompt.digest] = (
                    error if isinstance(error, EngineError) else EngineError(str(error))
                )
            raise
        self._failed.pop(prompt.digest, None)
        answers = [
            self._record(asked, prompt, nth, one, text)
            for nth, one, text in zip(numbers, done, texts, strict=True)
        ]
        self._chats |= {answer.number: chat for answer, chat in zip(answers, begun, strict=True)}
        self._overridden.update(self._not_taken(asked))
        self._unenforced.update(asked.unenforced)
        self._unenforced[INVALID_JSON] += sum(
            asked.wants_json and not answer.calls and not _is_json(answer.text) for answer in answers
        )
        self._unenforced += Counter()  # without what never happened
        return answers

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(self.name)

    def _sampling(self, asked: Sampling) -> Sampling:
        """How tokens are picked: as asked, within what the run says."""
        fixed = self._fixed
        if fixed is None:
            return asked
        return replace(fixed, max_tokens=min(fixed.max_tokens, asked.max_tokens), stop=asked.stop)

    def _not_taken(self, asked: ChatRequest) -> Iterator[str]:
        """The settings that a request names and the run decides otherwise."""
        if self._fixed is None:
            return
        for parameter, value in asked.settings.items():
            name = PICKING[parameter]
            own = getattr(self._fixed, name)
            taken = value <= own if name == "max_tokens" else max(value, 0) == max(own, 0)  # top_k=-1 is 0
            if not taken:
                yield f"{name}={value}"

    # --- with the tokenizer, in any thread
    def _prompt(self, asked: ChatRequest, form: ChatFormat) -> Prompt:
        """The prompt of a request, which goes on from a call where that is possible."""
        if asked.raw is not None:
            ids = asked.raw if isinstance(asked.raw, tuple) else self._tokens.tokenizer.encode(asked.raw)
            return Prompt(ids, self._behind(ids), _digest_of(ids))
        begun = self._tokens.tokenizer.encode(asked.begun)
        ids, parent = self._going_on(asked, form) or (self._root(asked.chat, form.tools), None)
        ids += begun
        return Prompt(ids, parent, _digest_of(ids))

    def _behind(self, ids: tuple[int, ...]) -> int | None:
        """The call with the most tokens of those that these tokens go on from; None if there is none."""
        ends = ((self._tokens_of(n), n) for n in range(len(self.calls)))
        found = [(len(end), -n) for end, n in ends if ids[: len(end)] == end and len(end) < len(ids)]
        return -max(found)[1] if found else None

    def _tokens_of(self, number: int) -> tuple[int, ...]:
        """The tokens of a call: those of its parent, what is new of its prompt, and its answer."""
        parts: list[tuple[int, ...]] = []
        at: int | None = number
        while at is not None:
            call = self.calls[at].call
            parts += [call.response_ids, call.new_prompt_ids]
            at = call.parent
        return tuple(itertools.chain.from_iterable(reversed(parts)))

    async def count(self, asked: ChatRequest) -> int:
        """Tokens of the prompt of a request, which is not answered."""
        _, prompt = await self._prompted(asked)
        return len(prompt.ids)

    async def _prompted(self, asked: ChatRequest) -> tuple[ChatFormat, Prompt]:
        form, size = await self._tokens.of(asked), sum(len(turn.text) for turn in asked.chat)
        return form, await self._tokens.work(partial(self._prompt, asked, form), size)

    def _going_on(self, asked: ChatRequest, form: ChatFormat) -> tuple[tuple[int, ...], int] | None:
        """The tokens of a chat that goes on from a call, and that call; None if it goes on from none."""
        turns, turn, tools = asked.turns, asked.chat[-1], form.tools
        ends = self._ends.get(_digest_of_turns(turns[:-1]))
        if not ends:
            return None
        # several end so if they differ in blanks or tokens alone
        last, calls = turns[-2][1], self.calls
        parent = min(ends, key=lambda n: (calls[n].answer != last, calls[n].digest, calls[n].nth))
        said = calls[parent].call.response_ids
        try:
            if turn.results:
                new = tools.extend_results(said, turn.results)
            else:
                new = tools.tokenizer.extend(said, {"role": "user", "content": turn.text})
        except EngineError as error:  # the template writes earlier turns anew
            logger.warning("session %s: this call is a prompt of its own: %s", self.name, error)
            return None
        ids = self._tokens_of(parent) + new
        self._check_drift(parent, asked, ids, form)
        return ids, parent

    def _root(self, chat: Sequence[Turn], tools: ToolChat) -> tuple[int, ...]:
        """The tokens of a chat that goes on from nothing."""
        messages = [one for turn in chat for one in _messages(turn, tools)]
        try:
            return tools.tokenizer.start(tools.with_tools(messages))
        except EngineError as error:
            raise RefusedError(str(error), param="messages") from error

    def _check_drift(
        self, parent: int, asked: ChatRequest, prompt: tuple[int, ...], form: ChatFormat
    ) -> None:
        """Warn, the first few times, if the chat template writes a chat otherwise than the model sees it."""
        if not form.prompter.checks_drift:
            return
        shown = [_messages(turn, form.tools) for turn in asked.chat]
        number: int | None = parent
        at = len(shown) - 2
        while number is not None:  # answers as they were said, whatever a program made of them
            recorded = self.calls[number]
            said = self._tokens.tokenizer.decode(recorded.call.response_ids)
            answer: Message = {"role": "assistant", "content": recorded.begun + said}
            shown[at] = [answer]
            number, at = recorded.call.parent, at - 2
        form.prompter.check_drift([message for turn in shown for message in turn], prompt)

    def _read(self, asked: ChatRequest, tools: ToolChat, done: Sequence[Completion]) -> list[Written]:
        """What the choices of an answer say."""
        found = []
        for one in done:
            text = self._tokens.tokenizer.decode(one.token_ids)
            ends = ((text.find(stop), stop) for stop in asked.sampling.stop if stop in text)
            end, stop = min(ends, default=(None, None))
            sent_back = [text[:end]]
            if stop is not None and text == f"{text[:end]}{stop}":
                sent_back.append(text)  # programs may put the stop text back
            whole = (_sent_back(*tools.split(f"{asked.begun}{way}")) for way in sent_back)
            decode = self._tokens.tokenizer.decode
            pieces = tuple(decode([token]) for token in one.token_ids) if asked.logprobs else ()
            found.append(Written(*tools.split(text[:end]), stop, tuple(whole), pieces))
        return found

    # --- the record
    def _record(
        self, asked: ChatRequest, prompt: Prompt, nth: int, done: Completion, text: Written
    ) -> Choice:
        ids, parent, digest = prompt
        known, turns = (
            (0, asked.turns) if parent is None else (len(self._tokens_of(parent)), asked.turns[-1:])
        )
        call = Call(ids[known:], parent, done.token_ids, done.logprobs, done.weights_version, done.finish)
        number = len(self.calls)
        self._answered_at = len(self._spent)
        said = text.sent_back[0]
        self.size += 8 * (len(call.new_prompt_ids) + 2 * len(done.token_ids))
        self.size += len(said) + sum(len(words) for _, words in turns)
        self.calls.append(Recorded(self.name, number, digest, nth, call, turns, said, asked.begun))
        ways = text.sent_back if asked.raw is None else ()  # no chat goes on from what was none
        for end in dict.fromkeys(_digest_of_turns((*asked.turns, ("assistant", way))) for way in ways):
            self._ends.setdefault(end, []).append(number)
        return Choice(number, text.text, text.calls, done, ids, len(ids) - known, text.stop, text.pieces)

    def close(self, *, in_time: bool = False) -> list[tuple[Recorded, Call]]:
        """End the session; its calls, each behind its parent.

        Args:
            in_time: in the order in which they were asked, which is only known where none came while another one was
                being answered; else in an order that does not depend on who asked first.
        """
        self.closed = True
        unread = {answer.number for answers, _ in self._unwritten.values() for answer in answers}
        whole = [self._tokens_of(n) for n in range(len(self.calls))]
        lengths = [len(ids) - len(r.call.response_ids) for ids, r in zip(whole, self.calls, strict=True)]
        order = [recorded for recorded in self.calls if recorded.number not in unread]
        if not in_time or self.at_once:
            order.sort(key=lambda r: (lengths[r.number], r.digest, r.nth))
        ends: dict[tuple[int, ...], int] = {}  # the first call that a prompt may go on from
        found: list[tuple[Recorded, Call]] = []
        for recorded in order:
            call = recorded.call
            parent = None if call.parent is None else ends[whole[call.parent]]
            ends.setdefault(whole[recorded.number], len(found))
            found.append((recorded, replace(call, parent=parent)))
        return found


def _digest_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def _is_json(text: str) -> bool:
    with contextlib.suppress(ValueError):
        from_json(text)
        return True
    return False


def _messages(turn: Turn, tools: ToolChat) -> list[Message]:
    """A turn as the messages of a chat."""
    if turn.results:
        with contextlib.suppress(EngineError):  # a template that has no place for results
            return tools.messages(turn.results)
    return [{"role": turn.role, "content": turn.written(tools.written)}]


def _sent_back(text: str, calls: Sequence[ToolCall]) -> str:
    """What a program sends back that got this answer, as the text of its turn."""
    return Part("assistant", text, calls=tuple((None, call) for call in calls)).written()


def _digest_of_turns(turns: Turns) -> bytes:
    """Of turns without the blanks around what the model said, which programs often drop."""
    stripped = [(role, text.strip() if role == "assistant" else text) for role, text in turns]
    return hashlib.sha256(msgspec.json.encode(stripped)).digest()
