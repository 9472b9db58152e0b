import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import DataError, EngineError
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.tiny import ROWS, TinyEngine, TinyShape
from shoal.samplers.tokenizers import ASSISTANT, CONTROL, END, PAD, SYSTEM, UNKNOWN, USER, TinyTokenizer
from shoal.train.agent.policies.loading import policy_of

WORDS = ["Left", "Down", "Right", "Up"]


@pytest.fixture(scope="module")
def engine():
    return TinyEngine(WORDS, TinyShape(width=32, layers=2, heads=2, context=64), seed=3)


def requests(engine, n, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Request(
            tuple(rng.integers(6, engine.tokenizer.size, rng.integers(1, 40)).tolist()),
            Key(seed, (0, i, 0, 0)),
            Sampling(max_tokens=int(rng.integers(1, 7)), temperature=float(rng.choice([0, 0.7, 1.0]))),
        )
        for i in range(n)
    ]


@given(st.text(max_size=60))
def test_plain_text_survives_the_tiny_tokenizer(text):
    tokenizer = TinyTokenizer(WORDS)
    ids = tokenizer.encode(text)
    known = "".join(c if c in tokenizer.tokens else "�" for c in text)
    assert tokenizer.decode(ids) == known
    assert all(i >= len(CONTROL) - 1 for i in ids)  # text cannot write control tokens, except <unknown>


def test_tags_and_action_words_are_one_token():
    tokenizer = TinyTokenizer(WORDS)
    for word in WORDS:
        assert len(tokenizer.encode(f"<action>{word}</action>")) == 3
    assert tokenizer.encode("<user>") == tuple(tokenizer.encode(c)[0] for c in "<user>")


def test_more_prompts_of_one_length_than_fit_in_a_batch_are_each_answered_as_alone(engine):
    ids = np.random.default_rng(0).permutation(np.arange(6, engine.tokenizer.size))
    asked = [
        Request((int(ids[i]), int(ids[i + 1])), Key(0, (0, i, 0, 0)), Sampling(max_tokens=2))
        for i in range(ROWS + 5)
    ]
    assert engine.generate(asked) == [engine.generate([one])[0] for one in asked]


def test_members_of_a_group_differ_by_their_key_alone(engine):
    prompt = engine.tokenizer.start([{"role": "user", "content": "P__G"}])
    sampling = Sampling(max_tokens=6)
    same = engine.generate([Request(prompt, Key(0, (1, 2, 3, 4)), sampling)] * 2)
    assert same[0] == same[1]
    others = engine.generate([Request(prompt, Key(0, (1, 2, member, 4)), sampling) for member in range(20)])
    assert len({completion.token_ids for completion in others}) > 10


@pytest.fixture(scope="module")
def unstopped(engine):
    prompt = engine.tokenizer.start([{"role": "user", "content": "x"}])
    return engine.generate([Request(prompt, Key(1, (0, i, 0, 0)), Sampling(24, 3.0)) for i in range(60)])


@pytest.mark.parametrize("stop", ["p", "pU", "UpL", "tU", "oUp", "e</action>", "é\n", "r>", "</"])
def test_a_response_ends_where_its_stop_text_is_whole_however_it_falls_on_tokens(engine, unstopped, stop):
    prompt = engine.tokenizer.start([{"role": "user", "content": "x"}])
    asked = [Request(prompt, Key(1, (0, i, 0, 0)), Sampling(24, 3.0, (stop,))) for i in range(60)]
    ended = 0
    for free, found in zip(unstopped, engine.generate(asked), strict=True):
        said = [engine.tokenizer.decode(free.token_ids[: n + 1]) for n in range(len(free.token_ids))]
        n = next((n + 1 for n, text in enumerate(said) if stop in text), None)
        assert found.token_ids == free.token_ids[:n]
        assert found.finish == (free.finish if n is None else "stop")
        ended += n is not None
    assert ended or stop not in ("p", "</")


def test_a_prompt_without_tokens_is_an_error(engine):
    with pytest.raises(EngineError, match="at least one token"):
        engine.generate([Request((), Key(0, (0, 0, 0, 0)))])


def test_weights_survive_the_disk(engine, tmp_path):
    policy_of(engine).save(tmp_path)
    again = TinyEngine.load(tmp_path)
    assert again.generate(requests(engine, 5)) == engine.generate(requests(engine, 5))


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(0)
    one = TinyEngine(WORDS, seed=1).model.state_dict()
    torch.manual_seed(1)
    two, other = TinyEngine(WORDS, seed=1).model.state_dict(), TinyEngine(WORDS, seed=2).model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="width must be a multiple of heads=3, got 16"):
        TinyShape(width=16, heads=3)


def test_initial_weights_are_drawn_as_widely_as_their_layer_needs():
    model = TinyEngine(WORDS, TinyShape(width=64, layers=2, heads=4), seed=1).model
    for name, parameter in model.named_parameters():
        if name.startswith(("embedding", "position")):
            assert parameter.mean().item() == pytest.approx(0, abs=0.02)
            assert parameter.std().item() == pytest.approx(0.5, abs=0.02)
        elif parameter.ndim == 2:  # uniform, within one over the root of its inputs
            bound = parameter.shape[1] ** -0.5
            assert bound * 0.98 < parameter.abs().max() <= bound
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all()


def test_drawing_initial_weights_leaves_torchs_own_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    TinyEngine(WORDS)
    assert torch.equal(torch.rand(3), expected)


def test_an_engine_file_that_describes_none_is_named(tmp_path):
    for text in ("{}", '{"words": ["Up"], "shape": {"width": 0}}', '{"words": ["Up"], "shape": {"wide": 8}}'):
        (tmp_path / "engine.json").write_text(text)
        with pytest.raises(DataError, match="engine.json does not describe a tiny engine "):
            TinyEngine.load(tmp_path)
    (tmp_path / "engine.json").write_text('{"words": ["Up"], "shape": {}}')
    for _ in range(2):
        with pytest.raises(DataError, match="model.safetensors holds no weights that load "):
            TinyEngine.load(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"half")


def test_words_of_one_letter_and_words_named_twice_make_no_token_more():
    tokenizer = TinyTokenizer(["Up", "A", "Up", "Upper"])
    assert tokenizer.words == ("Up", "Upper")
    assert tokenizer.size == len(tokenizer.tokens) == len(set(tokenizer.tokens))
    assert [tokenizer.tokens[i] for i in tokenizer.encode("UpperUpA")] == ["Upper", "Up", "A"]  # the longest
    assert tokenizer.encode("é") == (UNKNOWN,)
    assert tokenizer.decode((UNKNOWN, END, PAD, *tokenizer.encode("A"))) == "\ufffdA"
    chat = [{"role": "system", "content": "A"}, {"role": "user", "content": "Up"}]
    assert tokenizer.start(chat) == (SYSTEM, *tokenizer.encode("A"), USER, *tokenizer.encode("Up"), ASSISTANT)
    for response, closing in (((), (END,)), ((9,), (END,)), ((9, END), ())):
        assert tokenizer.extend(response, chat[1]) == (*closing, *tokenizer.start(chat[1:]))
