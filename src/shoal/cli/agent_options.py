"""The command line of what plays or trains agents: a config by name, and Hydra's `key=value` overrides."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.cli.command import Flag
from shoal.core.errors import ConfigError


def _config_names(default: str) -> str:
    from shoal.train.agent.config import config_names

    return f"(of {', '.join(config_names())}) (default: {default})"


ConfigName = tyro.conf.arg(
    metavar="NAME", help="a config that comes with shoal, or your own", help_behavior_hint=_config_names
)


@dataclass(frozen=True)
class AgentOptions:
    """What names a run of agents: a config, settings to change, and the flags that all commands have."""

    overrides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[key=value ...]")] = ()
    """settings to change, as in Hydra: +key=value adds one, ~key removes one"""
    config_name: Annotated[str, ConfigName] = "demo"
    config_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder with your own YAML configs"""
    run_dir: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """run_dir=FOLDER: where the run goes"""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """seed=N: of the whole run"""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """engine.device=NAME: cpu, cuda, cuda:1, mps"""
    json: Flag = False
    """print the summary as JSON at the end; the rest to stderr"""

    def settings(self, device: str = "engine.device") -> list[str]:
        """The settings, with `--seed`, `--device` (whose key is given) and `--resume` among them.

        Raises:
            ConfigError: a flag is given as a setting, too.
        """
        flags = {"seed": self.seed, device: self.device, "resume": getattr(self, "resume", None) or None}
        words = list(self.overrides)
        for key, value in flags.items():
            if value is not None:
                _refuse_twice(key, words)
                words.append(f"{key}={str(value).lower() if value is True else value}")
        return words


def composed(options: AgentOptions) -> Any:
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
    words = options.settings()
    own = options.config_dir / f"{options.config_name}.yaml" if options.config_dir is not None else None
    _refuse_secrets([*words, own.read_text("utf-8", "replace") if own and own.is_file() else ""])
    config = compose_config(options.config_name, [_own_key(word) for word in words], options.config_dir)
    if options.run_dir is not None:
        _refuse_twice("run_dir", words)
        config = replace(config, run_dir=options.run_dir)
    refuse_device(config.engine.device)
    return config


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
