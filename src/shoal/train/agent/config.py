"""The settings of agent training, as the YAML names them, checked against each other, and composed by Hydra.

Unknown keys are errors, and so are settings that would have no effect beside each other.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.core.configuration import check_fields, from_mapping, read_settings, to_mapping
from shoal.core.errors import ConfigError, UnknownNameError, unknown_name
from shoal.core.extensions import import_extensions
from shoal.core.registry import Registry
from shoal.maths.updates import Decay
from shoal.rollout.factory import EnvTag, EsManager, VectorConfig
from shoal.rollout.rewards.settings import ENV, FORMAT, RewardConfig
from shoal.rollout.settings import RolloutSettings
from shoal.samplers.registry import EngineConfig as EngineConfig
from shoal.train.agent.algorithms.advantages import ESTIMATORS, Method
from shoal.train.agent.algorithms.conflicts import conflicts_of
from shoal.train.agent.algorithms.losses import LOSSES, Aggregation, KLEstimator
from shoal.train.agent.algorithms.presets import free_answers, preset_words, purposes, settle
from shoal.train.agent.batch.packing import Batching

T = TypeVar("T")
FilterType = Literal["std", "max_mean"]
_COMPOSING = threading.Lock()


def check_ranges(settings: Any, **ranges: str) -> None:
    """A `ConfigError` for the first number that is not in its interval, such as `(0, 1]`; null and words pass."""
    known = {item.name: item.default for item in fields(settings)}
    for name, interval in ranges.items():
        value, (low, high) = getattr(settings, name), map(float, interval[1:-1].split(","))
        if value is None or isinstance(value, str):
            continue
        inside = low <= value <= high and (value != low or interval[0] == "[")
        if not inside or (value == high and interval[-1] == ")"):
            words = {"(0, inf": "positive", "[0, inf": "0 or positive", "[1, inf": "at least 1"}
            null = ", or null" if known[name] is None else ""
            raise ConfigError(
                f"{name} must be {words.get(interval[:-1], f'in {interval}')}{null}, got {value}"
            )


def _known(registry: Registry[T], name: str) -> T:
    """What is registered; a `ConfigError` names the nearest for what is not."""
    try:
        return registry[name]
    except UnknownNameError as error:
        hint = " PPO with a critic is adv_estimator=gae." if name == "ppo" else ""
        raise ConfigError(f"{error}{hint}") from error


@dataclass(frozen=True)
class FilterGroups:
    """Which groups are learned from."""

    enable: bool | Literal["auto"] = "auto"
    """Leave out groups whose members all got the same return. `auto`: where `max_num_gen_batches` is above 1."""
    max_num_gen_batches: int = 1
    """Batches of groups to play, at most, until `env_groups` with different rewards are there."""

    def __post_init__(self) -> None:
        check_ranges(self, max_num_gen_batches="[1, inf)")


@dataclass(frozen=True)
class Critic:
    """The value network of estimators that need one (`gae`)."""

    gae_lambda: float = 0.95
    """Trace decay from token to token."""
    learning_rate: float | Literal["auto"] = "auto"
    """Of the critic; `auto` follows from the engine."""
    value_clip: float | None = None
    """How far a value may move from that of the rollout before the loss stops pulling; null is no limit."""
    warmup: int = 0
    """Iterations at the start in which the critic learns alone: the policy's rate is 0 (verl's `critic_warmup`)."""
    whitening: Literal["population", "sample"] = "population"
    """Standard deviation that advantages are divided by; `sample` has Bessel's correction, as in verl."""

    def __post_init__(self) -> None:
        check_ranges(
            self, gae_lambda="[0, 1]", learning_rate="(0, inf)", value_clip="(0, inf]", warmup="[0, inf)"
        )


@dataclass(frozen=True)
class GiGPO:
    """Variants of the episode part of `gigpo`."""

    episode_reward: Literal["return", "sum"] = "sum"
    """Compare plain sums of rewards, as the paper does, or discounted returns."""
    statistics: Literal["episodes", "steps"] = "episodes"
    """What mean and standard deviation are of: each episode counts once, or once a turn as in verl-agent."""


@dataclass(frozen=True)
class KLPenalty:
    """Holding on to the weights that the run started from."""

    coef: float = 0.04
    """0 keeps no reference model."""
    estimator: KLEstimator = "k3"
    """Of the KL of the policy against the reference at a token. In the loss: `k3`, as GRPO has it, or `k2`, whose
    gradient is that of the KL; `k1`, the difference of the log-probabilities, has a gradient with mean 0 there. In the
    reward: `k1`, as RLOO, REINFORCE++ and PPO for language models have it, or one of the others."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: added to the loss of each token; `reward`: taken off the reward of each token before advantages."""
    anchor: Literal["warmup", "start"] = "warmup"
    """The reference: the weights after the warm-up (the supervised model of the papers), or those before it."""
    target: float | None = None
    """Nats a token that the policy shall be away from the reference: an iteration's coefficient is `coef` times the
    square of the KL of its answers over this (a token counts 10 nats at most). Little holds the policy near the
    reference, much far from it; null: `coef` everywhere."""

    def __post_init__(self) -> None:
        check_ranges(self, coef="[0, inf)", target="(0, inf)")


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights for an engine whose log-probs differ from the trainer's."""

    method: Literal["none", "truncate", "mask"] = "none"
    """`none`: weights are 1; `truncate`: larger weights than `cap` are cut to it (TIS); `mask`: what has a larger one
    is left out (MIS)."""
    level: Literal["token", "sequence"] = "token"
    """Whose weights: each token's, or those of whole samples, the product of their tokens'."""
    cap: float = 2.0
    """The largest weight."""
    floor: float = 0.0
    """With `mask`, what has a smaller weight is left out too (IcePop); 0 is off."""

    def __post_init__(self) -> None:
        check_ranges(self, cap="[1, inf]", floor="[0, 1]")
        if self.floor and self.method != "mask":
            raise ConfigError(
                f"floor={self.floor} has no effect with method={self.method}: set method to mask"
            )


@dataclass(frozen=True)
class Algorithm:
    """How trajectories change the weights."""

    adv_estimator: str = "grpo"
    """A registered estimator, see `shoal.train.agent.algorithms.advantages`."""
    gamma: float = 1.0
    """Discount per turn; below 1, shorter solutions are worth more."""
    step_advantage_weight: float = 1.0
    """GiGPO: weight of the step-level advantage beside the episode's."""
    gigpo: GiGPO = GiGPO()
    teacher: str | None = None
    """Distillation: the folder of a model, or of a checkpoint's engine, that scores the tokens (same vocabulary)."""
    policy_loss: str = "clip"
    """A registered loss, see `shoal.train.agent.algorithms.losses`."""
    loss_aggregation: Aggregation = "sequence_mean"
    """`token_mean`: every token counts the same; `sequence_mean`: every sample, and its tokens share; `constant`: the
    sum over tokens, divided by the number of samples and by `loss_constant`."""
    loss_constant: float | Literal["budget"] = 1.0
    """Tokens a sample is divided by, for `loss_aggregation: constant`. `budget`: as many as a sample may have,
    `max_tokens` a response."""
    clip_ratio_low: float = 0.2
    """How far below 1 a ratio counts."""
    clip_ratio_high: float = 0.2
    """How far above 1 a ratio counts."""
    dual_clip: float | None = None
    """Bound on the loss of tokens with negative advantage (above 1; 3 is usual)."""
    entropy_coef: float = 0.0
    """Bonus for a nat of entropy."""
    entropy_target: float | None = None
    """Nats a token at which the bonus has fallen to 0: it is whole for a deterministic policy, and never makes one more
    random than this. null: `entropy_coef` holds where any reward differs, and there is no bonus elsewhere."""
    learning_rate: float | Literal["auto"] = "auto"
    """Of Adam; `auto` follows from the engine."""
    lr_schedule: Decay = "constant"
    """From `learning_rate` at the first iteration to 0 after the last."""
    weight_decay: float = 0.0
    """Of AdamW; 0 is plain Adam."""
    epochs: int = 1
    """Passes over each iteration's samples."""
    minibatch_size: int | None = None
    """Samples of one gradient step (window prompt: turns; append: episodes); null: one step a batch."""
    micro_batch_tokens: int = 16384
    """Tokens, padding included, that go through the network at once; changes memory, not results."""
    batching: Batching = "packed"
    """How samples share the rows of a micro-batch: `packed` (several in a row, attention within each, and a common
    beginning once) or `padded` (one a row); changes speed. A model that cannot be packed is padded, which is said."""
    gradient_checkpointing: bool = False
    """Compute each layer a second time in the backward pass: less memory, the same gradients, about a third slower."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic of the update (autocast); weights and optimizer keep theirs. See `logprob_gap_max`."""
    max_grad_norm: float | None = 1.0
    """Longer gradients are shortened to this length; 0 or null leaves them as they are."""
    overlong_filter: bool = False
    """Learn nothing from episodes in which a response was cut off at `max_tokens` or by the context (DAPO). What
    `prompt.closing` is put behind is whole."""
    rollout_filter_ratio: float = 1.0
    """Share of the groups played to learn from: those that score highest; 1 keeps all."""
    rollout_filter_type: FilterType = "std"
    """Score of a group: the spread of its members' task rewards (`std`), or the best one less the mean (`max_mean`)."""
    filter_groups: FilterGroups = FilterGroups()
    critic: Critic = Critic()
    kl: KLPenalty = KLPenalty()
    rollout_correction: RolloutCorrection = RolloutCorrection()

    def __post_init__(self) -> None:
        _known(ESTIMATORS, self.adv_estimator)
        _known(LOSSES, self.policy_loss)
        check_ranges(
            self, gamma="(0, 1]", learning_rate="(0, inf)", weight_decay="[0, inf)", max_grad_norm="[0, inf)"
        )
        check_ranges(self, epochs="[1, inf)", minibatch_size="[1, inf)", micro_batch_tokens="[1, inf)")
        check_ranges(self, clip_ratio_low="[0, 1]", clip_ratio_high="[0, inf)", dual_clip="(1, inf]")
        check_ranges(self, loss_constant="(0, inf)", entropy_target="(0, inf)", rollout_filter_ratio="(0, 1]")

    @property
    def rates(self) -> tuple[float, float]:
        """The learning rates of the policy and of the critic.

        Raises:
            ConfigError: one is `auto`, and no engine has decided it.
        """
        rates = self.learning_rate, self.critic.learning_rate
        if isinstance(rates[0], str) or isinstance(rates[1], str):
            raise ConfigError(
                "learning_rate=auto follows from the engine of an AgentConfig: give a number here"
            )
        return rates[0], rates[1]

    @property
    def needs(self) -> str:
        """What the estimator asks beside the policy: a "critic", a "teacher", or "nothing"."""
        return ESTIMATORS[self.adv_estimator].needs


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, arXiv:2106.09685) in the place of training all weights (huggingface, vllm)."""

    rank: int = 0
    """0 trains the weights themselves."""
    alpha: float = 32.0
    """The adapters' output is scaled by `alpha / rank`."""
    target_modules: str | list[str] = "all-linear"
    """Names of layers, such as `[q_proj, v_proj]`, or `all-linear`."""
    dropout: float = 0.0
    """Share of the adapters' inputs that is set to 0 in updates by `policy_loss: likelihood`. Other losses compare
    log-probabilities with those of the rollout, and nothing is dropped there."""

    def __post_init__(self) -> None:
        check_ranges(self, rank="[0, inf)", alpha="(0, inf)", dropout="[0, 1)")


@dataclass(frozen=True)
class ModelConfig:
    """What of the model is trained."""

    lora: Lora = Lora()


@dataclass(frozen=True)
class RewardNormalization:
    """How rewards become advantages."""

    grouping: Literal["state", "inductive", "batch"] = "state"
    """Compare within a start state, within a kind of env, or within the whole batch."""
    method: Method = "mean_std"
    """What is done to the rewards that are compared: `mean_std` subtracts their mean and divides by their standard
    deviation, `mean` only subtracts the mean, `asym_clip` clips `mean_std` to [-1, 3], `identity` leaves them as they
    are."""


@dataclass(frozen=True)
class AgentProxy(RolloutSettings):
    """How the agent meets its envs, and what its rewards become."""

    overlong_buffer: int = 0
    """DAPO's soft punishment of long responses: it grows over that many tokens below `max_tokens`; 0 for none."""
    overlong_penalty: float = 1.0
    """Taken off the reward of a response of `max_tokens`."""
    format_penalty: float = 0.0
    """Weight of the reward `format`, -1 for each turn without a valid action, beside those of `rewards`."""
    reward_normalization: RewardNormalization = RewardNormalization()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, format_penalty="[0, inf)", overlong_penalty="[0, inf)", overlong_buffer="[0, inf)")
        if self.overlong_buffer and (self.max_tokens == "auto" or self.overlong_buffer > self.max_tokens):
            raise ConfigError(
                f"overlong_buffer={self.overlong_buffer} needs a max_tokens of as many or more, got {self.max_tokens}"
            )


@dataclass(frozen=True)
class Warmup:
    """Supervised steps on random play, or on play of the env's expert.

    With `expert: 0`, actions are uniformly random valid ones: the format is learned, and nothing of the task.
    """

    steps: int | Literal["auto"] = 0
    """Gradient steps before the first iteration; 0 for none. `auto`: 20, if less than half of the answers in a probe of
    64 turns or a few more (groups are played to their end) hold an action; else none."""
    batch_size: int = 64
    """Samples of a step."""
    learning_rate: float = 1e-3
    """Of the warm-up alone."""
    lr_schedule: Decay = "constant"
    """From `learning_rate` at the first step to 0 after the last."""
    max_grad_norm: float | None = None
    """Longer gradients are shortened to it; 0 or null leaves them as they are."""
    expert: float = 0.0
    """Share of actions that come from the env's expert (Sokoban's solver, say), where it knows one."""
    rehearsal: float = 0.0
    """Weight of a supervised step after each update, on random valid actions in turns of groups that are stuck (nobody
    succeeded, all were paid the same) and of whose answers the model is sure: it keeps trying there. 0 for none."""
    only_expert: bool = False
    """Learn the expert's actions alone: the others are played, and lead to states where it shows the way back (as
    DAgger does, Ross et al. 2011). Episodes of an env without expert are learned whole."""

    def __post_init__(self) -> None:
        check_ranges(self, steps="[0, inf)", batch_size="[1, inf)", learning_rate="(0, inf)")
        check_ranges(self, rehearsal="[0, inf)", max_grad_norm="[0, inf)", expert="[0, 1]")
        if self.only_expert and not self.expert:
            raise ConfigError("warmup.only_expert needs actions of the expert: set warmup.expert above 0")


@dataclass(frozen=True)
class TrainerConfig:
    """The loop."""

    iterations: int = 100
    """Rounds of playing and learning."""
    lag: int = 0
    """Iterations for which playing is ahead of learning: those of iteration `k` are played with the weights of
    iteration `k - lag`, while the ones before are learned from. Needs `agent_proxy.use_parallel_rollout`; the sampler
    then holds `lag + 1` versions of the weights."""
    check_envs: bool = True
    """Play a few episodes of your own envs before the model is loaded (`shoal train`), and report faults by line."""
    eval_every: int = 10
    """Iterations between held-out evaluations; there is always one at the end."""
    save_every: int = 5
    """Iterations between checkpoints; there is always one at the end."""
    keep_checkpoints: int = 3
    """How many of the newest are kept, beside the best."""
    log_entropy: bool = True
    """Log the entropy also where `algorithm.entropy_coef` is 0, and nothing else needs it."""
    save_trajectories_every: int = 10
    """Iterations between files in `trajectories/`."""
    tensorboard: bool = True
    """Write TensorBoard files beside `metrics.jsonl`."""
    wandb: bool = False
    """Send the same rows to Weights & Biases (package `wandb`; `WANDB_MODE=offline` keeps them here)."""
    wandb_project: str = "shoal"
    """The project on Weights & Biases that gets them."""
    sharding: Literal["none", "full"] = "none"
    """With several processes: `none`, each holds all weights and optimizer state; `full`, parameters, gradients and
    optimizer state are cut into one shard a process (FSDP2). Changes memory, not results; alone it does nothing."""
    stop_at_success: float | None = None
    """End early when a held-out evaluation reaches this success rate."""
    stop_on_collapse: bool = True
    """End early, as failed, when the policy has collapsed: for 10 iterations its entropy is below a tenth of the first,
    hardly a group has different rewards, and less than half of the episodes succeed."""

    def __post_init__(self) -> None:
        counts = ("iterations", "eval_every", "save_every", "keep_checkpoints", "save_trajectories_every")
        check_ranges(self, **dict.fromkeys(counts, "[1, inf)"), stop_at_success="(0, 1]", lag="[0, inf)")


DEFAULT_FOLDER = "runs/agent"
"""The run folder of a config that names none."""


@dataclass(frozen=True)
class AgentConfig:
    """Everything about a run of agent training."""

    seed: int = 0
    """Seed of the whole run: start states, sampling, minibatches and fresh weights follow from it."""
    run_dir: str | None = None
    """The run folder; `runs/<config name>` (or the next free number) if not given."""
    resume: bool = False
    """Go on with the run in `run_dir` from its newest checkpoint."""
    engine: EngineConfig = EngineConfig()
    model: ModelConfig = ModelConfig()
    agent_proxy: AgentProxy = AgentProxy()
    es_manager: EsManager = EsManager()
    custom_envs: dict[str, EnvTag] = field(default_factory=dict)
    """The kinds of env, under names of your own (tags)."""
    use_parallel_envs: bool = True
    """Step the envs in workers, as `vector` says; false steps them one after the other in this process."""
    vector: VectorConfig = VectorConfig()
    rewards: tuple[str | RewardConfig, ...] = ()
    """What an episode is paid: the weighted sum of this list. An empty one pays the environment's own reward."""
    algorithm: Algorithm = Algorithm()
    warmup: Warmup = Warmup()
    trainer: TrainerConfig = TrainerConfig()
    next_step: str = ""
    """A line that the command shows when the run is done."""
    imports: list[str] = field(default_factory=list)
    """Modules, and files that end in .py, to import first: they register advantages, losses, samplers and envs.

    A folder (with a slash in its name) is one to find modules in; `--config-dir` adds its own."""

    def __post_init__(self) -> None:
        check_fields(self)
        settle(self)
        if self.model.lora.rank and self.engine.train_last_layers is not None:  # adapters are in all layers
            object.__setattr__(self, "engine", replace(self.engine, train_last_layers=None))
        if conflict := next(conflicts_of(self), None):
            raise ConfigError(conflict)  # one setting would be ignored because of another

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> AgentConfig:
        """The settings in a mapping; what its `imports` register is known by then.

        What it leaves out, or says null where that is no value, has the default of its field.

        Raises:
            ConfigError: an unknown key, a value that does not fit, or an import that fails.
        """
        import_extensions(values.get("imports") or ())
        return from_mapping(cls, free_answers(values))

    @property
    def paid(self) -> tuple[str | RewardConfig, ...]:
        """What an episode is paid: `rewards`, and the format penalty; empty where the env's own reward is all."""
        penalty = self.agent_proxy.format_penalty
        return (*(self.rewards or (ENV,)), RewardConfig(FORMAT, penalty)) if penalty else self.rewards

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates, by their settings; they may change when a run goes on, which is warned of."""
        policy, critic = self.algorithm.rates
        of_critic = {"algorithm.critic.learning_rate": critic} if self.algorithm.needs == "critic" else {}
        return {"algorithm.learning_rate": policy} | of_critic

    def comparable(self) -> dict[str, Any]:
        """What must be equal for a run to be continued: all that can change its results."""
        return comparable(to_mapping(self))


def _without(values: Mapping[str, Any], paths: Collection[str], here: str = "") -> dict[str, Any]:
    """A copy of nested settings that lacks those at some paths."""
    return {
        name: _without(value, paths, f"{here}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if f"{here}{name}" not in paths
    }


def comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's settings, as a mapping, that can change its results.

    Where and how fast something is computed, in how much memory, and learning rates may change when a run goes on.
    """
    known, replicas = _without(values, _FREE), values["engine"]["replicas"]
    known["engine"]["replicas"] = {"engine": replicas["engine"]}
    if values["algorithm"]["lr_schedule"] != "constant":  # it depends on how many iterations there are
        known["trainer"] = {"iterations": values["trainer"]["iterations"]}
    if lag := values["trainer"]["lag"]:
        known["trainer"] = {**known.get("trainer", {}), "lag": lag}
    rewards = known.pop("rewards", [])
    known_rewards = [_without(one, _FREE_OF_REWARDS) if isinstance(one, Mapping) else one for one in rewards]
    return known | {"rewards": known_rewards} if rewards else known


def playing_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings of a run, as a mapping, those that change what is played, but for the weights."""
    known = comparable(values)
    del known["engine"]["model"]
    wanted = ("seed", "engine", "model", "agent_proxy", "es_manager", "custom_envs")
    return {key: known[key] for key in wanted}


_FREE = {
    "run_dir", "resume", "vector", "use_parallel_envs", "next_step", "trainer", "imports",
    "agent_proxy.use_parallel_rollout", "agent_proxy.parallel_n_jobs", "agent_proxy.parallel",
    "algorithm.micro_batch_tokens", "algorithm.gradient_checkpointing", "algorithm.batching",
    "algorithm.learning_rate", "algorithm.critic.learning_rate",
    "engine.device", "engine.threads", "engine.vllm", "engine.server",
}  # fmt: skip
"""Settings that change no results, by their paths; and learning rates, the remedy for a run that diverged."""
_FREE_OF_REWARDS = {
    "timeout", "retries", "concurrency", "model.base_url", "model.api_key_env", "model.patience",
}  # fmt: skip
"""Where a judge runs, and how long it is waited for."""


# --- from YAML and the command line
def config_names() -> list[str]:
    """The configs that come with shoal."""
    return list(purposes())


def refuse_unknown_config(name: str, folder: Path | None = None, further: Sequence[str] = ()) -> None:
    """Raise an `UnknownNameError` for a config that neither shoal nor `folder` has; `further` ones are named too.

    Raises:
        ConfigError: it lies in the working directory, and no folder was named.
    """
    own = [path.stem for path in folder.glob("*.yaml")] if folder else []
    if name not in (known := [*config_names(), *own]):
        if folder is None and Path(f"{name}.yaml").is_file():
            raise ConfigError(f"{name}.yaml of this folder is found with --config-dir . --config-name {name}")
        raise unknown_name("config", name, [*known, *further])


def compose_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> AgentConfig:
    """The config `name` with `overrides` in Hydra's grammar (`a.b=1`, `+a.c=2`, `~a.d`).

    Args:
        name: one of `config_names()`, or of a YAML file in `folder`.
        overrides: applied last.
        folder: a folder of the user's YAML; its files may name shoal's in their defaults list. One without such a
            list changes the defaults of the settings.

    Raises:
        UnknownNameError: no such config.
        ConfigError: an override or a value that does not fit.
    """
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    refuse_unknown_config(name, folder)
    if folder is not None and (own := folder / f"{name}.yaml").is_file():
        read_settings(own)  # it is YAML of settings, and no more
    further = [] if folder is None else ["hydra.searchpath=[pkg://shoal.configs]"]

    def preset(word: str) -> Any:
        return OmegaConf.to_container(compose(overrides=[word, *further]), resolve=True)

    try:
        with _own_hydra():
            if folder is None:
                initialize_config_module("shoal.configs", version_base=None)
            else:
                initialize_config_dir(str(folder.resolve()), version_base=None)
            words = [_forced(word, folder) for word in preset_words(list(overrides), folder, preset)]
            composed = compose(name, overrides=[*words, *further])
        whole = OmegaConf.merge(_defaults(), composed)
        values: dict[str, Any] = OmegaConf.to_container(whole, resolve=True)  # type: ignore[assignment]
    except MissingConfigException as error:
        raise ConfigError(f"config {name!r} needs one that is not there: {error}") from error
    except (ConfigCompositionException, OmegaConfBaseException, HydraException) as error:
        raise ConfigError(str(error).strip().split("\n")[0]) from error
    kinds = values.get("custom_envs")
    if isinstance(kinds, dict):
        values["custom_envs"] = {tag: kind for tag, kind in kinds.items() if kind is not None}
    return AgentConfig.read(values)


def _forced(word: str, folder: Path | None) -> str:
    """A setting as Hydra takes it that its config does not name; `AgentConfig` itself knows which there are.

    Raises:
        ConfigError: it is not in Hydra's grammar; the shell took the quotes of most that are not.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    try:
        OverridesParser.create().parse_override(word)
    except HydraException as error:
        if not equals or not key.strip("+~") or value.startswith("="):
            raise ConfigError(f"cannot read {word!r}: expected key=value, +key=value or ~key") from error
        quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
        raise ConfigError(
            f"cannot read the value of {key}, {value}: a text with braces, brackets, commas or quotes needs "
            f"quotes of its own inside those of the shell: {quoted}"
        ) from error
    group = folder is not None and (folder / key.partition("@")[0]).is_dir()
    return word if group or word.startswith(("+", "~")) else f"++{word}"


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra, of which a program has one, for this thread; an app of the user's finds its own again after."""
    from hydra.core.global_hydra import GlobalHydra

    with _COMPOSING:
        before = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            yield
        finally:  # there may be another instance by now
            GlobalHydra.instance().hydra = before


def _defaults() -> dict[str, Any]:
    """The defaults of all settings, in which those that the engine decides are `auto`."""
    defaults = {}
    for item in fields(AgentConfig):
        made = item.default if item.default_factory is MISSING else item.default_factory()
        defaults[item.name] = to_mapping(made)
    return defaults
