"""The command line of what plays or trains agents: a config by name, and Hydra's `key=value` overrides."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.grammar import parser_of
from shoal.core.errors import ConfigError


def agent_parser(prog: str, description: str, epilog: str, config: str) -> argparse.ArgumentParser:
    """A parser with `--config-name` (`config` if not given), `--config-dir` and the overrides."""
    from shoal.train.agent.config import config_names

    parser = parser_of(prog, description, epilog)
    parser.add_argument(
        "--config-name", default=config, help=f"one of {', '.join(config_names())}, or your own"
    )
    parser.add_argument("--config-dir", type=Path, help="folder with your own YAML configs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    alike = parser.add_argument_group("as in every command (each is a setting, too)")
    alike.add_argument("--run-dir", metavar="FOLDER", help="run_dir=FOLDER: where the run goes")
    alike.add_argument("--seed", type=int, metavar="N", help="seed=N: of the whole run")
    alike.add_argument("--device", metavar="NAME", help="engine.device=NAME: cpu, cuda, cuda:1, mps")
    alike.add_argument(
        "--json", action="store_true", help="print the summary as JSON at the end; the rest to stderr"
    )
    return parser


def composed(options: argparse.Namespace) -> Any:
    """The config that the command line names, an `AgentConfig`; flags become settings."""
    from shoal.train.agent.config import compose_config

    if options.config_dir is not None and not options.config_dir.is_dir():
        raise ConfigError(f"--config-dir must be a folder, got {options.config_dir}")
    for word in options.overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(
                f"settings are given as key=value (such as seed=1), got {word!r}; a config is named by --config-name"
                f"{_meant(word)}"
            )
    flags_as_settings(options, "engine.device")
    own = options.config_dir / f"{options.config_name}.yaml" if options.config_dir is not None else None
    _refuse_secrets([*options.overrides, own.read_text("utf-8", "replace") if own and own.is_file() else ""])
    options.overrides = [_own_key(word) for word in options.overrides]
    config = compose_config(options.config_name, options.overrides, options.config_dir)
    if options.run_dir is not None:
        _refuse_twice("run_dir", options.overrides)
        config = replace(config, run_dir=options.run_dir)
    refuse_device(config.engine.device)
    return config


def flags_as_settings(options: argparse.Namespace, device: str) -> None:
    """Write `--seed`, `--device` and `--resume` as settings; `device` is the key of that one.

    Raises:
        ConfigError: one is given as a setting, too.
    """
    flags = {"seed": options.seed, device: options.device, "resume": getattr(options, "resume", None) or None}
    for key, value in flags.items():
        if value is not None:
            _refuse_twice(key, options.overrides)
            options.overrides.append(f"{key}={str(value).lower() if value is True else value}")


def _refuse_secrets(texts: Sequence[str]) -> None:
    """Settings are printed, and written into config.yaml and names of folders: no place for a secret's value."""
    for name in re.findall(r"\$\{\s*oc\.(?:env|decode)\s*:\s*([^,}\s]+)", "\n".join(texts)):
        if re.search(r"key|token|secret|passw|credential", name, re.IGNORECASE):
            raise ConfigError(
                f"${{oc.env:{name}}} would write what {name} holds into config.yaml: name the variable instead, "
                f"such as engine.server.api_key_env={name}"
            )


def _own_key(word: str) -> str:
    """A setting of an env may be new to the config: the env itself knows which there are, and refuses others."""
    return f"++{word}" if re.match(r"custom_envs\.[^.=]+\.env_config\.[^=]+=", word) else word


def _meant(word: str) -> str:
    from shoal.train.agent.config import config_names

    return f": --config-name {word}" if word in config_names() else ""


def _refuse_twice(key: str, overrides: Sequence[str]) -> None:
    if any(word.partition("=")[0].lstrip("+") == key for word in overrides):
        raise ConfigError(f"{key} is given twice, as a setting and as a flag: leave one of them out")


def refuse_device(device: str) -> None:
    """Refuse a device that torch does not know, or that this machine does not have.

    Raises:
        ConfigError: names the devices that there are.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return
    import torch

    have = ["cpu"]
    have += (
        [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    mps = getattr(torch.backends, "mps", None)
    have += ["mps"] if mps is not None and mps.is_available() else []
    known = {*have, *(name.partition(":")[0] for name in have), "auto"}
    if device not in known:
        raise ConfigError(
            f"device={device} is not available here: torch can use {', '.join(have)}; see shoal doctor"
        )


def hide_loading() -> None:
    """Keep the bars that transformers draws for each weight it loads off the screen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def show_warnings() -> None:
    """Send the library's warnings to standard error."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
