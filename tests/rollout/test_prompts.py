import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, EngineError
from shoal.rollout.prompts import PastTurn, PromptConfig, Prompter, Scene, fill, find_drift, first_difference
from shoal.samplers.tokenizers import TinyTokenizer

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
    alone = written.removesuffix(closing)
    assert (
        config.response(written) == prefill + alone + closing
    )  # a tag that it wrote itself stands there once
    assert config.written(config.response(written)) == alone


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


class Bracketed:
    """A template that puts brackets around each message; its tokens are characters."""

    def render(self, chat):
        return "".join(f"<{message['content']}>" for message in chat) + "?"

    def spell(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("seen", "piece", "shown"),
    [
        ("<one><two>?", None, None),
        ("[one><two>?", "what the template puts before message 0 (user)", ("[one><two>?", "<one><two>?")),
        ("<onE><two>?", "message 0 (user)", ("<onE><two>?", "<one><two>?")),
        (
            "<one>-<two>?",
            "what the template puts before message 1 (assistant)",
            ("<one>-<two>?", "<one><two>?"),
        ),
        ("<one><twx>?", "message 1 (assistant)", ("<one><twx>?", "<one><two>?")),
        ("<one><two>!", "what the template puts after the last message", ("<one><two>!", "<one><two>?")),
        ("<one><two>", "what the template puts after the last message", ("<one><two>", "<one><two>?")),
    ],
)
def test_where_a_template_writes_otherwise_is_named_and_shown(seen, piece, shown):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    drift = find_drift(Bracketed(), chat, [ord(c) for c in seen])
    if piece is None:
        assert drift is None
    else:  # from ten characters before to thirty after
        at = first_difference(*shown)
        saw, writes = (text[max(0, at - 10) : at + 30] for text in shown)
        assert drift == f"in {piece} the model saw {saw!r}, the template writes {writes!r}"


def test_what_is_shown_of_a_drift_begins_a_little_before_it():
    chat = [{"role": "user", "content": "x" * 50 + "y" * 50}]
    drift = find_drift(Bracketed(), chat, [ord(c) for c in "<" + "x" * 50 + "z" * 50 + ">?"])
    saw, writes = "x" * 10 + "z" * 30, "x" * 10 + "y" * 30
    assert drift == f"in message 0 (user) the model saw {saw!r}, the template writes {writes!r}"
    assert first_difference("abc", "ab") == first_difference("ab", "abc") == 2


@pytest.mark.parametrize(("on_drift", "checks"), [("warn", 8), ("ignore", 0), ("raise", 20)])
def test_drift_is_looked_for_in_the_first_turns_unless_it_ends_episodes(on_drift, checks, caplog):
    looked = []
    tokenizer = Bracketed()
    tokenizer.render = lambda chat: looked.append(chat) or Bracketed().render(chat)
    prompter = Prompter(PromptConfig(mode="append", on_drift=on_drift, system="S"), tokenizer)
    chat = [{"role": "user", "content": "one"}]
    for _ in range(20):
        prompter.check_drift(chat, [ord(c) for c in "<S><one>?"])
    assert len(looked) == checks
    assert all([message["role"] for message in chat] == ["system", "user"] for chat in looked)
    other = Prompter(PromptConfig(mode="append", on_drift=on_drift), tokenizer)
    if on_drift == "raise":
        with pytest.raises(
            EngineError, match="in message 0 .user. the model saw '<on!>.?', the template writes"
        ):
            other.check_drift(chat, [ord(c) for c in "<on!>?"])
    else:
        for _ in range(3):  # one warning is enough
            other.check_drift(chat, [ord(c) for c in "<on!>?"])
        assert [r.name for r in caplog.records].count("shoal.rollout.prompts") == (on_drift == "warn")
