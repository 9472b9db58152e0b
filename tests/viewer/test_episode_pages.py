"""Lists, groups and pages of episodes: what their addresses carry and what they show."""

import html
import re
import shutil
from dataclasses import replace
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from tests.records import trajectory_of
from tests.viewer.test_index import episode, turn
from tests.viewer.test_pages import FIXTURES
from tests.viewer.test_server import make_run

from shoal.core.data import (
    Call,
    Judged,
    Score,
    ToolUse,
    Trajectory,
    Turn,
    write_advantages,
    write_trajectories,
)
from shoal.envs import make
from shoal.viewer.episode_pages import call_tree, chat, drawing, key, readable
from shoal.viewer.group_pages import columns_of, kinds_of
from shoal.viewer.pages import Site
from shoal.viewer.server import page_for


@pytest.fixture
def played(tmp_path, opened):
    """Gives a run of these episodes."""

    def play(*made):
        run = opened(make_run(tmp_path / "run"))
        add(run, "train-000001", *made)
        return run

    return play


def add(run, name, *made):
    """Write a file of episodes."""
    write_trajectories(run.path / "trajectories" / f"{name}.jsonl", made)
    run.index.refresh()


@pytest.fixture
def run(played):
    """12 episodes in 3 groups, the first of each group failed."""
    return played(
        *(
            episode(
                (0.0,) * (1 + k % 4) + (float(k % 4 > 0) * k,), group=k // 4, member=k % 4, success=k % 4 > 0
            )
            for k in range(12)
        )
    )


def body_of(run, kind="episode", **query):
    return page_for(Site([run]), f"run/0/{kind}", query).body


def at(site, address):
    """The page at a link."""
    parts = urlsplit(unquote(address) if "%23" in address else address)
    return page_for(site, parts.path, dict(parse_qsl(parts.query)))


def rows_of(page):
    return re.findall(r'class="row-link" id="([^"]+)"', page.body)


# --- lists
def test_next_and_previous_stay_in_the_list_that_one_came_from(run):
    site = Site([run])
    asked = {"outcome": "success", "order": "worst"}
    listed = page_for(site, "run/0/episodes", asked)
    names = rows_of(listed)
    assert len(names) == 9
    address = re.search(r'href="([^"]+)" class="row-link"', listed.body)[1].replace("&amp;", "&")
    walked = []
    while address:
        page = at(site, address)
        walked.append(re.search(r"<h1>Episode (\S+) ", page.body)[1])
        assert f"episode {len(walked)} of 9 (outcome success, order worst)" in page.body
        assert ("next →" in page.body, "← previous" in page.body) == (len(walked) < 9, len(walked) > 1)
        assert dict(parse_qsl(urlsplit(page.up).query)) == asked
        assert urlsplit(page.up).fragment == walked[-1].replace(":", "%3A")
        address = page.next
    assert walked == names
    assert at(site, at(site, page.previous).next).title == page.title


def test_up_leads_to_the_page_of_the_list_that_has_the_episode(played):
    site = Site([played(*(episode((k,), group=k) for k in range(120)))])
    page = page_for(site, "run/0/episode", {"name": "train-000001:115", "order": "reward"})
    assert "train-000001:115" in rows_of(at(site, page.up))
    page = page_for(site, "run/0/group", {"name": "train-000001:60", "order": "-reward"})
    assert "train-000001:60" in rows_of(at(site, page.up))


def test_an_episode_that_nobody_came_to_from_a_list_is_one_of_its_file(run):
    page = page_for(Site([run]), "run/0/episode", {"name": "train-000001:3"})
    assert "episode 4 of 12 (file train-000001.jsonl, order file)" in page.body
    assert "name=train-000001%3A4" in page.next
    assert "order" not in page.next


def test_groups_of_a_list_follow_one_another(run):
    site = Site([run])
    page = page_for(site, "run/0/group", {"name": "train-000001:2", "outcome": "success", "order": "best"})
    assert "group 3 of 3" in page.body  # the best is of the last group
    assert page.next is None
    assert "<h1>Group 1</h1>" in at(site, page.previous).body


def test_a_list_is_filtered_by_its_form_and_sorted_by_its_heads(run):
    site = Site([run])
    page = page_for(
        site, "run/0/episodes", {"text": "a lake", "group": "1", "iteration": "", "outcome": "", "env": ""}
    )
    assert rows_of(page) == [f"train-000001:{k}" for k in (4, 5, 6, 7)]
    form = re.search(r"<form.*?</form>", page.body)[0]
    named = re.findall(r'<(?:input|select)[^>]* name="([^"]+)"', form)
    assert {"text", "outcome", "iteration", "group", "file", "invalid", "order"} <= set(named)
    assert 'name="text" value="a lake"' in form
    assert 'method="get"' in form
    assert page.body.count("<form") == 1
    head = re.search(r'<a href="([^"]+)" class="sort">turns', page.body)[1].replace("&amp;", "&")
    falling = at(site, head)
    assert rows_of(falling) == [f"train-000001:{k}" for k in (7, 6, 5, 4)]
    assert "turns ▼" in falling.body
    head = re.search(r'<a href="([^"]+)" class="sort">turns', falling.body)[1].replace("&amp;", "&")
    assert rows_of(at(site, head)) == [f"train-000001:{k}" for k in (4, 5, 6, 7)]
    assert rows_of(page_for(site, "run/0/episodes", {"text": "nowhere"})) == []


def test_a_line_of_a_list_has_the_last_action_or_what_was_found_and_leads_there(run):
    assert body_of(run, "episodes").count("<small>Up</small>") == 12
    said = turn(), turn(response="so <b>lake-side</b>")
    add(run, "train-000002", trajectory_of("Lake", 0, 0, 0, 1, said, True, True, False))
    [found] = re.findall(r'<a href="([^"]+)">2: (.*?)</a>', body_of(run, "episodes", text="LAKE-S"))
    assert found[1] == "so &lt;b&gt;<mark>lake-s</mark>ide&lt;/b&gt;"
    address, _, jump = html.unescape(found[0]).partition("#")
    assert jump == "turn-2"
    assert "text=LAKE-S" in address  # which a script marks in the turns
    assert "name=train-000002%3A0" in address
    assert 'id="turn-2"' in at(Site([run]), address).body


def test_a_prompt_is_its_messages_by_role_and_that_of_the_system_is_folded():
    made = chat(
        "<|im_start|>system\nBe <b>good</b>.<|im_end|>\n<|im_start|>user\nGo!<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = re.findall(r'<div class="message (\w+)">(.*?)</div></div>|<div class="message', made)
    assert [kind for kind in re.findall(r'class="message (\w+)"', made)] == ["system", "user", "assistant"]
    assert parts
    assert "<details><summary>system</summary>" in made
    assert "Be &lt;b&gt;good&lt;/b&gt;." in made
    assert '<b>user</b><div class="text">Go!</div>' in made
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
    made = chat("<|begin_of_text|>" + head.format("user", "Hi") + head.format("tool", "7"))
    assert "<pre>&lt;|begin_of_text|&gt;</pre>" in made
    assert re.findall(r'class="message (\w+)"><b>(\w+)', made) == [("user", "user"), ("other", "tool")]
    gemma = chat("<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n")
    assert re.findall(r"<b>(\w+)</b>", gemma) == ["user", "model"]
    assert chat("no message at <all>") == "<pre>no message at &lt;all&gt;</pre>"


def test_causes_and_envs_are_choices_where_there_are_some(run):
    failed = episode((), env="Other", status="env_error", error="the lake is closed")
    odd = trajectory_of("Lake", 1, 0, 0, 1, (turn(valid=False),), False, True, False)
    add(run, "train-000002", failed, odd)
    site = Site([run])
    page = page_for(site, "run/0/episodes", {"cause": "env_error: the lake is closed"})
    assert rows_of(page) == ["train-000002:0"]
    assert '<option value="env_error: the lake is closed" selected>' in page.body
    assert '<option value="Other">' in page.body
    assert rows_of(page_for(site, "run/0/episodes", {"invalid": "1"})) == ["train-000002:1"]


def test_a_long_list_has_its_pager_above_and_below(played):
    body = body_of(played(*(episode(group=k) for k in range(120))), "episodes", page="1")
    assert body.count("51 to 100 of 120") == 2
    before, after = body.split("<table")
    assert "later →" in before
    assert "later →" in after


# --- groups
def move(word, observation="a lake", reward=0.0):
    return turn(reward)._replace(observation=observation, response=word, action=word)


def member_of(k, *moves):
    return trajectory_of("Lake", 0, 0, k, 1, moves, bool(moves[-1].reward), True, False)


@pytest.fixture
def group(played):
    """Five members: 0, 2 and 4 fail alike, 1 and 3 part from them, 3 ends best."""
    lost = (move("Up"), move("Left", "north"))
    return played(
        member_of(0, *lost),
        member_of(1, move("Up"), move("Right", "north"), move("Up", "east", 0.5)),
        member_of(2, *lost),
        member_of(3, move("Down"), move("Left", "south", 1.0)),
        member_of(4, *lost),
    )


def test_members_stand_by_reward_and_equal_ones_in_one_column(group):
    body = body_of(group, "group", name="train-000001:2")
    heads = re.findall(r"<th(?: class=\"chosen\")? scope=\"col\">.*?</th>", body)
    assert [re.findall(r">(\d)</a>", head) for head in heads] == [["3"], ["1"], ["0", "2", "4"]]
    assert ["\N{MULTIPLICATION SIGN}3" in head for head in heads] == [False, False, True]
    assert ['class="chosen"' in head for head in heads] == [False, False, True]
    assert "they part in turn 1" in body


def test_only_actions_in_the_same_state_are_compared(group):
    members = group.index.episodes()
    columns = columns_of(members, [group.index.read(member) for member in members])
    assert kinds_of(columns) == [
        ["other", "as-most", "as-most"],  # member 3 goes down, all others up
        ["alone", "other", "as-most"],  # 3 is in the south; in the north, three of four go left
        ["gone", "alone", "gone"],
    ]
    body = body_of(group, "group", name="train-000001:2")
    assert all(f'class="edge {kind}"' in body for kind in ("as-most", "other", "alone"))


def test_the_same_observation_after_another_past_is_another_state():
    ways = [(move("Up", "start"), move("Left", "fork")), (move("Up", "elsewhere"), move("Right", "fork"))]
    trajectories = [member_of(k, *moves) for k, moves in enumerate(ways)]
    columns = [type("Column", (), {"members": [k], "trajectory": t}) for k, t in enumerate(trajectories)]
    assert kinds_of(columns) == [["alone", "alone"], ["alone", "alone"]]


# --- an episode
def test_a_group_without_a_difference_has_no_negative_zero(run):
    kept = run.path / "advantages" / "train-000001.jsonl"
    write_advantages(kept, [[[0.0] * 3] * (2 + k % 4) for k in range(12)])
    body = body_of(run, name="train-000001:0")
    assert ">-0<" not in body
    assert "every advantage is 0" in body
    assert 'data-do="colour"' not in body
    write_advantages(kept, [[[0.5 - k % 2] * 3] * (2 + k % 4) for k in range(12)])
    assert 'data-do="colour"' in body_of(run, name="train-000001:0")
    assert "-0.5" in key(0.5)


def test_a_long_episode_has_a_line_of_its_turns_and_folds(run):
    body = body_of(run, name="train-000001:3")  # 5 turns
    assert re.findall(r'href="#turn-(\d)" class="chip">\d Up', body) == list("12345")
    assert "5 Up +3" in body
    assert body.count("<details open>") == 5
    assert 'max="5"' in body
    short = body_of(run, name="train-000001:0")
    assert 'class="player"' not in short


def test_an_episode_ends_with_why_it_ended_and_what_was_seen_then(run):
    add(run, "train-000007", replace(episode((0.0,)), last="the shore", ended="turns"))
    body = body_of(run, name="train-000007:0")
    end = re.sub("<[^>]*>", "", body.rpartition("<article")[2])
    assert "At its end: its turns were used up" in end
    assert "the shore" in end


def test_a_page_of_an_episode_grows_as_its_record_does(run):
    """Turns that each go on from the one before have prompts of 27, 57, 87 … tokens: of twice as many four times."""
    engine = run.path / "checkpoints" / "step-000001" / "engine"
    shutil.copytree(FIXTURES / "agent/checkpoints/step-000002/engine", engine)
    sizes = []
    for n in (30, 60):
        turns, prompt = [], ()
        for _ in range(n):
            turns.append(turn()._replace(prompt_ids=(*prompt, *[5] * 27)))
            prompt = (*turns[-1].prompt_ids, *turns[-1].response_ids)
        add(run, "train-000007", trajectory_of("Lake", 7, 0, 0, 1, tuple(turns), False, True, False))
        body = body_of(run, name="train-000007:0")
        assert f"prompt of {30 * n - 3:,} tokens, 27 after turn {n - 1}" in body
        sizes.append(len(body))
    assert sizes[1] < 2.1 * sizes[0]


@pytest.mark.parametrize("env", ["frozen_lake", "sokoban"])
def test_observations_of_shoals_own_worlds_are_drawn(env):
    from shoal.envs.pictures import picture_of
    from shoal.rollout.images import picture_url

    text, _ = make(env).reset(seed=3)
    assert picture_url(picture_of(text, env)) in drawing(text)


@pytest.mark.parametrize(
    "text", ["", "P", "P_\n_", "P_\n_P", "__\n_G", "a lake\nof ice", "P_\nG?", "P_\n" * 50, "PO\n__\n"]
)
def test_other_observations_are_not_drawn(text):
    assert drawing(text) is None


def test_tool_calls_and_results_are_set_apart_and_indented():
    call = '<tool_call>{"name": "f", "arguments": {"x": "<b>"}}</tool_call>'
    said = f"so {call}<tool_response>no JSON</tool_response> end"
    shown = readable(said)
    assert '<span class="tool"><b>tool call</b>\n{\n &quot;name&quot;: &quot;f&quot;' in shown
    assert "&lt;b&gt;" in shown
    assert '<span class="tool"><b>tool response</b>\nno JSON</span> end' in shown
    assert readable("plain <b>") == "plain &lt;b&gt;"


def test_an_answer_that_is_itself_the_action_stands_there_once(played):
    made = episode((0.5,))
    turn = replace(made.turns[0], response="higher", action="higher", action_is_valid=True)
    others = replace(turn, action="up"), replace(turn, action_is_valid=False)
    run = played(*(replace(made, turns=(one,)) for one in (turn, *others)))
    bodies = [body_of(run, name=f"train-000001:{n}") for n in range(3)]
    hidden = [len(re.findall(r'class="did[^>]*hidden>', body)) for body in bodies]
    assert hidden == [1, 0, 0]  # the player shows it
    assert bodies[0].count('<pre class="said">higher</pre>') == 1


def test_scores_of_judges_are_shown_with_what_was_asked_and_answered(played):
    scored = Score("clarity", 0.5, 0.75, "Is it <clear>?", "0.75, mostly"), Score("length", 1.0, None)
    run = played(replace(episode((0.5,)), judged=Judged((0.0,), scored)))
    body = body_of(run, name="train-000001:0")
    assert "2 rewards judged it" in body
    assert "<b>clarity</b> 0.75, weight 0.5" in body
    assert "Is it &lt;clear&gt;?" in body
    assert "0.75, mostly" in body
    assert "<b>length</b> \N{EN DASH}, weight 1" in body


def test_tools_are_shown_with_their_arguments_and_what_came_of_them(played):
    uses = ToolUse("find", {"word": "<lake>"}, "two lines"), ToolUse("add", "no JSON", error="no such tool")
    made = episode((0.5,))
    run = played(replace(made, turns=(replace(made.turns[0], tools=uses),)))
    body = body_of(run, name="train-000001:0")
    shown = '<pre class="tool"><b>find</b> {\n &quot;word&quot;: &quot;&lt;lake&gt;&quot;\n}\ntwo lines</pre>'
    assert shown in body
    assert '<pre class="tool failed"><b>add</b> no JSON\nError: no such tool</pre>' in body


def tree_of(*parents, turns=None):
    calls = tuple(Call((10 + k,), parent, (20 + k, 21 + k), (-0.1, -0.1)) for k, parent in enumerate(parents))
    of = range(len(calls)) if turns is None else turns
    did = tuple(Turn("o", k, "r", "a", True, 0.0, "s") for k in of)
    trajectory = Trajectory("E", 0, 0, 0, 1, calls, did, True, True, False)
    shown = call_tree(trajectory, lambda ids: [f"<{i}>" for i in ids])
    if shown is None:
        return None
    return re.findall(
        r'<li class="depth-(\d)"><details><summary>call (\d) <small>([^<]*?), 1 new', shown
    ), shown


def test_calls_that_branch_are_a_tree():
    # 1 goes on to 2 and 3; 4 is a branch of 1; 5 begins anew, as a sub-agent does, and 6 goes on from it
    lines, shown = tree_of(None, 0, 1, 0, None, 4, turns=[0, 1, 2, 3])
    assert lines == [
        ("0", "1", "turn 1"),
        ("0", "2", "turn 2"),
        ("0", "3", "turn 3"),
        ("1", "4", "turn 4, branch of call 1"),
        ("0", "5", "in no turn, begins anew"),
        ("0", "6", "in no turn"),
    ]
    assert "2 tokens answered" in shown
    assert "&lt;14&gt;" in shown
    assert "6 calls: 2 prompts from the start, branches at 1 call" in shown


@pytest.mark.parametrize("parents", [(None,), (None, 0, 1), (None, None, None)])
def test_calls_that_follow_one_another_need_no_tree(parents):
    assert tree_of(*parents) is None


def test_a_lake_is_drawn_in_a_group_as_in_an_episode(run):
    lake, _ = make("frozen_lake", desc="4x4").reset(seed=0)
    add(run, "train-000003", *(member_of(k, move("Up", lake), move("Left", "no lake", k)) for k in range(2)))
    body = body_of(run, "group", name="train-000003:0")
    assert body.count("shot drawn") == 1  # until they part one for all
    assert body.count('<pre class="saw">no lake</pre>') == 1
