"""`shoal completion SHELL`: a script that completes commands, their flags, run folders and names of configs."""

from __future__ import annotations

import importlib
import re

from shoal.cli.grammar import parser_of
from shoal.cli.helping import flags_in, text_of

EPILOG = """\
examples:
  source <(shoal completion bash)                                  now, in this shell
  shoal completion bash > ~/.local/share/bash-completion/completions/shoal
  shoal completion zsh > ~/.zfunc/_shoal
  shoal completion fish > ~/.config/fish/completions/shoal.fish
"""


def main(argv: list[str]) -> int:
    """Print the script."""
    parser = parser_of(
        "shoal completion",
        "Print a script that completes shoal's commands and flags; it is made from their --help.",
        EPILOG,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    options = parser.parse_args(argv)
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](words()), end="")
    return 0


def words() -> dict[str, list[str]]:
    """What can follow each command: its flags, or its own commands and theirs (`envs show`)."""
    from shoal.cli.main import COMMANDS

    found = {}
    for name, (module, _) in COMMANDS.items():
        main_of = importlib.import_module(module).main
        text = text_of(main_of, [])
        inner = re.findall(r"^  ([a-z]+) {2,}\S", text, re.MULTILINE) if name in ("envs", "skills") else []
        found[name] = sorted({*flags_in(text), *inner})
        for verb in inner:
            found[f"{name} {verb}"] = sorted(flags_in(text_of(main_of, [verb])))
    return found


def _bash(found: dict[str, list[str]]) -> str:
    commands = " ".join(name for name in found if " " not in name)
    cases = "\n".join(f'    "{name}") words="{" ".join(values)}" ;;' for name, values in found.items())
    return f"""\
_shoal() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words="" first="${{COMP_WORDS[1]}}" second="${{COMP_WORDS[2]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$current")); return
  fi
  local key="$first"
  case "$first" in envs|skills) [ "$COMP_CWORD" -gt 2 ] && key="$first $second" ;; esac
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
