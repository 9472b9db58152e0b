"""Three machines with a node of Ray each: none sees the files of the first, and machines die and join meanwhile.

`SHOAL_KILLS` says how many iterations lose a machine (3; `make test-cluster` takes 20).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.machines import REPO, Machines, can_be_made

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        not can_be_made(), reason="needs Linux, root, and namespaces with a network between them"
    ),
]
KILLS = int(os.environ.get("SHOAL_KILLS", "3"))

BEGIN = """
import json, logging, os, sys, time
import ray
from shoal.core.executors import connect_ray
logging.basicConfig(level=logging.WARNING)  # on standard error

def say(**what):
    print(json.dumps(what), flush=True)

def paced(work):
    # Before each piece of work all machines are there, the third from the second piece on; the test answers "go", and
    # may pull a plug meanwhile.
    number = 0
    while True:
        while sum(node["Alive"] for node in ray.nodes()) < (3 if number else 2):
            time.sleep(0.2)
        say(ready=number)
        if sys.stdin.readline() != "go\\n":
            break
        work(number)
        number += 1
    say(done=number)

if os.environ.get("MACHINES"):
    connect_ray()  # what was begun with a working_dir of its own stays
"""
SEND = """
import os, sys
import ray
if os.environ.get("MACHINES"):  # the user's modules travel with the connection
    code = os.path.dirname(sys.argv[1]) + "/code"
    ray.init(os.environ["RAY_ADDRESS"], runtime_env={"working_dir": code}, log_to_driver=False)
"""
TRAIN = (
    SEND
    + BEGIN
    + """
from shoal.train.agent.config import compose_config
from shoal.train.agent.policies.policy import weights_sha256
from shoal.train.agent.trainer import AgentTrainer

folder, iterations, *settings = sys.argv[1:]
sys.path.insert(0, os.path.dirname(folder) + "/code")
small = [
    "custom_envs.FrozenLakeEnv=null", "+custom_envs.Words={env_type: 'their_env:Words'}",
    "es_manager.train.env_configs.tags=[Words]", "es_manager.val.env_configs.tags=[Words]",
    "es_manager.train.env_groups=3", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "engine.width=16", "engine.layers=1", "engine.heads=2", "warmup.steps=0", "warmup.rehearsal=0",
    "agent_proxy.max_tokens=2", "agent_proxy.use_parallel_rollout=true", "algorithm.learning_rate=0.003",
    "algorithm=grpo", "algorithm.kl.coef=0", "trainer.tensorboard=false", "trainer.stop_at_success=null",
    "trainer.stop_on_collapse=false", "trainer.eval_every=100",
    "rewards=[env, {function: 'their_reward:score'}, "
    "{name: judge, weight: 0.5, concurrency: 2, model: {base_url: 'http://10.77.0.9:8009/v1', model: scripted}}]",
    f"trainer.iterations={iterations}", f"run_dir={folder}", "trainer.save_trajectories_every=1",
]
with AgentTrainer(compose_config("base", [*small, *settings])) as trainer:
    rows = trainer.train()
    next(rows)  # the evaluation at the start
    if os.environ.get("MACHINES"):
        paced(lambda number: next(rows, None))
    for row in rows:
        pass
    say(weights=weights_sha256(trainer.policy.module))
"""
)
JUDGE = """
import hashlib, json, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        time.sleep(0.2)
        score = hashlib.sha256(asked.encode()).digest()[0] / 255
        message = {"role": "assistant", "content": f"<score>{score}</score>"}
        said = {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("", 8009), Judge).serve_forever()
"""
JUDGING = [sys.executable, "-c", JUDGE]
THEIR_ENV = (
    (REPO / "tests/train/agent/lag_env.py").read_text().replace("nap: float = 0.0", "nap: float = 0.05")
)
THEIR_REWARD = """
def score(episodes):
    return [0.1 * len(episode.turns) for episode in episodes]
"""


@pytest.fixture(scope="module")
def machines():
    machines = Machines(Path(f"/var/tmp/shoal-{os.getpid()}"))  # of a short name, outside /tmp
    try:
        for number in (1, 2):
            machines.add(number)
        yield machines
    finally:
        machines.close()
        shutil.rmtree(machines.folder, ignore_errors=True)


def of(done):
    """What a program said last."""
    assert done.returncode == 0, done.stdout + done.stderr
    return last(done.stdout)


def last(lines):
    return json.loads([line for line in lines.splitlines() if line.startswith("{")][-1])


def heard(process, log):
    """What a program says next, beside what Ray prints."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError(log.read_text())


def play_with_kills(machines, program, *arguments, kills=KILLS, after=0.4):
    """Run a program piece by piece; while it works on one, machine 2 or 3 dies, which then joins again.

    So does the judge's machine, where there is one. Machine 3 joins only after the first piece. Returns what the
    program said last, and its errors.
    """
    log = machines.folder / "program.log"
    with log.open("w") as errors:
        process = machines.start(program, *arguments, stderr=errors, MACHINES="yes")
        try:
            for number in range(kills):
                assert heard(process, log) == {"ready": number}
                process.stdin.write("go\n")
                process.stdin.flush()
                time.sleep(after)
                machines.kill(dying := 2 + number % 2)
                machines.add(dying)
                if 3 not in machines.nodes:
                    machines.add(3)
                if 9 in machines.nodes:
                    machines.kill(9)
                    machines.add(9, JUDGING)
            assert heard(process, log) == {"ready": kills}
            out, _ = process.communicate("stop\n", timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, out + log.read_text()
    return last(out), log.read_text()


@pytest.fixture(scope="module")
def theirs(machines):
    """A folder with an env and a reward of the user's own, on the first machine alone."""
    code = machines.hidden / "code"
    code.mkdir()
    (code / "their_env.py").write_text(THEIR_ENV)
    (code / "their_reward.py").write_text(THEIR_REWARD)
    return machines.hidden


def trained(machines, theirs, name, *settings, kills=0):
    arguments = [str(theirs / name), str(KILLS + 1), *settings]
    if not kills:
        return of(machines.run(TRAIN, *arguments)), ""
    return play_with_kills(machines, TRAIN, *arguments, kills=kills)


def test_training_on_them_gives_the_weights_of_one_process(machines, theirs):
    """Episodes, replicas of the sampler and rewards; two machines die in each iteration, and one joins late."""
    machines.add(9, JUDGING)
    calm, _ = trained(machines, theirs, "calm", "agent_proxy.parallel.backend=serial")
    spread = [
        "agent_proxy.parallel.backend=ray",
        "agent_proxy.parallel_n_jobs=3",
        "engine.name=ray",
        "engine.replicas.engine=tiny",
        "engine.replicas.count=3",
        "engine.replicas.resources={num_cpus: 0.1}",
    ]
    found, errors = trained(machines, theirs, "spread", *spread, kills=KILLS)
    assert found == calm, errors
    assert "a rollout worker is gone" in errors or "is replaced" in errors
    episodes = [
        [(theirs / run / "trajectories" / f"train-{k:06d}.jsonl").read_bytes() for k in range(1, KILLS + 2)]
        for run in ("calm", "spread")
    ]
    assert episodes[0] == episodes[1]
    assert b"<score>" in episodes[0][0]
    machines.kill(9)


VECTOR = (
    BEGIN
    + """
import hashlib
import numpy as np
from shoal import make_vec
from shoal.core.errors import WorkerError

kills = int(sys.argv[1])
options = {"ray_options": {"num_cpus": 0.1, "scheduling_strategy": "SPREAD"}, "num_workers": 3}
where = {"backend": "ray", **options} if os.environ.get("MACHINES") else {"backend": "serial"}
envs = make_vec("CartPole-v1", 6, **where)
digest, broken = hashlib.sha256(), 0

def play(number):
    global broken
    actions = np.random.default_rng(number).integers(0, 2, (150, 6))
    while True:
        seen = []
        try:
            observations, _ = envs.reset(seed=number)
            seen.append(observations.copy())
            for row in actions:
                observations, rewards, *_ = envs.step(row)
                seen += [observations.copy(), rewards.copy()]
        except WorkerError:
            broken += 1
            continue
        digest.update(b"".join(one.tobytes() for one in seen))
        return

if os.environ.get("MACHINES"):
    paced(play)
else:
    for number in range(kills):
        play(number)
envs.close()
say(digest=digest.hexdigest(), broken=broken > 0)
"""
)


def test_envs_on_them_give_the_arrays_of_one_process(machines):
    calm = of(machines.run(VECTOR, str(KILLS)))
    found, _ = play_with_kills(machines, VECTOR, str(KILLS))
    assert found["digest"] == calm["digest"]
    assert found["broken"], "no machine died while its envs were stepped"


SPLIT = (
    BEGIN
    + """
import hashlib
import torch
from shoal.core.errors import ConfigError
from shoal.splitting import StepwiseTrajectorySplitter
from shoal.splitting.processors import build_qwen_processor, load_processor
from shoal.splitting.synthetic import write_gui_recordings

folder, kills = sys.argv[1], int(sys.argv[2])
if not os.path.exists(folder + "/processor"):
    build_qwen_processor(folder + "/processor", vocabulary=20_000)
    write_gui_recordings(folder + "/recordings", 24, steps=4, size=(200, 150))
ids = sorted(os.listdir(folder + "/recordings"))
splitter = StepwiseTrajectorySplitter(load_processor(folder + "/processor"), folder + "/recordings", padding="longest")
digests = []

def split(number):
    parallel = os.environ.get("MACHINES")
    batch = splitter.split_parallel(ids, num_cpus=3) if parallel else splitter.split(ids)
    arrays = [batch[name] for name in ("input_ids", "attention_mask", "position_ids", "responses") if name in batch]
    digests.append(hashlib.sha256(b"".join(one.numpy().tobytes() for one in arrays)).hexdigest())

try:
    if os.environ.get("MACHINES"):
        paced(split)
    else:
        split(0)
    say(digests=sorted(set(digests)))
except ConfigError as error:
    say(error=str(error))
"""
)


def test_splitting_on_them_gives_the_batch_of_one_process(machines):
    shared = machines.folder / "shared"
    shared.mkdir()
    calm = of(machines.run(SPLIT, str(shared), "1"))
    found, _ = play_with_kills(machines, SPLIT, str(shared), str(KILLS), after=1.0)
    assert found == calm
    assert len(calm["digests"]) == 1
    alone = machines.start(
        SPLIT, str(machines.hidden), "1", stderr=subprocess.DEVNULL, MACHINES="yes"
    )  # which the others lack
    out, _ = alone.communicate("go\n", timeout=300)
    assert str(machines.hidden / "recordings") in last(out)["error"]


SKILLS = (
    BEGIN
    + """
from dataclasses import replace
from pathlib import Path
from shoal.skills.graph.launchers import RayLauncher
from shoal.skills.proposers import knowledge_base
from shoal.skills.scheduler import SkillScheduler
from shoal.skills.spec import load_skills
from shoal.skills.worlds.crafting import CRAFTING
from tests.skills.conftest import QUICK

base = Path(sys.argv[1])
skills = {skill.name: replace(skill, horizon=100) for skill in load_skills(knowledge_base("crafting"), CRAFTING)}
found, lost, reasons = [], [], []

def learn(number):
    launcher = {"launcher": RayLauncher()} if os.environ.get("MACHINES") else {}
    scheduler = SkillScheduler(base / str(number), 3, 0.2, config=replace(QUICK, total_timesteps=16384), **launcher,
                               on_event=lambda event: reasons.append(str(event)))
    for name in ("Collect Wood", "Drink Water", "Collect Sapling"):
        scheduler.add_skill(name, skills[name])
    whole = scheduler.run()
    ends = [one.outcome for one in scheduler.store.attempts()]
    scheduler.close()
    experts = sorted(path.name for path in (base / str(number) / "experts").glob("*.safetensors"))
    found.append([whole, *experts])
    lost.append(ends.count("lost"))

if os.environ.get("MACHINES"):
    paced(learn)
else:
    learn(0)
print(lost, file=sys.stderr)
say(found=[one for k, one in enumerate(found) if one not in found[:k]], untouched=lost.count(0),
    reasons=[one for one in reasons if "all nodes share" in one][:1])
"""
)


@pytest.mark.flaky(reruns=2)  # on a busy machine a kill may come before the trainings have begun
def test_skills_on_them_are_the_experts_of_one_process(machines):
    """A training whose machine dies is run again; a run folder that only one machine has is named."""
    shared = machines.folder / "skills"
    calm = of(machines.run(SKILLS, str(shared / "calm")))
    assert calm["found"][0][0]
    assert len(calm["found"][0]) == 4
    found, errors = play_with_kills(machines, SKILLS, str(shared / "spread"), after=3.5)
    assert found["found"] == calm["found"], errors
    assert found["untouched"] == 0, errors
    alone = machines.start(SKILLS, str(machines.hidden / "skills"), stderr=subprocess.DEVNULL, MACHINES="yes")
    assert heard(alone, machines.folder / "skills.log") == {"ready": 0}
    alone.stdin.write("go\n")
    alone.stdin.flush()
    out, _ = alone.communicate("stop\n", timeout=300)
    assert "the run folder must be one that all nodes share" in str(last(out)["reasons"])
