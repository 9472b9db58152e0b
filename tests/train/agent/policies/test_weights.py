"""A sampler writes by the policy's weights, however they changed, and gets them only when they have."""

from types import SimpleNamespace

import pytest
import torch

from shoal.core.errors import ConfigError, EngineError
from shoal.samplers.sampler import Capabilities, Key, Request, Sampling
from shoal.samplers.tiny import TinyEngine
from shoal.train.agent.config import compose_config
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.sync import WeightSync
from shoal.train.agent.trainer import AgentTrainer


def ask(sampler, n=6):
    start = sampler.tokenizer.start
    requests = [
        Request(start([{"role": "user", "content": f"say {i}"}]), Key(0, (0, i, 0, 0)), Sampling(5))
        for i in range(n)
    ]
    return sampler.generate(requests)


def words_of(completions):
    return [completion.token_ids for completion in completions]


def test_a_sampler_writes_by_the_weights_of_the_policy_however_they_changed():
    local, there = TinyEngine(["Up"], seed=1), TinyEngine(["Up"], seed=2)
    policy = policy_of(local)
    sync = WeightSync(policy, there)
    assert words_of(ask(there)) != words_of(ask(local))
    sync.carry()
    assert ask(there) == ask(local)
    with torch.no_grad():  # as an optimizer does, with the version still to come
        for parameter in policy.module.parameters():
            parameter.mul_(-1.3)
    sync.carry()
    assert ask(there) == ask(local)
    policy.weights_version += 1
    sync.carry()
    assert {completion.weights_version for completion in ask(there)} == {1}
    fresh = TinyEngine(["Up"], seed=3)
    policy.load_weights(fresh.model.state_dict(), 7)
    sync.carry()
    assert words_of(ask(there)) == words_of(ask(fresh))


def test_weights_that_did_not_change_are_not_carried_again():
    policy, taken = policy_of(TinyEngine(["Up"])), []
    sync = WeightSync(policy, SimpleNamespace(load_weights=lambda weights, version: taken.append(version)))
    for _ in range(3):
        sync.carry()
    assert taken == [0]
    policy.weights_version += 1
    sync.carry()
    sync.carry()
    assert taken == [0, 1]
    sync.changed()
    sync.carry()
    assert taken == [0, 1, 1]


def test_weights_that_a_sampler_failed_to_take_are_carried_again():
    policy, taken = policy_of(TinyEngine(["Up"])), []

    def load_weights(weights, version):
        taken.append(version)
        if len(taken) == 2:
            raise EngineError("it died while weights travelled")

    sync = WeightSync(policy, SimpleNamespace(load_weights=load_weights))
    sync.carry()
    policy.weights_version += 1
    with pytest.raises(EngineError):
        sync.carry()
    policy.weights_version -= 1  # even those that it had before: who knows what is there
    sync.carry()
    assert taken == [0, 1, 0]


class OnGpu:
    """A parameter on a device that a sampler elsewhere may not have."""

    device, _version = "cuda", 0

    def detach(self):
        return self

    def cpu(self):
        whole = OnGpu()
        whole.device = "cpu"
        return whole


class InShards(OnGpu):
    gathered = 0

    def full_tensor(self):
        self.gathered += 1
        return OnGpu()


@pytest.mark.parametrize("kind", [OnGpu, InShards])
def test_what_is_carried_lies_in_memory_of_the_cpu_and_shards_are_gathered_once(kind):
    weight, taken = kind(), []
    module = SimpleNamespace(parameters=lambda: [weight], state_dict=lambda keep_vars: {"w": weight})
    policy = SimpleNamespace(module=module, weights_version=3)
    sampler = SimpleNamespace(load_weights=lambda weights, version: taken.append(weights))
    sync = WeightSync(policy, sampler)
    for _ in range(3):
        sync.carry()
    assert [weights["w"].device for weights in taken] == ["cpu"]
    assert kind is OnGpu or weight.gathered == 1


def test_a_sampler_of_the_same_network_is_told_the_version():
    sampler = TinyEngine(["Up"])
    policy = policy_of(sampler)
    sync = WeightSync(policy, sampler)
    policy.weights_version = 5
    sampler.load_weights = None  # there is nothing to carry
    sync.carry()
    assert sync.shared
    assert sampler.weights_version == 5


SMALL = [
    "trainer.iterations=2", "warmup.steps=2", "warmup.batch_size=16",
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4",
    "es_manager.val.env_groups=2", "trainer.tensorboard=false", "use_parallel_envs=false",
]  # fmt: skip


@pytest.mark.slow
def test_a_trainer_takes_a_policy_and_a_sampler_from_outside(tmp_path):
    ways = []
    for name in ("config", "shared", "apart"):
        config = compose_config("demo", [*SMALL, f"run_dir={tmp_path / name}"])
        with AgentTrainer(config) as trainer:
            words, shape = trainer.policy.tokenizer.words, trainer.policy.module.shape
            given = {}
        if name != "config":
            sampler = TinyEngine(words, shape, seed=config.seed)
            given = {"sampler": sampler}
        if name == "apart":
            given = {"policy": policy_of(TinyEngine(words, shape, seed=config.seed)), "sampler": sampler}
        with AgentTrainer(config, **given) as trainer:
            list(trainer.train())
            ways.append([tensor.clone() for tensor in trainer.policy.module.state_dict().values()])
    for other in ways[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ways[0], other, strict=True))


def test_a_policy_without_a_sampler_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give AgentTrainer the sampler too"):
        AgentTrainer(compose_config("demo", [f"run_dir={tmp_path}"]), policy=policy_of(TinyEngine(["Up"])))


class Bare:
    """A sampler around another one that says of itself what a test wants, and shows no network."""

    level, weights_version = "L1", 0

    def __init__(self, sampler, **about):
        self.tokenizer, self.generate = sampler.tokenizer, sampler.generate
        vars(self).update(about)


WORDS = ["Down", "Left", "Right", "Up"]
MESSAGES = Capabilities(token_ids=False, logprobs=False, weights=True)


@pytest.mark.parametrize(
    ("sampler", "policy", "told"),
    [
        (lambda: Bare(TinyEngine(WORDS)), policy_of, "Bare cannot take over weights"),
        (lambda: Bare(TinyEngine(WORDS), capabilities=MESSAGES), policy_of, "Bare is for evaluation only"),
        (lambda: TinyEngine(WORDS[::-1]), policy_of, "of which 'Down' is another one: give both the same"),
        (lambda: TinyEngine(WORDS[:2]), policy_of, "of which 'Right' is another one"),
        (lambda: TinyEngine(WORDS), lambda engine: engine, "policy must be a Policy.*got a TinyEngine"),
    ],
)
def test_a_policy_and_a_sampler_that_do_not_fit_are_refused(tmp_path, sampler, policy, told):
    config = compose_config("demo", [*SMALL, f"run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=told):
        AgentTrainer(config, policy=policy(TinyEngine(WORDS)), sampler=sampler())
    assert not (tmp_path / "config.yaml").exists()


def test_a_sampler_that_answers_each_request_by_itself_is_timed_too(tmp_path):
    engine = TinyEngine(WORDS)

    async def sample(request):
        return engine.generate([request])[0]

    each = Bare(engine, model=engine.model, pad_id=engine.pad_id, sample=sample)
    config = compose_config("demo", [*SMALL, f"run_dir={tmp_path}"])
    with AgentTrainer(config, sampler=each) as trainer:
        assert trainer.train_iteration()["engine_busy"] > 0
