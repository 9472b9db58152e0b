"""Answers that are equal, answers that only look so, and the questions made by rule."""

import json
import pickle
import re
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError, MissingExtraError
from shoal.envs import make
from shoal.envs.math_answers import final_answer
from shoal.envs.metamathqa import KINDS, is_correct, load_questions, make_question

SAME = [
    ("42", "42"),
    ("42.", "42"),
    (".5", "0.5"),
    ("1,000", "1000"),
    ("$1,234,567.89", "1234567.89"),
    (r"10,\!000", "10000"),
    ("<think>5</think><answer>6</answer>", "6"),
    ("<answer>so \\boxed{6}</answer> and </p>", "6"),
    ("1/2", r"\frac12"),
    (r"\dfrac{1}{2}", "0.5"),
    (r"-\frac{1}{2}", "-0.5"),
    ("-1/2", "1/-2"),
    ("1 1/2", "3/2"),
    (r"1\frac{1}{2}", "1.5"),
    ("50%", "0.5"),
    ("50 per cent", "50%"),
    ("5th", "5"),
    ("5 ml", "5"),
    ("5 miles a day", "5"),
    (r"10\%", "10%"),
    ("$10", "10"),
    ("10 dollars", "$10"),
    ("5 apples", "5"),
    (r"5\text{ cm}^2", "5"),
    ("5 kg", "5 kilograms"),
    ("5 km/h", "5"),
    (r"90^\circ", "90"),
    ("x = 5", "5"),
    (r"first \boxed{7}, no: \boxed{\frac{3}{4}}", "0.75"),
    ("The answer is: 42", "Some words. The answer is: 42"),
    ("The answer is $\\boxed{3}$.", "3"),
    ("the answer is 5 or so\nThe answer is: 6", "6"),
    ("3*24=72\n#### 72", "72"),
    ("Final Answer: 72", "72"),
    ("the answer isn't clear, the answer : 72", "72"),
    ("#### 71\nThe answer is: 72", "72"),
    (r"\(\frac{3}{4}\)", "3/4"),
    ("$\\$5.00$", "5"),
    ("**7**", "7"),
    ("-5", "−5"),
    ("3 million", "3000000"),
    (r"1.5 \times 10^3", "1500"),
    ("(1, 2)", "(1,2)"),
    (r"\left( \frac{1}{2}, 3 \right)", "(0.5, 3)"),
    (r"\{2,1\}", "{1,2}"),
    ("y = 5, x=3", "x = 3, y = 5"),
    ("x=3, y=5", "5, 3"),
    ("a=3, b=5", "x=3, y=5"),
    (r"3\sqrt{2}", r"3 \sqrt{2}"),
    (r"\text{Monday}", "monday"),
]

DIFFERENT = [
    ("50", "50%"),
    ("0.333333", "1/3"),
    ("1 or 5", "5"),
    ("1, 1", "1, 2"),
    ("the myanswer: 5", "5"),
    ("5 minus 3", "5"),
    ("2+3", "5"),
    ("5x", "5"),
    ("5!", "5"),
    ("6ab", "6"),
    ("2pi", "2"),
    ("5 squared", "5"),
    ("5²", "5"),
    ("5 km", "5 miles"),
    ("5 cents", "$5"),
    ("12,34", "1234"),
    ("--5", "5"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("x = 3, y = 5", "x = 5, y = 3"),
    (r"x_{1} = 3, x_2 = 5", "x_1 = 5, x_2 = 3"),
    ("1_0", "10"),
    ("5/0", "5"),
    (r"3\sqrt{2}", "3"),
    (r"\boxed{5", "5"),
    (r"\boxed{}", ""),
    ("", ""),
    ("$5 apples", "5"),
    ('__import__("os")', "1"),
    (r"\boxed{5} so the answer is 6", "5"),
]


@pytest.mark.parametrize(("response", "truth"), SAME)
def test_equal_answers_are_equal_both_ways(response, truth):
    assert is_correct(response, truth)
    assert is_correct(truth, response)


@pytest.mark.parametrize(("response", "truth"), DIFFERENT)
def test_answers_that_only_look_alike_differ_both_ways(response, truth):
    assert not is_correct(response, truth)
    assert not is_correct(truth, response)


fractions = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=500)


def spellings(value):
    """Ways of writing one number, each by a rule of its own."""
    over, under = value.numerator, value.denominator
    yield f"{over}/{under}"
    yield rf"\frac{{{over}}}{{{under}}}"
    yield rf"The answer is: $\boxed{{\dfrac{{{over}}}{{{under}}}}}$."
    yield f"{over * 3} / {under * 3} dollars"
    yield f"{over * 100}/{under}%"
    if under == 1:
        yield from (f"{over:,}", f"{over}.00", f"#### {over:,}", f"n = {over}")
        yield f"{'-' if over < 0 else ''}${abs(over):,}"
    if 1000 % under == 0:
        yield f"{over * 1000 // under}e-3"


@settings(max_examples=40)
@given(fractions, fractions)
def test_numbers_are_compared_exactly_in_every_spelling(one, other):
    for left in spellings(one):
        for right in spellings(one):
            assert is_correct(left, right)
        for right in spellings(other):
            assert is_correct(left, right) == (one == other)


@given(st.text(max_size=400), st.text(max_size=60))
def test_no_text_raises_and_equality_has_no_direction(response, truth):
    assert is_correct(response, truth) == is_correct(truth, response)
    if (answer := final_answer(response)) is not None:
        assert is_correct(answer, answer) in (True, False)


HOSTILE = [
    r"\boxed{", "answer : ", "1,000", "(", "9", " ", r"\frac{1}", r"\text{", "a = ", "{", "5 km ", ",",
    r"\boxed{1}", "\n", "answer\t", r"\frac{1}{2}",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_responses_cost_little(piece):
    """Nothing is timed: at a million characters only a bounded checker is done in time."""
    for size in (250, 1_000_000):
        text = piece * (size // len(piece))
        for shown in (
            text,
            rf"\boxed{{{text}}}",
            rf"\boxed{{{text[:240]}}}",
            f"The answer is: {text}",
            text + "5",
        ):
            assert is_correct(shown, "5") in (True, False)
            is_correct("5", shown)


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:/\d+)?")
EVENTS = {
    "?": lambda value: value,
    "gives": lambda value, lost: value - lost,
    "twice": lambda value: 2 * value,
    "three times": lambda value: 3 * value,
    "four times": lambda value: 4 * value,
    "loses": lambda value, part: value - value * part,
    "buys": lambda value, packs, each: value + packs * each,
    "sends": lambda value, found: value + found,
    "raised": lambda value, percent: value * (100 + percent) / 100,
    "cut": lambda value, percent: value * (100 - percent) / 100,
    "younger": lambda value, years: value - years,
    "older": lambda value, years: value + years,
}


def by_reading(story):
    """The answer of a story, by its sentences alone."""
    first, second = (list(map(Fraction, NUMBER.findall(story)))[start::2] for start in (0, 1))
    products = sum(one * other for one, other in zip(first, second, strict=False))
    if "pays with" in story:
        return first[-1] - products
    if "divided" in story:
        return products / first[-1]
    if "drives" in story:
        return products / sum(first) if "average" in story else products
    value = first[0]
    for sentence in story.split(". ")[1:]:
        event = next(event for word, event in EVENTS.items() if word in sentence)
        value = event(value, *map(Fraction, NUMBER.findall(sentence)))
    return value


@pytest.mark.parametrize("steps", range(1, 9))
def test_answers_are_what_the_stories_say(steps):
    for seed in range(60):
        question = make_question(np.random.default_rng(seed), steps)
        assert by_reading(question.text) == Fraction(question.answer), question


def test_questions_are_of_all_kinds_and_hardly_repeat():
    texts = set()
    for seed in range(500):
        question = make_question(np.random.default_rng(seed), 3)
        texts.add(question.text)
        assert len(question.text) < 600
    assert len(texts) > 490
    assert len(KINDS) == 6
    marks = ("has", "pays", "price", "drives", "old", "divided")
    assert sum(any(mark in text for text in texts) for mark in marks) >= 5


def test_each_attempt_halves_what_a_right_answer_is_worth():
    env = make("metamathqa")
    for before in range(5):
        question, _ = env.reset(seed=7)
        for _ in range(before):
            observation, reward, terminated, truncated, info = env.step("no idea")
            assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
            assert observation.startswith(question)
            assert "incorrect" in observation
        _, reward, terminated, _, info = env.step(f"It is \\boxed{{{env.question.answer}}}")
        assert (reward, terminated, info["success"]) == (0.5**before, True, True)


def test_the_last_wrong_answer_ends_the_episode_without_success():
    env = make("metamathqa", max_steps=2, invalid_penalty=-0.1, decay=1.0)
    env.reset(seed=7)
    _, reward, terminated, _, info = env.step(env.projection("no tag").actions[0])
    assert (reward, terminated, info["action_is_valid"]) == (-0.1, False, False)
    _, reward, terminated, truncated, info = env.step("wrong")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_questions_come_from_files_of_either_project(tmp_path):
    path = tmp_path / "metamath.json"
    path.write_text(
        json.dumps([{"query": "1+1?", "response": "Sum: 2\nThe answer is: 2", "type": "GSM_AnsAug"}])
    )
    assert load_questions(str(path))[0].answer == "2"
    other = tmp_path / "gsm8k.jsonl"
    other.write_text(json.dumps({"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}) + "\n")
    env = make("metamathqa", source=str(other))
    assert env.reset(seed=0)[0] == "2+2?"
    assert env.step("4")[1] == 1.0
    path.write_text(
        json.dumps([{"query": "?", "response": "The answer is: 1"}, {"query": "?", "response": "x" * 999}])
    )
    with pytest.raises(DataError, match="record 1: its answer has no end"):
        load_questions(str(path))


def test_words_that_answer_a_question_of_the_file_are_answers_too(tmp_path):
    path = tmp_path / "words.json"
    truths = ["Monday", r"\text{no}", "red, blue", "7", "ab+c"]
    path.write_text(json.dumps([{"query": f"{i}?", "answer": f"#### {t}"} for i, t in enumerate(truths)]))
    env = make("metamathqa", source=str(path))
    for text in ("monday", "No", "blue, red", "Monday, 3", "ab + c", "red", "8", *truths):
        assert env.projection(f"<answer>{text}</answer>").valid, text
    for text in ("hello", "Tuesday", "Monday, hello"):
        assert not env.projection(f"<answer>{text}</answer>").valid, text
    for seed in range(20):
        env.reset(seed=seed)
        action = env.projection(f"<answer>{env.expert_action()}</answer>").actions[0]
        assert env.step(action)[1] == 1.0
    twin = pickle.loads(pickle.dumps(env))
    assert twin.projection("<answer>monday</answer>").valid
    assert not make("metamathqa").projection("<answer>monday</answer>").valid


@given(fractions)
def test_every_spelling_of_a_number_is_taken_from_a_response(value):
    project = make("metamathqa").projection
    for text in spellings(value):
        assert project(f"<answer>{text}</answer>").actions == (text,)


def test_settings_that_cannot_work_are_refused():
    for refused in (
        {"checker": "guess"},
        {"decay": 2.0},
        {"min_reasoning": 5},
        {"split": "test"},
    ):
        with pytest.raises(ConfigError, match=next(iter(refused))):
            make("metamathqa", **refused)


@pytest.fixture
def verifier():
    pytest.importorskip("math_verify")
    from shoal.envs.math_verifier import MathVerifier

    verifier = MathVerifier(seconds=60.0)
    yield verifier
    verifier.close()


def test_math_verify_knows_algebra_and_survives_hostile_answers(verifier):
    assert verifier.same("2^{10}", "1024")
    assert not verifier.same("3", "4")
    process = verifier._process
    verifier.seconds = 1.0
    assert not verifier.same("1000000!", "5")  # does not end in time
    verifier.seconds = 60.0
    assert not process.alive()
    assert verifier.same("(x-1)(x+1)", "x^2-1")  # by a new process
    verifier._process.kill()  # from outside
    assert verifier.same("2^{10}", "1024")
    assert not verifier.same("1" * 300, "1" * 300)  # too long to hand over
    assert not verifier.same('__import__("os").system("true")', "0")
    results = []
    thread = threading.Thread(target=lambda: results.append(verifier.same("0.5", r"\frac12")))
    thread.start()
    thread.join()
    assert results == [True]


def test_the_math_verify_checker_adds_to_the_exact_one():
    pytest.importorskip("math_verify")
    env = make("metamathqa", checker="math_verify", check_seconds=60.0)
    env.reset(seed=0)
    root = f"\\sqrt{{{env.question.answer}^2}}"
    assert env.step(root)[1] == 1.0
    env.close()
    strict = make("metamathqa")
    strict.reset(seed=0)
    assert strict.step(root)[1] == 0.0


def test_math_verify_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[math\]"):
        make("metamathqa", checker="math_verify")
