"""A command that closes its own terminal and goes on if it may."""

import os
import signal


def main(argv):
    os.kill(os.getpid(), signal.SIGHUP)
    return 7
