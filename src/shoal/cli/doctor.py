"""`shoal doctor`: the versions, extras and hardware that shoal finds, and what to do about what is missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal.cli.command import Command
from shoal.cli.grammar import print_json

MORE = """\
Each line is ok, optional (a part that is not here), warning (it works, with
less) or failed. The pip lines are for the clone of shoal that it was installed from.
Exit status: 0 if nothing failed, 1 otherwise.
`shoal prove --quick` tests the installation by training.

examples:
  shoal doctor
  shoal doctor --json           for a bug report or a script
"""


COLOURS = {"ok": "green", "optional": "cyan", "warning": "yellow", "failed": "red"}


@dataclass(frozen=True)
class DoctorOptions:
    """Check the installation and the hardware: versions, extras, cores, GPU, Ray, shared memory."""

    json: bool = False
    """Print the findings as JSON."""


def doctor(options: DoctorOptions) -> int:
    """Look and print."""
    from rich.console import Console
    from rich.text import Text

    from shoal.testing.installation import examine

    findings, console = [], Console(soft_wrap=True)
    for finding in examine():
        findings.append(finding)
        if not options.json:
            word = (f"{finding.status:<8}", COLOURS[finding.status])
            console.print(Text.assemble(word, f" {finding.name:<12} {finding.found}"))
            if finding.advice:
                console.print(Text(f"{'':<21} → {finding.advice}"))
    wrong = [finding.name for finding in findings if finding.status == "failed"]
    if options.json:
        print_json({"findings": [asdict(finding) for finding in findings], "failed": wrong})
    else:
        print(f"\n{'wrong: ' + ', '.join(wrong) if wrong else 'shoal works here'}")
    return int(bool(wrong))


COMMAND = Command(DoctorOptions, doctor, MORE)
