"""With a lag, iteration k is played by the weights of k - lag: a serial loop says the same, wherever it is played."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.rollout.doubles import FakeServer
from tests.rollout.tools.test_example import SMALL, rows, vault  # noqa: F401 (a fixture)
from tests.train.agent.lag_env import Words
from tests.train.agent.run.test_rewards import rewards
from tests.train.agent.test_trainer import CLOCKS, KILLED, WORKERS

from shoal.core.data import read_trajectories
from shoal.core.errors import ConfigError
from shoal.rollout.factory import make_roles, words_of_roles
from shoal.rollout.hosts.episodes import Begin, Ended, Sampled, Setup, Slot
from shoal.rollout.plan import assignments_of
from shoal.samplers.registry import make_engine
from shoal.samplers.sampler import Request
from shoal.train.agent.config import compose_config
from shoal.train.agent.optimizer import split_optimizer, trained_parameters
from shoal.train.agent.policies.loading import policy_of
from shoal.train.agent.policies.policy import weights_sha256
from shoal.train.agent.processes.determinism import threads
from shoal.train.agent.run.checkpoint import list_checkpoints
from shoal.train.agent.trainer import AgentTrainer
from shoal.train.agent.update import Learner, prepare_samples, sampled_entropy, update

ITERATIONS = 20
SETTINGS = [
    "custom_envs.FrozenLakeEnv=null", "+custom_envs.Words={env_type: 'tests.train.agent.lag_env:Words'}",
    "es_manager.train.env_configs.tags=[Words]", "es_manager.val.env_configs.tags=[Words]",
    "es_manager.train.env_groups=3", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=0", "warmup.rehearsal=0",
    "agent_proxy.max_tokens=2", "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel_n_jobs=2",
    "agent_proxy.parallel.backend=thread", "algorithm=grpo", "algorithm.kl.coef=0", "trainer.tensorboard=false",
    "trainer.stop_at_success=null", "trainer.stop_on_collapse=false", "trainer.eval_every=7",
    "trainer.save_every=4", f"trainer.iterations={ITERATIONS}", "algorithm.learning_rate=0.003",
]  # fmt: skip


def settings(folder, *overrides):
    return compose_config("base", [*SETTINGS, f"run_dir={folder}", *overrides])


def trained(folder, *overrides):
    with AgentTrainer(settings(folder, *overrides)) as trainer:
        rows = list(trainer.train())
        return rows, weights_sha256(trainer.policy.module)


def without_clocks(rows):
    return [{k: v for k, v in row.items() if k not in (*CLOCKS, *WORKERS, "overlap")} for row in rows]


# --- the oracle: one loop that plays, then learns
def simulated(config, lag):
    """The weights after all iterations, and the rewards of each, without a player or a journal."""
    groups, proxy = config.es_manager.train, config.agent_proxy
    tags = groups.group_tags()
    roles = make_roles(config.custom_envs, tags, proxy.max_turn)
    learner_side, player = (make_engine(config.engine, words_of_roles(roles), config.seed) for _ in range(2))
    policy, algorithm = policy_of(learner_side), config.algorithm
    optimizer = split_optimizer(
        trained_parameters(policy.module), None, *algorithm.rates, algorithm.weight_decay
    )
    learner = Learner(policy, optimizer, algorithm, proxy, seed=config.seed)
    setup, kept, rewards = Setup({"Words": Words}, roles, proxy.prompt, player.tokenizer), [], []
    for iteration in range(config.trainer.iterations):
        kept.append({name: tensor.clone() for name, tensor in policy.module.state_dict().items()})
        version = max(0, iteration - lag)
        player.load_weights(kept[version], version)
        played = []
        for assignment in assignments_of(config.seed, iteration, tags, groups.group_size):
            slot, context = Slot(setup, setup.prompter), ()
            event = slot.handle(Begin(0, assignment, proxy.sampling()))
            while not isinstance(event, Ended):
                prompt = context + event.new_ids if event.goes_on else event.new_ids
                request = Request(prompt, assignment.place.key(event.turn), proxy.sampling())
                [completion] = player.generate([request])
                context = prompt + completion.token_ids
                event = slot.handle(Sampled(0, completion))
            played.append(event.trajectory)
        rewards.append(sum(t.reward for t in played))
        update(learner, prepare_samples(played, learner), iteration, entropy=sampled_entropy(played))
    return weights_sha256(policy.module), rewards


@pytest.fixture(scope="module", params=[1, 2])
def simulation(request, tmp_path_factory):
    with threads(1):
        return request.param, *simulated(settings(tmp_path_factory.mktemp("oracle")), request.param)


RAY = [
    pytest.param("ray", 2, [], marks=pytest.mark.slow),
    pytest.param(
        "thread", 2, ["engine.name=ray", "engine.replicas.engine=tiny", "engine.replicas.count=2"],
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "hosts", "engine"),
    [
        ("serial", 1, []),
        pytest.param("thread", 1, [], marks=pytest.mark.slow),
        ("thread", 3, ["engine.copy=process"]),
        ("process", 2, []),
        *RAY,
    ],
)
def test_weights_are_those_of_a_serial_loop(simulation, backend, hosts, engine, tmp_path):
    lag, weights, rewards = simulation
    more = [*engine, f"agent_proxy.parallel.backend={backend}", f"agent_proxy.parallel_n_jobs={hosts}"]
    rows, found = trained(tmp_path / "run", f"trainer.lag={lag}", *more)
    assert found == weights
    assert [row["lag"] for row in rows[1:]] == [min(lag, k) for k in range(ITERATIONS)]
    assert [row["reward"] * 12 for row in rows[1:]] == pytest.approx(rewards)
    assert len(set(rewards)) > 3  # or nothing would have been compared
    for iteration in (7, 14, ITERATIONS):  # evaluations are played by the present weights
        played = read_trajectories(tmp_path / "run" / "trajectories" / f"heldout-{iteration:06d}.jsonl")
        assert {call.weights_version for t in played for call in t.calls} == {iteration}


def test_a_lag_changes_what_is_learned(simulation, tmp_path):
    assert simulated(settings(tmp_path), 0)[0] != simulation[1]


def test_a_run_goes_on_with_its_own_lag_alone(tmp_path):
    known = [settings(tmp_path, f"trainer.lag={lag}").comparable() for lag in (0, 1, 2)]
    assert known[0] != known[1] != known[2] != known[0]


# --- faults
@pytest.mark.parametrize("killed_at", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_end(tmp_path, killed_at):
    """The checkpoint holds the weights by which iterations are played that had begun."""
    calm, weights = trained(tmp_path / "calm", "trainer.lag=2")
    command = [sys.executable, "-c", KILLED, str(killed_at), "train", "--config-name", "base", "--json-events",
               *SETTINGS, f"run_dir={tmp_path / 'run'}", "trainer.lag=2"]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert [file.stem for file in sorted((newest / "earlier").iterdir())] == [
        f"{killed_at - 2:06d}", f"{killed_at - 1:06d}",
    ]  # fmt: skip
    rows, found = trained(tmp_path / "run", "trainer.lag=2", "resume=true")
    assert found == weights
    assert without_clocks(rows) == json.loads(json.dumps(without_clocks(calm)))


@pytest.mark.parametrize("which", ["the sampler", pytest.param("a host", marks=pytest.mark.slow)])
def test_processes_that_are_killed_cost_time_alone(simulation, which, tmp_path):
    lag, weights, _ = simulation
    more = ["engine.copy=process", "agent_proxy.parallel.backend=process", f"trainer.lag={lag}"]
    with AgentTrainer(settings(tmp_path / "run", *more)) as trainer:
        killed = 0
        for row in trainer.train():
            pids = trainer.sampler.pids() if which == "the sampler" else trainer.worker_pids()
            if row["iteration"] % 4 == 1 and pids:
                os.kill(pids[0], signal.SIGKILL)
                killed += 1
        assert killed >= 4
        assert weights_sha256(trainer.policy.module) == weights


def test_a_judge_is_asked_as_often_and_says_the_same_on_any_hosts(tmp_path):
    with FakeServer("openai") as server:
        server.say = lambda said: f"<score>{sum(map(ord, said)) % 11 / 10}</score>"

        def judged(name, lag, *more):
            asked = len(server.seen)
            config = settings(tmp_path / name, "trainer.iterations=6", f"trainer.lag={lag}", *more)
            with AgentTrainer(config, rewards=rewards(server)) as trainer:
                found = without_clocks(list(trainer.train()))
                return found, weights_sha256(trainer.policy.module), len(server.seen) - asked

        one = judged("one", 2, "agent_proxy.parallel_n_jobs=1")
        three = judged("three", 2, "agent_proxy.parallel_n_jobs=3", "engine.copy=process")
        assert three == one
        assert len({row["score/judge"] for row in one[0][1:]}) > 3
        assert judged("at once", 0)[1] != one[1]


@pytest.mark.slow
def test_tools_are_called_under_a_lag_the_same_on_any_hosts(vault, tmp_path):  # noqa: F811
    functions = 'agent_proxy.tools=["vault:search", "vault:multiply"]'
    hosts = "agent_proxy.use_parallel_rollout=true", "agent_proxy.parallel.backend=thread"
    lagged = (*SMALL, functions, *hosts, "trainer.iterations=4", "trainer.lag=1")
    one = rows(vault(*lagged, f"run_dir={tmp_path}/one", "agent_proxy.parallel_n_jobs=1"))
    more = rows(vault(*lagged, f"run_dir={tmp_path}/more", "agent_proxy.parallel_n_jobs=3"))
    assert [{k: v for k, v in row.items() if k != "overlap"} for row in more] == [
        {k: v for k, v in row.items() if k != "overlap"} for row in one
    ]
    uses = [
        sorted((tmp_path / name / "tool_uses.jsonl").read_text().splitlines()) for name in ("one", "more")
    ]
    assert uses[0] == uses[1]
    assert any("multiply" in use for use in uses[0])


def test_a_run_that_stops_early_leaves_nothing_that_plays_on(tmp_path):
    with AgentTrainer(settings(tmp_path / "run", "trainer.lag=2", "trainer.stop_at_success=0.01")) as trainer:
        rows = list(trainer.train())
    assert rows[-1]["iteration"] < ITERATIONS
    assert not (tmp_path / "run" / "unfinished.jsonl").exists()


def test_a_sampler_that_is_given_has_no_copies_to_play_with(tmp_path):
    engine = make_engine(settings(tmp_path).engine)
    with pytest.raises(ConfigError, match="a sampler that is given has one"):
        AgentTrainer(settings(tmp_path, "trainer.lag=1"), policy=policy_of(engine), sampler=engine)
