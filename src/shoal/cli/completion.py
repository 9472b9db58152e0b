"""`shoal completion SHELL`: a script that completes commands, their flags, run folders and names of configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from shoal.cli.command import Command, every, flags_of

MORE = """\
examples:
  source <(shoal completion bash)                                  now, in this shell
  shoal completion bash > ~/.local/share/bash-completion/completions/shoal
  shoal completion zsh > ~/.zfunc/_shoal
  shoal completion fish > ~/.config/fish/completions/shoal.fish
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes shoal's commands and flags; it is made from what they take."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """for which it is"""


def complete(options: CompletionOptions) -> None:
    """Print the script."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](words()), end="")


COMMAND = Command(CompletionOptions, complete, MORE)


def words() -> dict[str, list[str]]:
    """What can follow each command: its flags, or its own commands and theirs (`envs show`)."""
    from shoal.cli.main import COMMANDS

    found: dict[str, list[str]] = {}
    for first, entry in COMMANDS.items():
        for name, command in every(entry, first):
            found[name] = sorted({*flags_of(command, name), "--help", "--help-all"})
            if name != first:
                found.setdefault(first, []).append(name.removeprefix(f"{first} "))
    return found


def _bash(found: dict[str, list[str]]) -> str:
    commands = " ".join(name for name in found if " " not in name)
    groups = "|".join(dict.fromkeys(name.split()[0] for name in found if " " in name))
    cases = "\n".join(f'    "{name}") words="{" ".join(values)}" ;;' for name, values in found.items())
    return f"""\
_shoal() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words="" first="${{COMP_WORDS[1]}}" second="${{COMP_WORDS[2]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$current")); return
  fi
  local key="$first"
  case "$first" in {groups}) [ "$COMP_CWORD" -gt 2 ] && key="$first $second" ;; esac
  case "$key" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -d -- "$current"))
}}
complete -o filenames -F _shoal shoal
"""


def _zsh(found: dict[str, list[str]]) -> str:
    return "#compdef shoal\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(found)


def _fish(found: dict[str, list[str]]) -> str:
    names = [name for name in found if " " not in name]
    lines = [f"complete -c shoal -n __fish_use_subcommand -a '{' '.join(names)}'"]
    for name in names:
        flags = [word[2:] for word in found[name] if word.startswith("--")]
        inner = [word for word in found[name] if not word.startswith("--")]
        lines += [f"complete -c shoal -n '__fish_seen_subcommand_from {name}' -l {flag}" for flag in flags]
        if inner:
            lines.append(f"complete -c shoal -n '__fish_seen_subcommand_from {name}' -a '{' '.join(inner)}'")
    return "\n".join(lines) + "\n"
