import warnings

import pytest

from shoal.core.errors import EngineError
from shoal.rollout.engine import Key, Request, Sampling
from shoal.rollout.engines.tiny import TinyEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # of Ray itself
]


def make():
    return TinyEngine(["Up"])


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


def requests(engine, n=12):
    start = engine.tokenizer.start
    return [
        Request(start([{"role": "user", "content": f"say {i}"}]), Key(0, 0, i // 3, i % 3, 0), Sampling(5))
        for i in range(n)
    ]


def test_replicas_write_what_one_engine_writes_also_after_one_has_died_and_with_new_weights(cluster):
    from shoal.rollout.engines.ray_actors import RayEngine

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
    assert remote.capabilities.trainable
    with pytest.raises(EngineError, match="replica 0.*must have at least one token"):
        remote.generate([Request((), Key(0, 0, 0, 0, 0))])
    remote.close()
