"""The room itself: how many doors a request goes through."""

from tests.rollout.doubles import HashEngine
from tests.rooms.trace import Tracer

from shoal.rollout.parallel.server import KNOWN, SharedLLMInferenceManager
from shoal.rollout.parallel.transport import SocketLink
from shoal.rollout.parallel.worker import LocalLink
from shoal.rollout.samplers.sampler import Key, Request


def test_a_request_of_a_worker_passes_at_most_five_files(tmp_path):
    """From a worker's question to its answer, through the socket, the batch and the engine and back."""
    with Tracer("shoal", tmp_path) as tracer, SharedLLMInferenceManager(HashEngine()) as shared:
        link = SocketLink(shared.serve())
        with tracer.piece() as passed:
            for turn in range(2 * KNOWN):  # in the engine's own thread, then at once
                link.generate([Request((1, 2, 3), Key(0, 0, 0, 0, turn))], timeout=20)
        link.close()
    assert len(passed.processes()) == 1
    files = passed.files(leave_out=("core/",))
    parallel = {file for file in files if file.startswith("rollout/parallel/")}
    assert parallel == {"rollout/parallel/transport.py", "rollout/parallel/server.py"}
    assert len(files) <= 5, files


def test_a_request_in_the_caller_passes_the_worker_and_the_sampler_alone(tmp_path):
    link = LocalLink(HashEngine(), print)
    with Tracer("shoal", tmp_path) as tracer, tracer.piece() as passed:
        link.generate([Request((1, 2, 3), Key(0, 0, 0, 0, 0))])
    files = passed.files(leave_out=("core/", "rollout/samplers/tokenizers.py"))
    assert files == {"rollout/parallel/worker.py", "rollout/samplers/sampler.py"}
