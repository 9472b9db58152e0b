"""From what a user names (an env's name or id, `module:Class`, a class, a function) to what makes the env.

`resolve` is the one way in for vectors, training, agents and commands. What it returns holds the class, function or
Gymnasium spec itself, never a name, so a worker process need not have run the code that registered it.

Adding an env of shoal's own: a file with a `TextEnv`, a line in `BUILT_IN`, a test.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import json
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled

from shoal.core.data import deep_copy
from shoal.core.errors import (
    ConfigError,
    MissingExtraError,
    UnknownNameError,
    did_you_mean,
    explain_import,
    format_error,
    user_frames,
)
from shoal.core.extensions import package_of
from shoal.core.registry import SAFE_NAME, Registry
from shoal.envs.text import TextEnv

logger = logging.getLogger(__name__)
Env = gymnasium.Env[Any, Any]
EnvFn = Callable[[], Env]
"""Makes one environment; it can be sent to another process (by cloudpickle)."""
Source = str | Callable[..., Env] | EnvSpec
"""What can be asked for: a name (see `find`), a class, a function, or Gymnasium's spec."""
Wrapper = str | Callable[[Any], Env]
"""A function or class from env to env, or its "module:Name"."""

BUILT_IN = {
    "frozen_lake": "shoal.envs.frozen_lake:FrozenLakeEnv",
    "bandit": "shoal.envs.bandit:BanditEnv",
    "sokoban": "shoal.envs.sokoban.env:SokobanEnv",
    "countdown": "shoal.envs.countdown:CountdownEnv",
    "metamathqa": "shoal.envs.metamathqa:MetaMathQAEnv",
    "webshop": "shoal.envs.webshop.env:WebShopEnv",
}
"""shoal's own envs; each is also `shoal/Name-v0` for `gymnasium.make`."""

ADAPTERS = {
    "gymnasium": "shoal.envs.adapters.gymnasium:GymnasiumEnv",
    "reasoning_gym": "shoal.envs.adapters.reasoning_gym:ReasoningGymEnv",
    "textarena": "shoal.envs.adapters.textarena:TextArenaEnv",
    "textworld": "shoal.envs.adapters.textworld:TextWorldEnv",
    "gem": "shoal.envs.adapters.gem:GemEnv",
    "aviary": "shoal.envs.adapters.aviary:AviaryEnv",
    "openenv": "shoal.envs.adapters.openenv:OpenEnvEnv",
    "openenv_tools": "shoal.envs.adapters.openenv_tools:OpenEnvToolEnv",
    "program": "shoal.envs.program:ProgramEnv",
}
"""Other people's envs as text; which one is a setting."""

SEATS = {"pettingzoo": "shoal.envs.adapters.pettingzoo:TurnGameEnv"}
"""Other people's games of several seats, from one of them; agents see them through the adapter `gymnasium`."""

BATCHES = ("ale", "envpool", "gymnax", "jax")
"""What names of batches begin with, as in "envpool:Pong-v5": only `make_vec(backend="native")` makes them."""

GROUP = "shoal.envs"
"""The group of entry points in which installed packages name their envs."""

_envs: Registry[str | Callable[..., Env]] = Registry("env")
for _name, _where in {**BUILT_IN, **ADAPTERS, **SEATS}.items():
    _envs.register(_name, _where)


# --- names
def register(name: str, env: str | Callable[..., Env], *, replace: bool = False) -> None:
    """Give an env a name: its class, a function that makes it, or "module:Class", imported on first use."""
    _envs.register(name, env, replace=replace)


def names() -> list[str]:
    """All names: shoal's own, those registered, and those of installed packages; sorted."""
    return sorted({*_envs, *installed()})


class Installed(NamedTuple):
    """An env that an installed package names in its entry points."""

    package: str
    where: str  # module:Class


def installed() -> dict[str, Installed]:
    """The envs that installed packages name in the group `shoal.envs`, none of them imported."""
    found: dict[str, Installed] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = package_of(entry)
        where = entry.value.partition("[")[0].strip()  # behind it stand the extras that it needs
        if SAFE_NAME.fullmatch(entry.name):
            found.setdefault(entry.name, Installed(package, where))
        else:
            logger.warning("package %s names an env %r, which is no usable name", package, entry.name)
    return found


def name_of(env: Source) -> str:
    """What to call an env in files and messages."""
    if isinstance(env, str):
        return env
    if isinstance(env, functools.partial):
        return name_of(env.func)
    return env.id if isinstance(env, EnvSpec) else str(getattr(env, "__qualname__", type(env).__name__))


def names_batch(env: Any) -> bool:
    """Whether it is a name such as "envpool:Pong-v5", which stands for a batch and for no single env."""
    return isinstance(env, str) and env.startswith(tuple(f"{kind}:" for kind in BATCHES))


# --- from a name to what makes an env
def find(env: Source) -> Callable[..., Env] | EnvSpec:
    """The class, function or spec that `env` stands for; imports what it names and nothing else.

    A name is one of: a name that `names()` has, a Gymnasium id, `module:Id-v0` (importing the module registers the
    id; Gymnasium's own ids have no other module), `module:Class` or `module:function` (dotted names too, such as
    `module:Outer.Inner`).

    Raises:
        UnknownNameError: nothing has that name; says which was probably meant, or which package has it.
        ConfigError: the module cannot be imported, or what it has there makes no env.
        MissingExtraError: it needs a package that is not installed.
    """
    if isinstance(env, EnvSpec):
        return _without_main(env)
    if not isinstance(env, str):
        if callable(env):
            return env
        raise TypeError(
            "an environment is a name, a spec, a class or a function that makes one, got the object "
            f"{type(env).__name__}: pass a function, such as lambda: gymnasium.make('CartPole-v1')"
        )
    if env in _envs:
        registered = _envs[env]
        return _of_module(registered) if isinstance(registered, str) else registered
    if ":" in env:
        return _of_module(env)
    if env in gymnasium.registry:
        return _without_main(gymnasium.registry[env])
    packaged = installed()
    if env in packaged:
        return _of_module(packaged[env].where)
    raise _unknown(env, [*_envs, *packaged, *gymnasium.registry])


def resolve(
    env: Source, *, env_kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[Wrapper] = ()
) -> EnvFn:
    """A function without arguments that makes the env, here or in a worker process.

    Args:
        env: what `find` takes.
        env_kwargs: for what makes the env; of Gymnasium's ids also those of `gymnasium.make`. Each env has its own copy
            of their dicts, lists, tuples, sets and arrays; arrays of more than a megabyte they share, and cannot write.
        wrappers: put around the env, the first innermost: callables from env to env, or "module:Name".

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: it cannot be imported, makes no env, or does not accept `env_kwargs`.
        MissingExtraError: it needs a package that is not installed.

    >>> make = resolve("frozen_lake", env_kwargs={"size": 3}, wrappers=["gymnasium.wrappers:RecordEpisodeStatistics"])
    >>> make().unwrapped.config.size
    3
    """
    if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
        raise ConfigError(f"wrappers must be a sequence of wrappers, got {wrappers!r:.80}: put it in a list")
    make = _bound(name_of(env), find(env), named(env_kwargs))
    return functools.partial(_make_wrapped, make, *map(find_wrapper, wrappers)) if wrappers else make


def named(env_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of an env as they are now, which must be a mapping of names to values."""
    if not isinstance(env_kwargs, Mapping | None) or not all(
        isinstance(name, str) for name in env_kwargs or ()
    ):
        raise ConfigError(f"env_kwargs must be a mapping of names to values, got {env_kwargs!r:.80}")
    return _own_arguments(env_kwargs or {})


MOST_COPIED = 1 << 20
"""Bytes of an array that every env has of its own."""


def _own_arguments(env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that an env may change; its large arrays, which may be data for all, it can only read."""
    kept = {}
    for name, value in env_kwargs.items():
        if isinstance(value, np.ndarray) and value.nbytes > MOST_COPIED:
            kept[name] = value.view()
            kept[name].flags.writeable = False
        else:
            kept[name] = deep_copy(value)
    return kept


class _Making(functools.partial[Any]):
    """A partial whose every env has arguments of its own: what one takes out of a list is there for the next."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.func(*self.args, *args, **_own_arguments(self.keywords), **kwargs)


def _bound(name: str, found: Callable[..., Env] | EnvSpec, kwargs: dict[str, Any]) -> EnvFn:
    """What was found with its arguments, which are checked."""
    if isinstance(found, EnvSpec):
        if kwargs:  # else it is not imported before it is made
            _check_arguments(name, _creator(found), kwargs, found.kwargs, _MAKE_ARGUMENTS)
        return _Making(_make_registered, found, **kwargs)
    if _is_text_class(found):
        kwargs = found.resolved(kwargs)
    _check_arguments(name, found, kwargs)
    return _Making(found, **kwargs) if kwargs else found


# --- text envs
def env_class(name: str) -> type[TextEnv[Any]]:
    """The `TextEnv` class registered under `name`, or given as "module:Class"."""
    found = find(name)
    if not _is_text_class(found):
        raise ConfigError(f"{name!r} must be a TextEnv class, got {found!r}")
    return found


def resolve_text(env: Source, config: Mapping[str, Any] | None = None) -> Callable[[], TextEnv[Any]]:
    """`resolve` for agents: an env that is no `TextEnv` is shown as text by the adapter `gymnasium`.

    Args:
        env: what `find` takes.
        config: the env's settings; to set how the adapter shows it, name the adapter and give the env as its `id`.
    """
    found = find(env)
    make = _bound(name_of(env), found, named(config))
    if _is_text_class(found):
        return make  # type: ignore[return-value]
    if isinstance(found, type | EnvSpec):
        return functools.partial(env_class("gymnasium"), id=name_of(env), make=make)
    return functools.partial(_shown_as_text, make, name_of(env))


def make(env_type: str, **config: Any) -> TextEnv[Any]:
    """A text env by name, with its config's settings as keywords.

    >>> env = make("frozen_lake", is_slippery=False)
    >>> observation, info = env.reset(seed=3)
    """
    return resolve_text(env_type, config)()


def _shown_as_text(make: EnvFn, name: str) -> TextEnv[Any]:
    """What a function makes, as text if it is no `TextEnv`, which is known only then."""
    env = make()
    if isinstance(env, TextEnv):
        return env
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{name} must make a gymnasium.Env, got {type(env).__name__}")
    show = "auto" if env.render_mode == "ansi" else "values"
    env.close()
    return env_class("gymnasium")(id=name, make=make, show=show)


# --- modules
def _of_module(name: str) -> Callable[..., Env] | EnvSpec:
    """What "module:rest" is: an attribute of the module if it has that, else the Gymnasium id `rest`."""
    path, _, rest = name.partition(":")
    if names_batch(name):
        alone = f"; the game alone is 'ale_py:ALE/{rest}'" if path == "ale" else ""
        raise ConfigError(
            f"{name!r} is a native batch, not an environment that can be stepped alone: make_vec({name!r}, …, "
            f"backend='native') makes it, shoal train-ppo and PPO train on it; agents and other backends need an "
            f"environment in Python{alone}"
        )
    module, found = attribute_named(name, "the environment")
    of_gymnasium = path.partition(".")[0] == "gymnasium"
    if found is None and rest in gymnasium.registry:
        found = gymnasium.registry[rest]
        if _is_gymnasiums_own(found) and not of_gymnasium:
            raise ConfigError(
                f"{path} has no environment {rest!r}, Gymnasium has: write {rest!r} for Gymnasium's, or name what "
                f"{path} has as 'module:Class', 'module:function' or 'module:Id-v0'"
            )
    if found is None:
        _refuse_folder(module, rest)
        classes = [key for key, value in vars(module).items() if _is_env_class(value)]
        shown = ", ".join(classes[:5]) + (", …" if classes[5:] else "")
        has = f"; it has {shown}" if classes else ""
        ids = [id for id, spec in gymnasium.registry.items() if of_gymnasium or not _is_gymnasiums_own(spec)]
        raise _unknown(rest, [*classes, *ids], f"{module.__name__}:", has)
    if isinstance(found, EnvSpec):
        return _without_main(found)
    if not callable(found) or (isinstance(found, type) and not _is_env_class(found)):
        raise ConfigError(
            f"{name!r} must be a gymnasium.Env class, a function that makes an env, or an id, got {found!r}"
        )
    return found  # type: ignore[no-any-return]


def _is_gymnasiums_own(spec: EnvSpec) -> bool:
    """Whether it is as Gymnasium itself registers it, so that no other module gave it this id."""
    made_by = spec.entry_point if isinstance(spec.entry_point, str) else ""
    return made_by.startswith("gymnasium.envs.") and f'id="{spec.id}"' in inspect.getsource(gymnasium.envs)


def _refuse_folder(module: Any, rest: str) -> None:
    """Raise an `UnknownNameError` where a folder was imported, though the env is in a module inside it."""
    name = module.__name__
    inside = [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ()))]
    own = name.rpartition(".")[2]
    plain_folder = inside and module.__spec__.origin is None  # without an __init__.py
    if own in inside or plain_folder:
        likely = own if own in inside else inside[0]
        raise UnknownNameError(
            f"no env named {f'{name}:{rest}'!r}: {name} is the folder {next(iter(module.__path__))}, with the modules "
            f"{', '.join(inside)}; name the one that has the env, as in '{name}.{likely}:{rest}'"
        )


def attribute_named(name: str, kind: str) -> tuple[Any, Any]:
    """The module of "module:Name", imported, and what it has under that (dotted) name, else None.

    Raises:
        ConfigError: the text has another form, or the module cannot be imported, whatever it raises.
        MissingExtraError: it needs a package that is not installed.
    """
    path, _, rest = name.partition(":")
    if not rest or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{kind} must be 'module:Name' with the module as Python imports it ('package.module:Name'), got {name!r}"
        )
    try:
        module = found = importlib.import_module(path)
        for part in rest.split("."):
            found = getattr(found, part, None)  # type: ignore[assignment]
    except (Exception, SystemExit) as error:  # a module may raise anything; the message names it
        raise _not_imported(name, path, kind, error) from error
    return module, found


def function_named(name: str, kind: str) -> Callable[..., Any]:
    """The function that "module:function" stands for; raises as `attribute_named` does."""
    _, found = attribute_named(name, kind)
    if found is None:
        raise ConfigError(f"{kind} {name!r}: its module holds nothing of that name")
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} must be a function, got {found!r:.80}")
    return found  # type: ignore[no-any-return]


def _not_imported(name: str, path: str, kind: str, error: BaseException) -> Exception:
    said = f"cannot import {kind} {name!r}"
    if isinstance(error, ModuleNotFoundError):
        explained = explain_import(f"{kind} {name!r}", error)
        if explained is not error:
            return explained
        if error.name is not None and f"{path}.".startswith(f"{error.name}."):
            package = _package_of(name.partition(":")[2])
            wanted = "'module:Class', 'module:function' or 'module:Id-v0'"
            file = "; leave out '.py'" if path.endswith(".py") else ""
            return ConfigError(
                f"{said}: there is no module {error.name!r} here{file}; expected "
                f"{wanted if package is None else package.written(name.partition(':')[2])}, of a module in the "
                "current folder or on PYTHONPATH"
            )
    if isinstance(error, ConfigError):  # a class that was refused says which, and where
        return ConfigError(f"{said}: {error}")
    lines = "".join(f"\n  {line}" for line in user_frames(error))
    return ConfigError(f"{said}: importing {path!r} failed with {format_error(error)}{lines}")


def _is_env_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, gymnasium.Env)


def _is_text_class(value: Any) -> TypeGuard[type[TextEnv[Any]]]:
    return isinstance(value, type) and issubclass(value, TextEnv)


# --- Gymnasium's specs
_MAKE_ARGUMENTS = ("max_episode_steps", "disable_env_checker", "render_mode")


def _make_registered(spec: EnvSpec, /, **kwargs: Any) -> Env:
    try:
        return gymnasium.make(spec, **kwargs)
    except DependencyNotInstalled as error:
        raise _needs_package(spec, error) from error


def _creator(spec: EnvSpec) -> Any:
    """The class or function behind a spec."""
    if callable(spec.entry_point):
        return spec.entry_point
    if spec.entry_point is None:
        raise ConfigError(f"environment {spec.id!r} has only a vector env of its own, no single one")
    try:
        return load_env_creator(spec.entry_point)
    except DependencyNotInstalled as error:
        raise _needs_package(spec, error) from error
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import environment {spec.id!r} ({spec.entry_point}): {error}") from error


def _needs_package(spec: EnvSpec, error: Exception) -> MissingExtraError:
    return MissingExtraError(f"environment {spec.id!r} needs a package: {error}")


def _without_main(spec: EnvSpec) -> EnvSpec:
    """The spec; what it names in the main script, which a worker's own main module lacks, is put in its place."""
    if not (isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:")):
        return spec
    found = copy.copy(spec)
    found.entry_point = _creator(spec)
    return found


# --- arguments and wrappers
def _check_arguments(
    name: str, made_by: Any, given: Mapping[str, Any], preset: Iterable[str] = (), also: Iterable[str] = ()
) -> None:
    """Raise a `ConfigError` for arguments that `made_by` does not take, or that it needs and lacks."""
    try:
        parameters = list(inspect.signature(made_by).parameters.values())
    except (TypeError, ValueError):  # written in C, without a signature
        return
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [*(p.name for p in takes), *also]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    config = getattr(made_by, "Config", None) if _is_text_class(made_by) else None
    if takes_any and isinstance(config, type) and dataclasses.is_dataclass(config):
        # a text env: what is left goes to its config
        settings = [field.name for field in dataclasses.fields(config)]
        for key in given:
            if key not in {*known, *settings, "config", "render_mode"}:
                raise ConfigError(f"{config.__name__} has no setting {key!r}.{did_you_mean(key, settings)}")
        return
    accepts = f"It accepts: {', '.join(map(_written, takes)) or 'nothing'}"
    for key in given:
        if key not in known and not takes_any:
            guess = did_you_mean(key, known).partition(" Known:")[0]
            raise ConfigError(f"environment {name!r} takes no argument {key!r}.{guess} {accepts}")
    lacking = [p.name for p in takes if p.default is p.empty and p.name not in {*given, *preset}]
    if lacking:
        raise ConfigError(
            f"environment {name!r} needs {', '.join(lacking)}: give env_kwargs (--env-kwargs KEY=VALUE). {accepts}"
        )


def _written(parameter: inspect.Parameter) -> str:
    return (
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
    )


def parse_env_kwargs(words: Iterable[str]) -> dict[str, Any]:
    """Arguments of an env from words KEY=VALUE; a value is JSON, and plain text where it is not.

    >>> parse_env_kwargs(["size=3", "map_name=8x8", "render_mode=null"])
    {'size': 3, 'map_name': '8x8', 'render_mode': None}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--env-kwargs must be KEY=VALUE, got {word!r}")
        if key in found:
            raise ConfigError(f"the argument {key!r} of the environment was given twice")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = text
    return found


def find_wrapper(wrapper: Wrapper) -> Callable[[Any], Env]:
    """The function or class from env to env that `wrapper` is or names.

    Raises:
        UnknownNameError: its module has nothing of that name.
        ConfigError: its module cannot be imported, or it cannot be called.
    """
    found = wrapper
    if isinstance(wrapper, str):
        module, found = attribute_named(wrapper, "the wrapper")
        if found is None:
            known = [key for key, value in vars(module).items() if isinstance(value, type)]
            near = _or(_nearest(wrapper.partition(":")[2], known))
            raise UnknownNameError(
                f"no wrapper named {wrapper!r}.{near} Expected module:Name of what {module.__name__} holds"
            )
    if not callable(found):
        raise ConfigError(f"a wrapper must be a function or class from env to env, got {found!r}")
    return found


def wrapper_name(wrapper: Wrapper) -> str:
    """The "module:Name" of a wrapper, as far as it has one."""
    if isinstance(wrapper, str):
        return wrapper
    if isinstance(wrapper, functools.partial):
        return f"partial of {wrapper_name(wrapper.func)}"
    return f"{wrapper.__module__}:{name_of(wrapper)}"


def _make_wrapped(make: EnvFn, /, *wrappers: Callable[[Any], Env]) -> Env:
    return functools.reduce(_wrapped, wrappers, make())


def without_wrappers(make: EnvFn) -> EnvFn:
    """What makes the env alone, of what `resolve` gave."""
    if isinstance(make, functools.partial) and make.func is _make_wrapped:
        return make.args[0]  # type: ignore[no-any-return]
    return make


def _wrapped(env: Env, wrapper: Callable[[Any], Env]) -> Env:
    try:
        around = wrapper(env)
    except TypeError as error:
        raise ConfigError(
            f"the wrapper {name_of(wrapper)} cannot be put around an env: {error}; give it its other arguments "
            f"by functools.partial or a function of your own"
        ) from error
    if not isinstance(around, gymnasium.Env):
        raise ConfigError(
            f"the wrapper {name_of(wrapper)} must return a gymnasium.Env, got {type(around).__name__}"
        )
    return around


# --- unknown names
class Package(NamedTuple):
    """Whose ids are known by their look, only to help with a name that nothing has."""

    ids: str  # a regular expression
    module: str  # to import
    pip: str
    prefix: str = ""  # of the id, where the name lacks it

    def written(self, name: str) -> str:
        """How to ask for an env of the package."""
        return f"'{self.module}:{self.prefix}{name}' (pip install {self.pip})"


PACKAGES = (
    Package(r"ALE/|\w+(NoFrameskip|Deterministic)-v\d", "ale_py", "ale-py"),
    Package(r"MiniGrid-|BabyAI-", "minigrid", "minigrid"),
    Package(
        r"Fetch(Reach|Push|Slide|PickAndPlace)|Hand(Reach|Manipulate)|(Ant|Point)Maze|AdroitHand|FrankaKitchen",
        "gymnasium_robotics", "gymnasium-robotics",
    ),
    Package(r"dm_control/", "shimmy", '"shimmy[dm-control]"'),
    Package(r"procgen-", "procgen_gym", "procgen-gym", "procgen_gym/"),
    Package(r"(highway|merge|roundabout|parking|intersection|racetrack)(-\w+)?-v\d", "highway_env", "highway-env"),
    Package(r"MiniWorld-", "miniworld", "miniworld"),
    Package(r"Meta-World/", "metaworld", "metaworld"),
    Package(r"Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip)", "panda_gym", "panda-gym"),
)  # fmt: skip


def _package_of(name: str) -> Package | None:
    return next((row for row in PACKAGES if re.match(row.ids, name)), None)


def _unknown(name: str, known: Iterable[str], module: str = "", has: str = "") -> UnknownNameError:
    """An error for `name`, with what its module `has`, the nearest of `known` or the package that has it."""
    said = f"no env named {module + name!r}."
    if module:
        said += f" {module[:-1]} was imported and has no {name}{has}."
    package, near = _package_of(name), _nearest(name, known)
    imported = package is not None and module == f"{package.module}:"
    if package is not None and not imported and not any(_plain(one) == _plain(name) for one in near):
        return UnknownNameError(f"{said} It is of a package that must be imported: {package.written(name)}")
    forms = "" if module else (
        " `shoal envs list` shows shoal's own, gymnasium.pprint_registry() Gymnasium's; others are 'module:Id-v0', "
        "'module:Class' or 'module:function'"
    )  # fmt: skip
    return UnknownNameError(f"{said}{_or([module + one for one in near])}{forms}")


def _nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """A few names like `name`, whatever their case, version and namespace; the best of each."""
    alike: dict[str, list[str]] = {}
    for one in known:
        alike.setdefault(_plain(one), []).append(one)
    plain = _plain(name)
    close = difflib.get_close_matches(plain, alike, n=most, cutoff=0.95)
    close = close or difflib.get_close_matches(plain, alike, n=most, cutoff=0.7)

    def likeness(one: str) -> tuple[float, str]:
        return difflib.SequenceMatcher(None, one, name).ratio(), one

    return [max(alike[found], key=likeness) for found in close]


def _plain(name: str) -> str:
    return re.sub(r"-v\d+$", "", name.rpartition("/")[2]).replace("_", "").replace("-", "").casefold()


def _or(near: Sequence[str]) -> str:
    quoted = [repr(one) for one in near]
    return (
        f" Did you mean {' or '.join(filter(None, [', '.join(quoted[:-1]), *quoted[-1:]]))}?" if near else ""
    )


# --- Gymnasium
def gymnasium_id(name: str) -> str:
    """The id of one of shoal's own envs for `gymnasium.make`.

    >>> gymnasium_id("frozen_lake")
    'shoal/FrozenLake-v0'
    """
    return f"shoal/{BUILT_IN[name].partition(':')[2].removesuffix('Env')}-v0"


# `gymnasium.make("shoal.envs:shoal/Sokoban-v0")` imports this module by itself
for _name, _where in BUILT_IN.items():
    if gymnasium_id(_name) not in gymnasium.registry:
        gymnasium.register(gymnasium_id(_name), entry_point=_where)
