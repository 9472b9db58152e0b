"""A command that closes its own terminal and goes on if it may."""

import os
import signal
from dataclasses import dataclass

from shoal.cli.command import Command


@dataclass
class Options:
    """Hang up."""


def hang_up(_):
    os.kill(os.getpid(), signal.SIGHUP)
    return 7


COMMAND = Command(Options, hang_up)
