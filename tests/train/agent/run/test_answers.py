"""No setting of prompts and limits silently excludes an action: it is seen before anything is played."""

import pytest

from shoal.core.errors import ConfigError
from shoal.envs.actions import Projection
from shoal.rollout.episode import Role
from shoal.rollout.prompts import PromptConfig, Prompter
from shoal.rollout.settings import RolloutSettings
from shoal.samplers.sampler import Sampling
from shoal.samplers.tokenizers import TinyTokenizer
from shoal.train.agent.run.answers import answer_ids, with_room

TOKENIZER = TinyTokenizer()  # a character is a token, and so is a tag
GIVEN = {"prefill": "<action>", "closing": "</action>"}


def role(*words, **projection):
    lookup = {word: number for number, word in enumerate(words, 1)}
    return Role("House", "", Projection(lookup=lookup, **projection), 8)


def room(found, max_tokens="auto", stop=("</action>",), **prompt):
    config = PromptConfig(**prompt)
    settings = RolloutSettings(max_tokens=max_tokens, stop=stop, prompt=config)
    return with_room(settings, {found.tag: found}, Prompter(config, TOKENIZER)).max_tokens


def written(word, max_tokens, **prompt):
    """What the warm-up teaches, and what comes of it: the whole response, read as it would be in an episode."""
    config, house = PromptConfig(**prompt), role("go", "take")
    ids = answer_ids(word, house, config, Sampling(max_tokens, stop=("</action>",)), TOKENIZER)
    assert len(ids) <= max_tokens
    assert house.projection(config.response(TOKENIZER.decode(ids))).valid
    return ids


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ({}, 6),  # <action>take</action>
        ({"mode": "append"}, 6),
        ({"prefill": "<action>"}, 5),
        (GIVEN, 4),
        ({"closing": "</action>"}, 5),
        ({"prefill": "I choose <action>"}, 5),
    ],
)
def test_auto_is_what_the_longest_word_needs_and_less_is_refused_with_the_value_that_works(prompt, tokens):
    house = role("go", "take")
    assert room(house, **prompt) == tokens
    assert room(house, tokens, **prompt) == tokens
    with pytest.raises(ConfigError) as refused:
        room(house, tokens - 1, **prompt)
    assert f"max_tokens={tokens - 1} " in str(refused.value)
    assert "'take'" in str(refused.value)
    assert f"set it to {tokens}" in str(refused.value)


def test_auto_has_room_for_all_actions_of_a_turn_and_for_free_text():
    assert room(role("go", "take", separator="||", max_actions=2), **GIVEN) == len("take||take")
    assert room(Role("Essay", "", Projection(parse=str), 8), **GIVEN) == 64
    assert room(Role("Essay", "", Projection(parse=str), 8), 3, **GIVEN) == 3


@pytest.mark.parametrize(
    "prompt", [{"prefill": "action: "}, {"closing": "</answer>"}, GIVEN | {"prefill": "<act>"}]
)
def test_beside_another_prefill_or_closing_the_model_writes_the_tags_itself(prompt):
    written("take", room(role("go", "take"), **prompt), **prompt)


def test_a_thought_that_is_never_ended_leaves_no_answer():
    with pytest.raises(ConfigError, match=r"'go' of House .*prefill='<think>'"):
        room(role("go", "take"), prefill="<think>")


def test_a_stop_text_within_an_answer_is_refused():
    with pytest.raises(ConfigError, match=r"stop=\['ak'\] ends the answer .*'take'.* behind '<action>tak'"):
        room(role("go", "take"), stop=("ak",))


def test_a_word_that_is_shorter_than_the_limit_ends_by_itself_before_the_closing():
    assert written("take", 4, **GIVEN) == TOKENIZER.encode("take")
    assert written("go", 4, **GIVEN) == (*TOKENIZER.encode("go"), *TOKENIZER.end_ids)
    assert written("go", 9, prefill="<action>") == TOKENIZER.encode("go</action>")
