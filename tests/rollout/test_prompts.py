import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.rollout.prompts import PastTurn, PromptConfig, Prompter, Scene, fill
from shoal.rollout.samplers.tokenizers import TinyTokenizer

TOKENIZER = TinyTokenizer(["Up"])


def scene(n_past, observation="now"):
    past = [PastTurn(f"saw {i}", f"said {i}", f"did {i}", 0.5 * i) for i in range(n_past)]
    return Scene("rules", observation, ["Up", "Down"], past, 9)


def test_a_window_shows_the_last_turns_and_no_others():
    config = PromptConfig(
        history=2,
        later="{history}|{observation}|{step}/{max_turns}|{actions}",
        turn="{step}:{action}={reward}",
    )
    text = Prompter(config, TOKENIZER).message(scene(4))
    assert text == "3:did 2=1\n4:did 3=1.5|now|4/9|Up, Down"


@pytest.mark.parametrize("history", range(7))
def test_a_window_longer_than_the_past_shows_all_of_it(history):
    config = PromptConfig(history=history, later="{history}", turn="{step}")
    for n_past in range(1, 7):
        numbers = [str(step) for step in range(1, n_past + 1)]
        told = Prompter(config, TOKENIZER).message(scene(n_past)).split()
        assert told == (numbers if history > n_past else [n for n in numbers if int(n) > n_past - history])


def test_the_first_turn_has_a_template_of_its_own():
    prompter = Prompter(PromptConfig(first="{instructions} {observation}", later="x"), TOKENIZER)
    assert prompter.message(scene(0)) == "rules now"
    assert prompter.message(scene(1)) == "x"


@given(st.text(max_size=30))
def test_braces_in_an_observation_stay_as_they_are(observation):
    assert fill("<{observation}>", {"observation": observation}) == f"<{observation}>"


def test_append_mode_extends_the_tokens_before_it():
    prompter = Prompter(PromptConfig(mode="append", first="{observation}", later="{observation}"), TOKENIZER)
    prompt = prompter.prompt(scene(0, "a"))
    response = TOKENIZER.encode("<action>Up</action>")
    longer = prompter.prompt(scene(1, "b"), (prompt, response))
    assert longer[: len(prompt) + len(response)] == prompt + response
    assert longer == prompt + response + TOKENIZER.extend(response, {"role": "user", "content": "b"})


def test_window_mode_forgets_what_was_written():
    prompter = Prompter(PromptConfig(history=0, first="{observation}", later="{observation}"), TOKENIZER)
    assert prompter.prompt(scene(1, "b"), ((1,), (2,))) == prompter.prompt(scene(0, "b"))


def test_a_prefill_stands_at_the_end_of_the_prompt():
    prompter = Prompter(PromptConfig(first="x", prefill="<action>"), TOKENIZER)
    assert prompter.prompt(scene(0))[-1:] == TOKENIZER.encode("<action>")


@given(st.text(max_size=30), st.text(max_size=8), st.text(max_size=8))
def test_what_the_model_writes_of_an_answer_is_what_stands_between_prefill_and_closing(
    written, prefill, closing
):
    config = PromptConfig(prefill=prefill, closing=closing)
    assert config.response(written) == prefill + written + closing
    assert config.written(config.response(written)) == written


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": "{observaton}"}, "no field {observaton}. Did you mean 'observation'"),
        ({"turn": "{history}"}, "no field {history}"),
        ({"history": -1}, "at least 0, got -1"),
        ({"mode": "chat"}, "must be 'window' or 'append', got 'chat'"),
        ({"mode": "append", "prefill": "<"}, "window mode only"),
        ({"mode": "append", "closing": ">"}, "window mode only"),
    ],
)
def test_templates_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PromptConfig(**settings)
