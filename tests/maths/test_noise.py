import threading

import pytest

torch = pytest.importorskip("torch")

from shoal.maths.noise import torch_noise  # noqa: E402


def test_noise_is_that_of_its_seed_whoever_asks_for_some_meanwhile():
    inside, drawn = threading.Event(), threading.Event()

    def draw(seed, found, meanwhile=None):
        with torch_noise(seed):
            first = torch.rand(2)
            if meanwhile is not None:
                meanwhile.start()
                inside.wait(0.2)  # which it must not be
            elif found is together:
                inside.set()
                drawn.wait()
            found[seed] = torch.cat([first, torch.rand(2)]).tolist()
        drawn.set()

    alone, together = {}, {}
    torch.manual_seed(7)
    draw(1, alone)
    draw(2, alone)
    draw(1, together, other := threading.Thread(target=draw, args=(2, together)))
    other.join()
    assert together == alone
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert drawn == torch.rand(1)


def test_noise_that_is_lent_twice_to_one_thread_is_given_back_twice():
    with torch_noise(3):
        expected = torch.rand(4)
    with torch_noise(3):
        first = torch.rand(2)
        with torch_noise():
            torch.rand(5)
        assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
