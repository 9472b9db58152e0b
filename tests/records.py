"""Made-up records of episodes, written with the whole prompt of each turn."""

from dataclasses import replace
from typing import NamedTuple

from shoal.core.data import Call, Trajectory, Turn


class Exchange(NamedTuple):
    """A turn and its call."""

    observation: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    response: str
    action: str | None
    action_is_valid: bool
    reward: float
    anchor: str
    image: str | None = None
    finish: str | None = None


def trajectory_of(env, iteration, group, member, env_seed, turns, *rest, **more):
    """A trajectory of exchanges; a prompt that extends the turn before goes on from its call."""
    calls, context = [], None
    for number, one in enumerate(turns):
        goes_on = context is not None and one.prompt_ids[: len(context)] == context
        new = one.prompt_ids[len(context) :] if goes_on else one.prompt_ids
        parent = number - 1 if goes_on else None
        calls.append(Call(new, parent, one.response_ids, one.logprobs, finish=one.finish))
        context = one.prompt_ids + one.response_ids
    told = [
        Turn(
            one.observation, number, one.response, one.action, one.action_is_valid, one.reward, one.anchor, one.image
        )
        for number, one in enumerate(turns)
    ]  # fmt: skip
    return Trajectory(env, iteration, group, member, env_seed, tuple(calls), tuple(told), *rest, **more)


def exchanges(trajectory):
    """The turns of a trajectory with the whole prompt and the call of each."""
    return [
        Exchange(
            turn.observation,
            trajectory.prompt_ids(turn.call),
            call.response_ids,
            call.logprobs,
            turn.response,
            turn.action,
            turn.action_is_valid,
            turn.reward,
            turn.anchor,
            turn.image,
            call.finish,
        )
        for turn in trajectory.turns
        for call in (trajectory.call_of(turn),)
    ]


def with_call(trajectory, number, **changes):
    """The trajectory with another call of that number."""
    calls = list(trajectory.calls)
    calls[number] = replace(calls[number], **changes)
    return replace(trajectory, calls=tuple(calls))


def of_no_weights(trajectory):
    """The trajectory as weights of version 0 would have written it."""
    return replace(trajectory, calls=tuple(replace(call, weights_version=0) for call in trajectory.calls))
