"""What does not depend on which of a program's parallel sub-agents asks first, and what does."""

from collections import Counter
from pathlib import Path

from tests.rollout.doubles import HashEngine, config

from shoal import ParallelRolloutManager
from shoal.gateway.programs import sessions_of


def played(function, first, folder):
    """The episodes of a program whose sub-agents ask in the order of the letters of `first`."""
    (folder / "tasks.jsonl").write_text(f'"{first}"\n')
    program = {
        "function": f"agents:{function}",
        "folder": str(Path(__file__).parent),
        "tasks": str(folder / "tasks.jsonl"),
        "parallel": True,
    }
    settings = config(groups=4)
    settings["custom_envs"]["Counter"] = {"env_type": "program", "env_config": program}
    with ParallelRolloutManager(settings, HashEngine(), 1, sessions=sessions_of) as manager:
        return manager.collect(4)


def answers(episode):
    """What was said to each prompt of one message, and how often."""
    roots = [number for number, call in enumerate(episode.calls) if call.parent is None]
    return Counter((episode.turns[n].observation, episode.turns[n].response) for n in roots)


def test_sub_agents_that_say_who_they_are_leave_the_same_record_whoever_asks_first(tmp_path):
    one, other = (played("named", order, tmp_path) for order in ("AB", "BA"))
    assert all(episode.status == "ok" and len(episode.calls) == 4 for episode in one)
    assert one == other


def test_sub_agents_that_ask_the_same_get_the_same_answers_in_the_order_in_which_they_ask(tmp_path):
    one, other = (played("alike", order, tmp_path) for order in ("AB", "BA"))
    assert all(episode.status == "ok" and len(episode.calls) == 4 for episode in one)
    assert list(map(answers, one)) == list(map(answers, other))
    assert one != other  # which of them got which, and went on from it, is decided by who came first
