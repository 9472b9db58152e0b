"""How many files of the rollout carry a request from a host to the engine and back."""

import sys

from tests.rollout.doubles import HashEngine, config

from shoal import ParallelRolloutManager

MACHINE = {"rollout/episode.py", "rollout/prompts.py", "samplers/tokenizers.py"}
"""What an episode itself is made of, wherever it plays."""


def test_a_request_passes_few_files_beside_the_machine_of_the_episode():
    """From one answer of the engine to the next question, in the caller's thread."""
    seen = set()

    def note(frame, event, argument):
        if event == "call":
            seen.add(frame.f_code.co_filename.partition("/src/shoal/")[2])

    def before(requests):
        sys.setprofile(note if requests[0].key.path[3] == 1 else None)

    settings = config(groups=1, members=1)
    with ParallelRolloutManager(settings, HashEngine(before), backend="serial") as manager:
        manager.collect(4)
    passed = {file for file in seen - MACHINE if file.startswith(("rollout/", "samplers/"))}
    assert passed == {
        "rollout/driver.py",
        "rollout/hosts/host.py",
        "rollout/hosts/episodes.py",
        "samplers/asking.py",
        "samplers/sampler.py",
    }
