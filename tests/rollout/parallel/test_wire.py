import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.parallel.wire import Ask, ask_of, request_of
from shoal.rollout.samplers.sampler import Key, Request, Sampling

REQUESTS = st.builds(
    Request,
    st.lists(st.integers(0, 2**20), max_size=5).map(tuple),
    st.builds(Key, *[st.integers(0, 2**62)] * 5),
    st.builds(
        Sampling, st.integers(1, 99), st.floats(0, 3), st.lists(st.text(max_size=4), max_size=2).map(tuple)
    ),
    st.lists(st.text(max_size=8), max_size=2).map(tuple),
)


@given(REQUESTS)
def test_a_request_reaches_the_engine_as_it_was_asked(request):
    sent = msgspec.msgpack.encode(ask_of(3, request, 0.5))
    assert request_of(msgspec.msgpack.decode(sent, type=Ask)) == request
