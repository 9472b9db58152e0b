"""Which envs a run plays: the `es_manager` and `custom_envs` parts of the YAML, checked and made.

`tags` name entries of `custom_envs`; `n_groups` says how many of `env_groups` each tag gets, as counts or as
proportions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from shoal.core.configuration import check_settings, from_mapping, plain_values
from shoal.core.errors import ConfigError, EnvError, ShoalError, did_you_mean
from shoal.core.executors import available_cpus, in_own_thread
from shoal.envs.catalogue import resolve_text
from shoal.envs.tools import Tool, tools_of
from shoal.rollout.episode import Role
from shoal.rollout.hosts.episodes import close_env
from shoal.rollout.hosts.pool import EnvPool
from shoal.rollout.prompts import TOOL_PROMPT, PromptConfig
from shoal.rollout.tools.chat import tool_words
from shoal.vector import make_vec
from shoal.vector.make import BackendName as Backend
from shoal.vector.vector_env import VectorPool

C = TypeVar("C")
STEP_TIMEOUT = 60.0
"""Default, in seconds."""


@dataclass(frozen=True)
class EnvTag:
    """One kind of environment, under a name (tag) that you choose."""

    env_type: str
    """The environment: a name (`shoal envs list`), a Gymnasium id, "module:Id-v0" or "module:Class"."""
    max_actions_per_traj: int | None = None
    """Turns after which an episode is truncated; the env's own `max_steps` if not given."""
    env_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment, passed to its constructor."""
    max_actions_per_turn: int = 1
    """Maximum number of actions in one response."""
    action_sep: str = "||"
    """Separator between the actions of one response."""
    prompt: dict[str, Any] = field(default_factory=dict)
    """Templates of this kind of environment that replace those of `agent_proxy.prompt`."""

    def __post_init__(self) -> None:
        check_settings(self, max_actions_per_turn=1, max_actions_per_traj=1)
        if not self.action_sep:
            raise ConfigError("action_sep must not be empty")
        if "mode" in self.prompt:
            raise ConfigError("prompt.mode is one for all envs: set agent_proxy.prompt.mode")
        from_mapping(PromptConfig, self.prompt, "prompt.")

    def role(self) -> Role:
        """What all envs of this kind have in common; the first call makes one and closes it."""
        known: Role | None = self.__dict__.get("_role")
        if known is not None:
            return known
        env = resolve_text(self.env_type, self.env_config)()
        try:
            tools = tools_of(env.reset(seed=0)[1]) if env.calls_tools else None
            known = Role(
                "", env.instructions, env.projection, env.max_steps, self.prompt, env.draws_actions,
                env.has_expert, tools,
            )  # fmt: skip
        finally:
            close_env(env)
        self.__dict__["_role"] = known
        return known


@dataclass(frozen=True)
class EnvMix:
    """The mix of kinds of environments."""

    tags: tuple[str, ...] = ()
    """Names of entries of `custom_envs`. Those of `val` are those of `train` where it names none."""
    n_groups: tuple[int, ...] = ()
    """Groups of each tag; the sum must be `env_groups` or a divisor of it. Empty for equal shares. Where `val` names no
    tags, it has them in the proportions of `train`."""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class EnvGroups:
    """The groups of episodes of one iteration."""

    env_groups: int = 8
    """Number of groups: start states per iteration."""
    group_size: int = 16
    """Episodes per group, all from its start state."""
    env_configs: EnvMix = EnvMix()

    def __post_init__(self) -> None:
        check_settings(self, env_groups=1, group_size=1)
        self.group_tags()

    def group_tags(self) -> tuple[str, ...]:
        """The tag of each group."""
        tags, shares = self.env_configs.tags, self.env_configs.n_groups or (1,) * len(self.env_configs.tags)
        if not tags:
            return ()
        if len(shares) != len(tags) or min(shares) < 1:
            raise ConfigError(
                f"env_configs.n_groups must give a positive number for each of the tags {list(tags)}, "
                f"got {list(shares)}"
            )
        if self.env_groups % sum(shares):
            raise ConfigError(
                f"env_configs.n_groups {list(shares)} must sum to env_groups={self.env_groups} or to a divisor "
                f"of it, got a sum of {sum(shares)}"
            )
        unit = self.env_groups // sum(shares)
        return tuple(tag for tag, share in zip(tags, shares, strict=True) for _ in range(share * unit))


@dataclass(frozen=True)
class EsManager:
    """Training and validation envs; `val` has the kinds of `train` where it names none of its own."""

    train: EnvGroups = EnvGroups()
    val: EnvGroups = EnvGroups(env_groups=64, group_size=1)

    def __post_init__(self) -> None:
        check_settings(self)
        mix = self.train.env_configs
        if mix.tags and not self.val.env_configs.tags:
            shares = self.val.env_configs.n_groups or _shares(mix, self.val.env_groups)
            followed = EnvMix(mix.tags, shares)
            object.__setattr__(self, "val", replace(self.val, env_configs=followed))


def _shares(mix: EnvMix, groups: int) -> tuple[int, ...]:
    """How many of so many groups each kind of a mix gets: in its proportions, and at least one."""
    shares = mix.n_groups or (1,) * len(mix.tags)
    if groups % sum(shares) == 0:
        return mix.n_groups
    if groups < len(shares):
        raise ConfigError(
            f"es_manager.val.env_groups={groups} must be at least {len(shares)}, a group for each of the tags "
            f"{list(mix.tags)} of es_manager.train: raise it, or name fewer in es_manager.val.env_configs.tags"
        )
    counts = [1] * len(shares)
    while sum(counts) < groups:  # the next one to the kind that lacks most of its share (Sainte-Laguë)
        counts[min(range(len(shares)), key=lambda i: (counts[i] + 0.5) / shares[i])] += 1
    return tuple(counts)


@dataclass(frozen=True)
class VectorConfig:
    """Where environments are stepped; affects speed, not results."""

    backend: Backend = "auto"
    """`auto` measures one environment and chooses a backend."""
    num_workers: int | None = None
    """Number of workers; the backend's default if not given."""
    step_timeout: float | None = STEP_TIMEOUT
    """Seconds for one step or reset of an environment, after which its worker is replaced; null for no limit.
    Environments in the trainer's process (`serial`) cannot be interrupted: the default is ignored there."""
    make_timeout: float | None = None
    """Seconds for the constructor of an environment; `step_timeout` if not given."""

    def __post_init__(self) -> None:
        check_settings(self, ["step_timeout", "make_timeout"], num_workers=1)

    @property
    def limit(self) -> float | None:
        """`step_timeout`, unless it is the default and means nothing here."""
        return None if self.backend == "serial" and self.step_timeout == STEP_TIMEOUT else self.step_timeout


@dataclass(frozen=True)
class EnvironmentConfig:
    """What `make_environments` reads; a whole training config has these fields too."""

    es_manager: EsManager = EsManager()
    custom_envs: dict[str, EnvTag] = field(default_factory=dict)
    use_parallel_envs: bool = True
    vector: VectorConfig = VectorConfig()

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class EnvironmentSet:
    """A pool of envs, what kind each group is, and what an agent knows of each kind."""

    pool: EnvPool
    tags: tuple[str, ...]
    group_size: int
    roles: dict[str, Role]


class NoEnvs:
    """The pool of a rollout whose workers make envs of their own."""

    def reset_some(self, indices: Sequence[int], seeds: Sequence[int], /) -> Any:
        """There is nothing to reset."""
        raise EnvError("these envs live in rollout workers (use_parallel_rollout): there is no pool to step")

    step_some = reset_some

    def close(self) -> None:
        """There is nothing to close."""


def make_environments(config: Any, *, with_pools: bool = True) -> tuple[EnvironmentSet, EnvironmentSet]:
    """Training and validation envs of a config (an object or mapping with the keys of `EnvironmentConfig`)."""
    checked = validate_environment_config(config)
    sides = checked.es_manager.train, checked.es_manager.val
    train, val = (make_set(checked, side, with_pool=with_pools) for side in sides)
    return train, val


def make_set(config: EnvironmentConfig, groups: EnvGroups, *, with_pool: bool = True) -> EnvironmentSet:
    """The envs of one side; close its pool when done. Without a pool when workers make envs of their own."""
    tags = groups.group_tags()
    if with_pool and (programs := program_tags(config.custom_envs, tags)):
        raise ConfigError(
            f"custom_envs.{programs[0]}: programs are played beside each other: set "
            f"agent_proxy.use_parallel_rollout=true"
        )
    if not with_pool:
        return EnvironmentSet(NoEnvs(), tags, groups.group_size, make_roles(config.custom_envs, tags))
    kinds = [config.custom_envs[tag] for tag in tags for _ in range(groups.group_size)]
    pool = make_pool([resolve_text(kind.env_type, kind.env_config) for kind in kinds], host_of(config))
    return EnvironmentSet(pool, tags, groups.group_size, make_roles(config.custom_envs, tags))


def program_tags(custom_envs: Mapping[str, EnvTag], tags: Sequence[str]) -> list[str]:
    """Those tags whose envs are programs, which ask the model by themselves."""
    return [tag for tag in dict.fromkeys(tags) if custom_envs[tag].env_type == "program"]


def host_of(config: Any) -> VectorConfig:
    """Where the envs of a config are stepped."""
    return config.vector if config.use_parallel_envs else VectorConfig(backend="serial")  # type: ignore[no-any-return]


def make_pool(env_fns: Sequence[Callable[[], Any]], vector: VectorConfig) -> VectorPool:
    """Envs for episodes; one that fails, hangs or ends its process is replaced, and its episode is lost."""
    n_workers = vector.num_workers
    if n_workers is None and vector.backend in ("auto", "process"):
        n_workers = min(available_cpus(), len(env_fns))  # not one for each env, as with a limit of its own
    pool: VectorPool = make_vec(
        env_fns,
        backend=vector.backend,
        num_workers=None if vector.backend == "serial" else n_workers,
        step_timeout=vector.limit,
        make_timeout=vector.make_timeout,
        autoreset="disabled",
        on_failure="restart",
        max_restarts=1000,
        check_nan=False,  # an episode looks at its rewards itself
    )
    pool.warns = False  # the player of the episodes reports them
    return pool


def make_roles(
    custom_envs: Mapping[str, EnvTag], tags: Sequence[str], max_turn: int | None = None
) -> dict[str, Role]:
    """The role of each tag; turns are limited by the smallest of `max_turn`, tag and env."""
    roles = {}
    for tag in dict.fromkeys(tags):
        kind = custom_envs[tag]
        role = _role_of(tag, kind)
        limits = (max_turn, kind.max_actions_per_traj, role.max_turns)
        turns = min(limit for limit in limits if limit is not None)
        projection = role.projection
        if (most := kind.max_actions_per_turn) > 1:
            projection = replace(projection, separator=kind.action_sep, max_actions=most)
        prompt = kind.prompt if role.tools is None else {**TOOL_PROMPT, **kind.prompt}
        roles[tag] = replace(role, tag=tag, projection=projection, max_turns=turns, prompt=prompt)
    return roles


def words_of(config: Any, tools: Sequence[Tool] = ()) -> list[str]:
    """The words for actions and calls of all that a run plays, of which an untrained tiny engine makes tokens."""
    tags = {*config.es_manager.train.group_tags(), *config.es_manager.val.group_tags()}
    roles = make_roles(config.custom_envs, sorted(tags), config.agent_proxy.max_turn)
    return words_of_roles(roles, tools)


def words_of_roles(roles: Mapping[str, Role], tools: Sequence[Tool] = ()) -> list[str]:
    """The words for actions of these roles, and pieces of calls of these tools."""
    words = sorted({word for role in roles.values() for word in role.projection.words()})
    return words + tool_words([*tools, *(tool for role in roles.values() for tool in role.tools or ())])


def part_of(kind: type[C], config: Any) -> C:
    """A config dataclass out of an object or a mapping that has more than its fields."""
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    if isinstance(config, Mapping):
        return from_mapping(kind, {name: plain_values(config[name]) for name in config if name in names})
    return kind(**{name: getattr(config, name) for name in names})


def validate_environment_config(config: Any) -> EnvironmentConfig:
    """The checked config; a `ConfigError` says which key is wrong, what was expected and what came.

    One env of every kind that is used is made and closed, so that a wrong setting shows now and not in a worker; within
    the time that `config` gives its constructor, if it gives one.
    """
    proxy = None if isinstance(config, Mapping) else getattr(config, "agent_proxy", None)
    parallel, prompt = getattr(proxy, "parallel", None), getattr(proxy, "prompt", PromptConfig())
    checked = part_of(EnvironmentConfig, config)
    if checked.vector.step_timeout not in (None, STEP_TIMEOUT) and not checked.use_parallel_envs:
        raise ConfigError(
            "vector.step_timeout needs use_parallel_envs=true: with false the caller steps the envs, and cannot "
            "interrupt itself"
        )
    host = host_of(checked)
    own = None if host.step_timeout == STEP_TIMEOUT else host.step_timeout
    given = [host.make_timeout or own]
    if parallel is not None:
        given.append(parallel.make_timeout or parallel.step_timeout)
    seconds = max((limit for limit in given if limit is not None), default=host.limit)
    for side in ("train", "val"):
        tags = getattr(checked.es_manager, side).group_tags()
        if not tags:
            raise ConfigError(f"es_manager.{side}.env_configs.tags must name at least one of custom_envs")
        for tag in dict.fromkeys(tags):
            if tag not in checked.custom_envs:
                raise ConfigError(
                    f"es_manager.{side}.env_configs.tags names {tag!r}, which is not in custom_envs."
                    f"{did_you_mean(tag, checked.custom_envs)}"
                )
            _fits(tag, checked.custom_envs[tag], prompt)
            _try(tag, checked.custom_envs[tag], seconds)
    return checked


def _fits(tag: str, kind: EnvTag, prompt: PromptConfig) -> None:
    """The prompt settings of a kind go together with those of all."""
    try:
        replace(prompt, **kind.prompt)
    except ConfigError as error:
        raise ConfigError(f"custom_envs.{tag}.prompt with agent_proxy.prompt: {error}") from error


def _try(tag: str, kind: EnvTag, seconds: float | None) -> None:
    """Make an env of a kind and close it; a constructor that takes too long is abandoned in its thread."""
    if seconds is None:
        _role_of(tag, kind)
        return
    tried = in_own_thread(lambda: _role_of(tag, kind), f"shoal-try-{tag}")
    if not wait([tried], seconds).done:
        raise ConfigError(
            f"custom_envs.{tag}: making one env of {kind.env_type!r} took longer than {seconds:g} s "
            "(make_timeout, else step_timeout)"
        )
    tried.result()


def _role_of(tag: str, kind: EnvTag) -> Role:
    try:
        return kind.role()
    except (ShoalError, ImportError, AttributeError) as error:
        raise ConfigError(f"custom_envs.{tag}: {error}") from error
