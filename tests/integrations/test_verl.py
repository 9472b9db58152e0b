"""verl's own functions and agent-loop worker on shoal's trajectories: skipped where verl is not installed."""

import asyncio
import logging
import os
import time

import numpy as np
import pytest

pytest.importorskip("verl")
import torch
import verl

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
        from verl.protocol import DataProto
        from verl.trainer.ppo import core_algos
        from verl.utils.model import compute_position_id_with_mask
        from verl.workers.rollout.replica import TokenOutput

from omegaconf import OmegaConf
from tests.integrations import doubles
from tests.records import exchanges

from shoal.core.errors import DataError, EngineError
from shoal.core.seeding import derive_seed, stream
from shoal.integrations.verl import agent_loop_outputs, to_dataproto
from shoal.rollout.episode import Episode
from shoal.rollout.play import ParallelRolloutManager
from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.train.agent.algorithms.advantages import token_gae, turn_advantages
from shoal.train.agent.config import AgentProxy, Algorithm

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROXY = {
    "max_tokens": 3,
    "stop": [],
    "prompt": {"mode": "append", "first": "{observation}", "later": "{observation}", "on_drift": "ignore"},
}
LETTER = {"env_type": "tests.integrations.doubles:LetterEnv"}


@pytest.fixture(scope="module")
def engine():
    from tests.integrations.conftest import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    return HuggingFaceEngine(make_model(tokenizer), tokenizer)


def play(engine, mode="append", groups=3, size=4):
    side = {"env_groups": groups, "group_size": size, "env_configs": {"tags": ["letter"]}}
    config = {
        "seed": 1,
        "custom_envs": {"letter": LETTER},
        "es_manager": {"train": side, "val": side},
        "agent_proxy": PROXY | {"prompt": PROXY["prompt"] | {"mode": mode}},
    }
    with ParallelRolloutManager(config, engine, backend="serial") as manager:
        return manager.collect(0)


def test_tensors_are_what_verl_expects(engine):
    trajectories = play(engine)
    data = to_dataproto(trajectories, 2, prompt_length=64, response_length=90)
    batch = data.batch
    assert batch["input_ids"].shape == (12, 154)
    torch.testing.assert_close(batch["position_ids"], compute_position_id_with_mask(batch["attention_mask"]))
    torch.testing.assert_close(torch.cat([batch["prompts"], batch["responses"]], 1), batch["input_ids"])
    for place, trajectory in enumerate(trajectories):
        last = exchanges(trajectory)[-1]
        real = batch["input_ids"][place][batch["attention_mask"][place].bool()]
        assert tuple(real.tolist()) == last.prompt_ids + last.response_ids
        written = batch["response_mask"][place].bool()
        assert batch["responses"][place][written].tolist() == [
            i for t in exchanges(trajectory) for i in t.response_ids
        ]
        expected = [p for t in exchanges(trajectory) for p in t.logprobs]
        np.testing.assert_allclose(batch["rollout_log_probs"][place][written], expected, rtol=1e-6)
    np.testing.assert_allclose(batch["rm_scores"].sum(-1), [t.reward for t in trajectories])
    assert list(data.non_tensor_batch["uid"]) == [f"letter-0-{t.group}" for t in trajectories]
    assert len(set(data.non_tensor_batch["traj_uid"])) == 12
    columns = ("env", "turn", "reward", "success", "__num_turns__")
    assert list(zip(*(data.non_tensor_batch[name].tolist() for name in columns), strict=True)) == [
        ("letter", 0, t.reward, t.success, 2 * len(t.turns)) for t in trajectories
    ]
    assert len(DataProto.concat([data, data])) == 24
    with pytest.raises(DataError, match="response_length must be at least"):
        to_dataproto(trajectories, 2, response_length=5)


def test_failed_episodes_stay_outside(engine):
    from dataclasses import replace

    trajectories = play(engine, groups=1)
    failed = [replace(trajectories[0], status="env_error", error="x"), *trajectories[1:]]
    assert len(to_dataproto(failed, 2)) == 3
    with pytest.raises(DataError, match="no whole episode"):
        to_dataproto(failed[:1], 2)


def test_token_gae_of_verl_and_of_shoal_are_the_same(engine):
    trajectories = play(engine)
    data = to_dataproto(trajectories, 2)
    mask = data.batch["response_mask"]
    rng = stream(0, "values")
    values = torch.from_numpy(rng.normal(size=mask.shape).astype(np.float32))
    _, returns = core_algos.compute_gae_advantage_return(
        data.batch["token_level_rewards"], values, mask.float(), torch.tensor(1.0), torch.tensor(0.9)
    )
    for place, trajectory in enumerate(trajectories):
        written = mask[place].bool()
        cuts = np.cumsum([len(t.response_ids) for t in exchanges(trajectory)])[:-1]
        known = np.split(values[place][written].numpy().astype(np.float64), cuts)
        _, targets = token_gae([t.reward for t in trajectory.turns], known, 1.0, 0.9)
        np.testing.assert_allclose(returns[place][written], np.concatenate(targets), atol=1e-5)


def test_a_fresh_chat_each_turn_gives_one_row_a_turn_with_shoals_advantages(engine):
    trajectories = play(engine, mode="window")
    turns = turn_advantages(trajectories, Algorithm(adv_estimator="gigpo"), AgentProxy())
    data = to_dataproto(trajectories, 2, advantages=turns)
    assert len(data) == sum(len(t.turns) for t in trajectories)
    row = 0
    for trajectory, numbers in zip(trajectories, turns, strict=True):
        for place, turn in enumerate(exchanges(trajectory)):
            mask = data.batch["response_mask"][row].bool()
            assert data.batch["responses"][row][mask].tolist() == list(turn.response_ids)
            np.testing.assert_allclose(data.batch["advantages"][row][mask], numbers[place], rtol=1e-6)
            assert data.non_tensor_batch["turn"][row] == place
            row += 1


class Client:
    """verl's server client with shoal's engine behind it: keyed noise, so episodes can be told apart."""

    def __init__(self, engine, logprobs=True):
        self.engine, self.logprobs, self.requests = engine, logprobs, []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **rest):
        self.requests.append((request_id, list(prompt_ids), sampling_params))
        key = Key(0, (0, 0, len(self.requests), 0))
        sampling = Sampling(sampling_params["max_tokens"], sampling_params["temperature"])
        answer = self.engine.generate([Request(tuple(prompt_ids), key, sampling)])[0]
        return TokenOutput(
            token_ids=list(answer.token_ids), log_probs=list(answer.logprobs) if self.logprobs else None
        )


def make_worker(engine, folder, env, client, response_length=128, **proxy):
    from hydra import compose, initialize_config_dir

    engine.model.save_pretrained(folder)
    engine.tokenizer.tokenizer.save_pretrained(folder)
    loop = {
        "name": "shoal_agent",
        "_target_": "shoal.integrations.verl_agent.ShoalAgentLoop",
        "seed": 3,
        "custom_envs": {"letter": env},
        "agent_proxy": PROXY | proxy,
    }
    OmegaConf.save(OmegaConf.create([loop]), folder / "loops.yaml")
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(os.path.join(verl.__path__[0], "trainer", "config"), version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder}",
                f"{rollout}.name=vllm",
                f"{rollout}.prompt_length=64",
                f"{rollout}.response_length={response_length}",
                f"{rollout}.calculate_log_probs=true",
                f"{rollout}.agent.agent_loop_config_path={folder}/loops.yaml",
                f"{rollout}.agent.default_agent_loop=shoal_agent",
            ],
        )
    return AgentLoopWorker(config, client)


def rows(n_groups=2, size=3):
    chats = np.empty(n_groups * size, dtype=object)
    chats[:] = [[{"role": "user", "content": "letter"}]] * len(chats)
    return DataProto.from_single_dict(
        {
            "env": np.array(["letter"] * len(chats), dtype=object),
            "start": np.repeat(np.arange(n_groups), size),
            "uid": np.repeat(np.array([f"g{i}" for i in range(n_groups)], dtype=object), size),
            "raw_prompt": chats,
            "dummy": torch.zeros(len(chats)),
        }
    )


@pytest.fixture
def quiet_logs():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet_logs")
def test_verls_agent_loop_worker_plays_shoals_envs(engine, tmp_path):
    client = Client(engine)
    worker = make_worker(engine, tmp_path, LETTER, client)
    data = asyncio.run(worker.generate_sequences(rows()))
    assert len(data) == 6
    conversations = {}
    for name, prompt, _ in client.requests:
        conversations.setdefault(name, []).append(prompt)
    assert len(conversations) == 6
    for prompts in conversations.values():
        assert prompts[1][: len(prompts[0])] == prompts[0]
    by_prompt = {tuple(prompts[1]): prompts for prompts in conversations.values()}
    decode = engine.tokenizer.decode
    for place in range(6):
        batch = data.batch[place]
        real = batch["input_ids"][batch["attention_mask"].bool()].tolist()
        assert any(tuple(real[: len(prompt)]) == prompt for prompt in by_prompt)
        written = batch["responses"][batch["response_mask"].bool()]
        reward = batch["rm_scores"].sum().item()
        scores = data.non_tensor_batch["turn_scores"][place]
        assert reward == sum(scores)
        halves = (written[: len(written) // 2], written[len(written) // 2 :])
        if len(written) == 6:  # two turns of three tokens: the env's own rule
            assert scores == [sum(map(ord, decode(half.tolist()))) % 2 for half in halves]
    prompts = [data.batch[i]["prompts"].tolist() for i in range(6)]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    word = f"word {int(stream_of(derive_seed(3, 'env', 0, 0)))}"
    assert word in decode(prompts[0])
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        data.batch["rm_scores"], data.batch["response_mask"].float(), data.non_tensor_batch["uid"]
    )
    assert advantages.shape == data.batch["responses"].shape


def stream_of(seed):
    """The number that the env shows, from a fresh env."""
    from tests.integrations.doubles import LetterEnv

    observation, _ = LetterEnv().reset(seed=seed)
    return observation.removeprefix("word ")


@pytest.mark.usefixtures("quiet_logs")
def test_padding_of_verls_worker_and_of_shoal_agree(engine, tmp_path):
    trajectories = play(engine, groups=2, size=3)
    worker = make_worker(engine, tmp_path, LETTER, Client(engine))

    async def through_verl():
        outputs = [agent_loop_outputs(trajectory)[0] for trajectory in trajectories]
        return [await worker._agent_loop_postprocess(out, False, raw_prompt=[]) for out in outputs]

    theirs = worker._postprocess(asyncio.run(through_verl()))
    pad = engine.tokenizer.tokenizer.pad_token_id
    ours = to_dataproto(trajectories, pad, prompt_length=64, response_length=128)
    for name in theirs.batch.keys() - {"rm_scores"}:
        torch.testing.assert_close(ours.batch[name], theirs.batch[name], msg=name)
    torch.testing.assert_close(ours.batch["rm_scores"].sum(-1), theirs.batch["rm_scores"].sum(-1))


@pytest.mark.usefixtures("quiet_logs")
def test_an_env_that_fails_costs_its_own_row(engine, tmp_path):
    broken = {"env_type": "tests.integrations.doubles:BrokenEnv"}
    worker = make_worker(engine, tmp_path, broken, Client(engine), parallel={"env_retries": 1})
    data = asyncio.run(worker.generate_sequences(rows()))
    assert data.batch["attention_mask"][:, 64:].sum(-1).min() >= 3  # the turn before the failure is there
    assert data.batch["response_mask"].sum() == 0
    assert data.batch["rm_scores"].abs().sum() == 0
    assert list(data.non_tensor_batch["failed"]) == [1.0] * 6


@pytest.mark.usefixtures("quiet_logs")
def test_an_episode_ends_where_verls_response_is_full_and_needs_no_log_probs(engine, tmp_path):
    worker = make_worker(engine, tmp_path, LETTER, Client(engine, logprobs=False), response_length=10)
    data = asyncio.run(worker.generate_sequences(rows()))
    assert data.batch["response_mask"].sum(-1).max() <= 10
    assert set(data.non_tensor_batch["turns"]) == {1}
    assert "rollout_log_probs" not in data.batch


@pytest.mark.usefixtures("quiet_logs")
def test_an_env_lives_and_dies_in_one_thread(engine, tmp_path):
    doubles.CLOSED.clear()
    alone = {"env_type": "tests.integrations.doubles:OneThreadEnv"}
    worker = make_worker(engine, tmp_path, alone, Client(engine))
    made = len(doubles.CLOSED)  # by the check of the settings
    data = asyncio.run(worker.generate_sequences(rows()))
    assert list(data.non_tensor_batch["failed"]) == [0.0] * 6
    assert len(doubles.CLOSED) - made >= 6


@pytest.mark.usefixtures("quiet_logs")
@pytest.mark.parametrize("kind", ["HangingEnv", "ExitingEnv"])
def test_an_env_that_hangs_or_exits_costs_its_own_row(engine, tmp_path, kind):
    doubles.CLOSED.clear()
    doubles.COME_BACK.clear()
    env = {"env_type": f"tests.integrations.doubles:{kind}"}
    limits = {"step_timeout": 0.3, "make_timeout": 30.0, "env_retries": 1}
    worker = make_worker(engine, tmp_path, env, Client(engine), parallel=limits)
    data = asyncio.run(asyncio.wait_for(worker.generate_sequences(rows()), 200))
    assert list(data.non_tensor_batch["failed"]) == [1.0] * 6
    assert data.batch["response_mask"].sum() == 0
    doubles.COME_BACK.set()
    if kind == "HangingEnv":  # those that come back are closed after all, both tries of each row
        deadline = time.monotonic() + 60
        while len(doubles.CLOSED) < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(doubles.CLOSED) >= 12


@pytest.mark.usefixtures("quiet_logs")
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda answer: answer.log_probs.pop(), "as many log-probabilities"),
        (lambda answer: answer.log_probs.__setitem__(0, float("nan")), "finite"),
        (lambda answer: answer.token_ids.clear(), "1 to 3 token ids"),
    ],
)
def test_an_answer_that_cannot_be_one_is_refused(engine, tmp_path, spoil, told):
    class Spoiling(Client):
        async def generate(self, *args, **settings):
            answer = await super().generate(*args, **settings)
            spoil(answer)
            return answer

    worker = make_worker(engine, tmp_path, LETTER, Spoiling(engine))
    with pytest.raises(EngineError, match=told):
        asyncio.run(worker.generate_sequences(rows(1, 1)))


@pytest.mark.usefixtures("quiet_logs")
def test_a_prompt_that_cannot_be_made_costs_its_own_row(engine, tmp_path, monkeypatch):
    worker = make_worker(engine, tmp_path, LETTER, Client(engine))
    made, request = [], Episode.request

    def fails_once(self):
        made.append(self)
        if len(made) == 1:
            raise ValueError("no such template")
        return request(self)

    monkeypatch.setattr(Episode, "request", fails_once)
    data = asyncio.run(worker.generate_sequences(rows()))
    assert sorted(data.non_tensor_batch["failed"]) == [0.0] * 5 + [1.0]
