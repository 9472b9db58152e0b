"""`shoal doctor`: the versions, extras and hardware that shoal finds, and what to do about what is missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal.cli.command import Command
from shoal.cli.grammar import print_json

MORE = """\
Each line is ok, missing (an optional part), warning (it works, with less) or
failed. The pip lines are for the clone of shoal that it was installed from.
Exit status: 0 if nothing failed, 1 otherwise.
`shoal prove --quick` tests the installation by training.

examples:
  shoal doctor
  shoal doctor --json           for a bug report or a script
"""


@dataclass(frozen=True)
class DoctorOptions:
    """Check the installation and the hardware: versions, extras, cores, GPU, Ray, shared memory."""

    json: bool = False
    """Print the findings as JSON."""


def doctor(options: DoctorOptions) -> int:
    """Look and print."""
    from shoal.testing.installation import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(f"{finding.status:<8} {finding.name:<12} {finding.found}", flush=True)
            if finding.advice:
                print(f"{'':<21} → {finding.advice}", flush=True)
    wrong = [finding.name for finding in findings if finding.status == "failed"]
    if options.json:
        print_json({"findings": [asdict(finding) for finding in findings], "failed": wrong})
    else:
        print(f"\n{'wrong: ' + ', '.join(wrong) if wrong else 'shoal works here'}")
    return int(bool(wrong))


COMMAND = Command(DoctorOptions, doctor, MORE)
