"""Policies and their samplers, from a config, a sampler or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import read_json
from shoal.envs.tools import Tool
from shoal.rollout.episode import Role
from shoal.rollout.factory import words_of_roles
from shoal.samplers.models import resolve_model
from shoal.samplers.registry import EngineConfig, close_engine, make_engine, make_versions
from shoal.samplers.sampler import require_trainable, require_weights
from shoal.samplers.tiny import TinyNetwork
from shoal.samplers.tokenizers import TinyTokenizer
from shoal.train.agent.config import DEFAULT_FOLDER, AgentConfig
from shoal.train.agent.policies.huggingface import HuggingFacePolicy
from shoal.train.agent.policies.policy import Policy, TinyPolicy
from shoal.train.agent.processes.distributed import Processes


# --- from a config, a sampler or a folder
def policy_of(sampler: Any) -> Policy:
    """The policy whose network a sampler of this process writes with.

    Raises:
        ConfigError: its network is not here.
    """
    module = getattr(sampler, "model", None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{type(sampler).__name__} has no network in this process that could be trained")
    kind = TinyPolicy if isinstance(module, TinyNetwork) else HuggingFacePolicy
    return kind(module, sampler.tokenizer, sampler.pad_id)


def make_policy(config: EngineConfig, words: Sequence[str], seed: int, held: int = 1) -> tuple[Policy, Any]:
    """The policy of a config, with fresh or pretrained weights, and what samples by them; close that.

    With `held` above 1 the sampler has weights of its own, of so many versions.

    Raises:
        ConfigError: the weights of this sampler cannot follow an update.
    """
    here = "tiny" if config.played_by == "tiny" else "huggingface"
    if here != "tiny" and config.model is None:
        raise ConfigError(
            f"engine.model must be a model folder or a name that `shoal model get` knows, for "
            f"engine.name={config.name}, got none"
        )
    invariant = config.batch_invariant and config.played_by == here  # vLLM's order of additions is its own
    local: Any = make_engine(replace(config, name=here, batch_invariant=invariant), words, seed)
    policy = policy_of(local)
    if isinstance(policy, HuggingFacePolicy) and config.train_last_layers is not None:
        policy.freeze_all_but_last(config.train_last_layers)
    if config.name == here and held == 1:
        return policy, local
    sampler: Any = make_engine(config, words, seed) if held == 1 else make_versions(config, words, seed, held)
    try:
        require_trainable(sampler)
        require_weights(sampler)
    except ConfigError:
        sampler.close()
        raise
    return policy, sampler


def load_policy(
    folder: Path, *, device: str = "cpu", config: EngineConfig | None = None
) -> tuple[Policy, Any]:
    """The policy in a model folder or the `engine` folder of a checkpoint, and a sampler with its network.

    Args:
        folder: what `Policy.save` or transformers wrote.
        device: where the network lives.
        config: of the run, for what its sampler is set to beside its weights.

    Raises:
        DataError: the folder holds no model.
    """
    options: dict[str, Any] = {}
    if config is not None:
        options = {"max_batch": config.max_batch, "cache_tokens": config.cache_tokens, **config.template}
        options["batch_invariant"] = config.batch_invariant and config.played_by == "huggingface"
    file, described = folder / "engine.json", dict[str, Any]()
    if file.exists():
        described = read_json(file)
        if not isinstance(described, dict):
            raise DataError(f"{file} must be a mapping that names the engine, got {described!r:.80}")
    elif not (folder / "config.json").exists():  # which a bare model has
        hint = f"; the one of this checkpoint is {folder / 'engine'}" if (folder / "engine").is_dir() else ""
        raise DataError(f"{folder} is no model folder: it has neither config.json nor engine.json{hint}")
    sampler: Any
    if described.get("engine") == "tiny":
        from shoal.samplers.tiny import TinyEngine

        sampler = TinyEngine.load(folder, device=device)
    elif described.get("engine") == "huggingface-lora":
        from shoal.train.agent.policies.lora import load_lora

        return load_lora(folder, device, **options)
    else:
        from shoal.samplers.huggingface.engine import HuggingFaceEngine

        dtype = described.get("dtype", "float32")
        sampler = HuggingFaceEngine.load(folder, device=device, dtype=dtype, **options)
    return policy_of(sampler), sampler


def load_engine(folder: Path, *, device: str = "cpu", config: EngineConfig | None = None) -> Any:
    """The sampler in the `engine` folder of a checkpoint, to play with; see `load_policy`."""
    return load_policy(folder, device=device, config=config)[1]


def load_teacher(folder: str, student: Policy) -> Policy:
    """A frozen network that scores what a student wrote, from a model folder or the `engine` folder of a checkpoint.

    Raises:
        ConfigError: it does not read the student's tokens.
    """
    device = str(next(student.module.parameters()).device)
    teacher, _ = load_policy(resolve_model(folder), device=device)
    sizes = [next(p for p in one.module.parameters() if p.dim() == 2).shape[0] for one in (teacher, student)]
    other = _read_otherwise(teacher.tokenizer, student.tokenizer)
    if other or sizes[0] < sizes[1]:
        raise ConfigError(
            f"algorithm.teacher={folder} has another vocabulary than the model that is trained ({sizes[0]} and "
            f"{sizes[1]} tokens{other}): choose a teacher of the same family"
        )
    teacher.module.requires_grad_(False)
    return teacher


def refuse_stranger(sampler: Any, policy: Any) -> None:
    """Check that what a sampler writes can be learned from by a policy that is given beside it.

    Raises:
        ConfigError: it is no policy; or the sampler tells no tokens, takes no weights, or has other tokens.
    """
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy must be a Policy, as shoal.train.agent.policies.loading.policy_of(sampler) gives, got a "
            f"{type(policy).__name__}"
        )
    require_trainable(sampler)
    if getattr(sampler, "model", None) is not policy.module:
        require_weights(sampler)
    if other := _read_otherwise(sampler.tokenizer, policy.tokenizer):
        raise ConfigError(
            f"the sampler's tokens are not those of the policy that is trained{other}: give both the same tokenizer, "
            f"with the same words in the same order"
        )


def _read_otherwise(one: Any, other: Any) -> str:
    """Which token two tokenizers do not have alike, for a message; empty if they read all alike."""
    if one is other:
        return ""
    known, wanted = _vocabulary(one), _vocabulary(other)
    for number, token in wanted.items():
        if known.get(number, token) != token:
            return f", of which {token!r} is another one"
    text = "The quick brown fox: 3 + 4 = 7? <action>Up</action>"
    return "" if one.encode(text) == other.encode(text) else ", which cut texts otherwise"


def _vocabulary(tokenizer: Any) -> dict[int, str]:
    """The tokens by their numbers, where a tokenizer says them."""
    if isinstance(tokenizer, TinyTokenizer):
        return dict(enumerate(tokenizer.tokens))
    tokens: dict[str, int] = getattr(getattr(tokenizer, "tokenizer", None), "get_vocab", dict)()
    return {number: token for token, number in tokens.items()}


def make_networked(
    config: AgentConfig, roles: dict[str, Role], processes: Processes, tools: Sequence[Tool] = ()
) -> tuple[Policy, Any]:
    """The policy of a config on this process's device, with adapters if they are what is trained, and its sampler."""
    words = words_of_roles(roles, tools)
    engine = replace(config.engine, device=processes.device(config.engine.device))
    held = config.trainer.lag + 1
    if engine.name == "openai":  # each process tells the server, by files of its own
        if held > 1 and processes.count > 1:
            raise ConfigError(
                f"trainer.lag={held - 1} lets each of {processes.count} processes want other weights of one server at "
                f"the same time: train in one process, or set trainer.lag=0"
            )
        server, run = engine.server, Path(config.run_dir or DEFAULT_FOLDER)
        weights = f"{server.weights or run / 'server'}-{processes.rank}"
        server = replace(server, weights=weights, tokenizer=server.tokenizer or engine.model)
        engine = replace(engine, server=server)
    if not config.model.lora.rank:
        return make_policy(engine, words, config.seed, held)
    from shoal.train.agent.policies.lora import add_lora, refuse_unfit_peft, with_adapters

    refuse_unfit_peft()
    policy, sampler = make_policy(with_adapters(engine, config.model.lora.rank), words, config.seed, held)
    try:
        return add_lora(policy, config.model.lora, config.engine.model, config.seed), sampler
    except BaseException:
        close_engine(sampler)  # it may have begun processes
        raise
