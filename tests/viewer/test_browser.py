"""The viewer as a person uses it, in a headless Chromium: `make test-browser`."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from tests.viewer.test_index import episode
from tests.viewer.test_pages import FIXTURES
from tests.viewer.test_server import HOSTILE, make_run
from tests.viewer.test_split_pages import batch_of

from shoal.core.data import encode_trajectory
from shoal.viewer.export import export
from shoal.viewer.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A run of the demo, a few iterations of it."""
    run = tmp_path_factory.mktemp("demo") / "demo"
    words = [
        "trainer.iterations=3",
        "trainer.eval_every=1",
        "trainer.save_trajectories_every=1",
        "warmup.steps=60",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "--config-name", "demo", f"run_dir={run}", *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with (run / "trajectories" / "train-000002.jsonl").open("ab") as file:
        file.write(encode_trajectory(episode((), iteration=2, group=900, status="env_error", error=HOSTILE)))
    return run


@contextlib.contextmanager
def served(*runs, cache):
    words = [sys.executable, "-m", "shoal", "view", *map(str, runs)]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "XDG_STATE_HOME": str(cache)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


def test_a_run_is_read_from_its_curves_to_a_token(browser, demo, tmp_path):
    with served(demo, cache=tmp_path) as address:
        browser.size(1280)
        browser.problems.clear()
        browser.open(address)
        assert browser.run("document.querySelector('svg.spark').getBoundingClientRect().width") > 50
        browser.click("a.row-link", "demo")
        browser.until("document.querySelectorAll('svg.chart').length >= 5")
        browser.until("document.querySelector('#episodes td.n')?.textContent > 0")  # the index is there
        browser.click("svg.chart a[href*='train-000002']")
        browser.until("location.search.includes('train-000002') && !!document.querySelector('svg.histogram')")
        fills = "[...document.querySelectorAll('.histogram rect')].map(e => getComputedStyle(e).fill)"
        browser.until(f"!{fills}.includes('rgb(0, 0, 0)')")  # that of what has no style
        # failures, as a filter
        browser.click("a.chip.error")
        browser.until("location.search.includes('outcome=error')")
        browser.until("document.querySelectorAll('table.episodes tbody tr').length === 1")
        assert HOSTILE[:25] in browser.run("document.querySelector('.causes').textContent")
        browser.open(f"{address}run/0/episodes?file=train-000002.jsonl&order=file")
        # a group side by side
        browser.click("table.episodes a[href*='/group']")
        browser.until("document.querySelectorAll('table.group thead th').length > 8")
        assert "part" in browser.run("document.querySelector('.facts').textContent")
        left = "document.querySelector('table.group th.chosen').getBoundingClientRect().left"
        turns = "document.querySelector('table.group thead th').getBoundingClientRect().right"
        assert browser.run(f"{left} >= {turns}")  # the member is not below the numbers of the turns
        # an episode, its tokens in their colours
        browser.click("table.group thead a")
        browser.until("document.querySelectorAll('.strip .token').length > 2")
        colours = (
            "[...document.querySelectorAll('.strip .token')].map(e => getComputedStyle(e).backgroundColor)"
        )
        browser.until(f"new Set({colours}).size >= 2")  # the style sheet is there
        assert "log-prob -" in browser.run("document.querySelector('.strip .token').title")
        # their advantages
        browser.open(f"{address}run/0/episodes?file=train-000001.jsonl&order=best")
        browser.click("table.episodes a.row-link")
        browser.until("!!document.querySelector('.js .strip .token.a9')")
        assert not browser.run("document.querySelector('.key-line.worth').checkVisibility()")
        browser.press("a")
        assert browser.run("document.querySelector('.key-line.worth').checkVisibility()")
        assert not browser.run("document.querySelector('.key-line.chance').checkVisibility()")
        colour = "getComputedStyle(document.querySelector('.strip .token.a9')).backgroundColor"
        shown = "getComputedStyle(document.querySelector('.key-line.worth .token.p9')).backgroundColor"
        assert browser.run(f"{colour} === {shown}")
        browser.press("a")
        # keys: next episode, theme, help
        before = browser.run("location.href")
        browser.press("n")
        browser.until(f"location.href !== {json.dumps(before)} && document.documentElement.matches('.js')")
        browser.press("t")
        assert browser.run("document.documentElement.dataset.theme") in ("dark", "light")
        browser.press("?")
        assert browser.run("document.getElementById('keys').open")
        assert browser.run("document.querySelector('[data-copy]').dataset.copy").startswith("shoal replay ")
        assert browser.problems == []


def test_points_arrive_while_a_run_goes_on(browser, tmp_path):
    run = make_run(tmp_path / "run", rows=3)
    row = {"iteration": 2, "success": 0.2, "grad_norm": 0.1}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**row, "iteration": 1}) + "\n" + json.dumps({**row, "grad_norm": 0.2}) + "\n")
    with served(run, cache=tmp_path / "cache") as address:
        browser.open(f"{address}run/0")
        count = "document.querySelector('svg.chart').querySelectorAll('.s0 circle').length"
        browser.until(f"{count} === 3")
        browser.run("window.same = 1")
        opened = "[...document.querySelectorAll('details[open]')].map(d => d.innerText.split(':')[0]).join()"
        browser.click("details > summary", "Update: 1 further metric")
        browser.until(f"{opened} === 'Update'")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(
                '{"iteration": 3, "success": 0.9, "policy_loss": 1, "learning_rate": 1, "tokens": 9}\n'
            )
            file.write('{"iteration": 4, "su')
            file.flush()
            browser.until(f"{count} === 4")
            file.write('ccess": 1.0}\n')
            file.flush()
            browser.until(f"{count} === 5")
            file.write(
                '{"iteration": 5, "success": 1.0, "policy_loss": 2, "learning_rate": 2, "tokens": 19}\n'
            )
            file.flush()
            browser.until("document.body.textContent.includes('Update: 2 further metrics')")
        assert browser.run("window.same") == 1  # the page was not loaded anew
        assert browser.run(opened) == "Update"  # though it has more in it, and there are more folds
        with (run / "trajectories" / "train-000001.jsonl").open("ab") as file:
            file.write(encode_trajectory(episode((1.0,))))
        browser.until("document.querySelector('#episodes td.n').textContent === '4'")


def test_the_static_file_opens_from_disk_and_its_links_lead(browser, demo, tmp_path):
    run = Run(demo)
    run.index.refresh()
    page = tmp_path / "out.html"
    page.write_text(export([run], 12))
    browser.problems.clear()
    browser.open(page.as_uri())
    shown = (
        "document.querySelectorAll('.page.shown').length === 1 && document.querySelector('.page.shown').id"
    )
    assert browser.until(shown) == "runs"
    browser.click(".page.shown a.row-link", "demo")
    browser.until(f"({shown}) === 'run-demo'")
    browser.click(".page.shown a[href*='episodes']")
    browser.until(f"({shown}).toString().includes('episodes')")
    browser.open(page.as_uri() + "#run-demo")  # a deep link
    assert browser.until(shown) == "run-demo"
    episode_link = "document.querySelector('.page[id*=\"-episode-name\"]').id"
    browser.run(f"location.hash = {episode_link}")
    browser.until("document.querySelectorAll('.page.shown .strip .token').length > 0")
    assert browser.problems == []


def test_hostile_text_runs_no_script(browser, demo, tmp_path):
    with served(demo, cache=tmp_path) as address:
        browser.open(f"{address}run/0/episodes?outcome=error")
        browser.until("document.body.textContent.includes('alert(1)')")
        assert browser.run("document.querySelectorAll('img[src=x], main script').length") == 0


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_is_wider_than_its_window(browser, demo, tmp_path, width, dark):
    browser.size(width, dark=dark)
    name = "train-000002:1"
    with served(demo, cache=tmp_path) as address:
        for path in (
            "",
            "run/0",
            "run/0/episodes",
            f"run/0/episode?name={name}",
            f"run/0/group?name={name}",
            "compare",
        ):
            browser.open(address + path)
            assert browser.run("document.documentElement.scrollWidth") <= width, path
            ink = browser.run(
                "getComputedStyle(document.body).color + getComputedStyle(document.body).backgroundColor"
            )
            assert ("rgb(20, 23, 26)" in ink) == dark, path


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation_on_any_page(browser, demo, tmp_path, width, dark):
    browser.size(width, dark=dark)
    other = make_run(tmp_path / "other")
    sample = batch_of(tmp_path, "click(476, 329)").path
    episode = "?name=train-000002:1"
    with served(demo, other, FIXTURES / "skills", sample, FIXTURES / "ppo-torch", cache=tmp_path) as address:
        browser.open(f"{address}run/0/episodes")
        browser.until("document.querySelectorAll('a.row-link').length > 0 || (location.reload(), false)")
        pages = {
            "": "Runs", "run/0": "demo", "run/0/episodes": "Episodes", f"run/0/episode{episode}": "Episode",
            f"run/0/group{episode}": "Group", "run/0/log": "Log", "run/2": "skills",
            "run/2/skill?name=Collect%20Wood": "Collect Wood", "run/3": "split", "run/3/sample?number=0": "Sample 0",
            "run/4": "ppo-torch", "compare": "Runs compared", "nowhere": "Not here",
        }  # fmt: skip
        for path, title in pages.items():
            browser.open(address + path)
            assert title in browser.run("document.querySelector('h1').textContent")
            browser.run("document.querySelectorAll('details').forEach(d => { d.open = true }), true")
            assert browser.broken_rules() == [], path
        browser.press("?")
        assert browser.broken_rules() == []
