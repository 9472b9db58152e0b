"""The list of runs, runs compared, the page of a run, and addresses that last."""

import contextlib
import html
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.viewer.test_index import episode
from tests.viewer.test_pages import FIXTURES, arrays_of_a_sample
from tests.viewer.test_server import make_run, tables_of

from shoal.cli.main import main
from shoal.core.data import write_trajectories
from shoal.core.errors import DataError
from shoal.core.run_folder import RunFolder
from shoal.viewer import server
from shoal.viewer.curves import meaning, table
from shoal.viewer.export import export
from shoal.viewer.markup import spark
from shoal.viewer.pages import Site, compare
from shoal.viewer.server import page_for

ROOT = Path(__file__).resolve().parents[2]


def page(run, path="", **query):
    site = Site([run])
    return page_for(site, f"{site.place(run)}{path}", query).body


def lines_of(home):
    """The cells of each line of the list of runs, by the name of their column."""
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", home.partition("<tbody>")[2])
    text = lambda cell: re.sub(r"<[^>]+>", "", cell)  # noqa: E731
    return [
        {name: text(cell) for name, cell in re.findall(r'data-name="(\w+)">(.*?)</td>', line)}
        for line in lines
    ]


# --- all runs
def test_a_running_run_says_how_far_it_is_what_is_left_and_when_its_last_row_came(tmp_path, opened):
    rows = [{"iteration": k, "success": 0.1 * k, "seconds": 3.0 + 10 * k} for k in range(6)]
    run = opened(make_run(tmp_path / "run", rows=rows, config="seed: 1\ntrainer: {iterations: 40}\n"))
    with RunFolder(run.path, "train", 0):
        # 10 s an iteration, and 35 iterations are left
        told = "iteration 5 of 40, about 5 min 50 s left, last row at "
        [line] = lines_of(page_for(Site([run]), "", {}).body)
        assert told in line["state"]
        assert "<dt>progress</dt><dd>iteration 5 of 40</dd>" in page(run)
        assert line["took"] == "53 s"  # up to its last row
    assert "of 40" not in page_for(Site([run]), "", {}).body


def test_a_run_that_was_stopped_says_how_far_it_is_and_the_command_that_goes_on_with_it(
    tmp_path, opened, prints
):
    rows = [{"iteration": k, "success": 0.1, "seconds": 3.0 * k} for k in range(6)]
    run = opened(make_run(tmp_path / "a run", rows=rows, config="seed: 7\ntrainer: {iterations: 40}\n"))
    (run.path / "summary.json").unlink()
    assert "resume=true" not in page(run)  # there is nothing that it could go on from
    (run.path / "checkpoints" / "step-000005").mkdir(parents=True)
    [line] = lines_of(page_for(Site([run]), "", {}).body)
    assert line["state"] == "unfinishediteration 5 of 40"
    assert "<dt>progress</dt><dd>iteration 5 of 40</dd>" in page(run)
    told = html.unescape(re.search('data-copy=["]([^"]*resume=true)', page(run))[1])
    assert told in prints("show", run.path)  # the terminal says it in the same words


@pytest.mark.parametrize(
    "text", ["trainer: 5", "trainer: {iterations: x}", "[1]", "env: [1]", "{", "trainer: {iterations: .nan}"]
)
def test_an_odd_config_of_a_running_run_does_not_hide_the_list(tmp_path, opened, text):
    runs = [opened(make_run(tmp_path / name, config=text)) for name, text in (("odd", text), ("other", None))]
    with RunFolder(runs[0].path, "train", 0):
        lines = lines_of(page_for(Site(runs), "", {}).body)
    assert {line["run"] for line in lines} == {"odd", "other"}


def test_steps_are_the_progress_of_ppo(tmp_path, opened):
    folder = shutil.copytree(FIXTURES / "ppo-torch", tmp_path / "ppo")
    (folder / "metrics.jsonl").write_text('{"steps": 64, "seconds": 1.0}\n{"steps": 128, "seconds": 3.0}\n')
    assert opened(folder).progress() == (128, 256, 4.0)  # 64 steps in 2 s, and 128 steps are left


def test_every_kind_of_run_has_its_env_its_result_and_how_long_it_took(tmp_path, opened):
    arrays_of_a_sample(tmp_path)
    (tmp_path / "split" / "batch" / "batch.json").write_text('{"samples": [{}, {}]}')
    runs = [opened(FIXTURES / name) for name in ("agent", "ppo-torch", "skills")]
    lines = lines_of(page_for(Site([*runs, opened(tmp_path / "split")]), "", {}).body)
    told = {line["run"]: (line["kind"], line["env"], line["result"], line["took"]) for line in lines}
    assert told == {
        "agent": ("agent", "BanditEnv", "0.5 held-out success", "3.2 s"),
        "ppo-torch": ("ppo", "Pendulum-v1", "-1298 eval return mean", "1.5 s"),
        "skills": ("skills", "crafting", "1 of 1 skill", "2.8 s"),
        "split": ("split", "–", "2 samples", "–"),
    }
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", line["written"]) for line in lines)


def test_the_run_that_was_written_last_is_first(tmp_path, opened):
    runs = [opened(make_run(tmp_path / name)) for name in ("a", "b", "c")]
    for run, age in zip(runs, (30, 10, 20), strict=True):
        for file in run.path.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    lines = lines_of(page_for(Site(runs), "", {}).body)
    assert [line["run"] for line in lines] == ["b", "c", "a"]


def test_a_small_curve_stands_at_its_value_within_a_fixed_scale():
    def heights(drawn):
        return [float(y) for y in re.findall(r",([\d.]+)", re.search(r'points="([^"]+)"', drawn)[1])]

    assert [spark([]), spark([0.5])] == ["", ""]
    assert 'points="2.0,20.0 98.0,4.0"' in spark([0.0, 1.0])
    # the picture reaches from 20, the lowest value, up to 4
    assert heights(spark([0.0, 0.0], (0.0, 1.0))) == [20, 20]
    assert heights(spark([1.0, 1.0], (0.0, 1.0))) == [4, 4]
    assert heights(spark([0.5, 0.75], (0.0, 1.0))) == [12, 8]
    assert heights(spark([500.0, 500.0])) == [4, 4]
    assert heights(spark([-200.0, -100.0])) == [20, 12]
    assert "from 0 at the bottom to 500 at the top" in spark([500.0, 500.0])


# --- comparing
def test_only_the_chosen_runs_are_compared_and_what_has_no_curves_is_named(tmp_path, opened):
    runs = [opened(make_run(tmp_path / name)) for name in ("one", "two", "three")]
    runs.append(opened(shutil.copytree(FIXTURES / "skills", tmp_path / "skills")))
    runs.append(opened(make_run(tmp_path / "begun", rows=0)))
    site = Site(runs)
    body = page_for(site, "compare", {"runs": "one,three,skills,begun"}).body
    assert tables_of(body)[0]["name"] == "one, three"
    assert "Left out, having no curves to compare: skills, begun." in body
    assert "<h2>PPO" not in body
    assert "no curves to compare" in page_for(site, "compare", {"runs": "begun"}).body


def test_settings_that_differ_come_before_those_that_only_some_runs_have(tmp_path, opened):
    runs = []
    for k, name in enumerate(("one", "two", "three")):
        more = "".join(f"  only{n:03d}: {n}\n" for n in range(120)) if k == 2 else ""
        text = f"seed: 1\nzeta: {{iterations: {40 - k}}}\nsame: 3\nalpha:\n  here: 1\n{more}"
        runs.append(opened(make_run(tmp_path / name, config=text)))
    runs.append(opened(make_run(tmp_path / "bare")))
    (runs[-1].path / "config.yaml").unlink()
    settings = compare(Site(runs), {}).body.partition("Settings that differ")[2]
    first, _, folded = settings.partition("<details")
    assert (
        '<td>zeta.iterations</td><td class="n">40</td><td class="n">39</td><td class="n">38</td></tr>'
        in first
    )
    assert first.count("<tr><td>") == 1
    assert "No settings are known of bare." in first
    assert "120 settings that only some of the runs have" in folded
    assert "The first 100 of 120 settings." in folded
    assert folded.count("<tr><td>alpha.only") == 100
    assert "same" not in settings


def test_the_static_file_has_its_buttons_and_compares_only_runs_of_one_kind(tmp_path, opened):
    agents = [opened(make_run(tmp_path / name)) for name in ("one", "two")]
    skills = opened(FIXTURES / "skills")
    unlike, alike = export([agents[0], skills]), export([*agents, skills])
    assert ('id="compare"' in unlike, ">Compare<" in unlike) == (False, False)
    assert ('id="compare"' in alike, ">Compare<" in alike) == (True, True)
    for text in (unlike, alike):
        assert text.count('data-do="theme"') == text.count('class="page"')
        assert 'data-do="help"' in text
        assert 'data-run="' not in text  # what is ticked needs a server


# --- the page of a run
def test_metrics_stand_under_the_headings_of_the_docs_with_their_sentences(tmp_path, opened):
    same = {"groups_too_few": 0, "heldout_success": 0.5}
    rows = [
        {"iteration": k, **same, "loss": 0.1 * k, "grad_norm": 2.0 + k, "mine": k, "failed/timeout": k}
        for k in (1, 2)
    ]
    body = page(opened(make_run(tmp_path / "run", rows=rows)))
    groups = dict(re.findall(r"<summary>([^<:]+): ([^<]+)</summary>", body))
    assert groups == {
        "Success and episodes": "1 further metric",
        "Update": "2 further metrics",
        "Others": "1 further metric",
    }
    update = body.partition("<summary>Update:")[2].partition("</details></div>")[0]
    assert "mean norm of the gradient before clipping" in update
    assert "1 constant or single values" in body
    assert "<dt>groups_too_few</dt><dd><b>0</b> groups with fewer than two whole episodes</dd>" in body
    assert meaning("agent", "failed/timeout").startswith("how many episodes ended as env_error")
    assert (
        meaning("ppo", "reward_mean") == "mean return and length of the last 100 finished training episodes"
    )


def test_the_sentences_that_are_installed_are_those_of_the_docs():
    write = (
        "import sys; sys.path.insert(0, 'docs'); import make_metrics; sys.stdout.write(make_metrics.text())"
    )
    done = subprocess.run([sys.executable, "-c", write], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = (ROOT / "src" / "shoal" / "viewer" / "static" / "metrics.json").read_text("utf-8")
    assert done.stdout == kept, "docs/metrics.md or docs/ppo.md has changed: run python docs/make_metrics.py"
    assert json.loads(kept)["agent"]["Update"]["entropy"].startswith("mean entropy")


def test_numbers_of_a_long_run_are_thinned_by_metric_and_keep_their_extremes():
    rows = [
        {"iteration": k, "loss": {4321: 1.0, 5678: -1.0}.get(k, 0.0), "rare": 7 if k == 77 else None}
        for k in range(10_000)
    ]
    held = table(rows, ("iteration",), ("loss", "rare", "missing"))
    points = {
        name: [
            (held["rows"][i], held["axes"]["iteration"][i], y)
            for i, y in zip(one["i"], one["y"], strict=True)
        ]
        for name, one in held["curves"].items()
    }
    assert len(points["loss"]) < 610
    assert len(held["rows"]) < 611  # what is drawn of no metric is not in the page
    assert {(0, 0, 0.0), (4321, 4321, 1.0), (5678, 5678, -1.0), (9999, 9999, 0.0)} <= set(points["loss"])
    assert points["rare"] == [(77, 77, 7)]
    assert "missing" not in held["curves"]


def test_a_run_without_advice_says_so_and_many_files_are_folded(tmp_path, opened):
    folder = make_run(tmp_path / "run", rows=4)
    for k in range(2, 41):
        write_trajectories(folder / "trajectories" / f"train-{k:06d}.jsonl", [episode((1.0,))])
    body = page(opened(folder))
    assert "Nothing striking in the metrics." in body
    listed = body.partition('id="episodes"')[2].partition("<details>")[0]
    assert listed.count("<tr>") == 11  # a head and the ten newest
    assert "30 older files" in body
    assert "unreadable" not in body
    with (folder / "trajectories" / "train-000040.jsonl").open("a") as file:
        file.write("{broken}\n")
    assert "unreadable lines" in page(opened(folder))


def test_a_ppo_run_shows_its_film_and_the_time_of_the_whole_run(tmp_path, opened):
    folder = shutil.copytree(FIXTURES / "ppo-torch", tmp_path / "ppo")
    (folder / "video.gif").write_bytes(b"GIF89a")
    body = page(opened(folder))
    assert '<img src="/run/ppo/file?name=video.gif"' in body
    assert "<dt>whole run</dt><dd>1.5 s</dd>" in body
    assert "mean and deviation of the return of --eval-episodes evaluation episodes" in body


# --- skills
@pytest.fixture
def failed(tmp_path, opened):
    """A graph whose one skill used up its steps."""
    folder = shutil.copytree(FIXTURES / "skills", tmp_path / "skills")
    reason = "not learned: success 0.26 < min_success 0.3 after 20480 env steps"
    training = folder / "training_runs" / "skill_0_Collect_Wood"
    training.mkdir(parents=True)
    rows = [{"step": 10240 * k, "success": 0.1 * k, "entropy": 2.0, "wall": 1.5 * k} for k in (1, 2)]
    (training / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.closing(sqlite3.connect(folder / "state.db")) as db, db:
        db.execute(
            "update skill set status='failed', reason=?, budget_used=0, budget_total=20000, result='{}'",
            (reason,),
        )
        db.execute("update attempt set outcome='exhausted', reason=?, frames=null", (reason,))
        db.execute("delete from head")
        db.execute("delete from version")
    return opened(folder)


def test_a_failed_skill_tells_the_steps_it_used_and_shows_its_curve(failed):
    body = page(failed)
    [row] = re.findall(r"<tr>(?:(?!<tr>).)*Collect Wood(?:(?!<tr>).)*20,000.*?</tr>", body)
    assert '<td class="n">20,480</td><td class="n">20,000</td>' in row
    assert 'class="span is-exhausted"' in body
    skill = page(failed, "/skill", name="Collect Wood")
    assert "<dt>env steps used</dt><dd>20,480 of 20,000</dd>" in skill
    assert 'is-exhausted">exhausted' in skill
    assert "None: no training of it was accepted." in skill
    [held] = tables_of(skill)
    assert held["curves"]["success"]["y"] == [0.1, 0.2]
    assert held["axes"] == {"env steps": [10240, 20480], "seconds": [1.5, 3.0]}


def test_the_success_of_a_skill_and_that_of_the_chain_are_named_apart(opened):
    body = page(opened(FIXTURES / "skills"))
    assert "<dt>whole chain, on unseen worlds</dt><dd>56.2%</dd>" in body
    assert '<th class="n">own test</th><th class="n">on the chain</th>' in body
    assert '<td class="n">90.6%</td><td class="n">56.2%</td>' in body
    assert "completed, own test 90.6%" in body
    assert "<dt>training in all</dt><dd>2.3 s</dd>" in body  # from 213.582 to 215.906
    assert "<td>frames</td>" in body  # the summary says 40,448 too
    assert '<td class="n">40,448</td><td class="n">40,000</td>' in body


# --- addresses that last
def addresses(monkeypatch, *words):
    """Where the server is when it is begun so, and the page of all runs there."""
    found = []

    def serve(app, port, ready, before):
        taken = port or before or 54321
        ready(f"http://127.0.0.1:{taken}/{app.state.token}/", taken)
        client = TestClient(app, base_url="http://127.0.0.1:8000")
        found.append((app.state.token, taken, client.get(f"/{app.state.token}/").text))

    monkeypatch.setattr(server, "serve", serve)
    assert main(["view", *map(str, words)]) == 0
    return found[0]


def test_token_and_port_of_a_folder_are_kept_where_only_the_user_reads_them(tmp_path, monkeypatch, prints):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("runs", "others"):
        make_run(tmp_path / folder / "one")
    first, other = (addresses(monkeypatch, tmp_path / folder) for folder in ("runs", "others"))
    assert addresses(monkeypatch, tmp_path / "runs") == first
    assert first[:1] != other[:1]
    kept = list((tmp_path / "state" / "shoal" / "view").iterdir())
    assert len(kept) == 2
    if os.name != "nt":
        assert {stat.S_IMODE(file.stat().st_mode) for file in kept} == {0o600}
        assert stat.S_IMODE(kept[0].parent.stat().st_mode) == 0o700
    assert addresses(monkeypatch, tmp_path / "runs", "--port", 12345)[:2] == (first[0], 12345)
    assert addresses(monkeypatch, tmp_path / "runs")[:2] == (first[0], 12345)
    own = "my-own-token-of-22-letters"
    assert addresses(monkeypatch, tmp_path / "runs", "--token", own)[0] == own
    assert addresses(monkeypatch, tmp_path / "runs")[0] == first[0]
    for file in kept:
        file.write_text("{broken")
    assert addresses(monkeypatch, tmp_path / "runs")[0] not in (first[0], other[0])
    assert "--token must be 22 to 200" in prints("view", tmp_path / "runs", "--token", "short", code=2)


def test_a_port_that_is_taken_is_an_error_if_it_was_asked_for_and_else_another_is_taken(tmp_path):
    class Ended(Exception):  # noqa: N818
        pass

    from shoal.core.errors import ConfigError
    from shoal.core.ports import listening

    def ready(address, port):
        raise Ended(port)

    app = server.make_app([], "t" * 32)
    with listening(0) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match="is taken"):
            server.serve(app, taken, ready)
        with pytest.raises(Ended) as ended:
            server.serve(app, 0, ready, taken)
        assert ended.value.args != (taken,)
    with pytest.raises(Ended) as ended:
        server.serve(app, 0, ready, taken)
    assert ended.value.args == (taken,)


def test_the_address_of_a_run_is_its_name_so_that_it_lasts(tmp_path, opened):
    late = opened(make_run(tmp_path / "runs" / "late"))
    early = opened(make_run(tmp_path / "runs" / "early one"))
    again = opened(make_run(tmp_path / "sweep" / "late"))
    assert [Site([late]).place(late), Site([early, late]).place(late)] == ["run/late", "run/late"]
    site = Site([early, late, again])
    assert [site.place(run) for run in site.runs] == ["run/early-one", "run/runs.late", "run/sweep.late"]
    names = ("early-one", "runs.late", "sweep.late", "2")
    assert [site.run(name) for name in names] == [early, late, again, again]
    # whatever order they are found in
    assert [Site([again, late]).place(run) for run in (late, again)] == ["run/runs.late", "run/sweep.late"]
    second = opened(make_run(tmp_path / "sweep" / "runs.late"))
    site = Site([late, again, second])
    assert [site.run(site.name(run)) for run in site.runs] == [late, again, second]


def test_the_address_of_a_run_never_leads_to_another_of_the_same_name(tmp_path, opened):
    first, found = opened(make_run(tmp_path / "b" / "late")), [tmp_path / "b" / "late"]
    site = Site([first], find=lambda: found)
    assert site.place(first) == "run/late"
    found.append(make_run(tmp_path / "a" / "late"))
    site.look()
    assert [site.place(run) for run in site.runs] == ["run/late", "run/a.late"]  # an open page goes on
    with pytest.raises(DataError, match="several runs are called late: a.late, b.late"):
        Site(list(map(opened, sorted(found)))).run("late")


# --- contrast
def _luminance(colour):
    if len(colour) == 4:
        colour = "#" + "".join(2 * c for c in colour[1:])
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    """WCAG 2.2, the definition of contrast ratio."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXT = [
    *[(ink, ground) for ink in ("ink", "dim", "link", "good", "bad", "warn") for ground in ("bg", "card")],
    *[(ink, "soft") for ink in ("ink", "dim", "link", "good")],
    *[(level, f"{level}bg") for level in ("good", "bad", "warn")],
    *[("ink", f"p{k}") for k in range(10)],
    ("bg", "ink"),
]
LINES = [
    *((f"c{k}", "card") for k in range(8)),
    ("accent", "card"),
    ("dim", "card"),
    ("dim", "bg"),
    ("good", "card"),
]


@pytest.mark.parametrize("theme", [0, 1, 2])  # light; dark by preference; dark by the button
def test_text_and_lines_have_the_contrast_of_wcag_aa(theme):
    blocks = re.findall(r"\{([^{}]*--bg:[^{}]*)\}", server.static("view.css"))
    colours = dict(re.findall(r"--(\w+):(#[0-9a-f]+)", blocks[theme]))
    found = {pair: _contrast(colours[pair[0]], colours[pair[1]]) for pair in TEXT + LINES}
    assert {pair: ratio for pair, ratio in found.items() if ratio < (4.5 if pair in TEXT else 3.0)} == {}
    assert blocks[1].split() == blocks[2].split()
