"""Curves, the list of runs and a server that goes, as a person uses them in a headless Chromium."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.viewer.test_browser import served
from tests.viewer.test_index import episode
from tests.viewer.test_server import make_run

from shoal.core.data import write_trajectories
from shoal.viewer.export import export
from shoal.viewer.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.browser]
CHART = "document.querySelectorAll('figure[data-lines]')[0]"
CIRCLES = (
    f"[...{CHART}.querySelectorAll('.s0 circle')].map(c => ['cx', 'cy'].map(k => Number(c.getAttribute(k))))"
)


@pytest.fixture
def run(tmp_path):
    """Five rows; success 0, 1/4 … 1, and a loss that grows tenfold with each."""
    rows = [
        {
            "iteration": k,
            "success": k / 4,
            "heldout_success": 0.5,
            "reward": -1.0,
            "entropy": 10.0 ** (k - 1),
            "tokens": 100 * k * k,
            "seconds": 2.0 * k,
            "groups_too_few": 0,
        }
        for k in range(5)
    ]
    folder = make_run(tmp_path / "runs" / "run", rows=rows)
    write_trajectories(folder / "trajectories" / "train-000003.jsonl", [episode((1.0,))])
    return folder


@pytest.fixture
def page(browser, run, tmp_path):
    with served(run.parent, cache=tmp_path / "cache") as address:
        browser.size(1401)  # of which a panel has 416
        browser.open("about:blank")  # what follows the server of the test before ends
        browser.problems.clear()
        browser.open(f"{address}run/run")
        browser.until("document.querySelectorAll('svg.chart').length >= 3")
        yield address
        assert browser.problems == []


def mouse(browser, kind, place, **more):
    browser.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", **more)


def on_chart(browser, number, x):
    """The point of the window at `x` of the picture of a panel, at half its height."""
    chart = f"document.querySelectorAll('figure[data-lines]')[{number}].querySelector('svg.chart')"
    return browser.run(
        f"(() => {{ {chart}.scrollIntoView({{block: 'center', behavior: 'instant'}}); "
        f"const box = {chart}.getBoundingClientRect(); "
        f"return [box.left + box.width * {x} / 416, box.top + box.height / 2 - 20]; }})()"
    )


def drag(browser, begin, end):
    mouse(browser, "mousePressed", begin, clickCount=1, buttons=1)
    mouse(browser, "mouseMoved", end, buttons=1)
    mouse(browser, "mouseReleased", end, clickCount=1)


def click(browser, element):
    """Click what an expression says, whatever covers it."""
    browser.run(f"{element}.dispatchEvent(new MouseEvent('click', {{bubbles: true}})), true")


def write(browser, text):
    """Write into the field that finds runs."""
    find = "document.getElementById('find')"
    change = f"{find}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    browser.run(f"{find}.focus(), {find}.value = {json.dumps(text)}, {change}")


def choose(browser, what, value):
    """Set a control as its user does."""
    control = f"document.querySelector('[data-set={what}]')"
    change = f"{control}.{'checked' if isinstance(value, bool) else 'value'} = {json.dumps(value)}"
    browser.run(f"{change}; {control}.dispatchEvent(new Event('input', {{bubbles: true}})); true")


def test_points_lie_where_their_values_are_and_all_panels_have_one_range(browser, page):
    # from 46 to 408 across, from 158 for 0 up to 10 for 1: a quarter of the way up is 158 - 148/4 = 121
    assert browser.run(CIRCLES) == [[46, 158], [136.5, 121], [227, 84], [317.5, 47], [408, 10]]
    ends = browser.run(
        "[...document.querySelectorAll('svg.chart')].filter(s => s.checkVisibility())"
        ".map(s => [...s.querySelectorAll('.axes text')].map(t => t.textContent))"
    )
    for words in ends:
        assert words[-6:] == ["0", "1", "2", "3", "4", "iteration"]  # the last tick is there


def test_kept_points_are_ringed_and_lead_to_their_episodes_by_mouse_and_by_keyboard(browser, page):
    assert browser.run("document.querySelectorAll('figure[data-lines] a.kept').length") == 6
    assert "iteration 1, 3." in browser.run("document.querySelector('#curves .hint').textContent")
    browser.run(f"{CHART}.querySelector('svg').focus(), true")
    arrow = (
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true})), true"
    )
    for _ in range(4):
        browser.run(arrow % "ArrowRight")
    assert browser.run(f"{CHART}.querySelector('.hover text').textContent") == (
        "iteration 3■ success 0.75■ held-out success 0.5"
    )
    browser.run(arrow % "Enter")
    browser.until("location.search === '?file=train-000003.jsonl'")
    browser.open(f"{page}run/run")
    browser.click("svg.chart a.kept")
    browser.until("location.search === '?file=train-000001.jsonl'")


def test_tab_reaches_every_control_and_every_chart(browser, page):
    seen = set()
    browser.run("document.body.focus(), true")
    for _ in range(60):
        for kind in ("keyDown", "keyUp"):
            browser.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        seen.add(
            browser.run(
                "(() => { const e = document.activeElement; return e.dataset.set || e.dataset.do || "
                "e.dataset.curve || (e.matches('svg.chart') ? 'chart' : e.tagName); })()"
            )
        )
    assert {
        "theme",
        "help",
        "axis",
        "smooth",
        "log",
        "csv",
        "png",
        "success",
        "chart",
        "SUMMARY",
        "A",
    } <= seen


def test_the_hover_line_stands_at_the_same_x_in_all_panels(browser, page):
    mouse(browser, "mouseMoved", on_chart(browser, 1, 230))  # near iteration 2, at 227
    browser.until("document.querySelectorAll('.hover.on').length === 3")
    lines = browser.run("[...document.querySelectorAll('.hover.on')].map(g => g.getAttribute('transform'))")
    assert set(lines) == {"translate(227)"}
    assert browser.run(f"{CHART}.querySelector('.hover text').textContent").startswith(
        "iteration 2■ success 0.5"
    )
    mouse(browser, "mouseMoved", [5, 5])
    browser.until("document.querySelectorAll('.hover.on').length === 0")


def test_a_drag_zooms_all_panels_and_a_double_click_ends_it(browser, page):
    place = on_chart(browser, 0, 130)
    drag(browser, place, on_chart(browser, 0, 320))
    browser.until(f"{CIRCLES}.length === 3")
    assert browser.run(CIRCLES) == [[46, 121], [227, 84], [408, 47]]  # iterations 1 to 3
    assert "episodes" not in browser.run("location.pathname")  # the end of the drag is no click on a point
    assert not browser.run("document.querySelector('[data-do=unzoom]').hidden")
    for count in (1, 2):
        mouse(browser, "mousePressed", place, clickCount=count, buttons=1)
        mouse(browser, "mouseReleased", place, clickCount=count)
    browser.until(f"{CIRCLES}.length === 5")
    assert browser.run("document.querySelector('[data-do=unzoom]').hidden")


def test_a_log_scale_has_equal_steps_for_equal_factors_and_leaves_out_zero(browser, page):
    entropy = "[...document.querySelectorAll('figure[data-lines]')].find(f => f.dataset.title.startsWith('Entropy'))"
    places = f"[...{entropy}.querySelectorAll('circle')].map(c => c.cy.baseVal.value)"
    choose(browser, "log", True)
    heights = browser.run(places)
    steps = {round(a - b, 0) for a, b in itertools.pairwise(heights)}
    assert len(steps) == 1
    assert steps.pop() > 20
    assert browser.run(f"{CIRCLES}.length") == 4  # success 0 has no logarithm
    assert (
        browser.run(
            "[...document.querySelectorAll('[points]')].some(p => /NaN|Infinity/.test(p.getAttribute('points')))"
        )
        is False
    )
    choose(browser, "log", False)
    assert browser.run(f"{CIRCLES}.length") == 5


def panels(browser):
    """Of each panel: labels of y with their heights, whether they are whole, and the heights of the points."""
    found = browser.run(
        "[...document.querySelectorAll('.page.shown figure[data-lines]')].filter(f => f.checkVisibility()).map(f => "
        "({name: f.dataset.title, labels: [...f.querySelectorAll('.axes text[text-anchor=end]')].filter(t => "
        "Number(t.getAttribute('x')) < 380).map(t => [t.textContent, Number(t.getAttribute('y')) - 3.5, "
        "t.getBBox().x]), "
        "points: [...f.querySelectorAll('circle')].map(c => c.cy.baseVal.value)}))"
    )
    return {panel["name"]: (panel["labels"], panel["points"]) for panel in found}


def test_the_labels_of_any_range_are_true_and_whole_and_those_of_a_log_scale_are_powers_of_ten(
    browser, tmp_path
):
    rng = np.random.default_rng(0)
    curves = {
        "clip": [0.003162, 0.0005, 0.2],
        "loss": [-0.0075, 0.0025, 0.01],
        "rate": [0.00025, 0.0001, 0.0],
        "tiny": [3.0e-9, 2.0e-7, 4.1e-7],
        "near": [1000.25, 1000.5, 1000.75],
        "one": [0.31, 0.32, 0.33],
        "many": [1e-12, 1.0, 1e12],
    }
    for k in range(30):
        middle, spread = 10 ** rng.uniform(-8, 8), 10 ** rng.uniform(-3, 4)
        curves[f"drawn {k}"] = [float(middle * spread ** rng.uniform(-1, 1)) for _ in range(3)]
    rows = [{"iteration": k} | {name: values[k] for name, values in curves.items()} for k in range(3)]
    folder = make_run(tmp_path / "run", rows=rows)
    place = tmp_path / "out.html"
    place.write_text(export([Run(folder)]))
    browser.size(1280)
    browser.open(f"{place.as_uri()}#run-run")
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; }), true")
    browser.until("!!document.querySelector('.page.shown svg.chart')")
    browser.problems.clear()
    for log in (False, True):
        choose(browser, "log", log)
        drawn = panels(browser)
        assert set(curves) <= set(drawn)
        for name, values in curves.items():
            labels, points = drawn[name]
            assert len(labels) >= 2, name
            assert all(left >= 0 for _, _, left in labels), (name, labels)
            numbers = [float(text.replace(",", "")) for text, _, _ in labels]
            if log:
                assert all(f"{number:e}"[:8] in ("1.000000", "2.000000", "5.000000") for number in numbers)
                if min(values) < 0.005 or max(values) > 2000:
                    assert all(re.fullmatch("[125]e-?[0-9]+", text) for text, _, _ in labels)
                shown = [value for value in values if value > 0]
                if max(shown) / min(shown) > 200:
                    assert all(f"{number:e}"[0] == "1" for number in numbers)
                numbers, values = np.log10(numbers), np.log10(shown)
            # a straight line through the labels says where each value lies, to the tenth of a pixel of both
            slope, at_zero = np.polyfit(np.subtract(numbers, numbers[0]), [y for _, y, _ in labels], 1)
            expected = [slope * (value - numbers[0]) + at_zero for value in values]
            assert np.allclose(points, expected, atol=0.4), (name, log, labels, points, expected)
    assert browser.problems == []


def test_so_many_points_that_no_call_takes_them_are_drawn(browser, tmp_path):
    folder = make_run(tmp_path / "run")
    place = tmp_path / "out.html"
    place.write_text(export([Run(folder)]))
    browser.open(f"{place.as_uri()}#run-run")
    browser.until("!!document.querySelector('.page.shown svg.chart')")
    browser.problems.clear()
    browser.run(
        "(() => { const section = document.querySelector('.page.shown .curves'), n = 150000;"
        "const tables = [{name: '', rows: [...Array(n).keys()], axes: {iteration: [...Array(n).keys()]}, curves: "
        "{success: {i: [...Array(n).keys()], y: Array(n).fill(0.5)}}}];"
        "const made = section.cloneNode(true); made.id = 'large'; made.dataset.tables = JSON.stringify(tables);"
        "for (const one of [...made.querySelectorAll('figure, details')].slice(1)) one.remove();"
        "section.replaceWith(made); dispatchEvent(new Event('hashchange')); })(), true"
    )
    browser.until(
        "document.querySelector('#large polyline')?.getAttribute('points').split(' ').length === 150000"
    )
    assert browser.problems == []


def test_smoothing_is_a_moving_average_without_bias(browser, page):
    choose(browser, "smooth", "0.5")
    drawn = browser.run(f"[...{CHART}.querySelectorAll('.s0 polyline')].at(-1).getAttribute('points')")
    values = [k / 4 for k in range(5)]
    for n, point in enumerate(drawn.split()):
        weights = [0.5 ** (n - k) for k in range(n + 1)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert math.isclose(float(point.split(",")[1]), 158 - 148 * mean, abs_tol=0.06)
    assert browser.run(f"!!{CHART}.querySelector('.line.faint')")
    mouse(browser, "mouseMoved", on_chart(browser, 0, 408))
    browser.until("document.querySelectorAll('.hover.on').length === 3")
    smoothed = sum(w * v for w, v in zip([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], values, strict=True)) / (31 / 16)
    assert browser.run(f"{CHART}.querySelector('.hover text').textContent").startswith(
        f"iteration 4■ success 1 (smoothed {smoothed:.4g})"  # what was measured is said first
    )
    # zoomed, the smooth line stays in its panel, though it is far from the last points
    drag(browser, on_chart(browser, 2, 310), on_chart(browser, 2, 407))
    entropy = "[...document.querySelectorAll('figure[data-lines]')].find(f => f.dataset.title.startsWith('Entropy'))"
    browser.until(f"{entropy}.querySelectorAll('circle').length === 2")
    line = browser.run(f"[...{entropy}.querySelectorAll('polyline')].at(-1).getAttribute('points')")
    assert all(10 <= float(point.split(",")[1]) <= 158 for point in line.split())
    choose(browser, "smooth", "0")


def test_what_is_measured_seldom_is_not_smoothed_towards_what_was_measured_long_ago(browser, page, run):
    choose(browser, "smooth", "0.5")
    with (run / "metrics.jsonl").open("a") as file:
        for k in range(5, 26):
            seldom = {"heldout_success": 1.0} if k == 25 else {}
            file.write(json.dumps({"iteration": k, "success": 1.0, **seldom}) + "\n")
    heldout = f"{CHART}.querySelectorAll('.s1 polyline')[1].getAttribute('points').split(' ')"
    browser.until(f"{heldout}.length === 6")
    assert browser.run(f"{heldout}.at(-1).split(',')[1]") == "10"
    choose(browser, "smooth", "0")


def test_the_x_axis_can_be_tokens_or_time_and_a_curve_can_be_hidden_while_the_page_follows(
    browser, page, run
):
    choose(browser, "axis", "tokens")
    # 0, 100, 400, 900, 1600 of 1600 over 362: 46, 68.6, 136.5, 249.6, 408
    assert [x for x, _ in browser.run(CIRCLES)] == [46, 68.6, 136.5, 249.6, 408]
    browser.click("[data-curve='held-out success']")
    browser.until(f"!{CHART}.querySelector('.s1.series')")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "success": 1.0, "heldout_success": 0.5, "tokens": 3200}\n')
    browser.until(f"{CIRCLES}.length === 6")
    assert [x for x, _ in browser.run(CIRCLES)][-1] == 408
    assert browser.run("document.querySelector('[data-set=axis]').value") == "tokens"
    assert browser.run(f"{CHART}.querySelector('.s1.series')") is None
    assert browser.run("document.querySelector('[data-curve=held-out\\\\ success]').ariaPressed") == "false"
    choose(browser, "axis", "seconds")
    assert [x for x, _ in browser.run(CIRCLES)] == [46, 136.5, 227, 317.5, 408]


def test_the_address_keeps_how_curves_are_looked_at(browser, page):
    choose(browser, "axis", "tokens")
    choose(browser, "smooth", "0.5")
    choose(browser, "log", True)
    browser.click("[data-curve='held-out success']")
    drag(browser, on_chart(browser, 2, 60), on_chart(browser, 2, 300))
    browser.until("!document.querySelector('[data-do=unzoom]').hidden")
    shown, drawn = browser.run("location.href"), browser.run("document.querySelector('.panels').innerHTML")
    browser.open("about:blank")
    browser.open(shown)
    browser.until("document.querySelectorAll('svg.chart').length >= 3")
    assert browser.run("document.querySelector('.panels').innerHTML") == drawn
    assert browser.run("document.querySelector('[data-set=log]').checked")
    for name, value in (("axis", "iteration"), ("smooth", "0"), ("log", False)):
        choose(browser, name, value)
    browser.click("[data-curve='held-out success']")
    browser.until("location.search === ''")


def test_a_panel_is_enlarged_and_the_address_says_so(browser, page):
    box = f"{CHART}.querySelector('svg.chart').getBoundingClientRect()"
    size = f"[{box}.width, {box}.height]"
    small = browser.run(size)
    click(browser, f"{CHART}.querySelector('[data-do=large]')")
    wide, high = browser.run(size)
    assert wide > 2.5 * small[0]
    assert high > 2 * small[1]
    lowest = browser.run(f"Math.max(...{CIRCLES}.map(([x, y]) => y))")
    assert lowest == pytest.approx(high - 32, abs=1.5)  # 0 stands on the lower end of the larger panel
    assert "large" in browser.run("location.search")
    browser.open(browser.run("location.href"))
    browser.until(f"{CHART}.querySelector('svg.chart') && {size}[1] > {small[1] * 2}")
    click(browser, f"{CHART}.querySelector('[data-do=large]')")
    assert browser.run(size) == small
    assert browser.run("location.search") == ""


@pytest.mark.parametrize("width", [400, 1401])
def test_the_text_of_a_chart_has_its_size_whatever_the_window_has(browser, page, width):
    browser.size(width)
    browser.run("document.querySelectorAll('#curves > details').forEach(d => { d.open = true; }), true")
    browser.until(
        "[...document.querySelectorAll('svg.chart')].every("
        "e => Math.abs(e.getBoundingClientRect().width / e.viewBox.baseVal.width - 1) < 0.02)"
    )
    assert browser.run("getComputedStyle(document.querySelector('svg.chart text')).fontSize") == "11px"
    right = "Math.max(...[...document.querySelectorAll('figure')].map(e => e.getBoundingClientRect().right))"
    assert width - 60 <= browser.run(right) <= width  # the curves fill the window


def test_curves_are_downloaded_as_csv_and_as_a_picture(browser, page):
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob; return 'blob:none'; }, true")
    browser.run("HTMLAnchorElement.prototype.click = function () { window.named = this.download; }, true")
    click(browser, "document.querySelector('[data-do=csv]')")
    head, *lines = browser.run("saved.text()").splitlines()
    assert head.startswith("run,iteration,tokens,seconds,")
    told = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
    assert [row["success"] for row in told] == ["0", "0.25", "0.5", "0.75", "1"]
    assert [row["tokens"] for row in told] == ["0", "100", "400", "900", "1600"]
    browser.run("window.saved = null")
    click(browser, f"{CHART}.querySelector('[data-do=png]')")
    browser.until("window.saved?.type === 'image/png'")
    assert browser.run("window.named") == "Success.png"
    colours = browser.run(
        "createImageBitmap(saved).then(b => { const c = new OffscreenCanvas(b.width, b.height).getContext('2d'); "
        "c.drawImage(b, 0, 0); const d = new Uint32Array(c.getImageData(0, 0, b.width, b.height).data.buffer); "
        "return [b.width, b.height, new Set(d).size]; })"
    )
    assert colours[:2] == [1248, 630]
    assert colours[2] > 20  # two curves, a grid and words, not a blank page


def test_metrics_of_a_group_are_drawn_when_it_is_opened_with_their_meaning(browser, page):
    browser.run("document.querySelectorAll('#curves > details').forEach(d => { d.open = true; }), true")
    browser.until("[...document.querySelectorAll('figure[data-lines]')].every(f => f.querySelector('svg'))")
    assert "groups with fewer than two whole episodes" in browser.run(
        "document.querySelector('.constants').innerText"
    )
    browser.click("figure .meaning summary")
    assert "share of episodes that solved the task" in browser.run(
        f"{CHART}.querySelector('.meaning').innerText"
    )


@pytest.mark.parametrize(
    "values", [[5.0], [2.0, 2.0], [0.0], [9e299, -9e299], [1e-300, 2e-300], [0.0, 5e-324]]
)
def test_odd_curves_are_drawn(browser, tmp_path, opened, values):
    rows = [{"iteration": k, "entropy": value} for k, value in enumerate(values)]
    place = tmp_path / "out.html"
    place.write_text(export([opened(make_run(tmp_path / "run", rows=rows))]))
    browser.open("about:blank")
    browser.problems.clear()
    browser.open(f"{place.as_uri()}#run-run")
    browser.until("!!document.querySelector('.page.shown svg.chart')")
    drawn = browser.run("document.querySelector('.page.shown .panels').innerHTML")
    assert drawn.count("<circle") == len(values)
    assert "NaN" not in drawn
    assert "Infinity" not in drawn
    assert browser.problems == []


# --- the list of runs
@pytest.mark.parametrize("width", [1280, 390])
def test_runs_are_searched_sorted_and_chosen_to_compare(browser, tmp_path, width):
    folder = tmp_path / "runs"
    for name, seed, success in (("apple", 3, 0.9), ("banana", 20, 0.5), ("cherry", 1, 0.1)):
        rows = [{"iteration": 0, "success": 0.0}, {"iteration": 1, "success": success}]
        make_run(folder / name, seed=seed, rows=rows)
    names = "[...document.querySelectorAll('a.row-link')].filter(a => a.checkVisibility()).map(a => a.textContent)"
    with served(folder, cache=tmp_path / "cache") as address:
        browser.size(width)
        browser.open("about:blank")
        browser.problems.clear()
        browser.open(address)
        browser.click("th button", "seed")
        assert browser.until(f"JSON.stringify({names})") == '["cherry","apple","banana"]'
        browser.click("th button", "result")
        browser.until(f"{names}[2] === 'apple'")
        browser.click("th button", "result")
        browser.until(f"{names}.join() === 'apple,banana,cherry'")
        assert browser.run("document.querySelector('th[aria-sort=descending]').textContent") == "result"
        write(browser, "an completed")
        assert browser.run(names) == ["banana"]
        # a run that begins is listed, the words and the order stay
        make_run(folder / "mango", seed=7)
        browser.until(f"{names}.includes('mango')")
        assert browser.run("document.activeElement.id + document.activeElement.value") == "findan completed"
        write(browser, "")
        for name in ("apple", "cherry"):
            browser.run(f"document.querySelector('[data-run={name}]').click(), true")
        browser.click("a.button", "Compare")
        browser.until("location.search === '?runs=apple,cherry' && !!document.getElementById('main')")
        assert "banana" not in browser.run("document.getElementById('main').textContent")
        assert browser.problems == []


def test_on_a_phone_the_result_and_the_curve_of_a_run_are_seen(browser, tmp_path):
    make_run(tmp_path / "runs" / "a-run-with-quite-a-long-name-of-its-own")
    with served(tmp_path / "runs", cache=tmp_path / "cache") as address:
        browser.size(390)
        browser.open(address)
        browser.until("document.styleSheets.length > 0")
        inside = (
            "[...document.querySelectorAll('td[data-name=result] b, .spark, [data-run], .state')].every(e => {"
            " const b = e.getBoundingClientRect(); return b.width > 10 && b.left >= 0 && b.right <= 390; })"
        )
        assert browser.run(inside)
        # nothing is cut, however long an advice is
        browser.size(1400)
        browser.run(
            "document.querySelector('[data-name=advice]').textContent = 'The held-out episodes lag behind those of the "
            "training, and the updates are far too large', true"
        )
        wide = (
            "(() => { const e = document.querySelector('.wide'); return e.scrollWidth <= e.clientWidth; })()"
        )
        assert browser.run(wide)
        browser.size(390)
        small = (
            "[...document.querySelectorAll('a, button, input')].filter(e => e.checkVisibility() && "
            "e.getBoundingClientRect().height < 23.5).map(e => e.outerHTML)"
        )
        assert browser.run(small) == []


def test_runs_have_columns_conditions_and_groups_of_settings_and_metrics_which_the_address_keeps(
    browser, tmp_path
):
    for name, estimator, rate, success in (
        ("a", "gigpo", 0.1, 0.9),
        ("b", "grpo", 0.02, 0.5),
        ("c", "gigpo", 0.003, 0.1),
    ):
        config = f"algorithm: {{adv_estimator: {estimator}}}\nlr: {rate}\nsame: 7\n"
        make_run(tmp_path / "runs" / name, rows=[{"iteration": 1, "success": success}], config=config)
    shown = "[...document.querySelectorAll('a.row-link')].filter(a => a.checkVisibility())"
    names = f"{shown}.map(a => a.textContent).join()"
    column = "[...document.querySelectorAll('td[data-name={}]')].map(e => e.textContent).join()"
    with served(tmp_path / "runs", cache=tmp_path / "cache") as address:
        browser.size(1400)
        browser.open("about:blank")
        browser.problems.clear()
        browser.open(address)
        for text, found in (
            ("adv_estimator=gigpo", {"a", "c"}), ("lr>0.01 success<0.8", {"b"}), ("same=7 kind!=ppo", {"a", "b", "c"}),
            ("adv_estimator=GIGPO lr<=0.003", {"c"}), ("nothing=1", set()),
        ):  # fmt: skip
            write(browser, text)
            assert set(filter(None, browser.run(names).split(","))) == found, text
            told = "no run has nothing" if text.startswith("nothing") else ""
            assert browser.run("document.getElementById('unknown').textContent") == told
        write(browser, "adv_estimator=gigpo")
        field = "document.getElementById('column')"
        for name in ("lr", "success"):
            browser.run(
                f"{field}.value = '{name}', {field}.dispatchEvent(new Event('change', {{bubbles: true}}))"
            )
        browser.click("th button", "success")
        browser.click("th button", "success")
        browser.until(f"{names} === 'a,c'")
        kept = browser.run("location.href")
        browser.open("about:blank")
        browser.open(kept)
        browser.until(f"{names} === 'a,c'")
        assert browser.run(column.format("lr")) == "0.1,0.02,0.003"
        assert (
            browser.run("document.querySelector('th[aria-sort=descending] button').textContent") == "success"
        )
        write(browser, "")
        group = "document.getElementById('group')"
        browser.run(
            f"{group}.value = 'adv_estimator', {group}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        heads = "[...document.querySelectorAll('tr.heading')].map(e => e.textContent).join('; ')"
        assert browser.run(heads) == "adv_estimator gigpo, 2 runs; adv_estimator grpo, 1 run"
        assert browser.run(names) == "a,c,b"
        browser.click("th button", "×")
        browser.until("document.querySelectorAll('td.more').length === 3")
        assert browser.problems == []


# --- a server that goes
def test_a_page_says_that_its_server_is_gone_and_goes_on_when_it_is_back(browser, tmp_path):
    run = make_run(tmp_path / "runs" / "run", rows=3)
    words = [sys.executable, "-m", "shoal", "view", str(tmp_path / "runs")]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}

    def begin():
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        return process, process.stdout.readline().split()[-1]

    def end(process):
        process.send_signal(signal.SIGINT)
        process.wait(20)
        process.stdout.close()

    process, address = begin()
    try:
        browser.size(1280)
        browser.open(f"{address}run/run")
        browser.until(f"{CIRCLES}.length === 3")
        end(process)
        browser.until("!document.getElementById('lost').hidden")
        assert "Connection lost" in browser.run("document.getElementById('lost').textContent")
        browser.problems.clear()
        time.sleep(7)  # at 1.5 s each it would have asked four times
        browser.run("1")
        assert len(browser.problems) <= 2
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 3, "success": 0.9}\n')
        process, again = begin()
        assert again == address  # a bookmark leads there
        browser.until(f"{CIRCLES}.length === 4", 40)
        assert browser.run("document.getElementById('lost').hidden")
    finally:
        if process.poll() is None:
            end(process)
