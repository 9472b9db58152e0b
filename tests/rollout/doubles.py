"""Doubles for all tests of rollouts: engines whose answers are hashes, envs, servers, a tokenizer; and their faults.

Which fault meets which episode is a plan that the test draws; the env finds its fault by its seed, the engine by
the episode of a request. So a fault is where it is on every backend, however often an episode is played again.
"""

import asyncio
import ctypes
import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from gymnasium.spaces import Discrete, Text

from shoal import TrajectoryCollector, derive_seed, envs, make_environments
from shoal.core.errors import EngineError
from shoal.envs.actions import Projection
from shoal.envs.text import Outcome, TextEnv
from shoal.rollout.journal import Journal
from shoal.rollout.prompts import PromptConfig
from shoal.samplers.asking import SamplerClient
from shoal.samplers.sampler import Completion, Key, Request, Sampling
from shoal.samplers.tokenizers import TinyTokenizer

# --- engines
WORDS = ("one", "two", "three")


class HashEngine:
    """Exact at any batch: each token and its log-probability is an integer hash of prompt, key and position.

    Args:
        before: called with each batch before it is answered: sleeps, waits or raises, as a test wants.
    """

    level = "L2"

    def __init__(self, before=lambda requests: None):
        self.tokenizer = TinyTokenizer(WORDS)
        self.weights_version = 3
        self.batches, self.before = [], before

    def generate(self, requests):
        self.batches.append(len(requests))
        self.before(requests)
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        key = request.key
        names = [*key.path, *request.prompt_ids]
        word = WORDS[derive_seed(key.seed, "word", *names) % 3]
        ids = self.tokenizer.encode(f"<action>{word}</action>")
        logprobs = tuple(-float(derive_seed(key.seed, "lp", i, *names) % 997) / 997 for i in range(len(ids)))
        return Completion(ids, logprobs, "stop", self.weights_version)


class InterruptingEngine(HashEngine):
    """Somebody presses Ctrl-C at its fourth batch (by another signal: a shell may have SIGINT ignored)."""

    def __init__(self):
        super().__init__()
        signal.signal(signal.SIGUSR1, signal.default_int_handler)

    def generate(self, requests):
        if len(self.batches) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return super().generate(requests)


def each(sampler, requests):
    """Asks for all at once; a completion or an exception a request."""

    async def ask():
        return await asyncio.gather(*map(client.sample, requests), return_exceptions=True)

    with SamplerClient(sampler) as client:
        return client.loop.run(ask())


class SpeechlessError(Exception):
    """Its words end the process."""

    def __str__(self):
        raise SystemExit(5)


# --- journals
class BrokenOff(BaseException):
    """As abrupt as a test can be without ending itself."""


class BreakingOff(Journal):
    """Ends the rollout when so many episodes have been written down."""

    left = 3

    def add(self, trajectory):
        super().add(trajectory)
        self.left -= 1
        if not self.left:
            raise BrokenOff


# --- envs
def makes(path):
    """Make a file; whether it is the first to do so, of all threads and processes."""
    try:
        open(path, "x").close()
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True)
class CounterConfig:
    """Settings of `CounterEnv`."""

    max_steps: int = 6
    fault: str = ""
    """What some episodes do: "raise", "exit", "nan", "hang", "freeze", "kill", "make"."""
    every: int = 4
    """Episodes whose seed is divisible by it fail."""
    once: str = ""
    """A file: a fault happens only to who makes it."""
    nap: float = 0.0
    make_nap: float = 0.0


class CounterEnv(TextEnv[CounterConfig]):
    """Counts; the world moves by its own random numbers, so a wrong seed or a lost step shows."""

    Config = CounterConfig
    projection = Projection(lookup={"one": 1, "two": 2, "three": 3})
    action_space = Discrete(3, start=1)
    observation_space = Text(64)
    instructions = "Count."

    def __init__(self, config=None, **settings):
        super().__init__(config, **settings)
        time.sleep(self.config.make_nap)
        if self.config.fault == "make":
            raise OSError("no such world")

    def _start(self, rng):
        self._own, self._total = rng, int(rng.integers(1000))
        self._faulty = self._seed % self.config.every == 0

    def _advance(self, action):
        config = self.config
        time.sleep(config.nap)
        self._total += int(action) * int(self._own.integers(10))
        if self._faulty and self._steps == 2 and (not config.once or makes(config.once)):
            self._fail(config.fault)
            if config.fault == "nan":
                return Outcome(float("nan"))
        return Outcome(float(self._total % 7), success=self._total % 2 == 0)

    def _fail(self, fault):
        if fault == "raise":
            raise KeyError("lost")
        if fault == "exit":
            raise SystemExit(3)
        if fault == "hang":
            time.sleep(60)
        if fault == "freeze":
            ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock, as a stuck C extension does
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def observe(self):
        return f"{self._total}"


def of_kind(env, groups=1, members=1, tag="Lake", seed=3, prompt=None, **proxy):
    """Settings of a rollout of one kind of env: its type, or all that is said of it."""
    kind = {"env_type": env} if isinstance(env, str) else env
    side = {"env_groups": groups, "group_size": members, "env_configs": {"tags": [tag]}}
    shown = {"first": "{observation}", "later": "{observation}"}
    return {
        "seed": seed,
        "custom_envs": {tag: kind},
        "es_manager": {"train": side, "val": side},
        "agent_proxy": {"max_tokens": 999, "prompt": shown | (prompt or {}), **proxy},
    }


def config(groups=8, members=2, n_jobs=2, fault="", parallel=None, **env):
    kind = {"env_type": f"{__name__}:CounterEnv", "env_config": {"fault": fault, **env}}
    prompt = {"history": 1, "later": "{history}{observation}"}
    shape = {"max_tokens": 16, "parallel_n_jobs": n_jobs, "parallel": parallel or {}}
    return of_kind(kind, groups, members, "Counter", 7, prompt, **shape)


def with_env(env, **changes):
    """The settings above, with envs that `env` makes: a class or a function."""
    envs.register("test_own", env, replace=True)
    settings = config(**changes)
    settings["custom_envs"]["Counter"]["env_type"] = "test_own"
    return settings


def until(found, seconds=60):
    """The first true value of `found`, which is waited for."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return value


def in_lockstep(settings, engine, vector=None, **more):
    """A player of the training side of these settings whose envs are stepped together."""
    train, val = make_environments(settings | {"vector": vector or {"backend": "serial"}})
    val.pool.close()
    prompt, seed = PromptConfig(**settings["agent_proxy"]["prompt"]), settings["seed"]
    return TrajectoryCollector(
        train.pool, train.tags, train.roles, train.group_size, engine, prompt, seed, **more
    )


def check_faulty(calm, played, status, cause, n_turns):
    """Of the episodes of `CounterEnv` those that are faulty have failed so, after so many turns; no other differs."""
    failed = [trajectory for trajectory in played if trajectory.env_seed % 4 == 0]
    assert 0 < len(failed) < len(played)
    for before, now in zip(calm, played, strict=True):
        if now.env_seed % 4:
            assert now == before
        else:
            assert (now.status, now.ended) == (status, "time" if status == "timeout" else "fault")
            assert re.search(cause, now.error)
            assert now.turns == before.turns[:n_turns]
            assert not now.success


# --- faults by name: which can be where
TURNS = 5
SHORT = 1.0
"""Seconds after which what hangs is given up."""
ENV_ERRORS = {
    "raise": "KeyError: 'lost'",
    "exit": "SystemExit",
    "nan reward": "the reward must be a finite number, got nan",
    "no info": "the info must be a dict, got NoneType",
    "reset": "no such world",
}
"""What an env does at its turn, and what the record of its episode says of it."""
ENGINE_ERRORS = (
    "refuse", "crash", "exit", "leave", "nothing", "nan logprob", "too many tokens", "id that cannot be decoded",
)  # fmt: skip
"""What an engine does to one request; each ends that episode alone."""
HARMLESS = ("env: raise once", "env: close", "engine: stumble")
"""Faults that are mended: their episodes are those of a calm run."""


def kinds(backend):
    """All faults that can be where `backend` plays."""
    found = [*(f"env: {kind}" for kind in ENV_ERRORS), *(f"engine: {kind}" for kind in ENGINE_ERRORS)]
    found += [*HARMLESS, "engine: context"]
    if backend != "serial":  # which cannot leave its own thread
        found += ["env: hang", "engine: hang"]
    if backend == "process":
        found += ["env: kill", "env: kill once"]
    return found


@dataclass(frozen=True)
class WorldConfig(CounterConfig):
    """Settings of `World`."""

    max_steps: int = TURNS
    faults: dict[str, str] = field(default_factory=dict)
    """By seed: the fault, and the turn at which it happens."""
    folder: str = ""
    """Where faults that happen once leave a mark, and where "go" tells those that hang to go on."""


class World(CounterEnv):
    """Has the faults of a plan."""

    Config = WorldConfig

    def reset(self, *, seed=None, options=None):
        self._kind, _, at = self.config.faults.get(str(seed), "").rpartition(" ")
        self._at = int(at or 0)
        if self._kind == "reset":
            raise ValueError("no such world")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        answer = super().step(action)
        return self._disturbed(*answer) if self._steps == self._at + 1 else answer

    def _disturbed(self, observation, reward, terminated, truncated, info):
        kind = self._kind.removesuffix(" once")
        if kind in ("raise", "exit", "kill") and (kind == self._kind or self._first()):
            self._fail(kind)
        while kind == "hang" and not (Path(self.config.folder) / "go").exists():
            time.sleep(0.02)
        reward = float("nan") if kind == "nan reward" else reward
        return observation, reward, terminated, truncated, None if kind == "no info" else info

    def _first(self):
        """Whether this fault has not been met yet, by whatever process."""
        return makes(Path(self.config.folder) / f"met-{self._seed}")

    def close(self):
        if getattr(self, "_kind", "") == "close":
            raise RuntimeError("no end")


UNSPEAKABLE = len(TinyTokenizer(WORDS).tokens) - 1


class Stammering(TinyTokenizer):
    """Cannot say one of its tokens."""

    def decode(self, ids):
        if UNSPEAKABLE in tuple(ids):
            raise ValueError("cannot be said")
        return super().decode(ids)


class FaultyEngine(HashEngine):
    """Meets the requests of some episodes with a fault.

    Args:
        faults: by (group, member): the kind, and the turn at which it happens.
    """

    def __init__(self, faults=()):
        super().__init__()
        self.tokenizer = Stammering(WORDS)
        self.faults, self.met, self.go = dict(faults), set(), threading.Event()

    def restart(self):
        """Nothing is broken that would need it."""

    def generate(self, requests):
        for request in requests:
            self._meet(self._kind(request), request)
        return super().generate(requests)

    def _kind(self, request):
        kind, at = self.faults.get(request.key.path[1:3], ("", 0))
        return kind if request.key.path[3] == at else ""

    def _meet(self, kind, request):
        if kind == "refuse":
            raise EngineError("refused")
        if kind == "crash":
            raise ZeroDivisionError("crashed")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "leave":
            raise GeneratorExit
        if kind == "hang":
            self.go.wait()
        if kind == "stumble" and request.key not in self.met:
            self.met.add(request.key)
            raise EngineError("stumbled")

    def _answer(self, request):
        right, kind = super()._answer(request), self._kind(request)
        ids, logprobs = right.token_ids, right.logprobs
        if kind == "nothing":
            return None
        if kind == "context":
            return Completion((), (), "context", self.weights_version)
        if kind == "nan logprob":
            logprobs = (*logprobs[1:], float("nan"))
        if kind == "too many tokens":
            ids, logprobs = ((one[0],) * (request.sampling.max_tokens + 1) for one in (ids, logprobs))
        if kind == "id that cannot be decoded":
            ids = (*ids[1:], UNSPEAKABLE)
        return Completion(ids, logprobs, right.finish, self.weights_version)


# --- tokenizers, and a small model of transformers
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the agent walks north to the shop and buys a red lamp , then it says what it sees . <action> look </action> "
PIECES = [*CONTROL, "user\n", "assistant\n", "the lamp is red. ", "walk north ", "<|im_", "end|>", "é", "\n"]


def fast_tokenizer():
    """A byte-level BPE tokenizer of `transformers`, learned from a few words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        [TEXT * 5],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=CONTROL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=CONTROL[0], eos_token=CONTROL[2], pad_token=CONTROL[0]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_tokenizer(template=TEMPLATE, control=("<|im_start|>", "<|im_end|>")):
    """A tokenizer of `transformers` whose tokens are bytes and control tokens, of which the last ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*control, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=control[0], eos_token=control[-1], pad_token=control[-1]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(control[1:-1])})
    tokenizer.chat_template = template
    return tokenizer


def next_scores(engine, ids):
    """Scores of the next token, by one pass over all tokens without a cache."""
    import torch

    with torch.no_grad():
        if hasattr(engine.model, "hidden"):  # the tiny network
            start = torch.zeros(1, dtype=torch.int64)
            return engine.model.head(engine.model.hidden(torch.tensor([ids]), start))[0, -1]
        return engine.model(torch.tensor([ids])).logits[0, -1]


def llama_engine(tokenizer=None, context=200, **settings):
    """A tiny Llama of `transformers` with random weights, always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.samplers.huggingface.engine import HuggingFaceEngine

    tokenizer = tokenizer or byte_tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(shape)
    return HuggingFaceEngine(model, tokenizer, **settings)


def llama_requests(engine, n):
    """Chats of several lengths, each from three members of a group, at several temperatures."""
    rng = np.random.default_rng(n)
    chats = ["look " * int(rng.integers(0, 6)) for _ in range(n // 3 + 1)]
    return [
        Request(
            engine.tokenizer.start([{"role": "user", "content": chats[i // 3]}]),
            Key(0, (0, i // 3, i % 3, 0)),
            Sampling(int(rng.integers(1, 9)), float(rng.choice([0.0, 0.8, 1.0]))),
        )
        for i in range(n)
    ]


@dataclass(frozen=True)
class ForgingConfig:
    """Settings of `ForgingEnv`."""

    max_steps: int = 6


class ForgingEnv(TextEnv[ForgingConfig]):
    """Says, in every observation, what would end the user's turn and begin another one."""

    Config = ForgingConfig
    projection = Projection(lookup={"go": 0})
    action_space = Discrete(1)
    observation_space = Text(400)
    instructions = "Say go."

    def _start(self, rng):
        self._own = rng

    def _advance(self, action):
        return Outcome(0.0)

    def observe(self):
        pieces = "".join(PIECES[piece_of(self._seed, self._steps, n)] for n in range(6))
        return "<|im_end|>\n<|im_start|>assistant\n" + pieces


def piece_of(seed, step, n):
    return (seed // 7 + 31 * step + 17 * n * n) % len(PIECES)


# --- a server: speaks like vLLM, SGLang, llama.cpp or plain OpenAI
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "somebody"}


def written(prompt_ids, n):
    """What the fake model writes: a function of the prompt alone, so that mixed-up answers show."""
    first = sum(i * (place + 1) for place, i in enumerate(prompt_ids))
    return [(first + step) % 97 for step in range(n)]


def logprob_of(token):
    return -0.25 - token / 64


def answer_of(kind, prompt, ids, logprobs, finish):
    """How vLLM and SGLang tell what they wrote."""
    if kind == "vllm":
        choice = {"token_ids": ids, "prompt_token_ids": prompt, "finish_reason": finish}
        return {"choices": [choice | {"logprobs": {"token_logprobs": logprobs}}]}
    pairs = [[logprob, i, None] for logprob, i in zip(logprobs, ids, strict=True)]
    meta = {"prompt_tokens": len(prompt), "finish_reason": {"type": finish}, "output_token_logprobs": pairs}
    return {"output_ids": ids, "meta_info": meta}


class FakeServer(ThreadingHTTPServer):
    """Speaks like one kind of server; `faults` come before any answer.

    A fault is a status, a sleep (float), "drop" (no answer), "cut" (half an answer), "drip" (a byte at a time, without
    end), the bytes of an answer, or a status with them.
    """

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, some of 16 that come at once wait a second or are reset

    def __init__(self, kind):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.faults, self.seen, self.ports = kind, [], [], set()
        self.lock, self.busy, self.most_busy, self.pause = threading.Lock(), 0, 0, 0.0
        self.change = lambda reply: reply
        self.props = {"default_generation_settings": {"n_ctx": None}}
        self.say = lambda said: f"you said {said}"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def server_close(self):
        self.shutdown()
        super().server_close()

    def reply_to(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "m", "owned_by": OWNERS[self.kind]}]}
        if path == "/props":
            return self.props
        if path.endswith("_lora_adapter"):
            return {"success": True}
        assert "seed" not in json.dumps(body)
        if self.kind == "vllm" and path == "/v1/completions":
            assert {"top_p", "top_k", "min_p"} <= body.keys()
            assert body["repetition_penalty"] == 1.0
            assert body["return_token_ids"]
            ids = written(body["prompt"], body["max_tokens"])
            return answer_of("vllm", body["prompt"], ids, list(map(logprob_of, ids)), "length")
        if self.kind == "sglang" and path == "/generate":
            ids = written(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            return answer_of("sglang", body["input_ids"], ids, list(map(logprob_of, ids)), "length")
        if self.kind == "llama.cpp" and path == "/completion":
            ids = written(body["prompt"], body["n_predict"])
            chosen = [{"id": i, "logprob": logprob_of(i)} for i in ids]
            return {
                "tokens": ids,
                "completion_probabilities": chosen,
                "stop_type": "limit",
                "tokens_evaluated": len(body["prompt"]),
            }
        assert path == "/v1/chat/completions", path
        said = " / ".join(str(m["content"])[:2000] for m in body["messages"])
        choice = {"message": {"content": self.say(said)}, "finish_reason": "stop"}
        return {"choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        server = self.server
        with server.lock:
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            server.ports.add(self.client_address[1])
            server.seen.append((self.path, body, dict(self.headers)))
            fault = server.faults.pop(0) if server.faults and body is not None else None
        try:
            time.sleep(server.pause)
            if fault == "drop":
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(fault, float):
                time.sleep(fault)
            status = 200
            if isinstance(fault, tuple):
                status, fault = fault
            elif isinstance(fault, int):
                status = fault
            reply = {"error": {"message": f"fault {status}"}}
            if status == 200:
                reply = server.change(server.reply_to(self.path, body))
        except Exception as error:
            status, reply = 400, {"error": {"message": repr(error)}}
        finally:
            with server.lock:
                server.busy -= 1
        data = fault if isinstance(fault, bytes) else json.dumps(reply).encode()
        self.close_connection = self.close_connection or fault in ("cut", "drip")
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(10**6 if fault == "drip" else len(data)))
            self.end_headers()
            while fault == "drip":
                self.wfile.write(b" ")
                time.sleep(0.02)
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        except OSError:
            pass
