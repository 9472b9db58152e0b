"""The command line of what plays or trains agents: a config by name, and Hydra's `key=value` overrides."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError


def agent_parser(prog: str, description: str, epilog: str, config: str) -> argparse.ArgumentParser:
    """A parser with `--config-name` (`config` if not given), `--config-dir` and the overrides."""
    from shoal.train.agent.config import config_names

    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config-name", default=config, help=f"one of {', '.join(config_names())}, or your own"
    )
    parser.add_argument("--config-dir", type=Path, help="folder with your own YAML configs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    return parser


def composed(options: argparse.Namespace) -> Any:
    """The config that the command line names, an `AgentConfig`."""
    from shoal.train.agent.config import compose_config

    if options.config_dir is not None and not options.config_dir.is_dir():
        raise ConfigError(f"--config-dir must be a folder, got {options.config_dir}")
    return compose_config(options.config_name, options.overrides, options.config_dir)


def hide_loading() -> None:
    """Keep the bars that transformers draws for each weight it loads off the screen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def show_warnings() -> None:
    """Send the library's warnings to standard error."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
