"""`python -m shoal.skills.tee LOG COMMAND…`: run a command, its output on this terminal and in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run `argv[1:]`, copying its output to the file `argv[0]`; returns its exit status."""
    with Path(argv[0]).open("ab", buffering=0) as log:
        process = subprocess.Popen(argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        while chunk := process.stdout.read1(65536):  # type: ignore[attr-defined]
            log.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
