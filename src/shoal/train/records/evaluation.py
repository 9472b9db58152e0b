"""`shoal.evaluate`: held-out episodes with a trained run, an exported or other model, or what a server serves.

A broken-off evaluation with a folder goes on where it was: whole episodes are kept there, one by one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.configuration import as_yaml, to_mapping
from shoal.core.data import Trajectory, write_trajectories
from shoal.core.errors import ConfigError
from shoal.core.files import write_json, write_text
from shoal.core.run_folder import RunFolder, command_of, finite
from shoal.core.seeding import derive_seed
from shoal.maths.statistics import mean_interval, wilson
from shoal.rollout.factory import (
    EnvGroups,
    EnvironmentConfig,
    EnvMix,
    EnvTag,
    EsManager,
    make_roles,
    make_set,
    program_tags,
)
from shoal.rollout.journal import CountedJournal, Journal, Progress
from shoal.rollout.play import ParallelRolloutManager, TrajectoryCollector
from shoal.rollout.tools.toolbox import Toolbox
from shoal.samplers.registry import ServerConfig, close_engine
from shoal.samplers.sampler import Sampling
from shoal.train.agent.config import AgentConfig, playing_settings
from shoal.train.agent.processes.determinism import threads
from shoal.train.agent.run.metrics import program_metrics, success_by_kind
from shoal.train.agent.run.playing import whole_episodes
from shoal.train.ppo.checkpoint import checkpoint_named, checkpoint_step, holds_policy, load_run
from shoal.train.records.config import EvaluationConfig
from shoal.train.records.models import LOCAL, SERVER, Opened, brings_prompts, is_server, open_model

PANELS: dict[str, dict[str, dict[str, Any]]] = {
    "core": {
        "sokoban": {"dim_room": [6, 6], "num_boxes": 1, "max_pushes": 4, "max_steps": 12},
        "frozen_lake": {"size": 4, "p": 0.8, "is_slippery": False, "max_steps": 12},
        "webshop": {"num_products": 200, "page_size": 5, "max_steps": 8, "split": "test"},
        "countdown": {"difficulty": "easy"},
    },
}
PANELS["all"] = PANELS["core"] | {  # those of the extra "envs" too
    "textworld": {"nb_rooms": 2, "nb_objects": 3, "quest_length": 2, "max_steps": 8, "game_seed": 1000},
    "reasoning_gym": {"dataset": "leg_counting", "dataset_config": {"max_animals": 3}, "dataset_seed": 1},
}
"""Envs and their settings; never changed, since tables of one name are compared."""
PANEL_SEED = 20_260_101
"""Seed of the episodes of all panels."""
FEW = 0.2
"""Share of answers with an action below which something is wrong with the prompts."""
AT_ONCE = 64
"""Groups of one env that are played side by side, at most."""


class Evaluation(NamedTuple):
    """How a model did."""

    metrics: dict[str, Any]  # by the names of `shoal eval --json`; docs/metrics.md explains them
    trajectories: list[Trajectory]  # failed ones too, in the order of their seeds; none of a PPO run
    notes: list[str]  # failed episodes, how a bare model was prompted, why its answers held no action


@dataclass(frozen=True)
class _Plan:
    """What is played, and how."""

    envs: EnvironmentConfig
    sampling: Sampling
    seed: int
    settings: dict[str, Any]
    """The config of a run that plays the same."""


def evaluate(
    model: Path | str,
    env: str | None = None,
    env_config: Mapping[str, Any] | None = None,
    *,
    server: ServerConfig | None = None,
    video: Path | str | None = None,
    progress: Progress = lambda played, total: None,
    **settings: Any,
) -> Evaluation:
    """Play held-out episodes with a run, a model or a server, and measure how well it does; `shoal eval` in Python.

    >>> result = shoal.evaluate("runs/demo", episodes=400)  # doctest: +SKIP
    >>> result.metrics["success"], result.metrics["success_low"], result.metrics["success_high"]  # doctest: +SKIP

    Of agents the metrics are the share of solved episodes (`success`) with its 95% Wilson interval, the mean `reward`
    of an episode with the half width of its 95% interval, the mean number of `turns`, and the share of turns with a
    valid action. Episodes that failed for a technical reason are counted in `failed_episodes` and left out. Of a PPO
    run they are the mean, deviation, least and most of the undiscounted returns, and the mean length in env steps.

    Args:
        model: a run folder (of agents or PPO), a PPO checkpoint, a folder that `shoal export` wrote, another Hugging
            Face model folder, a name of `shoal model list`, or "openai:MODEL" on a server.
        env: a name of `shoal envs list`; the held-out envs of the run or export if not given.
        env_config: settings of that env.
        server: its address, key and limits, for "openai:MODEL"; port 8000 of this machine if not given.
        video: a file for a film (GIF) of the first episode of a PPO run.
        progress: called with the episodes played and all of them, first with those that `out` had kept, and after
            each episode; not for PPO runs.
        settings: the fields of `EvaluationConfig`: `episodes`, `seed`, `temperature`, `device`, `checkpoint`,
            `max_tokens`, `out`. The same seed gives the same episodes whatever the model.

    Raises:
        DataError: there is no such model or checkpoint, or it is damaged.
        ConfigError: a setting does not fit, or would do nothing.
        EngineError: no episode came to an end.
    """
    how = EvaluationConfig(**settings)
    if is_ppo_run(model):
        idle = {"env": env, "env_config": env_config, "max_tokens": how.max_tokens, "server": server}
        if given := [name for name, value in idle.items() if value is not None]:
            raise ConfigError(f"{given[0]} does nothing with a PPO run: leave it out")
        return _evaluate_ppo(Path(model), how, video)
    if video is not None:
        raise ConfigError(
            "video films a PPO run, and this is an agent, whose episodes are text: leave it out"
        )
    if env_config and env is None:
        raise ConfigError(
            "env_config sets the env that env names, and a run's own envs are played: give env too"
        )
    if env is None and is_server(model):
        raise ConfigError(NO_ENV)
    with ExitStack() as ending:
        folder, opened = _opened(ending, model, how, server)
        plan = _planned(opened.settings, env, env_config or {}, how)
        played = _play(opened, plan, _journal(folder, opened.weights, {"eval": plan}, how, progress), how)
        metrics, notes = _measured(played)
        if not brings_prompts(model):
            notes += _first_prompt(opened.engine, played)
        if metrics["valid_actions"] < FEW:
            notes += _why_invalid(model, played, opened.settings, plan)
        if folder is not None:
            _clear(folder.path)
            write_text(folder.path / "config.yaml", as_yaml(plan.settings))
            write_trajectories(folder.path / "trajectories" / "eval.jsonl", played)
            folder.finish(metrics)
    return Evaluation(metrics, played, notes)


def evaluate_panel(
    model: Path | str,
    panel: str = "core",
    *,
    server: ServerConfig | None = None,
    progress: Progress = lambda played, total: None,
    **settings: Any,
) -> Evaluation:
    """Play pinned episodes of the envs of a panel: the same table, to the last digit, for the same weights.

    Args:
        model: as in `evaluate`, but for PPO runs.
        panel: a name in `PANELS`.
        server: as there.
        progress: called with the episodes of all envs together.
        settings: as there, but for the seed. A server's answers do not repeat, so it wants `out`.

    Returns:
        As metrics the `panel`, the `model`, whether the table is `repeatable`, how it was played, and `rows`, one of
        metrics for each env; the trajectories of all envs.
    """
    from shoal import envs

    how, repeatable = EvaluationConfig(seed=PANEL_SEED, **settings), not is_server(model)
    if not repeatable and how.out is None:
        raise ConfigError("a server's answers do not repeat: keep them beside the table with --out FOLDER")
    for env, config in PANELS[panel].items():
        envs.make(env, **config).close()  # a package that is missing is told before anything is played
    rows: list[dict[str, Any]] = []
    trajectories: list[Trajectory] = []
    notes: list[str] = []
    with ExitStack() as ending:
        folder, opened = _opened(ending, model, how, server)
        plans = {env: _planned(opened.settings, env, config, how) for env, config in PANELS[panel].items()}
        journal = _journal(folder, opened.weights, plans, how, progress)
        if folder is not None:
            _clear(folder.path)
        for env, plan in plans.items():
            played = _play(opened, plan, journal, how)
            if folder is not None:
                write_trajectories(folder.path / "trajectories" / f"{env}.jsonl", played)
            metrics, failures = _measured(played)
            rows.append({"env": env, **metrics})
            trajectories += played
            notes += failures
        name = str(model) if repeatable else f"{SERVER}{opened.engine.model}"
        table: dict[str, Any] = {"panel": panel, "model": name, "repeatable": repeatable}
        table |= {"temperature": plan.sampling.temperature, "max_tokens": plan.sampling.max_tokens}
        if opened.weights.startswith("sha256 "):
            table["weights"] = opened.weights
        table["rows"] = rows
        if folder is not None:
            write_json(folder.path / "panel.json", finite(table))
            folder.finish({f"success/{row['env']}": row["success"] for row in rows})
    return Evaluation(table, trajectories, notes)


NO_ENV = "say which env to play: --env NAME (shoal envs list shows them)"


def _measured(trajectories: Sequence[Trajectory]) -> tuple[dict[str, Any], list[str]]:
    """The metrics of whole episodes, and a note of failed ones, which are counted and left out."""
    whole, notes = whole_episodes(trajectories)
    rate = wilson(sum(t.success for t in whole), len(whole))
    reward, half = mean_interval([t.reward for t in whole])
    turns, _ = mean_interval([float(len(t.turns)) for t in whole])
    valid = [turn.action_is_valid for t in whole for turn in t.turns]
    metrics = {
        "success": rate.value,
        "success_low": rate.low,
        "success_high": rate.high,
        "reward": reward,
        "reward_half_width": half,
        "turns": turns,
        "valid_actions": sum(valid) / max(1, len(valid)),
        "episodes": len(whole),
        "failed_episodes": len(trajectories) - len(whole),
        **program_metrics(trajectories),
        **success_by_kind(whole),
    }
    return metrics, notes


def _opened(
    ending: ExitStack, model: Path | str, how: EvaluationConfig, server: ServerConfig | None
) -> tuple[RunFolder | None, Opened]:
    """The run folder, nobody else's until the end, and the model, with as many threads as it was trained with.

    A folder that is there is asked before anything is loaded, another is made when the model is.
    """
    if how.episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {how.episodes}")
    out, folder = None if how.out is None else Path(how.out), None
    if out is not None and out.exists():
        folder = ending.enter_context(RunFolder(out, "eval", how.seed))
    opened = open_model(
        model, checkpoint=how.checkpoint, device=how.device, seed=how.seed, server=server or LOCAL,
        identify=out is not None,
    )  # fmt: skip
    ending.callback(close_engine, opened.engine)
    ending.enter_context(threads(opened.settings.engine.threads))
    if out is not None and folder is None:
        folder = ending.enter_context(RunFolder(out, "eval", how.seed))
    return folder, opened


def _journal(
    folder: RunFolder | None,
    weights: str,
    plans: Mapping[str, _Plan],
    how: EvaluationConfig,
    progress: Progress,
) -> Journal:
    """What was played for these plans before an evaluation was broken off."""
    total = how.episodes * len(plans)
    if folder is None:
        return CountedJournal(progress, total)
    plays = {name: playing_settings(plan.settings) for name, plan in plans.items()}
    asked = {"weights": weights, "episodes": how.episodes, "plays": plays}
    return CountedJournal(progress, total, folder.unfinished_path, asked, folder.hold)


def _clear(folder: Path) -> None:
    """Remove what an evaluation of before left, so that a kill leaves none of it beside the new episodes."""
    for name in ("summary.json", "panel.json", "config.yaml"):
        (folder / name).unlink(missing_ok=True)
    for name in ("eval", *PANELS["all"]):
        (folder / "trajectories" / f"{name}.jsonl").unlink(missing_ok=True)


def _planned(
    run: AgentConfig, env: str | None, env_config: Mapping[str, Any], how: EvaluationConfig
) -> _Plan:
    """What is asked for, of a run's own held-out envs or of another."""
    if env is None:
        tags, kinds = run.es_manager.val.env_configs, run.custom_envs
    else:
        tags = EnvMix((env,))
        known = (kind.prompt for kind in run.custom_envs.values() if kind.env_type == env)
        kinds = {env: EnvTag(env, env_config=dict(env_config), prompt=next(known, {}))}
    if not tags.tags:
        raise ConfigError(NO_ENV)
    shares = sum(tags.n_groups) if tags.n_groups else len(tags.tags)
    groups = EnvGroups(shares * max(1, min(how.episodes, AT_ONCE) // shares), 1, tags)
    proxy = run.agent_proxy
    if how.max_tokens is not None:
        proxy = replace(proxy, max_tokens=how.max_tokens)
    sampling = replace(proxy.sampling(greedy=not how.temperature), temperature=how.temperature)
    values = to_mapping(run)
    values |= {"seed": how.seed, "run_dir": None, "resume": False}
    values["custom_envs"] |= {tag: to_mapping(kind) for tag, kind in kinds.items()}
    values["es_manager"]["val"] = to_mapping(groups)
    values["agent_proxy"] |= {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "max_turn": proxy.max_turn if env is None else None,  # another env has its own limit
    }
    envs = EnvironmentConfig(EsManager(groups, groups), kinds, vector=run.vector)
    return _Plan(envs, sampling, derive_seed(how.seed, "evaluation"), values)


def _play(opened: Opened, plan: _Plan, journal: Journal, how: EvaluationConfig) -> list[Trajectory]:
    """The episodes of a plan: programs on the run's hosts with a gateway, envs in this process."""
    from shoal.gateway.programs import sessions_of

    run, kinds, side = opened.settings, plan.envs.custom_envs, plan.envs.es_manager.val
    proxy = run.agent_proxy
    collector: TrajectoryCollector
    with ExitStack() as ending:
        if program_tags(kinds, side.env_configs.tags):
            config = replace(run, es_manager=plan.envs.es_manager, custom_envs=kinds, rewards=())
            collector = ending.enter_context(
                ParallelRolloutManager(
                    config, opened.engine, side="val", seed=plan.seed, journal=journal, sessions=sessions_of
                )
            )
        else:
            made = make_set(plan.envs, side)
            ending.callback(made.pool.close)
            toolbox = Toolbox(proxy.tools, proxy.max_tool_turns)
            ending.callback(toolbox.close)
            if how.out is not None:
                toolbox.keep(Path(how.out))
            roles = make_roles(kinds, made.tags, plan.settings["agent_proxy"]["max_turn"])
            collector = TrajectoryCollector(
                made.pool, made.tags, roles, 1, opened.engine, proxy.prompt, plan.seed,
                env_retries=proxy.parallel.env_retries, journal=journal, toolbox=toolbox,
            )  # fmt: skip
        played: list[Trajectory] = []
        while len(played) < how.episodes:
            played += collector.collect(0, plan.sampling, first_group=len(played))
        return played[: how.episodes]


# --- what a reader should know of the answers
def _first_prompt(engine: Any, trajectories: Sequence[Trajectory]) -> list[str]:
    """How a model was asked that does not come with prompts of its own."""
    prompt = next((trajectory.prompt_ids(0) for trajectory in trajectories if trajectory.calls), None)
    if prompt is None:
        return []
    spell = getattr(engine.tokenizer, "spell", engine.tokenizer.decode)
    shown = textwrap.indent(spell(prompt), "    ")
    return [f"the model says nothing of its prompts (no shoal.json); the first that it got:\n{shown}"]


def _why_invalid(
    model: Path | str, trajectories: Sequence[Trajectory], run: AgentConfig, plan: _Plan
) -> list[str]:
    """An answer that holds no action, the words that would be one, and what to do."""
    turns = [(t, turn) for t in trajectories if t.status == "ok" for turn in t.turns]
    bad = [(t, turn) for t, turn in turns if not turn.action_is_valid]
    if not bad:  # no turn was played: the first prompt has filled the context
        return []
    trajectory, turn = bad[0]
    role = make_roles(plan.envs.custom_envs, [trajectory.env])[trajectory.env]
    words = ", ".join(role.projection.words()[:20]) or "any text"
    prompt, most = replace(run.agent_proxy.prompt, **role.prompt), plan.sampling.max_tokens
    if not brings_prompts(model):
        remedy = "a model that shoal trained wants the prompts of its run: evaluate the run, or shoal export RUN OUT"
    elif trajectory.call_of(turn).finish == "length" and not prompt.closing:
        remedy = f"the answer was cut off at {most} tokens: --max-tokens {4 * most}"
    elif "{actions}" not in prompt.first + prompt.later:
        remedy = "the prompt does not name the actions: use {actions} in agent_proxy.prompt.first and later"
    else:
        remedy = "the model does not answer in the form that its prompt asks for: train it, or ask for a simpler one"
    share = 1 - len(bad) / len(turns)
    tags = " or ".join(f"<{name}>…</{name}>" for name in role.projection.tags)
    said = turn.response if len(turn.response) <= 200 else f"{turn.response[:200]}…"
    lines = (
        f"WARNING {share:.0%} of the answers held an action that {trajectory.env} knows; one that did not:",
        f"    {said!r}",
        f"  it takes, inside {tags}: {words}",
        f"  {remedy}",
    )
    return ["\n".join(lines)]


# --- PPO runs
def is_ppo_run(model: Path | str) -> bool:
    """Whether a folder is a PPO run or one of its checkpoints."""
    folder = Path(model)
    return holds_policy(folder) or ((folder / "config.yaml").is_file() and command_of(folder) == "train-ppo")


def _evaluate_ppo(run: Path, how: EvaluationConfig, video: Path | str | None) -> Evaluation:
    """Play the policy on single episodes, as the run's own evaluations do."""
    from shoal.train.ppo.ppo import PPO
    from shoal.train.ppo.run import write_video

    if how.temperature not in (0.0, 1.0):
        raise ConfigError(f"--temperature of a PPO run must be 0 or 1, got {how.temperature}")
    folder = checkpoint_named(run, how.checkpoint)
    asked = load_run(folder).training.get("options", {})
    likeliest = not how.temperature and asked.get("eval_deterministic", True)
    with ExitStack() as ending:
        kept = ending.enter_context(RunFolder(how.out, "eval", how.seed)) if how.out else None
        ppo = ending.enter_context(PPO.load(folder, device=how.device or "cpu"))
        if video is not None:
            ppo.factory.check_rendering()
        played = ppo.evaluate(how.episodes, deterministic=likeliest, seed=how.seed)
        if video is not None:
            frames: list[Any] = []
            ppo.evaluate(1, deterministic=likeliest, frames=frames, seed=how.seed)
            write_video(Path(video), frames)
        metrics = {
            "env": ppo.factory.name, "steps": checkpoint_step(folder), "eval_return_mean": played.mean,
            "eval_return_std": played.std, "eval_return_min": min(played.returns),
            "eval_return_max": max(played.returns), "eval_length_mean": sum(played.lengths) / len(played.lengths),
            "episodes": len(played.returns), "deterministic": likeliest, "seed": how.seed, "returns": played.returns,
        }  # fmt: skip
        if kept is not None:
            kept.finish({key: value for key, value in metrics.items() if key != "returns"})
    return Evaluation(metrics, [], [])
