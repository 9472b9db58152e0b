import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.rollout.parallel.transport import Alive, Answer, Ask, Refusal, decode_answer, decode_request, frame
from shoal.rollout.samplers.sampler import Completion, Key, Request, Sampling

REQUESTS = st.builds(
    Request,
    st.lists(st.integers(0, 2**20), max_size=5).map(tuple),
    st.builds(Key, *[st.integers(0, 2**62)] * 5),
    st.builds(
        Sampling,
        st.integers(1, 99),
        st.floats(0, 3),
        st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
        st.floats(0.1, 1),
        st.integers(0, 50),
        st.floats(0, 1),
    ),
    st.lists(st.text(max_size=8), max_size=2).map(tuple),
)


@given(REQUESTS)
def test_a_request_reaches_the_engine_as_it_was_asked(request):
    assert decode_request(frame(Ask(3, request))[4:]) == Ask(3, request)


def test_an_answer_that_is_no_completion_becomes_the_refusal_of_its_request():
    odd = Completion((1,), (0.5,), "banana", 0)
    refused = decode_answer(frame(Answer(7, odd))[4:])
    assert isinstance(refused, Refusal)
    assert (refused.number, refused.late) == (7, False)
    assert "banana" in refused.error
    with pytest.raises(msgspec.ValidationError):
        decode_answer(frame(Alive())[4:])
