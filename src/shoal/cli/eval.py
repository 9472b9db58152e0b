"""`shoal eval`: play held-out episodes with a trained run, a model, or whatever a server serves, and say how well."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import (
    Progress,
    came_to_an_end,
    hide_loading,
    journal_of,
    playing_settings,
    print_json,
    refuse_below,
    refuse_device,
    refuse_idle,
    weights_at,
)
from shoal.cli.output import harmless, program
from shoal.core.errors import ConfigError, DataError
from shoal.core.run_folder import RunFolder, command_of, finite

if TYPE_CHECKING:
    from shoal.rollout.factory import EnvironmentConfig
    from shoal.rollout.journal import Journal
    from shoal.samplers.sampler import Sampling

SERVER = "openai:"
"""What the name of a model on a server begins with."""


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
FEW = 0.2
"""Share of answers with an action below which something is wrong with the prompts."""
PROGRAMS = ("program_errors", "refused_requests", "overridden/", "unenforced/")
"""Metrics of programs that are printed where they occur."""
PANEL_SEED = 20_260_101
"""Seed of the episodes of all panels."""


@dataclass(frozen=True)
class EvalOptions:
    """Play held-out episodes and report the success rate with its 95% interval, of a PPO run the return.

    Episodes that failed for a technical reason are counted apart.
    """

    model: Annotated[str, Positional("RUN_OR_MODEL")]
    """A run folder (of agents or PPO), a PPO checkpoint, a folder that `shoal export` wrote, another Hugging Face
    model folder, a name of `shoal model list`, or `openai:MODEL` on a server."""
    env: str | None = None
    """Env to play (`shoal envs list`); the held-out envs of the run, or of an export, if not given."""
    env_config: tuple[str, ...] = ()
    """Settings of the env as key=value; values are JSON or plain text."""
    panel: Literal["core", "all"] | None = None
    """Play pinned episodes of several envs: the same table, to the last digit, for whoever plays the same weights."""
    episodes: int = 200
    """How many to play (of each env of a panel); more give a narrower interval."""
    seed: int = 0
    """Seed of the evaluation episodes."""
    temperature: float = 0.0
    """0 takes the likeliest token, 1 samples as in training; a run's `top_p`, `top_k` and `min_p` hold. Of a PPO run 0
    acts as its own evaluations did (the likeliest actions, unless its preset draws them)."""
    device: str | None = None
    """Where the model runs, such as cuda:1; where the run was trained, or the CPU, if not given."""
    checkpoint: str = "newest"
    """Checkpoint of a run: newest, best, or an iteration (of a PPO run, its env steps)."""
    video: bool = False
    """Of a PPO run: film the first episode as video.gif, in --out or in the run folder."""
    max_tokens: int | None = None
    """Tokens of a response; what the run or export was trained with, 64 for another model, 512 for a server."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """Of an OpenAI-compatible server, for `openai:MODEL`; `openai:` alone takes the first model it lists."""
    api_key_env: str | None = None
    """Environment variable with the server's key."""
    concurrency: int = 16
    """Requests that the server gets at once."""
    timeout: float = 120.0
    """Seconds that the server has for an answer."""
    retries: int = 4
    """Attempts after the first, where the server is busy or out of reach."""
    out: Path | None = None
    """Folder for the episodes (`trajectories/eval.jsonl`) and `summary.json`; say the same again after a kill, Ctrl-C
    or full disk, and what was played is kept."""
    json: bool = False
    """Print the result as JSON."""


MORE = """\
examples:
  shoal eval runs/ppo-CartPole-v1 --video            a PPO run: its return, and a film
  shoal eval runs/demo --episodes 400                a run, on its own held-out envs
  shoal eval runs/demo --checkpoint best             its best weights, on the same episodes
  shoal eval my-model                                what shoal export wrote, prompted as in its run
  shoal eval smollm2 --env bandit                    a language model that was never trained here
  shoal eval runs/demo --panel core                  pinned episodes of pinned envs, as a table
  shoal eval openai:MODEL --base-url http://127.0.0.1:8000/v1 --env countdown
"""
WANTED = (
    "--env", "--env-kwargs", "--episodes", "--seed", "--temperature", "--device", "--checkpoint", "--base-url", "--out",
    "--json",
)  # fmt: skip


def evaluate(options: EvalOptions) -> int:
    """Evaluate and print."""
    refuse_below(options, episodes=1, max_tokens=1)
    if _is_ppo(Path(options.model)):
        return _play_ppo(options)
    refuse_idle(options, "with an agent: shoal show prints its episodes", "video")
    if options.env_config and options.env is None and options.panel is None:
        raise ConfigError(
            "--env-config sets the env that --env names, and a run's own envs are played: add --env NAME"
        )
    if options.model.startswith(SERVER):
        refuse_idle(options, "with a server's model", "checkpoint")
    else:
        refuse_idle(
            options, "without openai:MODEL", "base_url", "api_key_env", "concurrency", "timeout", "retries"
        )
        if not (Path(options.model) / "checkpoints").is_dir():
            refuse_idle(options, "with a model, which has only one", "checkpoint")
        if options.device is not None:
            refuse_device(options.device)
    if options.panel is not None:
        return _panel(options)
    with _held(options, options.seed) as (folder, engine, run, weights):
        plan = _planned(options, run)
        journal = _journal(options, folder, weights, {"eval": plan})
        trajectories = _play(options, engine, run, plan, journal)
        result = _result(trajectories)
        if _lacks_play(options.model):
            _tell_prompt(engine, trajectories)
        if result["valid_actions"] < FEW:
            _warn_of_invalid(options, trajectories, run, plan)
        if options.json:
            print_json(result)
        else:
            low, high = result["success_low"], result["success_high"]
            print(f"success        {result['success']:.3f}   95% interval {low:.3f} to {high:.3f}")
            for name in (name for name in result if name.startswith("success/")):
                print(f"  {name.removeprefix('success/')}: {result[name]:.3f}")
            print(f"reward         {result['reward']:.3f} ± {result['reward_half_width']:.3f}")
            print(f"turns          {result['turns']:.2f}")
            print(f"valid actions  {result['valid_actions']:.3f}")
            print(f"episodes       {result['episodes']} whole, {result['failed_episodes']} failed")
            for name in (name for name in result if name.startswith(PROGRAMS)):
                print(f"{name}  {result[name]:g}")
        if folder is not None:
            _write(options, folder, trajectories, result, plan.settings)
    return 0


COMMAND = Command(EvalOptions, evaluate, MORE, WANTED)


def _is_ppo(folder: Path) -> bool:
    from shoal.train.ppo.checkpoint import holds_policy

    return holds_policy(folder) or ((folder / "config.yaml").is_file() and command_of(folder) == "train-ppo")


OF_AGENTS = (
    "env", "env_config", "panel", "max_tokens", "base_url", "api_key_env", "concurrency", "timeout", "retries",
)  # fmt: skip
"""Options without a meaning for a PPO run."""


def _play_ppo(options: EvalOptions) -> int:
    """Evaluate the policy of a PPO run on single episodes, as its own evaluations do."""
    refuse_idle(options, "with a PPO run", *OF_AGENTS)
    if options.temperature not in (0.0, 1.0):
        raise ConfigError(f"--temperature of a PPO run must be 0 or 1, got {options.temperature}")
    refuse_device(options.device or "cpu")
    from shoal.train.ppo.checkpoint import checkpoint_step, load_run
    from shoal.train.ppo.ppo import PPO
    from shoal.train.ppo.run import write_video

    folder = _ppo_checkpoint(Path(options.model), options.checkpoint)
    asked = load_run(folder).training.get("options", {})
    likeliest = not options.temperature and asked.get("eval_deterministic", True)
    place = options.out or Path(options.model)
    with contextlib.ExitStack() as ending:
        kept = ending.enter_context(RunFolder(options.out, "eval", options.seed)) if options.out else None
        ppo = ending.enter_context(PPO.load(folder, backend="serial", device=options.device or "cpu"))
        if options.video:
            ppo.factory.check_rendering()
        with Progress("playing", sys.stderr):
            played = ppo.evaluate(options.episodes, deterministic=likeliest, seed=options.seed)
            if options.video:
                frames: list[Any] = []
                ppo.evaluate(1, deterministic=likeliest, frames=frames, seed=options.seed)
                write_video(place / "video.gif", frames)
        result = {
            "env": ppo.factory.name, "steps": checkpoint_step(folder), "eval_return_mean": played.mean,
            "eval_return_std": played.std, "eval_return_min": min(played.returns),
            "eval_return_max": max(played.returns), "eval_length_mean": sum(played.lengths) / len(played.lengths),
            "episodes": len(played.returns), "deterministic": likeliest, "seed": options.seed,
            "returns": played.returns,
        }  # fmt: skip
        if kept is not None:
            kept.finish({key: value for key, value in result.items() if key != "returns"})
    if options.json:
        print_json(result | ({"video": str(place / "video.gif")} if options.video else {}))
        return 0
    how = "the likeliest actions" if likeliest else "drawn actions"
    least, most = result["eval_return_min"], result["eval_return_max"]
    print(f"return    {played.mean:.2f} ± {played.std:.2f}   (least {least:g}, most {most:g})")
    print(f"length    {result['eval_length_mean']:.1f}")
    print(f"episodes  {len(played.returns)} of {ppo.factory.name}, {how}, seed {options.seed}, {folder.name}")
    if options.video:
        print(f"video     {place / 'video.gif'}")
    return 0


def _ppo_checkpoint(run: Path, wanted: str) -> Path:
    """The folder of the checkpoint that is asked for: newest, best, or the env steps after which it was made."""
    from shoal.train.ppo.checkpoint import checkpoint_step, find_checkpoint, list_checkpoints

    if wanted in ("newest", "best"):
        return find_checkpoint(run if wanted == "newest" else run / "best")
    there = {str(checkpoint_step(folder)): folder for folder in list_checkpoints(run / "checkpoints")}
    if wanted not in there:
        raise DataError(
            f"{run} has no checkpoint after {wanted} steps; it has newest, best, {', '.join(there) or 'no other'}"
        )
    return there[wanted]


def _lacks_play(model: str) -> bool:
    """Whether a model is one that nobody says how to prompt: no run, no export of one, and no server's."""
    from shoal.train.records.exported import FILE

    folder = Path(model)
    return not (model.startswith(SERVER) or (folder / "checkpoints").is_dir() or (folder / FILE).is_file())


def _tell_prompt(engine: Any, trajectories: list[Any]) -> None:
    """Show how a model was asked that does not come with prompts of its own."""
    prompt = next((trajectory.prompt_ids(0) for trajectory in trajectories if trajectory.calls), None)
    if prompt is not None:
        spell = getattr(engine.tokenizer, "spell", engine.tokenizer.decode)
        print(
            "the model says nothing of its prompts (no shoal.json); the first that it got:", file=sys.stderr
        )
        print(textwrap.indent(harmless(spell(prompt)), "    "), file=sys.stderr)


def _warn_of_invalid(options: EvalOptions, trajectories: list[Any], run: Any, plan: _Plan) -> None:
    """Show an answer that holds no action, the words that would be one, and what to do."""
    from shoal.rollout.factory import make_roles

    turns = [(t, turn) for t in trajectories if t.status == "ok" for turn in t.turns]
    bad = [(t, turn) for t, turn in turns if not turn.action_is_valid]
    if not bad:  # no turn was played: the first prompt has filled the context
        return
    trajectory, turn = bad[0]
    role = make_roles(plan.envs.custom_envs, [trajectory.env])[trajectory.env]
    words = ", ".join(role.projection.words()[:20]) or "any text"
    prompt, most = replace(run.agent_proxy.prompt, **role.prompt), plan.sampling.max_tokens
    if _lacks_play(options.model):
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
    told = [
        f"WARNING {share:.0%} of the answers held an action that {trajectory.env} knows; one that did not:",
        f"    {said!r}",
        f"  it takes, inside {tags}: {words}",
        f"  {remedy}",
    ]
    print(harmless("\n".join(told)), file=sys.stderr)


def _result(trajectories: list[Any]) -> dict[str, Any]:
    """What is said of episodes; failed ones are told and left out."""
    from shoal.maths.statistics import mean_interval, wilson
    from shoal.train.agent.run.metrics import program_metrics, success_by_kind

    whole = came_to_an_end(trajectories)
    rate = wilson(sum(t.success for t in whole), len(whole))
    reward, half = mean_interval([t.reward for t in whole])
    turns, _ = mean_interval([float(len(t.turns)) for t in whole])
    valid = [turn.action_is_valid for t in whole for turn in t.turns]
    return {
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


def _panel(options: EvalOptions) -> int:
    """Play every env of a panel, and print and keep the table."""
    from shoal import envs
    from shoal.core.data import write_trajectories
    from shoal.core.files import write_json

    repeatable = not options.model.startswith(SERVER)
    assert options.panel is not None
    if options.env is not None or options.env_config or options.seed:
        raise ConfigError("a panel has its own envs and seed: leave --env, --env-config and --seed out")
    if not repeatable and options.out is None:
        raise ConfigError("a server's answers do not repeat: keep them beside the table with --out FOLDER")
    for env, settings in PANELS[options.panel].items():
        envs.make(env, **settings).close()  # a package that is missing is told before anything is played
    rows = []
    with _held(options, PANEL_SEED) as (folder, engine, run, weights):
        model = options.model if repeatable else f"{SERVER}{engine.model}"
        plans = {}
        for env, settings in PANELS[options.panel].items():
            told = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
            plans[env] = _planned(replace(options, env=env, env_config=told, seed=PANEL_SEED), run)
        journal = _journal(options, folder, weights, plans)
        if folder is not None:
            _clear(folder.path)
        for env, plan in plans.items():
            played = _play(options, engine, run, plan, journal)
            if folder is not None:
                write_trajectories(folder.path / "trajectories" / f"{env}.jsonl", played)
            rows.append({"env": env, **_result(played)})
        how: dict[str, Any] = {
            "temperature": plan.sampling.temperature,
            "max_tokens": plan.sampling.max_tokens,
        }
        if weights.startswith("sha256 "):
            how["weights"] = weights
        table = {"panel": options.panel, "model": model, "repeatable": repeatable, **how, "rows": rows}
        if folder is not None:
            write_json(folder.path / "panel.json", finite(table))
            folder.finish({f"success/{row['env']}": row["success"] for row in rows})
    if options.json:
        print_json(table)
        return 0
    print(f"{'env':<14} {'success':>8}  {'95% interval':<18} {'reward':>8}  {'±':>7}  {'episodes':>8}")
    for row in rows:
        interval = f"{row['success_low']:.4f} to {row['success_high']:.4f}"
        print(
            f"{row['env']:<14} {row['success']:>8.4f}  {interval:<18} {row['reward']:>8.4f}  "
            f"{row['reward_half_width']:>7.4f}  {row['episodes']:>8}"
        )
    if not repeatable:
        print("not repeatable: a server's batches decide its rounding, and its model may change")
    return 0


@contextlib.contextmanager
def _held(options: EvalOptions, seed: int) -> Iterator[tuple[RunFolder | None, Any, Any, str]]:
    """The run folder that is asked for, nobody else's while it lasts, and what `_opened` gives.

    One that is there is asked before anything is loaded, another is made when something is.
    """
    with contextlib.ExitStack() as ending:
        out, folder = options.out, None
        if out is not None and out.exists():
            folder = ending.enter_context(RunFolder(out, "eval", seed))
        engine, run, weights = ending.enter_context(_opened(options))
        if out is not None and folder is None:
            folder = ending.enter_context(RunFolder(out, "eval", seed))
        yield folder, engine, run, weights


def _journal(
    options: EvalOptions, folder: RunFolder | None, weights: str, plans: Mapping[str, _Plan]
) -> Journal:
    """What was played for these plans before the command was broken off."""
    from shoal.rollout.journal import Journal

    if folder is None:
        return Journal()
    plays = {name: playing_settings(plan.settings) for name, plan in plans.items()}
    return journal_of(folder, weights, {"episodes": options.episodes, "plays": plays})


def _clear(folder: Path) -> None:
    """Remove what an evaluation of before left, so that a kill leaves none of it beside the new episodes."""
    for name in ("summary.json", "panel.json", "config.yaml"):
        (folder / name).unlink(missing_ok=True)
    for name in ("eval", *PANELS["all"]):
        (folder / "trajectories" / f"{name}.jsonl").unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(options: EvalOptions) -> Iterator[tuple[Any, Any, str]]:
    """What `engine_of` gives, one for all envs, so that all are played by the same weights."""
    import torch

    from shoal.samplers.registry import close_engine

    if options.env is None and options.panel is None and options.model.startswith(SERVER):
        raise ConfigError("say which env to play: --env NAME (shoal envs list shows them)")
    with Progress("loading the model", sys.stderr):
        engine, run, weights = engine_of(options)
    try:
        torch.set_num_threads(run.engine.threads)
        yield engine, run, weights
    finally:
        close_engine(engine)


@dataclass(frozen=True)
class _Plan:
    """What is played, and how."""

    envs: EnvironmentConfig
    sampling: Sampling
    seed: int
    settings: dict[str, Any]
    """The config of a run that plays the same."""


def _planned(options: EvalOptions, run: Any) -> _Plan:
    """What the options ask for, of a run's envs or another."""
    from shoal.core.configuration import to_mapping
    from shoal.core.seeding import derive_seed
    from shoal.envs.catalogue import parse_env_kwargs
    from shoal.rollout.factory import EnvGroups, EnvironmentConfig, EnvMix, EnvTag, EsManager

    if options.env is None:
        tags = run.es_manager.val.env_configs
        kinds = run.custom_envs
    else:
        tags = EnvMix((options.env,))
        told = parse_env_kwargs(options.env_config)
        known = (kind.prompt for kind in run.custom_envs.values() if kind.env_type == options.env)
        kinds = {options.env: EnvTag(options.env, env_config=told, prompt=next(known, {}))}
    if not tags.tags:
        raise ConfigError("say which env to play: --env NAME (shoal envs list shows them)")
    shares = sum(tags.n_groups) if tags.n_groups else len(tags.tags)
    at_once = shares * max(1, min(options.episodes, 64) // shares)
    groups = EnvGroups(at_once, 1, tags)
    proxy = run.agent_proxy
    if options.max_tokens is not None:
        proxy = replace(proxy, max_tokens=options.max_tokens)
    sampling = replace(proxy.sampling(greedy=not options.temperature), temperature=options.temperature)
    max_turn = proxy.max_turn if options.env is None else None  # another env has its own limit
    values = to_mapping(run)
    values["seed"], values["run_dir"], values["resume"] = options.seed, None, False
    values["custom_envs"] = {
        **values["custom_envs"],
        **{tag: to_mapping(kind) for tag, kind in kinds.items()},
    }
    values["es_manager"]["val"] = to_mapping(groups)
    values["agent_proxy"] |= {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "max_turn": max_turn,
    }  # fmt: skip
    envs = EnvironmentConfig(EsManager(groups, groups), kinds, vector=run.vector)
    return _Plan(envs, sampling, derive_seed(options.seed, "evaluation"), values)


def _play(options: EvalOptions, engine: Any, run: Any, plan: _Plan, journal: Journal) -> list[Any]:
    """The episodes."""
    with contextlib.ExitStack() as ending:
        collector = _collector(options, engine, run, plan, journal, ending)
        played: list[Any] = []
        with Progress("playing", sys.stderr) as progress:
            progress.doing = lambda: (
                f"playing, {len(played) + collector.counts[0]} of {options.episodes} episodes"
            )
            while len(played) < options.episodes:
                played += collector.collect(0, plan.sampling, first_group=len(played))
                done = min(len(played), options.episodes)
                progress.at(done / options.episodes, f"{done}/{options.episodes} episodes")
        return played[: options.episodes]


def _collector(
    options: EvalOptions, engine: Any, run: Any, plan: _Plan, journal: Journal, ending: contextlib.ExitStack
) -> Any:
    """What plays episodes of the plan: programs on the run's hosts with a gateway, envs in this process."""
    from shoal.gateway.programs import sessions_of
    from shoal.rollout.factory import make_roles, make_set, program_tags
    from shoal.rollout.play import ParallelRolloutManager, TrajectoryCollector
    from shoal.rollout.tools.toolbox import Toolbox

    proxy, kinds, side = run.agent_proxy, plan.envs.custom_envs, plan.envs.es_manager.val
    if program_tags(kinds, side.env_configs.tags):
        config = replace(run, es_manager=plan.envs.es_manager, custom_envs=kinds, rewards=())
        return ending.enter_context(
            ParallelRolloutManager(
                config, engine, side="val", seed=plan.seed, journal=journal, sessions=sessions_of
            )
        )
    made = make_set(plan.envs, side)
    ending.callback(made.pool.close)
    toolbox = Toolbox(proxy.tools, proxy.max_tool_turns)
    ending.callback(toolbox.close)
    if options.out is not None:
        toolbox.keep(options.out)
    roles = make_roles(kinds, made.tags, plan.settings["agent_proxy"]["max_turn"])
    return TrajectoryCollector(
        made.pool, made.tags, roles, 1, engine, proxy.prompt, plan.seed,
        env_retries=proxy.parallel.env_retries, journal=journal, toolbox=toolbox,
    )  # fmt: skip


def engine_of(options: EvalOptions) -> tuple[Any, Any, str]:
    """The engine to play with, the settings of its run (defaults for a bare model), and what tells its weights.

    The weights are told where they are asked for, with `out`.
    """
    asked = options.out is not None
    from shoal.samplers.models import KNOWN
    from shoal.samplers.registry import make_engine
    from shoal.train.agent.config import AgentConfig, AgentProxy, EngineConfig
    from shoal.train.agent.policies.loading import load_engine
    from shoal.train.records.checkpoints import read_checkpoint
    from shoal.train.records.exported import read_play
    from shoal.train.records.read import agent_config_of

    if options.model.startswith(SERVER):
        return _server(options)
    folder = Path(options.model)
    if (folder / "checkpoints").is_dir():
        run = agent_config_of(folder)
        if run.engine.name == "huggingface":
            hide_loading()
        device = options.device or run.engine.device

        def read(checkpoint: Path) -> tuple[Any, str]:
            weights = weights_at(checkpoint / "engine") if asked else ""
            return load_engine(checkpoint / "engine", device=device, config=run.engine), weights

        engine, weights = read_checkpoint(folder, options.checkpoint, read)
        return engine, run, weights
    if not folder.exists() and options.model not in KNOWN:
        raise DataError(
            f"there is no run folder and no model folder {folder}, nor is it one of {', '.join(KNOWN)} "
            f"(shoal model list) or openai:MODEL; shoal runs lists the runs"
        )
    weights = weights_at(options.model) if asked else ""
    device = options.device or "cpu"
    described = (folder / "engine.json").is_file()  # as in a checkpoint, and what `export --to shoal` wrote
    if folder.exists() and not described and not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise DataError(
                f"{folder} is an adapter alone: export the run without --adapter, which merges it, and evaluate that"
            )
        raise DataError(
            f"{folder} is neither a run folder (no checkpoints/) nor a model folder (no config.json)"
        )
    run = read_play(folder) or AgentConfig(
        engine=EngineConfig(name="huggingface", threads=2), agent_proxy=AgentProxy(max_tokens=64)
    )
    if run.engine.name == "huggingface":
        hide_loading()
        run = replace(run, engine=replace(run.engine, model=options.model, device=device))
    if described:
        return load_engine(folder, device=device, config=run.engine), run, weights
    return make_engine(run.engine, (), options.seed), run, weights


def _server(options: EvalOptions) -> tuple[Any, Any, str]:
    """A server by messages. No stop text is sent: servers leave it out of what they return, closing tag and all."""
    from shoal.samplers.registry import ServerConfig, make_engine
    from shoal.train.agent.config import AgentConfig, AgentProxy, EngineConfig

    if options.device is not None:
        raise ConfigError(f"--device {options.device} has no effect on a server's model: leave it out")
    server = ServerConfig(
        url=options.base_url,
        api_key_env=options.api_key_env,
        concurrency=options.concurrency,
        timeout=options.timeout,
        retries=options.retries,
    )
    settings = EngineConfig(name="openai", model=options.model.removeprefix(SERVER) or None, server=server)
    run = AgentConfig(engine=settings, agent_proxy=AgentProxy(max_tokens=512, stop=()))
    engine: Any = make_engine(settings)
    return engine, run, f"{SERVER}{engine.model}"


def _write(
    options: EvalOptions,
    folder: RunFolder,
    trajectories: list[Any],
    result: dict[str, float],
    played_as: dict[str, Any],
) -> None:
    from shoal.core.configuration import as_yaml
    from shoal.core.data import write_trajectories
    from shoal.core.files import write_text

    _clear(folder.path)
    write_text(folder.path / "config.yaml", as_yaml(played_as))
    write_trajectories(folder.path / "trajectories" / "eval.jsonl", trajectories)
    folder.finish(result)
    print(f"look at an episode:  {program()} show {shlex.quote(str(options.out))} --worst")
