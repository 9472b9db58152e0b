import warnings
from functools import partial

import pytest
from tests.rollout.doubles import until

from shoal.core.errors import EngineError
from shoal.samplers.sampler import Key, Request, Sampling
from shoal.samplers.tiny import TinyEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # of Ray itself
]


def make():
    return TinyEngine(["Up"])


@pytest.fixture(scope="module")
def cluster(ray_finds_shoal):
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()  # what a test before left running
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


def requests(engine, n=12):
    start = engine.tokenizer.start
    return [
        Request(start([{"role": "user", "content": f"say {i}"}]), Key(0, (0, i // 3, i % 3, 0)), Sampling(5))
        for i in range(n)
    ]


def test_replicas_write_what_one_engine_writes_also_after_one_has_died_and_with_new_weights(cluster):
    from shoal.samplers.ray import RayEngine

    local, remote = make(), RayEngine(make, 2, timeout=120)
    asked = requests(local)
    assert [c.token_ids for c in remote.generate(asked)] == [c.token_ids for c in local.generate(asked)]
    weights = {name: tensor * -1.5 for name, tensor in local.model.state_dict().items()}
    local.load_weights(weights, 4)
    remote.load_weights(weights, 4)
    expected = local.generate(asked)
    assert remote.generate(asked) == expected
    cluster.kill(remote._actors[1])
    assert remote.generate(asked) == expected  # the new replica has the last weights
    cluster.kill(remote._actors[0])
    for engine in (local, remote):
        engine.load_weights({name: tensor * 0.7 for name, tensor in weights.items()}, 5)
    assert remote.generate(asked) == local.generate(asked)  # also one that died just before
    remote.restart()
    assert remote.generate(asked) == local.generate(asked)
    assert remote.capabilities.trainable
    with pytest.raises(EngineError, match="replica 0.*must have at least one token"):
        remote.generate([Request((), Key(0, (0, 0, 0, 0)))])
    remote.close()


class Waiting(TinyEngine):
    """Answers the first chat when another replica has begun with the second one, as a file says."""

    def __init__(self, file):
        super().__init__(["Up"])
        self.file = file

    def generate(self, requests):
        if requests[0].key.path[1]:
            self.file.touch()
        until(self.file.exists)
        return super().generate(requests)


def test_a_slow_replica_holds_up_no_other(cluster, tmp_path):
    from shoal.samplers.ray import RayEngine

    asked = [Request((7, 8), Key(0, (0, group, 0, 0)), Sampling(5)) for group in range(2)]
    with RayEngine(partial(Waiting, tmp_path / "begun"), 2) as remote:
        assert len(remote.generate(asked)) == 2


def broken():
    raise ValueError("no such model")


def test_replicas_that_cannot_start_say_why(cluster):
    from shoal.samplers.ray import RayEngine

    with pytest.raises(EngineError, match="could not start.*no such model"):
        RayEngine(broken)
    with pytest.raises(
        EngineError, match="1 of 1 replicas have not started within 1 s: the cluster has.*CPU"
    ):
        RayEngine(make, resources={"num_gpus": 64}, timeout=1)


def test_a_run_that_samples_on_replicas_learns_what_one_engine_learns(cluster, tmp_path):
    from shoal.train.agent.config import compose_config
    from shoal.train.agent.trainer import AgentTrainer

    rows = []
    for place, named in enumerate(
        (["engine.name=tiny"], ["engine.name=ray", "engine.replicas.engine=tiny", "engine.replicas.count=2"])
    ):
        settings = [
            "trainer.iterations=2",
            "warmup.steps=3",
            "algorithm.kl.coef=0.1",
            "es_manager.train.env_groups=2",
            "es_manager.train.group_size=4",
            "es_manager.val.env_groups=4",
            f"run_dir={tmp_path / str(place)}",
        ]
        with AgentTrainer(compose_config("demo", [*settings, *named])) as trainer:
            timed = ("second", "share_", "engine_busy")
            rows.append(
                [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in trainer.train()]
            )
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3
