import html
import json
import re
import shutil
import time

import pytest
from starlette.testclient import TestClient
from tests.records import trajectory_of
from tests.viewer.test_index import episode, turn

from shoal.cli.main import main
from shoal.core.data import encode_trajectory, write_trajectories
from shoal.core.errors import DataError
from shoal.core.files import write_json
from shoal.viewer import server
from shoal.viewer.runs import Run, run_folders
from shoal.viewer.server import POLICY, index_in_background, make_app

TOKEN = "t" * 32
HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>&lt; \x00\u202eabc </pre></main>'


def make_run(folder, *, seed=1, rows=6, config=None):
    """A finished run with so many rows of metrics, or with these, and with settings as a text."""
    if isinstance(rows, int):
        rows = [
            {
                "iteration": k,
                "success": k / 10,
                "reward": k / 5,
                "entropy": 1 - k / 20,
                "heldout_success": 0.5,
            }
            for k in range(rows)
        ]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(config or f"seed: {seed}\nengine: {{name: tiny}}\n")
    write_json(
        folder / "summary.json",
        {"command": "train", "seed": seed, "status": "completed", "metrics": {"success": 0.5}},
    )
    write_trajectories(
        folder / "trajectories" / "train-000001.jsonl",
        [
            episode((0.0, 1.0), member=0, success=True),
            episode((0.0, 0.0), member=1, truncated=True),
            episode((), member=2, status="env_error", error="the lake is closed"),
        ],
    )
    return folder


def tables_of(body):
    """The numbers of the curves of a page."""
    return json.loads(html.unescape(re.search(r'data-tables="([^"]*)"', body)[1]))


@pytest.fixture
def runs(tmp_path, opened):
    return [opened(make_run(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two"))]


@pytest.fixture
def client(runs):
    return TestClient(make_app(runs, TOKEN), base_url="http://127.0.0.1:8000", raise_server_exceptions=True)


def get(client, path, **more):
    return client.get(f"/{TOKEN}/{path}", **more)


def test_a_picture_that_is_gone_before_it_is_sent_is_told(client, runs, monkeypatch):
    """It was an error of the server, with a traceback."""
    (runs[0].path / "curves.png").write_bytes(b"\x89PNG")
    file = Run.file

    def removed(run, *asked):
        found = file(run, *asked)
        found[0].unlink()
        return found

    monkeypatch.setattr(Run, "file", removed)
    assert get(client, "run/0/file?name=curves.png").status_code == 404


PAGES = [
    "", "run/0", "run/1", "run/0/episodes", "run/0/episodes?file=train-000001.jsonl&outcome=error&order=worst",
    "run/0/episode?name=train-000001:0", "run/0/episode?name=train-000001:2&turn=1", "run/0/group?name=train-000001:1",
    "compare", "compare?runs=0,1", "static/view.js", "static/view.css",
]  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_every_page_answers_with_all_its_guards(client, path):
    answer = get(client, path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY
    wide = re.findall(r'<div class="wide[^>]*>', answer.text)
    assert all('tabindex="0" role="region" aria-label="' in box for box in wide)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("token", ["", "x" * 32, TOKEN[:-1], TOKEN + "t", "ümlaut"])
def test_without_the_token_nothing_is_told(client, path, token):
    answer = client.get(f"/{token}/{path}".replace("//", "/"))
    assert answer.status_code == 403
    assert "lake" not in answer.text
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "127.0.0.1@evil.example"},
        {"Host": ""},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
@pytest.mark.parametrize("path", ["", "run/0/episodes", "static/view.js"])
def test_a_foreign_host_or_origin_is_refused_even_with_the_token(client, path, headers):
    assert get(client, path, headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "localhost"])
def test_names_of_this_machine_are_answered(client, host):
    assert get(client, "", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_can_be_sent(client, method):
    assert getattr(client, method)(f"/{TOKEN}/run/0").status_code == 405


@pytest.mark.parametrize(
    "name",
    [
        "../two/curves.png", "/etc/passwd", "../../../../etc/passwd", "config.yaml", "trajectories/train-000001.jsonl",
        "..%2ftwo%2fcurves.png", "link.png", "linked/curves.png", "a\x00.png", "", ".", "folder.png",
        "x" * 5000 + ".png",
    ],
)  # fmt: skip
def test_only_pictures_inside_the_run_are_given(client, runs, name):
    for run in runs:
        (run.path / "curves.png").write_bytes(b"\x89PNG")
    (runs[0].path / "link.png").symlink_to(runs[1].path / "curves.png")
    (runs[0].path / "linked").symlink_to(runs[1].path)
    (runs[0].path / "folder.png").mkdir()
    assert get(client, "run/0/file?name=curves.png").content == b"\x89PNG"
    assert client.get(f"/{TOKEN}/run/0/file", params={"name": name}).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "run/2", "run/-1", "run/x", "run/0/nothing", "nothing", "run/0/episode?name=../x:0", "run/0/group",
        "run/0/skill", "run", "run/0/episodes/more",
        "run/0/episodes?outcome=odd", "run/0/episodes?order=1;drop", "run/0/episodes?page=x", "run/0/sample?number=0",
        "run/0/episodes?reward_from=x", "static/../server.py", "static/server.py", "run/0/episodes?page=" + "9" * 40,
        "run/0/sample?number=" + "9" * 30, "run/" + "9" * 40, "run/\u00b2",
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_page_that_says_so(client, path):
    answer = get(client, path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


def test_text_of_models_and_envs_stays_text(tmp_path, opened):
    folder = make_run(tmp_path / HOSTILE.replace("/", "_").replace("\x00", ""))
    bad = episode((0.0,), env=HOSTILE, status="env_error", error=HOSTILE)
    hostile = turn(response=HOSTILE)
    shown = type(hostile)(HOSTILE, (1,), (2,), (-1.0,), HOSTILE, HOSTILE, True, 0.0, HOSTILE, HOSTILE)
    turns = trajectory_of(HOSTILE, 0, 0, 0, 1, (shown, shown), False, True, False, "ok", None)
    other = trajectory_of(HOSTILE, 0, 0, 1, 1, (hostile,), False, True, False, "ok", None)
    write_trajectories(folder / "trajectories" / "train-000001.jsonl", [bad, turns, other])
    (folder / "config.yaml").write_text(
        "seed: 1\nenv: " + json.dumps(HOSTILE) + "\n# " + HOSTILE.replace("\x00", "")
    )
    write_json(folder / "summary.json", {"status": HOSTILE, "seed": HOSTILE, "metrics": {HOSTILE: HOSTILE}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 9, HOSTILE: 1.0}) + "\n")
    client = TestClient(make_app([opened(folder)], TOKEN), base_url="http://127.0.0.1")
    name = "train-000001"
    for path in (
        "",
        "run/0",
        "run/0/episodes",
        f"run/0/episode?name={name}:1",
        f"run/0/group?name={name}:1",
        "compare",
    ):
        answer = get(client, path)
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text
        assert "<img src=x" not in answer.text
        assert "\u202e" not in answer.text
        assert "\x00" not in answer.text
    told = client.get(f"/{TOKEN}/run/0/episodes", params={"env": HOSTILE})
    assert told.status_code == 200
    assert "<script>alert" not in told.text
    assert "<script>alert" not in client.get(f"/{TOKEN}/run/0/episode", params={"name": HOSTILE}).text


def test_an_unchanged_page_is_not_sent_again_and_a_changed_one_is(client, runs):
    first = get(client, "run/0")
    version = first.text.split('data-version="')[1].split('"')[0]
    assert get(client, "run/0", headers={"x-have": version}).status_code == 204
    with (runs[0].path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "success": 0.77777}\n{"iteration": 7, "succ')
    again = get(client, "run/0", headers={"x-have": version})
    assert again.status_code == 200
    [table] = tables_of(again.text)
    assert table["axes"]["iteration"] == [0, 1, 2, 3, 4, 5, 6]
    assert table["curves"]["success"]["y"][-1] == 0.77777


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e308", "-1e308"])
def test_a_number_that_cannot_be_drawn_hides_no_page(client, runs, number):
    with (runs[0].path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"iteration": 6, "success": {number}, "entropy": {number}, "reward": 0.5}}\n')
        file.write(f'{{"iteration": {number}, "success": 0.1}}\n{{"iteration": 7, "success": -1.2e308}}\n')
    for path in ("", "run/0", "compare?runs=0,1"):
        page = get(client, path)
        assert page.status_code == 200
        assert "nan" not in page.text


def test_the_background_goes_on_when_an_index_cannot_be_written_now(runs, monkeypatch):
    calls = []

    def full(*_):
        calls.append(1)
        raise DataError("the index cannot be used (database or disk is full)")

    monkeypatch.setattr(runs[0].index, "refresh", full)
    end = index_in_background(lambda: runs, every=0.01)
    try:
        for _ in range(6000):
            if len(calls) > 2:
                break
            time.sleep(0.01)
        assert len(calls) > 2
    finally:
        end()


def test_the_background_finds_new_episodes(runs):
    end = index_in_background(lambda: runs, every=0.01)
    try:
        with (runs[0].path / "trajectories" / "train-000001.jsonl").open("ab") as file:
            file.write(encode_trajectory(episode((3.0,))))
        for _ in range(6000):
            if runs[0].index.count() == 4:
                break
            time.sleep(0.01)
        assert runs[0].index.count() == 4
    finally:
        end()


def test_a_point_leads_to_the_episodes_of_its_iteration(client):
    page = get(client, "run/one").text
    assert tables_of(page)[0]["links"] == {
        "train": {"1": f"/{TOKEN}/run/one/episodes?file=train-000001.jsonl"},
        "heldout": {},
    }
    assert "Ringed points open the training episodes of iteration 1." in page


def test_an_episode_shows_how_to_replay_it(client, runs):
    shown = get(client, "run/0/episode?name=train-000001:0").text
    assert f"shoal replay {runs[0].path} train-000001:0" in shown
    assert f">{2**63}<" in shown  # the seed of the env, as code takes it


def test_runs_that_begin_later_are_listed_and_those_that_went_are_not(tmp_path):
    folder = tmp_path / "runs"
    app = make_app([], TOKEN, find=lambda: run_folders([folder] if folder.is_dir() else [], empty=True))
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    assert "There are no runs yet" in get(client, "").text
    make_run(folder / "first", seed=0)
    page = get(client, "")
    assert "first" in page.text
    version = re.search(r'data-version="(\w+)"', page.text)[1]
    assert client.get(f"/{TOKEN}/", headers={"x-have": version}).status_code == 204
    make_run(folder / "a-second", seed=1)
    page = client.get(f"/{TOKEN}/", headers={"x-have": version})  # as an open page asks
    assert page.status_code == 200
    assert "a-second" in page.text
    assert "first" in get(client, "run/0").text  # links stay those of their run
    shutil.move(folder / "first", tmp_path / "elsewhere")
    page = get(client, "")
    assert "a-second" in page.text
    assert ">first<" not in page.text
    assert get(client, "run/0").status_code == 404
    assert "a-second" in get(client, "run/1").text
    shutil.move(tmp_path / "elsewhere", folder / "first")
    assert "first" in get(client, "run/0").text


@pytest.mark.parametrize("folder", ["empty", None])
def test_view_serves_an_empty_page_where_there_are_no_runs(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shown = []

    def serve(app, port, ready, before):
        ready("http://here/", 8000)
        shown.append(TestClient(app, base_url="http://127.0.0.1:8000").get(f"/{app.state.token}/").text)

    monkeypatch.setattr(server, "serve", serve)
    if folder is not None:
        (tmp_path / folder).mkdir()
    assert main(["view", *([folder] if folder else [])]) == 0
    assert "There are no runs yet" in shown[0]
    assert f"there are no runs in {folder or 'runs'} yet" in capsys.readouterr().out


def test_an_address_that_asks_wrongly_is_told_in_plain_words_and_the_last_slash_may_be_missing(client):
    answer = get(client, "run/0/episodes?iteration=abc")
    assert answer.status_code == 404
    assert "iteration=&#x27;abc&#x27;" in answer.text or "iteration='abc'" in answer.text
    assert "a whole number" in answer.text
    assert "$" not in answer.text.partition("iteration=")[2][:200]
    assert client.get(f"/{client.app.state.token}").status_code == 200
