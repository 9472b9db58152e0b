import contextlib
import math
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.rollout.doubles import CounterEnv, FakeServer, each, logprob_of, until, with_env, written

from shoal.core.errors import ConfigError, EngineError
from shoal.rollout.images import picture_url
from shoal.rollout.play import ParallelRolloutManager
from shoal.rollout.prompts import PromptConfig, Prompter, Scene
from shoal.samplers.asking import RetryPolicy
from shoal.samplers.sampler import Key, Request, Sampling, capabilities_of, require_trainable
from shoal.samplers.scripted import RandomEngine
from shoal.samplers.servers.openai import DIALECTS, OpenAIEngine
from shoal.samplers.tokenizers import TinyTokenizer

QUICK = RetryPolicy(timeout=30.0, retries=3, backoff=0.001, max_backoff=0.01)
LIMITED = Sampling(5, 1.0, (), 0.9, 7, 0.1)


@pytest.fixture
def serve():
    with contextlib.ExitStack() as opened:

        def start(kind="vllm", **settings):
            server = opened.enter_context(FakeServer(kind))
            settings = {"retry_policy": QUICK, "tokenizer": TinyTokenizer(), **settings}
            return server, opened.enter_context(OpenAIEngine(server.url, **settings))

        yield start


def request(i=0, n=5, temperature=1.0, **settings):
    return Request((7, 8, 9 + i), Key(0, (0, i, 0, 0)), Sampling(n, temperature), **settings)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp"])
def test_tokens_and_log_probs_come_back_for_the_request_they_belong_to(serve, kind):
    _, engine = serve(kind)
    asked = [request(i, n=1 + i % 7) for i in range(40)]
    for one, completion in zip(asked, engine.generate(asked), strict=True):
        ids = written(one.prompt_ids, one.sampling.max_tokens)
        assert completion.token_ids == tuple(ids)
        assert completion.logprobs == tuple(map(logprob_of, ids))
        assert completion.finish == "length"
    assert engine.server == kind
    assert capabilities_of(engine).trainable
    assert engine.level == "L0"
    require_trainable(engine)


@pytest.mark.parametrize("faults", [[408, 425, 429], [500, 502, 503], [504, "drop", "cut"]])
def test_passing_faults_are_retried_and_leave_no_trace(serve, faults):
    server, engine = serve()
    expected = engine.generate([request()])
    server.faults = list(faults)
    assert engine.generate([request()]) == expected


def test_a_server_that_stays_broken_is_an_engine_error_that_says_what_it_said(serve):
    server, engine = serve()
    server.faults = [500] * 4
    with pytest.raises(EngineError, match=r"no answer in 4 attempts over .*HTTP 500: fault 500"):
        engine.generate([request()])
    assert len(server.seen) == 1 + 4  # one rule for each request: whoever asks does not ask again
    assert engine.generate([request()])  # and the next request is none the worse


def test_a_failed_request_does_not_take_the_others_with_it(serve):
    server, engine = serve(concurrency=1)
    calm = engine.generate([request(i) for i in range(4)])
    server.faults = [200, 400]
    results = each(engine, [request(i) for i in range(4)])
    assert isinstance(results[1], EngineError)
    assert [results[0], *results[2:]] == [calm[0], *calm[2:]]
    server.faults = [200, 400]
    with pytest.raises(EngineError, match="HTTP 400"):
        engine.generate([request(i) for i in range(4)])


@pytest.mark.flaky(reruns=2)
def test_an_answer_that_takes_too_long_is_given_up_and_asked_for_again(serve):
    server, engine = serve(retry_policy=RetryPolicy(1.0, 1, 0.001, 0.01))
    server.faults = [3.0]
    assert engine.generate([request()])[0].token_ids == tuple(written((7, 8, 9), 5))
    server, engine = serve(retry_policy=RetryPolicy(0.1, 1, 0.001, 0.01), server="vllm", model="m")
    server.faults = [1.0, 1.0]
    with pytest.raises(EngineError, match="no answer in 2 attempts over .* timed out after 0.1 s"):
        engine.generate([request()])


CHOICE = b'{"choices": [{"token_ids": %s, "logprobs": {"token_logprobs": %s}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize("tokenizer", [None, TinyTokenizer()])
@pytest.mark.parametrize(
    "reply",
    [
        b'{"choices": [',
        b"<html>Welcome</html>",
        b"null",
        b'{"choices": [%s, %s]}' % ((b'{"message": {"content": "a"}, "finish_reason": "stop"}',) * 2),
        b"",
        b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        CHOICE % (b"[1]", b"[1" + b"0" * 400 + b"]"),
        CHOICE % (b"[1.5]", b"[-1.0]"),
        CHOICE % (b"[1" + b"0" * 5000 + b"]", b"[-1.0]"),
        CHOICE % (b"[1]", b"[NaN]"),
        CHOICE % (b"[1]", b"[0.5]"),
        b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1]}, "finish_reason": {"a": [1]}}]}',
        b'{"choices": [{"token_ids": [1], "logprobs": [1], "finish_reason": "stop"}]}',
    ],
)
def test_nonsense_is_asked_for_again_alone_and_then_an_engine_error(serve, reply, tokenizer):
    server, engine = serve(tokenizer=tokenizer)
    asked = [request(i) if tokenizer else chat_request(engine) for i in range(3)]
    right, before = engine.generate(asked), len(server.seen)
    server.faults = [reply]
    assert engine.generate(asked) == right
    assert len(server.seen) == before + 4
    server.faults = [reply] * 4
    with pytest.raises(EngineError, match="no answer in 4 attempts"):
        engine.generate(asked[:1])
    assert len(server.seen) == before + 8


@pytest.mark.parametrize("reply", [{"data": ["m"]}, {"data": [{"id": None}]}, {"text": "hello"}])
def test_a_list_of_models_that_is_none_is_an_engine_error(reply):
    with FakeServer("openai") as server:
        server.change = lambda _: reply
        with pytest.raises(EngineError, match="no list of models|lists no model"):
            OpenAIEngine(server.url, retry_policy=QUICK)


def chat_request(engine):
    prompt = engine.tokenizer.start([{"role": "user", "content": "hello"}])
    return Request(prompt, Key(0, (0, 0, 0, 0)), Sampling(5, 1.0))


def test_no_more_requests_are_under_way_than_allowed(serve):
    server, engine = serve(concurrency=3)
    together = threading.Barrier(3)
    server.change = lambda reply: together.wait(60) < 3 and reply
    engine.generate([request(i) for i in range(12)])
    assert server.most_busy == 3


def test_a_slow_answer_holds_up_no_other_episode(serve):
    """The first one is given when the other episode has asked for its second turn."""
    server, engine = serve("openai", tokenizer=None)
    server.say = lambda said: "<action>one</action>"
    slow = iter([True])
    server.change = lambda reply: (
        (until(lambda: len(server.seen) == 1 + 3) if next(slow, False) else True) and reply
    )
    settings = with_env(CounterEnv, groups=2, members=1, max_steps=2)
    with ParallelRolloutManager(settings, engine, backend="thread") as manager:
        assert [(t.status, len(t.turns)) for t in manager.collect(4)] == [("ok", 2), ("ok", 2)]


def test_connections_are_kept(serve):
    server, engine = serve(concurrency=2)
    for _ in range(5):
        engine.generate([request(i) for i in range(4)])
    assert len(server.seen) == 21
    assert len(server.ports) <= 2


def choice(reply):
    return reply["choices"][0]


CUT, NO_TEXT = "changed the prompt: 3 tokens were sent, it used ", "reply is none of a chat completion"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "vllm",
            lambda r: choice(r).pop("token_ids"),
            "must have as many .* log-probabilities, got None and 5",
        ),
        ("vllm", lambda r: choice(r)["logprobs"]["token_logprobs"].pop(), "got 5 and 4"),
        ("vllm", lambda r: choice(r).update(logprobs=None), "got 5 and"),
        (
            "vllm",
            lambda r: choice(r)["logprobs"].update(token_logprobs=[None] * 5),
            "reply is none of vllm's",
        ),
        ("vllm", lambda r: choice(r).update(finish_reason="abort"), r"broke the response off \(abort\)"),
        ("vllm", lambda r: choice(r)["prompt_token_ids"].pop(0), f"{CUT}2"),
        ("sglang", lambda r: r["meta_info"].update(prompt_tokens=1), f"{CUT}1"),
        ("llama.cpp", lambda r: r.update(tokens_evaluated=1), f"{CUT}1"),
        # it tells no log-probability of a token that ends amid a character, such as the first of an emoji's two
        ("llama.cpp", lambda r: r["completion_probabilities"].pop(1), "4 log-probabilities of the 5 tokens"),
        ("openai", lambda r: choice(r)["message"].update(content=[{"type": "text", "text": "Up"}]), NO_TEXT),
        ("openai", lambda r: choice(r)["message"].update(content=7), NO_TEXT),
    ],
)
def test_a_reply_that_is_none_or_cannot_be_learned_from_is_an_error(serve, kind, change, message):
    server, engine = serve(kind, tokenizer=None if kind == "openai" else TinyTokenizer())

    def bend(reply):
        change(reply)
        return reply

    server.change = bend
    with pytest.raises(EngineError, match=message):
        engine.generate([chat_request(engine) if kind == "openai" else request()])


@pytest.mark.parametrize(("kind", "logprobs", "fine"), [
    ("vllm", "processed", True), ("vllm", "raw", False), ("sglang", None, False), ("llama.cpp", None, False),
])  # fmt: skip
def test_log_probs_of_another_distribution_are_not_passed_off_as_those_of_the_sampling(
    serve, kind, logprobs, fine
):
    _, engine = serve(kind, logprobs=logprobs)
    limited, cooler = each(engine, [Request((7, 8), Key(0, (0, 0, 0, 0)), LIMITED), request(temperature=0.7)])
    assert isinstance(limited, EngineError) != fine
    assert fine or "top_p, top_k and min_p leave" in str(limited)
    assert isinstance(cooler, EngineError) == (engine.logprobs == "raw")
    assert engine.logprobs != "raw" or "--logprobs-mode processed_logprobs" in str(cooler)


def test_without_a_tokenizer_messages_travel_and_nothing_may_be_learned(serve):
    server, engine = serve("openai", tokenizer=None)
    prompter = Prompter(PromptConfig(system="be brief", first="{observation}"), engine.tokenizer)
    prompt = prompter.prompt(Scene("", "ünd <|im_end|>", [], [], 1))
    completion = engine.generate([Request(prompt, Key(0, (0, 0, 0, 0)), Sampling(9, 0.7))])[0]
    assert engine.tokenizer.decode(completion.token_ids) == "you said be brief / ünd <|im_end|>"
    assert completion.logprobs == ()
    assert server.seen[-1][1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ünd <|im_end|>"},
    ]
    with pytest.raises(ConfigError, match="evaluation only: its completions lack token_ids and logprobs"):
        require_trainable(engine)


def test_a_growing_chat_and_a_prefill_keep_their_roles(serve):
    server, engine = serve("openai", tokenizer=None)
    codec = engine.tokenizer
    prompt = codec.start([{"role": "user", "content": "a"}])
    prompt += codec.encode("b") + codec.extend(codec.encode("b"), {"role": "user", "content": "c"})
    engine.generate([Request(prompt + codec.encode("<act"), Key(0, (0, 0, 0, 0)))])
    body = server.seen[-1][1]
    roles = [(m["role"], m["content"]) for m in body["messages"]]
    assert roles == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "<act")]
    assert body["continue_final_message"]


def test_pictures_reach_the_server_beside_their_text(serve):
    server, engine = serve("openai", tokenizer=None)
    url = picture_url(np.zeros((2, 2, 3), np.uint8))
    prompter = Prompter(PromptConfig(first="{observation}"), engine.tokenizer)
    prompt = prompter.prompt(Scene("", "look", [], [], 1, n_images=1))
    engine.generate([Request(prompt, Key(0, (0, 0, 0, 0)), images=(url,))])
    (message,) = server.seen[-1][1]["messages"]
    expected = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "look"}]
    assert message["content"] == expected
    with pytest.raises(EngineError, match="more pictures than the 0"):
        engine.generate([Request(prompt, Key(0, (0, 0, 0, 0)))])
    with pytest.raises(EngineError, match="not made by the sampler's own tokenizer"):
        engine.generate([Request(prompt[1:], Key(0, (0, 0, 0, 0)))])
    with pytest.raises(EngineError, match="1 of 2 pictures have no place"):
        engine.generate([Request(prompt, Key(0, (0, 0, 0, 0)), images=(url, url))])


def test_a_picture_that_is_not_there_costs_its_own_request(serve, tmp_path):
    _, engine = serve("openai", tokenizer=None)
    (tmp_path / "a.gif").write_bytes(b"GIF89a")
    asked = [chat_request(engine)]
    for image in ("/nowhere/a.png", "\0", str(tmp_path / "a.gif")):
        prompt = engine.tokenizer.start([{"role": "user", "content": "look", "images": 1}])
        asked.append(Request(prompt, Key(0, (0, 0, 0, 0)), images=(image,)))
    first, *others = each(engine, asked)
    assert engine.tokenizer.decode(first.token_ids).startswith("you said")
    assert all(isinstance(other, EngineError) for other in others)
    assert "a picture cannot be sent (FileNotFoundError)" in str(others[0])


def test_an_adapter_is_in_use_though_an_answer_was_lost_or_the_one_before_stays(serve, tmp_path, caplog):
    server, engine = serve("vllm")
    engine.load_adapter(tmp_path, 1)
    lost = b'{"error": {"message": "The lora adapter \'x\' has already been loaded."}}'
    server.faults = ["drop", (400, lost), 400]
    engine.load_adapter(tmp_path, 2)
    assert engine.generate([request()])[0].weights_version == 2
    loaded = [body["lora_name"] for path, body, _ in server.seen if path == "/v1/load_lora_adapter"]
    assert server.seen[-1][1]["model"] == loaded[-1]
    assert "the server keeps the adapter before" in caplog.text
    server.faults = [400]
    with pytest.raises(EngineError, match="fault 400"):
        engine.load_adapter(tmp_path, 3)
    assert engine.weights_version == 2


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("tokenizer", [None, TinyTokenizer()], ids=["messages", "tokens"])
def test_every_request_names_the_adapter_whose_version_its_answer_bears_and_the_one_before_is_let_go(
    serve, tmp_path, kind, tokenizer
):
    server, engine = serve(kind, tokenizer=tokenizer)
    asked = [request() if tokenizer else chat_request(engine)]
    assert engine.generate(asked)[0].weights_version == 0
    assert "lora_path" not in server.seen[-1][1]
    assert server.seen[-1][1].get("model", "m") == "m"
    loaded = []
    for version in (7, 8):
        engine.load_adapter(tmp_path, version)
        told = [(path.rpartition("/")[2], body) for path, body, _ in server.seen]
        let_go = [body["lora_name"] for path, body in told if path == "unload_lora_adapter"]
        assert let_go == loaded
        loaded = [body["lora_name"] for path, body in told if path == "load_lora_adapter"]
        assert {body["lora_path"] for path, body in told if path == "load_lora_adapter"} == {str(tmp_path)}
        assert engine.generate(asked)[0].weights_version == version
        assert server.seen[-1][1]["model" if kind == "vllm" else "lora_path"] == loaded[-1]
    with pytest.raises(EngineError, match="takes no adapters"):
        serve("llama.cpp")[1].load_adapter(tmp_path, 1)


def test_requests_that_were_begun_before_a_push_name_the_adapter_of_their_version(serve, tmp_path):
    """One thread makes requests while another swaps the adapter: those made after it bore the old version."""
    server, engine = serve("vllm")
    engine.load_adapter(tmp_path, 1)
    plain = engine.dialect
    swap = threading.Thread(target=engine.load_adapter, args=(tmp_path, 2))

    def body(*arguments):
        if not swap.ident:
            swap.start()
        return plain.body(*arguments)

    engine.dialect = replace(plain, body=body)
    assert [answer.weights_version for answer in engine.generate([request(), request(1)])] == [1, 1]
    swap.join(60)
    assert engine.weights_version == 2
    first = next(said["lora_name"] for path, said, _ in server.seen if path == "/v1/load_lora_adapter")
    assert [said["model"] for path, said, _ in server.seen if path == "/v1/completions"] == [first] * 2


def test_what_cannot_work_is_refused_when_the_engine_is_made(serve):
    with pytest.raises(EngineError, match="no server that takes and gives token ids"):
        serve("openai")
    with pytest.raises(EngineError, match="has no model 'n'"):
        serve(model="n")
    with pytest.raises(ValueError, match="must begin with http"):
        OpenAIEngine("localhost:8000")
    with pytest.raises(ValueError, match="no kind of server named 'vlm'. Did you mean 'vllm'"):
        serve(server="vlm")
    with pytest.raises(ValueError, match="concurrency must be at least 1"):
        serve(concurrency=0)
    with pytest.raises(ValueError, match="context must be at least 1, or None, got 0"):
        serve(context=0)
    with pytest.raises(ValueError, match="timeout must be positive, or null, got nan"):
        RetryPolicy(timeout=math.nan)


def test_the_key_is_sent_and_never_shown(serve):
    server, engine = serve(api_key="s3cret")
    engine.generate([request()])
    assert server.seen[-1][2]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(engine) + repr(engine.client) + repr(vars(engine))
    server.faults = [401]
    with pytest.raises(EngineError) as caught:
        engine.generate([request()])
    assert "s3cret" not in str(caught.value)


def test_engines_that_state_nothing_are_known_by_what_they_have():
    known = capabilities_of(RandomEngine(["Up"]))
    assert (known.trainable, known.weights, known.adapters) == (True, False, False)


@pytest.mark.parametrize("kind", ["openai", "llama.cpp"])
def test_a_response_holds_its_stop_text_where_a_server_would_leave_it_out(serve, kind):
    tokenizer = None if kind == "openai" else TinyTokenizer(["Up"])
    server, engine = serve(kind, tokenizer=tokenizer)
    text = "<action>Up</action> and so on </action>"
    ids = engine.tokenizer.encode(text)
    server.say = lambda said: text

    def tell(reply):
        if kind == "llama.cpp":
            chosen = [{"id": i, "logprob": logprob_of(i)} for i in ids]
            reply |= {"tokens": list(ids), "completion_probabilities": chosen}
        return reply

    server.change = tell
    asked = chat_request(engine) if tokenizer is None else request()
    for stop, wanted in [
        (("</action>", "never"), "<action>Up</action>"),
        (("never", "Up", "so on"), "<action>Up"),
        (("never",), text),
        ((), text),
    ]:
        sampling = Sampling(len(ids), 1.0, stop)
        (found,) = engine.generate([msgspec.structs.replace(asked, sampling=sampling)])
        assert engine.tokenizer.decode(found.token_ids) == wanted
        assert wanted == text or found.finish == "stop"
        assert len(found.logprobs) == (len(found.token_ids) if tokenizer else 0)
        assert not server.seen[-1][1].get("stop")


PROMPT = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
TOLD = {
    "vllm": {
        "model": "m", "prompt": [7, 8], "max_tokens": 5, **PROMPT, **NO_PENALTIES, "stop": ["."],
        "stop_token_ids": [2, 4], "include_stop_str_in_output": True, "logprobs": 0, "return_token_ids": True,
    },
    "sglang": {
        "input_ids": [7, 8],
        "sampling_params": {
            "max_new_tokens": 5, **PROMPT, **NO_PENALTIES, "stop": ["."],
            "stop_token_ids": [2, 4], "no_stop_trim": True, "skip_special_tokens": False,
        },
        "return_logprob": True, "logprob_start_len": -1,
    },
    "llama.cpp": {
        "prompt": [7, 8], "n_predict": 5, **PROMPT, "samplers": ["temperature", "min_p", "top_k", "top_p"],
        "repeat_penalty": 1.0, "stop": [], "n_probs": 1, "return_tokens": True, "cache_prompt": True,
    },
}  # fmt: skip
"""As the servers' own documents call it; any default that is not said is the server's, and not ours."""


@pytest.mark.parametrize("kind", TOLD)
def test_a_server_is_told_all_that_decides_what_it_writes_also_that_there_are_no_limits(kind):
    class Ends(TinyTokenizer):
        end_ids = (2, 4)

    def told(sampling):
        return DIALECTS[kind].body(Request((7, 8), Key(0, (0, 0, 0, 0)), sampling), "m", Ends())

    assert told(Sampling(5, 0.5, (".",), 0.9, 7, 0.1)) == TOLD[kind]
    for top_k in (0, -1):
        body = told(Sampling(5, top_k=top_k))
        body = body.get("sampling_params", body)
        off = 0 if kind == "llama.cpp" else -1
        assert (body["top_p"], body["top_k"], body["min_p"]) == (1.0, off, 0.0)


def test_a_server_of_messages_is_told_what_its_api_has(serve):
    server, engine = serve("openai", tokenizer=None)
    asked = msgspec.structs.replace(chat_request(engine), sampling=LIMITED)
    engine.generate([asked, chat_request(engine)])
    (limited, plain) = sorted((body for _, body, _ in server.seen[-2:]), key=lambda body: body["top_p"])
    assert (limited["top_p"], limited["top_k"], limited["min_p"]) == (0.9, 7, 0.1)
    assert plain["top_p"] == 1.0
    assert not {"top_k", "min_p"} & plain.keys()


@pytest.mark.parametrize("status", [300, 400, 501])
def test_a_refused_request_is_not_asked_again(serve, status):
    server, engine = serve()
    server.faults = [status]
    with pytest.raises(EngineError, match=f"HTTP {status}"):
        engine.generate([request()])
    assert len(server.seen) == 2


def test_an_empty_reply_is_an_empty_object_and_words_are_its_text(serve):
    server, engine = serve()
    server.faults = [b"  ", b"loaded"]
    assert engine.client.post("/v1/load_lora_adapter", {}) == {}
    assert engine.client.post("/v1/load_lora_adapter", {}) == {"text": "loaded"}


def test_a_server_whose_kind_and_model_are_said_is_asked_nothing_when_the_engine_is_made(serve):
    server, engine = serve("sglang", server="sglang", model="mine")
    assert server.seen == []
    assert (engine.server, engine.model, engine.context, engine.logprobs) == (
        "sglang",
        "mine",
        None,
        "processed",
    )


def test_the_kind_is_the_first_models_and_the_context_that_of_the_model_that_is_played():
    listed = [
        {"id": "a", "owned_by": "vllm", "max_model_len": 10},
        {"id": "b", "owned_by": "me", "max_model_len": 20},
    ]
    with FakeServer("openai") as server:
        server.change = lambda _: {"data": listed}
        for model, length in ((None, 10), ("a", 10), ("b", 20)):
            with OpenAIEngine(server.url, model, tokenizer=TinyTokenizer()) as engine:
                assert (engine.server, engine.model, engine.context) == ("vllm", model or "a", length)
        server.change = lambda _: {"data": []}
        with OpenAIEngine(server.url, "c") as engine:  # it lists nothing: the name is believed
            assert (engine.server, engine.model) == ("openai", "c")
