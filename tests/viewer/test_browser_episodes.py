"""Lists, groups, episodes and samples as a person uses them, in a headless Chromium: `make test-browser`."""

import json

import pytest
from tests.viewer.test_browser import served
from tests.viewer.test_episode_pages import member_of, move
from tests.viewer.test_index import episode
from tests.viewer.test_server import make_run
from tests.viewer.test_split_pages import batch_of

from shoal.core.data import encode_trajectory, write_trajectories
from shoal.envs import make
from shoal.viewer.export import export

pytestmark = [pytest.mark.slow, pytest.mark.browser]
LAKE, _ = make("frozen_lake", desc="4x4").reset(seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A group of 12 members, each with moves of its own on a lake, the last the worst; and a file of 120 episodes."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "run")
    made = [
        member_of(k, *(move(f"Up{k}", LAKE) for _ in range(6)), move("Left", LAKE, 1 - k / 12))
        for k in range(12)
    ]
    write_trajectories(folder / "trajectories" / "train-000001.jsonl", made)
    many = [episode((k % 7 / 7,), group=k) for k in range(120)]
    write_trajectories(folder / "trajectories" / "train-000002.jsonl", many)
    return folder


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    sample = batch_of(tmp_path_factory.mktemp("split"), "click(476, 329)").path
    with served(folder, sample, cache=tmp_path_factory.mktemp("cache")) as address:
        yield address


def at_episodes(browser, address, path):
    """Open a page once the episodes are read."""
    browser.size(1280)
    browser.open(f"{address}run/0/episodes")
    browser.problems.clear()  # of a page whose server has ended
    for _ in range(100):
        if browser.run("document.querySelectorAll('a.row-link').length"):
            break
        browser.open(f"{address}run/0/episodes")
    browser.open(address + path)


def test_keys_walk_through_a_list_and_back_to_the_line_in_it(browser, address):
    at_episodes(browser, address, "run/0/episodes?file=train-000002.jsonl&order=worst&page=1")
    assert (
        browser.run("getComputedStyle(document.querySelector('.histogram .hit')).fill") == "rgba(0, 0, 0, 0)"
    )
    names = browser.run("[...document.querySelectorAll('a.row-link')].map(a => a.textContent)")
    browser.click("a.row-link", names[47])
    listens = (
        "document.documentElement.matches('.js') && document.querySelector('nav.steps small')?.textContent"
    )
    for name in (names[48], names[49]):
        browser.until(f"!!({listens})")
        browser.press("n")
        browser.until(f"document.querySelector('h1')?.textContent.includes({json.dumps(name + ' ')})")
    browser.click("nav.steps a", "next")
    browser.until(f"({listens}).startsWith('episode 101 of 120')")
    browser.press("p")
    browser.until(f"({listens}).startsWith('episode 100 of 120')")
    browser.press("u")
    browser.until(f"document.querySelector('tr.at a.row-link')?.textContent === {json.dumps(names[49])}")
    assert browser.problems == []


def test_a_line_that_was_found_leads_to_its_turn_where_the_text_is_marked(browser, address):
    at_episodes(browser, address, "run/0/episodes?text=uP7")
    browser.size(1280, 500)
    assert browser.run("document.querySelector('td mark').textContent") == "Up7"
    browser.click("td a[href*='#turn-']")
    browser.until("location.hash === '#turn-1' && CSS.highlights.get('found')?.size >= 6")
    browser.open(f"{address}run/0/episode?name=train-000001:7&text=left&order=newest#turn-7")
    browser.until("CSS.highlights.get('found')?.size >= 1")
    marked = "[...CSS.highlights.get('found')][0]"
    assert browser.run(f"{marked}.toString()") == "Left"
    assert browser.run(f"{marked}.startContainer.parentElement.closest('article').id") == "turn-7"
    box = "document.getElementById('turn-7').getBoundingClientRect()"
    bar = "document.querySelector('main > .steps').getBoundingClientRect()"
    browser.until(f"scrollY > 0 && {box}.top >= {bar}.bottom - 1 && {box}.top < 500")
    assert browser.problems == []


def test_the_form_finds_episodes_without_a_script(browser, address):
    at_episodes(browser, address, "run/0/episodes")
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(f"{address}run/0/episodes")
        browser.run("document.querySelector('[name=text]').value = 'uP7'")
        browser.run("document.querySelector('.filters button').click()")
        browser.until("location.search.includes('text=uP7')")
        browser.until("document.querySelectorAll('a.row-link').length === 1")
        assert browser.run("document.querySelector('a.row-link').textContent") == "train-000001:7"
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


def test_a_form_that_is_filled_in_is_left_as_it_is_while_episodes_arrive(browser, folder, tmp_path):
    run = make_run(tmp_path / "live")
    with served(run, cache=tmp_path) as address:
        at_episodes(browser, address, "run/0/episodes")
        typed = "const t = document.querySelector('[name=text]'); t.value = 'Lef'"
        browser.run(f"{typed}; t.dispatchEvent(new Event('input', {{bubbles: true}}))")
        with (run / "trajectories" / "train-000001.jsonl").open("ab") as file:
            file.write(encode_trajectory(episode((1.0,))))
        browser.run("new Promise(done => setTimeout(done, 5000))")  # the page asks every 1.5 s
        assert browser.run("document.querySelector('[name=text]').value") == "Lef"
        browser.open(f"{address}run/0/episodes")
        assert "of 4" in browser.run("document.querySelector('.pager').textContent")


def test_a_group_shows_the_member_that_one_came_from_under_its_head(browser, address):
    at_episodes(browser, address, "run/0/group?name=train-000001:11")
    inside = """(() => {
      const head = document.querySelector('th.chosen').getBoundingClientRect();
      const box = document.querySelector('.sides').getBoundingClientRect();
      const turn = document.querySelector('table.group thead th').getBoundingClientRect();
      return head.left >= turn.right - 1 && head.left < box.right - 100;
    })()"""
    browser.until(inside)
    assert browser.run("document.querySelector('th.chosen a').textContent") == "11"
    assert browser.run("document.querySelector('.sides').scrollLeft") > 0
    # the best member is seen beside it
    best = "document.querySelector('table.group thead th:nth-child(2)').getBoundingClientRect()"
    assert (
        browser.run(f"document.elementFromPoint({best}.left + 20, {best}.top + 10).closest('th').cellIndex")
        == 1
    )
    assert browser.run(f"document.querySelector('th.chosen').getBoundingClientRect().left >= {best}.right")
    browser.run("document.querySelector('.sides').scrollTop = 500")
    assert browser.run("document.querySelector('.sides').scrollTop") > 100
    assert browser.run(inside)  # the head is still there, above what it is the head of
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert abs(browser.run(f"{top.format('th.chosen')} - {top.format('.sides')}")) < 3
    assert browser.problems == []


def test_turns_are_played_and_folded(browser, address):
    at_episodes(browser, address, "run/0/episode?name=train-000001:3")
    assert browser.run("document.querySelectorAll('article.turn img.drawn').length") == 7
    browser.until("!!document.querySelector('.stage img')")
    slider = "document.querySelector('.player input')"
    browser.run(f"{slider}.value = 7; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert browser.run("document.querySelector('.player output').textContent") == "turn 7 of 7"
    assert browser.run("document.querySelector('.stage').textContent") == "→ Left"
    assert browser.run("document.querySelector('.turn.chosen').id") == "turn-7"
    anew = """fetch(location.href).then(answer => answer.text()).then(text => {
      const page = new DOMParser().parseFromString(text, 'text/html');
      const main = document.getElementById('main');
      main.replaceChildren(...page.getElementById('main').childNodes);
      main.dispatchEvent(new CustomEvent('followed', {bubbles: true}));
    })"""
    browser.run(anew)  # as a page that follows its run does
    assert browser.run("document.querySelector('.player output').textContent") == "turn 7 of 7"
    browser.click("button", "play")  # from the start, since it stood at the end
    browser.until("document.querySelector('.player output').textContent === 'turn 3 of 7'")
    browser.click("button", "stop")
    tall = "document.documentElement.scrollHeight"
    before = browser.run(tall)
    opened = "document.querySelectorAll('article.turn > details[open]').length"
    browser.press("f")
    assert browser.run(opened) == 0
    assert browser.run(tall) < before / 1.5
    browser.click(".outline a", "5 Up3")
    browser.until(f"{opened} === 1")
    browser.press("f")
    browser.press("f")
    browser.click("button", "short turns")
    browser.until("document.querySelector('[data-do=compact]').ariaPressed === 'true'")
    assert not browser.run("document.querySelector('.turn .strip').checkVisibility()")
    assert browser.problems == []


def test_the_colour_button_says_which_colour_is_on(browser, tmp_path):
    from shoal.core.data import write_advantages

    run = make_run(tmp_path / "run")
    write_trajectories(
        run / "trajectories" / "train-000001.jsonl", [episode((1.0,)), episode((0.0,), member=1)]
    )
    write_advantages(run / "advantages" / "train-000001.jsonl", [[[1.0] * 3], [[-1.0] * 3]])
    with served(run, cache=tmp_path) as address:
        at_episodes(browser, address, "run/0/episode?name=train-000001:0&colour=probability")
        shown = "document.querySelector('[data-do=colour]').innerText"
        assert browser.run(shown) == "colours show the probability"
        browser.click("[data-do=colour]")
        browser.until(f"{shown} === 'colours show the advantage'")
        browser.press("a")


def test_a_screenshot_enlarges_and_the_response_is_jumped_to(browser, address, tmp_path):
    at_episodes(browser, address, "run/1/sample?number=0")
    browser.until("!!document.querySelector('img.enlarges')")
    underline = "getComputedStyle(document.querySelector('.kinds .token:nth-child({})')).borderBottomColor"
    assert browser.run(underline.format(2)) == browser.run(
        "getComputedStyle(document.querySelector('.message .token:not(.masked)')).borderBottomColor"
    )
    assert browser.run(underline.format(1)) != browser.run(underline.format(2))
    small = browser.run("document.querySelector('img.enlarges').getBoundingClientRect().width")
    browser.click("img.enlarges")
    browser.until(
        f"document.querySelector('dialog.enlarged img').getBoundingClientRect().width > {small} * 1.5"
    )
    browser.run("document.querySelector('dialog.enlarged').close()")
    browser.until("!document.querySelector('dialog.enlarged')")
    enter = "new KeyboardEvent('keydown', {key: 'Enter', bubbles: true})"
    browser.run(f"document.querySelector('img.enlarges').dispatchEvent({enter})")
    browser.until("!!document.querySelector('dialog.enlarged')")
    page = tmp_path / "out.html"
    page.write_text(export([batch_of(tmp_path, "click(3, 4)")]))
    browser.size(900, 300)
    browser.open(page.as_uri())
    browser.run("location.hash = document.querySelector('.page[id*=sample]').id")
    browser.click(".page.shown [data-do=jump]")
    browser.until("document.querySelector('.page.shown .border').getBoundingClientRect().top < 250")
    assert browser.problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_has_everything_and_keys_reach_it(browser, address, dark):
    at_episodes(browser, address, "run/0/episodes")
    browser.size(390, dark=dark)
    for path in (
        "run/0/episodes?text=up&outcome=failed&order=-turns",
        "run/0/episode?name=train-000001:3",
        "run/0/group?name=train-000001:3",
        "run/1/sample?number=0",
    ):
        browser.open(address + path)
        assert browser.run("document.documentElement.scrollWidth") <= 390, path
        for reached in ("main button", "main input", "main select", "main a[href]", ".wide", "img.enlarges"):
            left_out = f"[...document.querySelectorAll('{reached}')].filter(e => e.tabIndex < 0 && !e.closest('svg'))"
            assert browser.run(f"{left_out}.length") == 0, (path, reached)
    browser.size(1280)
