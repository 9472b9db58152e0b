"""Every way to name an environment, through every door that takes one."""

import functools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import types
from contextlib import closing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from tests.envs import named_envs
from tests.envs.named_envs import Counter, Doubled, Outer, ParrotEnv, PlusOne, make_counter

import shoal.envs
from shoal import make_vec
from shoal.cli.main import main
from shoal.core.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError
from shoal.envs import resolve
from shoal.envs.catalogue import MOST_COPIED, find, name_of, parse_env_kwargs, resolve_text
from shoal.envs.frozen_lake import FrozenLakeEnv
from shoal.rollout.factory import make_set, validate_environment_config
from shoal.train.ppo.ppo import PPO

HERE = "tests.envs.named_envs"
REGISTERED = {
    "test_named_counter": Counter,
    "test_named_function": make_counter,
    "test_named_text": f"{HERE}:ParrotEnv",
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Names for these tests, which other tests do not see."""
    for name, env in REGISTERED.items():
        shoal.envs.register(name, env)
    yield
    for name in REGISTERED:
        del shoal.envs.catalogue._envs._items[name]


NAMES = {
    "frozen_lake": FrozenLakeEnv,
    "CartPole-v1": CartPoleEnv,
    f"{HERE}:NamedCounter-v0": Counter,
    "gymnasium:CartPole-v1": CartPoleEnv,
    f"{HERE}:Counter": Counter,
    f"{HERE}:Outer.Inner": Outer.Inner,
    f"{HERE}:make_counter": Counter,
    f"{HERE}:ParrotEnv": ParrotEnv,
    "test_named_counter": Counter,
    "test_named_function": Counter,
    "test_named_text": ParrotEnv,
}
OBJECTS = [
    Counter,
    make_counter,
    functools.partial(Counter, 2),
    gymnasium.spec("CartPole-v1"),
    lambda: Counter(3),
]
DOORS = ["frozen_lake", "CartPole-v1", f"{HERE}:NamedCounter-v0", f"{HERE}:make_counter", "test_named_text"]
"""A name of each kind; every door resolves all others in the same way."""


# --- the table


@pytest.mark.parametrize("source", [*DOORS, *OBJECTS], ids=name_of)
def test_a_vector_of_processes_takes_names_classes_functions_partials_and_specs(source):
    by_hand = CartPoleEnv if name_of(source) == "CartPole-v1" else NAMES.get(name_of(source), source)
    with closing(make_vec(source, 1, backend="process")) as envs:
        observations, _ = envs.reset(seed=3)
    np.testing.assert_array_equal(observations[0], by_hand().reset(seed=3)[0])


@pytest.mark.parametrize("name", [f"{HERE}:NamedCounter-v0", f"{HERE}:make_counter"])
def test_train_ppo_takes_every_form_with_arguments_and_wrappers(name, tmp_path, capsys):
    arguments = ["train-ppo", "--env", name, "--env-kwargs", "size=7", "--wrapper", f"{HERE}:Doubled",
                 "--wrapper", f"{HERE}:PlusOne", "--backend", "serial", "--n-envs", "2", "--n-steps", "8",
                 "--total-timesteps", "16", "--eval-episodes", "1", "--no-tensorboard",
                 "--run-dir", str(tmp_path / "run")]  # fmt: skip
    assert main(arguments) == 0, capsys.readouterr().err
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    policy = json.loads((checkpoint / "policy.json").read_text())
    assert (policy["env"], policy["env_kwargs"]) == (name, {"size": 7})
    assert policy["wrappers"] == [f"{HERE}:Doubled", f"{HERE}:PlusOne"]
    with PPO.load(checkpoint) as ppo:
        env = ppo.factory(0)
        assert env.unwrapped.size == 7
        observation, _ = env.reset()
        assert observation[0] == 2 * env.unwrapped.total + 1
    go_on = ["train-ppo", "--resume-from", str(tmp_path / "run"), "--total-timesteps", "32",
             "--run-dir", str(tmp_path / "run")]  # fmt: skip
    assert main([*go_on, "--env-kwargs", "size=8"]) == 2
    assert "was made with --env-kwargs {'size': 7}, got {'size': 8}" in capsys.readouterr().err
    assert main(go_on) == 0, capsys.readouterr().err
    newest = json.loads(
        (sorted((tmp_path / "run" / "checkpoints").iterdir())[-1] / "policy.json").read_text()
    )
    assert newest == policy


@pytest.mark.parametrize("name", DOORS)
def test_bench_takes_every_form(name, capsys):
    arguments = "--num-envs 2 --seconds 0.02 --backends serial --no-peers --json".split()
    assert main(["bench", name, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["ways"][0]["problem"] is None


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize("name", DOORS)
def test_envs_show_and_check_take_every_form(name, command, capsys, monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    assert main(["envs", command, name]) == 0
    out = capsys.readouterr().out
    assert (
        "The first observation of seed 0" if command == "show" else "ok      gymnasium's check_env"
    ) in out


def environment_config(name):
    side = {"env_groups": 1, "group_size": 1, "env_configs": {"tags": ["It"]}}
    return {
        "es_manager": {"train": side, "val": side},
        "custom_envs": {"It": {"env_type": name}},
        "vector": {"backend": "process"},
    }


@pytest.mark.parametrize("name", DOORS)
def test_agents_play_every_form_and_see_what_is_no_text_as_text(name):
    checked = validate_environment_config(environment_config(name))
    made = make_set(checked, checked.es_manager.train)
    try:
        observation, info = next(iter(made.pool.reset_some([0], [3])))
    finally:
        made.pool.close()
    assert isinstance(observation, str)
    assert info["available_actions"]
    if NAMES[name] in (FrozenLakeEnv, ParrotEnv):
        assert observation == NAMES[name]().reset(seed=3)[0]
    elif NAMES[name] is CartPoleEnv:
        assert observation.startswith("cart position: ") or len(observation.split()) == 4
    else:
        assert 0 <= float(observation) < 1000


def test_settings_of_an_agents_env_reach_what_makes_it():
    assert resolve_text(f"{HERE}:Counter", {"size": 4})().inner.unwrapped.size == 4
    assert resolve_text(f"{HERE}:make_counter", {"size": 5})().inner.unwrapped.size == 5
    adapter = {"id": f"{HERE}:Counter", "kwargs": {"size": 6}, "action_names": ["stay", "go"]}
    env = resolve_text("gymnasium", adapter)()
    assert env.inner.unwrapped.size == 6
    assert env.projection.words() == ["stay", "go"]
    assert resolve_text(f"{HERE}:ParrotEnv", {"word": "ahoy"})().observe.__self__.config.word == "ahoy"
    assert isinstance(shoal.envs.make(f"{HERE}:Outer.Inner").reset(seed=1)[0], str)


# --- what travels


@pytest.mark.parametrize("name", NAMES)
def test_what_is_resolved_can_be_pickled_and_holds_no_name(name):
    make = resolve(name)
    assert isinstance(make, functools.partial | type) or callable(make)
    assert type(pickle.loads(pickle.dumps(make))().unwrapped) is NAMES[name]
    before = shoal.envs.catalogue._envs._items.pop(name, None)
    spec = gymnasium.registry.pop(name.rpartition(":")[2], None)
    try:
        assert type(make().unwrapped) is NAMES[name]  # as in a process that registered nothing
    finally:
        if before is not None:
            shoal.envs.register(name, before)
        if spec is not None:
            gymnasium.registry[spec.id] = spec


SCRIPT = """
from contextlib import closing
import gymnasium, shoal.envs
from gymnasium.envs.classic_control import CartPoleEnv
from shoal import make_vec
from shoal.envs.bandit import BanditEnv

class MyBandit(BanditEnv):
    def observe(self):
        return "MINE " + super().observe()

class MyPole(CartPoleEnv):
    pass

def my_pole(gravity=9.8):
    env = MyPole()
    env.gravity = gravity
    return env

shoal.envs.register("my_bandit", MyBandit)
shoal.envs.register("my_pole", my_pole)
gymnasium.register("MyPole-v0", entry_point="__main__:MyPole", max_episode_steps=9)
gymnasium.register("MyOtherPole-v0", entry_point=MyPole, max_episode_steps=9)
"""


def run_script(tmp_path, body, **environment):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_what_a_script_registers_is_known_to_its_worker_processes(tmp_path):
    out = run_script(
        tmp_path,
        """
        for name in ("my_bandit", "my_pole", "MyPole-v0", "MyOtherPole-v0", "__main__:MyPole", "__main__:my_pole"):
            for backend in ("serial", "process"):
                with closing(make_vec(name, 2, backend=backend)) as envs:
                    print(name, repr(envs.reset(seed=1)[0][0]))
        from shoal.train.ppo.ppo import PPO
        for name in ("my_pole", "MyPole-v0"):
            with PPO(name, n_envs=2, backend="process", num_workers=2, n_steps=8, batch_size=8, hidden=(8,)) as ppo:
                ppo.learn(32)
                print(name, ppo.workers)
        """,
    )
    lines = out.splitlines()
    assert "my_bandit 'MINE" in lines[0]
    assert [lines[i] for i in range(0, 12, 2)] == [lines[i] for i in range(1, 13, 2)]
    assert lines[-2:] == ["my_pole 2", "MyPole-v0 2"]


# --- packages that name their envs


@pytest.fixture
def package(tmp_path):
    """An installed package with two envs, one of which cannot be imported."""
    site = tmp_path / "site"
    info = site / "pole_pack-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pole-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[shoal.envs]\npack_pole = pole_pack:PackPole [web]\n"
        "pack_broken = pole_pack.broken:Env\n../evil = pole_pack:X\n"
    )
    (site / "pole_pack").mkdir()
    (site / "pole_pack" / "__init__.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "print('pole_pack is imported')\n"
        "class PackPole(CartPoleEnv):\n    'A pole of a package.'\n"
    )
    (site / "pole_pack" / "broken.py").write_text("1 / 0\n")
    return site


def test_an_installed_package_names_envs_that_are_imported_on_first_use(package, tmp_path):
    out = run_script(
        tmp_path,
        """
        print("sokoban" in shoal.envs.names(), "pack_pole" in shoal.envs.names())
        gymnasium.make("CartPole-v1")
        print("before")
        with closing(make_vec("pack_pole", 2, backend="process")) as envs:
            print(envs.reset(seed=1)[0].shape)
        try:
            shoal.envs.resolve("pack_pol")
        except KeyError as error:
            print(error)
        try:
            shoal.envs.resolve("pack_broken")
        except ValueError as error:
            print(error)
        from shoal.cli.main import main
        main(["envs", "list"])
        """,
        PYTHONPATH=os.pathsep.join([str(package), *(str(Path(p).resolve()) for p in sys.path if p)]),
        COLUMNS="160",
    )
    lines = out.splitlines()
    assert lines[:3] == ["True True", "before", "pole_pack is imported"]
    assert "(2, 4)" in out
    assert "no env named 'pack_pol'. Did you mean 'pack_pole'?" in out
    broken = (
        "cannot import the environment 'pole_pack.broken:Env': importing 'pole_pack.broken' failed with Zero"
    )
    assert broken in out
    row = next(line for line in lines if line.startswith("pack_pole "))
    assert "A pole of a package." in row
    assert "of the package pole-pack" in row
    assert "evil" not in out


# --- wrappers and arguments


def test_wrappers_are_put_around_in_order():
    (start,) = Counter().reset(seed=3)[0]
    for wrappers in ([Doubled, PlusOne], [f"{HERE}:Doubled", PlusOne]):
        assert resolve(Counter, wrappers=wrappers)().reset(seed=3)[0] == [2 * start + 1]
    assert resolve(Counter, wrappers=[PlusOne, Doubled])().reset(seed=3)[0] == [2 * (start + 1)]
    limited = functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=2)
    env = resolve(f"{HERE}:Counter", env_kwargs={"size": 3}, wrappers=[limited])()
    env.reset(seed=3)
    assert [env.step(0)[3] for _ in range(2)] == [False, True]
    assert env.unwrapped.size == 3


@pytest.mark.parametrize("source", [f"{HERE}:Taker", EnvSpec("Taker-v0", entry_point=f"{HERE}:Taker")])
@pytest.mark.parametrize("backend", [("serial", None), ("process", 2)])
def test_an_env_that_changes_its_arguments_changes_them_for_no_other(source, backend):
    given = {"sizes": [10, 20, 30, 40], "steps": [1], "dealt": {"cards": np.array([2])}}
    with closing(make_vec(source, 4, backend=backend[0], num_workers=backend[1], env_kwargs=given)) as envs:
        first = envs.reset(seed=7)[0]
        assert (envs.step([0] * 4)[0] - first).ravel().tolist() == [43] * 4  # each took 40, and 2 + 1
    make = resolve_text(source, given)
    given["sizes"].clear()  # is the caller's
    assert given["dealt"]["cards"].tolist() == [2]
    assert [make().inner.unwrapped.size for _ in range(2)] == [43, 43]


class Prices(Counter):
    def __init__(self, prices):
        super().__init__(size=len(prices))
        self.prices = prices

    def step(self, action):
        if action == 1:
            self.prices[0] = 3.0
        return super().step(action)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_large_arrays_are_shared_by_all_envs_which_cannot_write_to_them(backend):
    prices = np.zeros(MOST_COPIED // 8 + 1)
    envs = [resolve(Prices, env_kwargs={"prices": prices})() for _ in range(2)]
    assert all(np.shares_memory(env.unwrapped.prices, prices) for env in envs)
    assert prices.flags.writeable
    with closing(make_vec(Prices, 2, backend=backend, env_kwargs={"prices": prices})) as vec:
        vec.reset(seed=0)
        vec.step([0, 0])
        with pytest.raises(ValueError, match="read-only"):
            vec.step([0, 1])
    assert prices[0] == 0


def test_arguments_of_gymnasiums_make_count_for_ids():
    env = resolve("CartPole-v1", env_kwargs={"max_episode_steps": 7, "sutton_barto_reward": True})()
    assert env.spec.max_episode_steps == 7
    assert env.unwrapped._sutton_barto_reward


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        ("CartPole-v1", {"render_mod": None}, "takes no argument 'render_mod'. Did you mean 'render_mode'"),
        ("CartPole-v1", {"gravty": 1}, "It accepts: sutton_barto_reward=False, render_mode=None"),
        (f"{HERE}:Counter", {"limt": 1}, "'limt'. Did you mean 'limit'? It accepts: size=1, limit=5"),
        (f"{HERE}:NamedCounter-v0", {"max_episode_step": 1}, "Did you mean 'max_episode_steps'"),
        (f"{HERE}:make_counter", {"limit": 1}, "takes no argument 'limit'. It accepts: size=1"),
        (lambda size: Counter(size), {}, "needs size: give env_kwargs"),
        ("frozen_lake", {"sise": 3}, "FrozenLakeConfig has no setting 'sise'. Did you mean 'size'"),
        ("gymnasium", {"id": "CartPole-v1", "kwargs": {"gravty": 1}}, "takes no argument 'gravty'"),
        ("frozen_lake", {"size": "many"}, None),
    ],
)  # fmt: skip
def test_wrong_arguments_are_answered_with_what_there_is(source, kwargs, message):
    if message is None:  # values are looked at where the env is made
        with pytest.raises(ConfigError, match="Expected `int`"):
            resolve(source, env_kwargs=kwargs)()
        return
    with pytest.raises(ConfigError) as caught:
        resolve(source, env_kwargs=kwargs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("wrapper", "error", "message"),
    [
        ("Doubled", ConfigError, "the wrapper must be 'module:Name'"),
        (f"{HERE}:Double", UnknownNameError, "Did you mean 'Doubled'"),
        (f"{HERE}:nothing", ConfigError, "a wrapper must be a function or class from env to env, got []"),
        ("nowhere_at_all:Wrapper", ConfigError, "cannot import the wrapper 'nowhere_at_all:Wrapper'"),
        ("gymnasium.wrappers:TransformReward", ConfigError, "TransformReward cannot be put around an env"),
        (lambda env: 3, ConfigError, "must return a gymnasium.Env, got int"),
    ],
)
def test_wrappers_that_are_none_are_named(wrapper, error, message):
    with pytest.raises(error) as caught:
        resolve(Counter, wrappers=[wrapper])()
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="must be a sequence"):
        resolve(Counter, wrappers=f"{HERE}:Doubled")


def test_wrappers_and_arguments_of_no_use_are_refused_before_anything_is_made():
    once = (wrapper for wrapper in [PlusOne])  # the second env would have none
    with pytest.raises(ConfigError, match="wrappers must be a sequence of wrappers"):
        make_vec([Counter, Counter], wrappers=once, backend="serial")
    for door in (resolve, lambda env, env_kwargs: resolve_text(env, env_kwargs)):
        with pytest.raises(ConfigError, match="env_kwargs must be a mapping of names to values, got {1: 2}"):
            door(lambda **anything: Counter(), env_kwargs={1: 2})
        with pytest.raises(ConfigError, match=r"env_kwargs must be a mapping of names to values, got \[1\]"):
            door(Counter, env_kwargs=[1])


def test_what_makes_no_env_is_told_to_agents():
    class Nothing(Counter):
        def __new__(cls):
            return None

    for source in (lambda: None, Nothing):
        with pytest.raises(ConfigError, match="must make a gymnasium.Env, got NoneType"):
            resolve_text(source)()


def test_arguments_on_a_command_line_are_json_or_plain_text():
    words = ["a=3", "b=0.5", "c=8x8", "d=[1, 2]", 'e="3"', "f=null", "g=true", "h=x=y", "i="]
    assert parse_env_kwargs(words) == {
        "a": 3, "b": 0.5, "c": "8x8", "d": [1, 2], "e": "3", "f": None, "g": True, "h": "x=y", "i": "",
    }  # fmt: skip
    for wrong in (["a"], ["=3"], ["a-b=3"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="KEY=VALUE|given twice"):
            parse_env_kwargs(wrong)


# --- names that nothing has


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "Did you mean 'CartPole-v1'?"),
        ("CartPole", "Did you mean 'CartPole-v1'?"),
        ("frozenlake", "Did you mean 'frozen_lake'?"),
        ("FrozenLake-v9", "Did you mean 'FrozenLake-v1'?"),
        ("sokobn", "no env named 'sokobn'. Did you mean 'sokoban'?"),
        ("ALE/Pong-v5", "'ale_py:ALE/Pong-v5' (pip install ale-py)"),
        ("procgen-coinrun-v0", "'procgen_gym:procgen_gym/procgen-coinrun-v0' (pip install procgen-gym)"),
        (f"{HERE}:Countr", f"Did you mean '{HERE}:Counter'?"),
        (f"{HERE}:NamedCounter-v3", f"Did you mean '{HERE}:NamedCounter-v0'?"),
        ("NoSuch-v1", "others are 'module:Id-v0', 'module:Class' or 'module:function'"),
        ("", "no env named ''"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_its_package(name, message):
    with pytest.raises(UnknownNameError) as caught:
        find(name)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 350  # a few names, not all that there are


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_at_all:Env", "there is no module 'nowhere_at_all' here; expected 'module:Class'"),
        ("json.py:Env", "there is no module 'json.py' here; leave out '.py'"),
        ("../evil:Env", "must be 'module:Name'"),
        (".named_envs:Counter", "must be 'module:Name'"),
        (f"{HERE}:", "must be 'module:Name'"),
        (f"{HERE}:nothing", "must be a gymnasium.Env class, a function that makes an env, or an id, got []"),
        (f"{HERE}:ParrotConfig", "must be a gymnasium.Env class"),
    ],
)
def test_a_module_that_cannot_be_used_is_named(name, message):
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "take", [resolve, resolve_text, lambda name: make_vec(name, 2), lambda name: PPO(name, backend="serial")]
)
@pytest.mark.parametrize(
    "name", ["envpool:CartPole-v1", "gymnax:CartPole-v1", "jax:Breakout-MinAtar", "ale:Pong-v5"]
)
def test_an_env_of_a_native_batch_is_never_another_one(name, take, monkeypatch):
    for package in ("envpool", "gymnax"):  # as if they were installed
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    with pytest.raises(ConfigError, match=rf"{name}.*backend='native'"):
        take(name)


@pytest.mark.parametrize("module", ["numpy", "collections.abc", HERE])
def test_a_module_is_not_credited_with_an_env_of_gymnasiums_own(module):
    with pytest.raises(ConfigError, match=f"{module} has no environment 'CartPole-v1', Gymnasium has"):
        find(f"{module}:CartPole-v1")
    with pytest.raises(UnknownNameError) as caught:
        find(f"{module}:CartPole-v9")
    assert "CartPole-v1" not in str(caught.value)


def test_a_module_may_register_a_class_of_gymnasiums_under_an_id_of_its_own(tmp_path, monkeypatch):
    where = "gymnasium.envs.classic_control:CartPoleEnv"
    text = f"import gymnasium\ngymnasium.register('LongPole-v0', entry_point={where!r})\n"
    (tmp_path / "long_pole.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        assert find("long_pole:LongPole-v0").id == "LongPole-v0"
    del gymnasium.registry["LongPole-v0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('half written')", "failed with RuntimeError: half written"),
        ("import sys; sys.exit(3)", "failed with SystemExit: 3"),
    ],
)
def test_a_module_that_raises_is_an_error_that_names_it(text, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "raising_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import the environment 'raising_module:Env'") as caught:
        find("raising_module:Env")
    assert message in str(caught.value)
    for command in (["bench", "raising_module:Env"], ["train-ppo", "--env", "raising_module:Env"]):
        assert main(command) == 2
        assert message in capsys.readouterr().err


def test_a_module_that_fails_midway_can_be_imported_again_with_what_it_registers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = f"from shoal.envs import register\nregister('test_midway', '{HERE}:Counter')\nimport test_midway_gone\n"
    (tmp_path / "test_midway_module.py").write_text(code)
    for _ in range(2):
        with pytest.raises(ConfigError, match="No module named 'test_midway_gone'"):
            find("test_midway_module:Env")
    (tmp_path / "test_midway_gone.py").write_text("")
    with pytest.raises(UnknownNameError):
        find("test_midway_module:Env")
    assert shoal.envs.catalogue._envs._items.pop("test_midway") == f"{HERE}:Counter"


@pytest.mark.parametrize("init", [True, False])
def test_a_folder_of_the_name_of_a_module_in_it_is_told_from_the_module(init, tmp_path, monkeypatch):
    folder = tmp_path / "test_twice_named"
    folder.mkdir()
    (folder / "test_twice_named.py").write_text(f"from {HERE} import Counter as Mine\n")
    if init:
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownNameError, match="is the folder .*test_twice_named, with the module") as caught:
        find("test_twice_named:Mine")
    assert find(str(caught.value).rpartition(" as in ")[2].strip("'")) is named_envs.Counter


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    def missing(**kwargs):
        raise gymnasium.error.DependencyNotInstalled("run `pip install box3d`")

    monkeypatch.setitem(
        gymnasium.registry, "Lander-v9", gymnasium.envs.registration.EnvSpec("Lander-v9", missing)
    )
    with pytest.raises(MissingExtraError, match="environment 'Lander-v9' needs a package: .*box3d"):
        resolve("Lander-v9")()


def test_commands_say_in_a_line_what_an_env_raised(capsys, monkeypatch):
    def raising():
        raise KeyError("no display")

    monkeypatch.setattr(named_envs, "raising", raising, raising=False)
    for command in (["bench"], ["envs", "show"], ["envs", "check"], ["envs", "play"], ["train-ppo", "--env"]):
        assert main([*command, f"{HERE}:raising"]) == 1
        assert f"{HERE}:raising" in (said := capsys.readouterr().err)
        assert "KeyError: 'no display'" in said
    with pytest.raises(EnvError, match="cannot be made"):
        PPO(raising)
    assert main(["bench", "CartPole-v1", "--env-kwargs", "gravty=1"]) == 2
    assert "takes no argument 'gravty'" in capsys.readouterr().err
    assert main(["bench", "frozen_lake", "size=3", "--env-kwargs", "size=4"]) == 2
    assert "'size' of the environment was given twice" in capsys.readouterr().err
    assert main(["train-ppo", "--env", "CartPol-v1"]) == 2
    assert "Did you mean 'CartPole-v1'?" in capsys.readouterr().err
