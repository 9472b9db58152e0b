"""What the first edition wrote loads, verifies, and is gone on with to the same bytes as by the first edition."""

from __future__ import annotations

import json
import shutil

import gymnasium
import pytest
import tests.freeze.formats as formats

from shoal.core.files import MANIFEST, verify_folder

RECORDED = json.loads(formats.RESULTS.read_text("utf-8"))
ENVS = {"ppo-compiled": "CartPole-v1", "ppo-torch": "Pendulum-v1"}
COMMITTED = sorted(path.parent for path in formats.FIXTURES.rglob(MANIFEST))


@pytest.mark.parametrize(
    "folder", COMMITTED, ids=lambda folder: folder.relative_to(formats.FIXTURES).as_posix()
)
def test_a_folder_of_the_first_edition_verifies(folder):
    assert verify_folder(folder) == folder


def test_all_kinds_of_folders_are_among_them():
    assert {folder.relative_to(formats.FIXTURES).parts[0] for folder in COMMITTED} == {
        "agent", "batch", "ppo-compiled", "ppo-torch",
    }  # fmt: skip


@pytest.mark.parametrize("name", formats.KINDS)
def test_going_on_from_the_first_edition_ends_in_the_bytes_it_ended_in(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now, expected = formats.gone_on_with(name, tmp_path), RECORDED["results"][name]
    assert now.keys() == expected.keys()
    if name != "batch" and formats.arithmetic() != RECORDED["arithmetic"]:
        pytest.skip(
            "went on, but trained bytes are not comparable: other versions or another processor's rounding"
        )
    assert now == expected


@pytest.mark.parametrize("name", ENVS)
def test_a_policy_of_the_first_edition_acts(name):
    from shoal import load_policy

    policy, env = load_policy(formats.FIXTURES / name), gymnasium.make(ENVS[name])
    assert env.action_space.contains(policy(env.reset(seed=0)[0]))
    env.close()


def test_a_store_of_the_first_edition_tells_its_skills(tmp_path, capsys):
    shutil.copytree(formats.FIXTURES / "skills", tmp_path / "skills")
    from shoal.cli.main import main

    assert main(["skills", "status", "--run-dir", str(tmp_path / "skills"), "--json"]) == 0
    skills = json.loads(capsys.readouterr().out)["skills"]
    assert {skill["status"] for skill in skills.values()} == {"completed"}


def test_a_run_of_the_first_edition_is_shown(capsys):
    from shoal.cli.main import main

    assert main(["show", str(formats.FIXTURES / "agent")]) == 0
    assert "turn" in capsys.readouterr().out
