"""What every engine promises: its completions, and the level of sameness that it states."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from shoal.rollout.samplers.sampler import (
    FINISHES,
    Capabilities,
    Completion,
    Engine,
    Key,
    Request,
    Sampling,
    capabilities_of,
)
from shoal.testing.promises import expect


def check_engine(
    make: Callable[[], Engine], prompts: Sequence[str] = ("Say something.", "And now?", "x")
) -> None:
    """Ask an engine for completions and compare what it does with what `Engine` and its level promise.

    Args:
        make: makes the engine; called once.
        prompts: user messages to complete.

    Raises:
        AssertionError: which promise broke, and for which request.
    """
    engine = make()
    expect(
        isinstance(engine, Engine),
        f"{type(engine).__name__} must have tokenizer, level, weights_version, generate",
    )
    known = capabilities_of(engine)
    expect(known.level == engine.level, f"capabilities state {known.level}, the engine {engine.level}")
    tokenizer = engine.tokenizer
    starts = [tokenizer.start([{"role": "user", "content": prompt}]) for prompt in prompts]
    for prompt, start in zip(prompts, starts, strict=True):
        expect(len(start) > 0, f"tokenizer.start must give a prompt for {prompt!r}")
        expect(tokenizer.decode(tokenizer.encode("a b 12")) == "a b 12", "decode must undo encode")
        expect(
            len(tokenizer.extend(start, {"role": "user", "content": prompt})) > 0, "extend must add a turn"
        )
    asked = [
        Request(start, Key(7, 1, group, member, 0), Sampling(2 + member, (1.0, 1.0, 0.0)[member]))
        for group, start in enumerate(starts)
        for member in range(3)
    ]
    whole = engine.generate(asked)
    expect(list(engine.generate([])) == [], "generate([]) must give an empty list")
    expect(len(whole) == len(asked), f"{len(asked)} requests must give as many completions, got {len(whole)}")
    for number, (request, completion) in enumerate(zip(asked, whole, strict=True)):
        _check_completion(engine, known, f"request {number}", request, completion)
    if engine.level == "L0":
        return
    order = list(range(len(asked)))
    random.Random(0).shuffle(order)
    shuffled = dict(zip(order, engine.generate([asked[i] for i in order]), strict=True))
    for number, request in enumerate(asked):
        for how, other in (("alone", engine.generate([request])[0]), ("in another order", shuffled[number])):
            where = f"request {number}: asked {how}"
            expect(
                other.token_ids == whole[number].token_ids, f"{where}, it has other tokens ({engine.level})"
            )
            if engine.level == "L2":
                expect(
                    other.logprobs == whole[number].logprobs, f"{where}, it has other log-probabilities (L2)"
                )


def _check_completion(
    engine: Engine, known: Capabilities, where: str, request: Request, completion: Completion
) -> None:
    ids, limit = completion.token_ids, request.sampling.max_tokens
    expect(all(type(i) is int for i in ids), f"{where}: token_ids must be ints, got {ids!r}")
    expect(len(ids) <= limit or not known.token_ids, f"{where}: max_tokens is {limit}, got {len(ids)} tokens")
    expect(completion.finish in FINISHES, f"{where}: finish must be one of {', '.join(FINISHES)}")
    full = getattr(engine, "context", None)
    if completion.finish == "length" and known.token_ids:
        room = limit if full is None else min(limit, full - len(request.prompt_ids))
        expect(len(ids) == room, f"{where}: finish is 'length' after {len(ids)} of {room} tokens")
    expect(
        completion.weights_version == engine.weights_version,
        f"{where}: weights_version must be {engine.weights_version}, got {completion.weights_version}",
    )
    if known.logprobs:
        expect(len(completion.logprobs) == len(ids), f"{where}: each token needs a log-probability")
        expect(
            all(math.isfinite(value) and value <= 1e-6 for value in completion.logprobs),
            f"{where}: log-probabilities must be finite and at most 0, got {completion.logprobs}",
        )
