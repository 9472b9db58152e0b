"""How episodes of programs end, what they count as, and which of them are played again."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from shoal import ParallelRolloutManager
from shoal.core.data import decode_trajectory, encode_trajectory
from shoal.gateway.programs import sessions_of
from shoal.gateway.server import Gateway
from shoal.rollout.journal import Journal
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import Key, Sampling
from shoal.samplers.tiny import TinyEngine, TinyShape
from shoal.train.agent.run.metrics import heldout_metrics, rollout_metrics
from tests.gateway.agent_endings import WAYS
from tests.gateway.asking import GO, chat_of, handled

HERE = Path(__file__).parent
NAMES = [way.__name__ for way in WAYS]
COUNTS = {  # truncated, reward, calls, and what is said of it
    "returns": (False, 1.0, 1, None),
    "raises_after_an_answer": (False, -0.5, 1, "KeyError: 'garden'"),
    "exits_after_an_answer": (False, -0.5, 1, ""),
    "raises_at_the_end_of_its_calls": (True, 0.0, 3, None),
    "returns_at_the_end_of_its_calls": (True, 0.25, 3, None),
    "ends_without_a_result_at_the_end_of_its_calls": (True, 0.0, 3, None),
    "asks_for_ever": (True, 0.0, 3, None),
    "raises_when_the_context_is_full": (True, 0.0, 1, None),
    "shortens_what_does_not_fit": (False, 1.0, 2, None),
    "begins_with_too_much": (True, 0.0, 0, None),
    "swallows_a_refusal": (False, 0.5, 1, None),
    "asks_what_is_not_served": (False, 0.5, 1, None),
}
FAULTS = {  # they are played again, then left out
    "raises_before_it_asks": "KeyError: 'garden'",
    "raises_where_it_is_refused": "refused 1 of its requests, such as 400: frequency_penalty=0.5",
    "swallows_all_refusals": "ended without an answer of the model; the gateway refused 2 of its requests, such as "
    "400: logit_bias",
    "never_asks": "ended without asking the model",
    "ends_without_a_result": "",
    "dies": "",
}
REFUSED = {  # an answered request of 3 has a budget of 3 calls
    "raises_where_it_is_refused": ["400: frequency_penalty=0.5"],
    "raises_at_the_end_of_its_calls": ["403: this session has had its 3 calls (max_steps)"],
    "returns_at_the_end_of_its_calls": ["403: this session has had its 3 calls (max_steps)"],
    "ends_without_a_result_at_the_end_of_its_calls": ["403: this session has had its 3 calls (max_steps)"],
    "asks_for_ever": ["403: this session has had its 3 calls (max_steps)"],
    "raises_when_the_context_is_full": ["400: the prompt of "],
    "shortens_what_does_not_fit": ["400: the prompt of "],
    "begins_with_too_much": ["400: the prompt of "],
    "swallows_a_refusal": ["400: tool_choice='required'"],
    "asks_what_is_not_served": ["404: /v1/embeddings is not served", "404: nothing answers POST"],
    "swallows_all_refusals": ["400: logit_bias"],
}


def config(**program):
    side = {"env_groups": len(WAYS), "group_size": 1, "env_configs": {"tags": ["Agent"]}}
    env = {
        "env_type": "program",
        "env_config": {"folder": str(HERE), "max_steps": 3, "on_error": -0.5, **program},
    }
    return {
        "custom_envs": {"Agent": env},
        "es_manager": {"train": side, "val": side},
        "agent_proxy": {"max_tokens": 2},
    }


def played(file):
    return Counter(file.read_text().split())


@pytest.mark.parametrize(
    "program",
    [{"function": "agent_endings:play"}, {"command": ["{python}", "agent_endings.py"]}],
    ids=["f", "c"],
)
def test_a_budget_or_an_exception_of_the_agent_counts_and_a_fault_is_played_again(
    program, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("PLAYED", str(tmp_path / "played"))
    engine = TinyEngine([], TinyShape(32, 1, 2, 200), seed=1)
    journal = tmp_path / "journal.jsonl"
    with ParallelRolloutManager(
        config(**program), engine, 2, sessions=sessions_of, journal=Journal(journal, {})
    ) as manager:
        episodes = dict(zip(NAMES, manager.collect(0), strict=True))
    assert episodes.keys() == COUNTS.keys() | FAULTS.keys()
    for name, (truncated, reward, calls, why) in COUNTS.items():
        one = episodes[name]
        found = (one.status, one.truncated, one.terminated, one.reward, len(one.calls))
        assert found == ("ok", truncated, not truncated, reward, calls), name
        assert one.success == (reward == 1.0), name
        budget = "context" if calls < 3 else "calls"
        assert one.ended == (budget if truncated else "env" if why is None else "fault"), name
        assert one.program_failed == (why is not None), name
        assert (why or "") in (one.error or ""), name
    for name, why in FAULTS.items():
        assert (episodes[name].status, episodes[name].success) == ("env_error", False), name
        assert why in episodes[name].error, name
    assert played(tmp_path / "played") == dict.fromkeys(COUNTS, 1) | dict.fromkeys(FAULTS, 2)
    for name, one in episodes.items():
        said = [refused.what for refused in one.requests.refused] if one.requests else []
        assert len(said) == len(REFUSED.get(name, [])), name
        assert all(map(str.startswith, said, REFUSED.get(name, []))), name
        assert decode_trajectory(encode_trajectory(one)) == one
    assert caplog.text.count("the gateway refused a request of a program: 404: /v1/embeddings") == 1

    metrics = rollout_metrics(list(episodes.values()))
    rewards = [reward for _, reward, _, _ in COUNTS.values()]
    assert metrics["success"] == pytest.approx(2 / 12)
    assert metrics["reward"] == pytest.approx(sum(rewards) / 12)
    assert metrics["truncated"] == pytest.approx(6 / 12)
    assert metrics["ended/context"] == pytest.approx(2 / 18)  # of all episodes
    assert metrics["ended/fault"] == pytest.approx((2 + 6) / 18)
    assert metrics["program_errors"] == pytest.approx(2 / 12)
    assert metrics["failed_episodes"] == metrics["failed/env_error"] == 6
    # one each of `raises_where_it_is_refused`, the three that end at their calls, three of the context, `swallows_a…`;
    # two each of `asks_what_is_not_served` and `swallows_all_refusals`; those of `asks_for_ever` until it is ended
    for_ever = episodes["asks_for_ever"].requests.refused[0].count
    assert 50 <= for_ever < 100
    assert metrics["refused_requests"] == 8 + 2 + 2 + for_ever
    held_out = heldout_metrics(list(episodes.values()))
    assert held_out["heldout_truncated"] == metrics["truncated"]
    assert held_out["heldout_program_errors"] == metrics["program_errors"]

    (tmp_path / "played").write_text("")  # after an interruption
    with ParallelRolloutManager(
        config(**program), engine, 2, sessions=sessions_of, journal=Journal(journal, {})
    ) as manager:
        again = dict(zip(NAMES, manager.collect(0), strict=True))
    assert {name: again[name] for name in COUNTS} == {name: episodes[name] for name in COUNTS}
    assert played(tmp_path / "played") == dict.fromkeys(FAULTS, 2) | {"begins_with_too_much": 1}


SENT = [
    {},
    {"temperature": 0.7},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
    {"top_k": -1, "top_p": 1, "temperature": None},
    {"max_tokens": 5},
    {"max_completion_tokens": 5000},
]


@pytest.mark.parametrize(
    "fixed", [Sampling(8, 0.7), Sampling(8, 0.0), Sampling(8, 1.0, top_p=0.5, min_p=0.1)]
)
def test_the_sampling_of_the_run_holds_whatever_a_program_sends_and_what_is_not_taken_is_counted(
    engine, fixed
):
    async def asked(number, path, body):
        gateway.open(f"s{number}", Key(5, (1,)), fixed=fixed)
        status, answer = await handled(gateway, f"s{number}", body, path)
        assert status == 200, answer
        session = gateway.sessions[f"s{number}"]
        overridden = (
            {} if session.requests is None else {c.what: c.count for c in session.requests.overridden}
        )
        return session.calls[0].call.response_ids, overridden

    gateway = Gateway(SamplerClient(engine), engine.tokenizer, max_tokens=8, by_asking=False)
    answers = [
        asyncio.run(asked(number, "chat/completions", chat_of("go", **sent)))
        for number, sent in enumerate(SENT)
    ]
    (plain, _), (short, _) = answers[0], answers[5]
    assert [ids for ids, _ in answers if ids != short] == [plain] * 6
    assert short == plain[:5]
    own = {"temperature": fixed.temperature, "top_p": fixed.top_p, "top_k": 0, "min_p": fixed.min_p}
    for sent, (_, overridden) in zip(SENT, answers, strict=True):
        wanted = {f"{name}={sent[name]}": 1 for name in own if sent.get(name) not in (None, own[name], -1)}
        assert overridden == wanted | ({"max_tokens=5000": 1} if "max_completion_tokens" in sent else {})
    anthropic = {"messages": GO, "max_tokens": 99, "temperature": 0.5, "top_k": 2}
    ids, overridden = asyncio.run(asked(90, "messages", anthropic))
    assert (ids, overridden) == (plain, {"max_tokens=99": 1, "temperature=0.5": 1, "top_k=2": 1})


def test_a_program_with_a_temperature_of_its_own_is_trained_and_evaluated(caplog):
    settings = config(function="agent_endings:warm")
    settings["agent_proxy"]["temperature"] = 0.7
    engine = TinyEngine([], TinyShape(32, 1, 2, 200), seed=1)
    with ParallelRolloutManager(settings, engine, 2, sessions=sessions_of) as manager:
        for greedy in (False, True):
            episodes = manager.collect(0, manager.config.agent_proxy.sampling(greedy=greedy))
            row = rollout_metrics(episodes)
            assert (row["success"], row["failed_episodes"]) == (1.0, 0.0)
            assert row.get("overridden/temperature", 0.0) == (len(episodes) if greedy else 0)
    assert caplog.text.count("a program asks for temperature=0.7: the run decides it") == 1
