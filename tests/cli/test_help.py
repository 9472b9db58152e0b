"""Help, completion and options of all commands: most used options first, any order, one line for a mistake."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import command
from shoal.cli.command import every
from shoal.cli.main import COMMANDS, main

EVERY = [found for name, entry in COMMANDS.items() for found in every(entry, name)]


@pytest.mark.parametrize(("name", "told"), EVERY, ids=[name for name, _ in EVERY])
def test_the_help_of_a_command_lists_every_flag_and_its_examples_are_calls(name, told, prints, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = prints(*name.split(), "--help")
    assert f"shoal {name}" in text
    for about in re.findall(r"^  shoal .*\S {2,}(\S.*)$", told.more, re.MULTILINE):
        assert about in text  # in one line
    monkeypatch.setenv("COLUMNS", "100")
    text = prints(*name.split(), "--help")
    assert max(map(len, text.splitlines())) <= 100
    flags = {flag for flag in command.flags_of(told, name)}
    assert flags <= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    assert {*told.most_used} <= flags
    assert len(told.most_used) in range(7, 11) or len([flag for flag in flags if flag[:5] != "--no-"]) < 12
    if told.most_used:  # they stand first
        assert text.index("Most used options") < text.index("All other options")
    examples = re.findall(rf"^  shoal {name} (.*?)(?:   .*)?$", told.more, re.MULTILINE)
    assert examples or f"  shoal {name}" in told.more
    for example in examples:
        assert {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", example.replace("_", "-"))} <= flags, example


HEAVY = "torch transformers ray jax numba scipy matplotlib starlette hydra"


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom shoal.cli.main import main\n"
        "for name in sys.argv[1:]:\n    assert main([*name.split(), '--help']) == 0\n"
        f"    heavy = [heavy for heavy in '{HEAVY}'.split() if heavy in sys.modules]\n"
        "    assert not heavy, f'shoal {name} --help imports {heavy}'"
    )
    names = ["", "skills", *(name for name, _ in EVERY)]
    subprocess.run([sys.executable, "-c", script, *names], stdout=subprocess.DEVNULL, check=True)


def test_booleans_are_flags_with_a_negative_everywhere():
    for name, told in EVERY:
        flags = command.flags_of(told, name)
        assert "--json" not in flags or "--no-json" in flags, name
    ppo = command.load(COMMANDS["train-ppo"])
    assert command.parse(ppo, "train-ppo", ["--record-video"]).run.record_video
    assert not command.parse(ppo, "train-ppo", ["--no-tensorboard"]).run.tensorboard


def test_words_and_flags_come_in_any_order():
    one = command.load(COMMANDS["train"])
    both = [
        command.parse(one, "train", shlex.split(words))
        for words in (
            "a=1 ~b c=-2 --seed 3 --json",
            "--seed 3 a=1 --json ~b c=-2",
            "--seed=3 a=1 ~b --json c=-2",
        )
    ]
    assert both[0] == both[1] == both[2]
    assert (both[0].overrides, both[0].seed, both[0].json) == (("a=1", "~b", "c=-2"), 3, True)
    again = command.parse(
        command.load(COMMANDS["replay"]), "replay", ["--turn", "2", "runs/a", "--pdb", "17"]
    )
    assert (again.run, again.episode, again.turn, again.pdb) == (Path("runs/a"), "17", 2, True)


def test_the_help_has_the_defaults_of_the_environment_that_is_named(prints):
    def default(*words):
        text = prints("train-ppo", *words, "--help")
        return re.search(r"--learning-rate .*default: ([\d.e-]+)\]", text)[1]

    assert default("--preset", "none") != default("--env", "CartPole-v1")


def test_bash_completes_commands_and_flags(prints, tmp_path):
    script = tmp_path / "completion.sh"
    script.write_text(prints("completion", "bash"))
    asked = {
        "tra": "train train-ppo train-recorded",
        "skills sta": "status",
        "skills train --dry": "--dry-run",
    }
    lines = [
        f"COMP_WORDS=(shoal {words}); COMP_CWORD={len(words.split())}; _shoal; echo ${{COMPREPLY[@]}}"
        for words in asked
    ]
    script.write_text("\n".join([script.read_text(), *lines]))
    done = subprocess.run(["bash", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [*asked.values()]


def test_completion_leaves_out_a_command_whose_extra_is_missing(prints, monkeypatch):
    monkeypatch.setitem(COMMANDS, "train-ppo", ("not_installed", ""))
    told = prints("completion", "bash")
    assert "train-recorded" in told
    assert "train-ppo" not in told


# --- options
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train-ppo --n-envs abc", "--n-envs must be a whole number, got 'abc'"),
        ("train-ppo --n-env 4", "Unknown option: --n-env. Did you mean --n-envs?"),
        (
            "train-ppo --recurrent lst",
            'Invalid value "lst" for --recurrent. Choose from: "none", "lstm", "gru". Did you mean "lstm"?',
        ),
        ("train-ppo --n-envs 1e20", "n_envs must be a whole number of 64 bits, got 100000000000000000000"),
        ("train-ppo --n-envs 1e999999999", "--n-envs must be a whole number, got '1e999999999'"),
        (
            "train-ppo --learning-rate fast",
            'Invalid value for --learning-rate: unable to convert "fast" into float.',
        ),
        ("train-ppo --hidden 64 x", "--hidden must be a whole number, got 'x'"),
        ("skills train --max_nodes x --dry-run", "--max_nodes must be a whole number, got 'x'"),
        ("train-ppo --env", "Parameter --env requires an argument."),
        ("skills train --env-name", "Parameter --env-name requires an argument."),
        ("eval x --seed", "Parameter --seed requires an argument."),
    ],
)
def test_an_option_that_is_wrong_is_one_line_of_one_look(words, told, capsys):
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"shoal: {told}\n"


def test_whole_numbers_may_be_said_in_powers_of_ten(prints):
    assert "seed: 1000\n" in prints("train", "--seed", "1e3", "--cfg")


def test_several_numbers_are_given_with_spaces_or_commas():
    from shoal.cli.train_ppo import COMMAND

    for words in ("--hidden 64 32", "--hidden 64,32", "--hidden=64,32"):
        assert command.parse(COMMAND, "train-ppo", words.split()).ppo.hidden == (64, 32)


def test_every_config_is_listed_with_what_it_is_for(prints):
    from shoal.train.agent.config import config_names

    out = prints("train", "--configs")
    for name in config_names():
        (row,) = [line.split(maxsplit=1) for line in out.splitlines() if line.split()[:1] == [name]]
        assert len(row[1]) > 20


def test_each_command_has_one_line_in_the_list_of_80_columns(prints, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = prints("--help")
    assert "SHOAL_TRACEBACK" in text
    rows = re.findall(r"^│ (\S*) +(.*?) *│$", text, re.MULTILINE)
    assert rows == [(name, about) for name, (_, about) in COMMANDS.items()]
