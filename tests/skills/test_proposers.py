from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from tests.skills.conftest import skill as a_skill

from shoal.core.errors import ConfigError, EngineError
from shoal.skills.graph.process import NotLearnedError
from shoal.skills.plan import dependencies
from shoal.skills.proposers import (
    KnowledgeBase,
    LanguageModel,
    Replay,
    first_object,
    knowledge_base,
)
from shoal.skills.scheduler import SkillScheduler
from shoal.skills.spec import Skill, load_skills
from shoal.skills.worlds.crafting import CRAFTING

SKILLS = load_skills(knowledge_base("crafting"), CRAFTING)
WOOD = {"name": "Collect Wood", "gain": {"wood": 1}, "done": {"feature": "wood"}}


class Server:
    """An OpenAI-compatible server that says what it is told to say, and remembers what it was asked.

    A reply that is a number is a status without a body.
    """

    def __init__(self) -> None:
        self.replies: list[str | int] = []
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.keys.append(self.headers["Authorization"])
                reply = outer.replies.pop(0)
                self.send_response(reply if isinstance(reply, int) else 200)
                if reply == 302:
                    self.send_header("Location", f"{outer.url}/elsewhere")
                self.end_headers()
                if isinstance(reply, str) and reply.startswith("RAW"):
                    self.wfile.write(reply.removeprefix("RAW").encode())
                elif isinstance(reply, str):
                    self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_a_models_skill_is_read_from_its_reply_whatever_stands_around_it(server: Server) -> None:
    server.replies = [f"Sure! Here is {{a skill}}:\n```json\n{json.dumps(WOOD)}\n``` I hope it helps {{}}"]
    skill = LanguageModel("m", server.url, CRAFTING).next_skill([], [], {})
    assert skill is not None
    assert skill.name == "Collect Wood"
    assert server.asked[0]["model"] == "m"
    assert "wood_pickaxe" in server.asked[0]["messages"][0]["content"]


def test_a_refused_skill_goes_back_to_the_model_with_the_reason(server: Server) -> None:
    server.replies = [
        json.dumps({**WOOD, "gain": {"gold": 1}}),
        "no json at all",
        json.dumps({**WOOD, "name": "../../etc/passwd; rm -rf ~"}),
        json.dumps(WOOD),
    ]
    skill = LanguageModel("m", server.url, CRAFTING, tries=4).next_skill([], [], {})
    assert skill is not None
    reasons = [request["messages"][-1]["content"] for request in server.asked[1:]]
    assert "no feature named 'gold'" in reasons[0]
    assert "holds no JSON object" in reasons[1]
    assert "name must be" in reasons[2]


def test_a_model_that_never_gives_a_usable_skill_is_an_error(server: Server) -> None:
    server.replies = [json.dumps({**WOOD, "code": "__import__('os').system('x')"})] * 3
    with pytest.raises(
        EngineError, match="no usable skill in 3 replies; the last problem: .*unknown key 'code'"
    ):
        LanguageModel("m", server.url, CRAFTING).next_skill([], [], {})


def test_a_skill_that_exists_or_cannot_be_reached_is_refused(server: Server) -> None:
    server.replies = [json.dumps(WOOD), json.dumps({**WOOD, "name": "New", "requirements": {"iron": 1}})]
    with pytest.raises(EngineError, match="'iron', which cannot be had"):
        LanguageModel("m", server.url, CRAFTING, tries=2).next_skill(SKILLS[:1], [], {})
    assert "named 'Collect Wood' already" in server.asked[1]["messages"][-1]["content"]


def test_a_model_may_say_that_there_is_nothing_left(server: Server) -> None:
    server.replies = ['{"name": null}']
    assert LanguageModel("m", server.url, CRAFTING).next_skill(SKILLS, [], {}) is None


@pytest.mark.parametrize(
    "reply", ["RAWnot json", 'RAW{"choices": []}', 'RAW{"choices": [{"message": {}}]}', "RAW" + "[" * 100_000]
)
def test_an_answer_that_is_not_a_chat_is_an_engine_error(server: Server, reply: str) -> None:
    server.replies = [reply] * 3
    with pytest.raises(EngineError, match="returned no chat completion|answered broken JSON"):
        LanguageModel("m", server.url, CRAFTING, tries=3, patience=0).next_skill([], [], {})


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not(server: Server) -> None:
    model = LanguageModel("m", server.url, CRAFTING, api_key="secret", patience=0)
    server.replies = [500, 429, json.dumps(WOOD)]
    assert model.next_skill([], [], {}) is not None
    for status in (400, 401, 302):  # a key is for the host that was named, not for where that one points to
        server.replies = [status]
        with pytest.raises(EngineError, match=f"refused the request: HTTP {status}"):
            model.next_skill([], [], {})
    server.replies = [500, 500, 500]
    with pytest.raises(EngineError, match="no answer in 3 attempts"):
        model.next_skill([], [], {})
    assert server.keys == ["Bearer secret"] * 9


def test_a_server_that_is_not_there_is_an_engine_error() -> None:
    with pytest.raises(
        EngineError, match="no answer in 3 attempts .* http://127.0.0.1:9/v1/chat/completions: no connection"
    ):
        LanguageModel("m", "http://127.0.0.1:9/v1", CRAFTING, timeout=2, patience=0).next_skill([], [], {})
    with pytest.raises(ConfigError, match="must start with http"):
        LanguageModel("m", "file:///etc/passwd", CRAFTING)


@pytest.mark.parametrize("text", ["{" * 5000, "[" * 20_000, '{"a":' * 3000, "", '"{"'])
def test_deeply_nested_and_endless_replies_are_only_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="no JSON object"):
        first_object(text)


def test_the_knowledge_base_gives_first_what_can_be_trained_now() -> None:
    base = KnowledgeBase(knowledge_base("crafting"), CRAFTING)
    names = []
    while (skill := base.next_skill([s for s in SKILLS if s.name in names], [], {})) is not None:
        names.append(skill.name)
    assert names[:3] == ["Collect Wood", "Drink Water", "Collect Sapling"]  # these need nothing
    assert sorted(names) == sorted(skill.name for skill in SKILLS)
    done = base.next_skill([s for s in SKILLS if s.name in names[:3]], ["Collect Sapling"], {})
    assert done is not None
    assert done.name == "Plant Sapling"  # its need is met, while the table's is not


def test_a_file_may_name_its_skills_in_any_order(tmp_path: Path, scripted) -> None:
    path = tmp_path / "skills.yaml"
    path.write_text(yaml.safe_dump({"skills": [skill.as_dict() for skill in reversed(SKILLS[:4])]}))
    s = SkillScheduler(tmp_path / "run", 2, 0.2, launcher=scripted())
    assert s.run(KnowledgeBase(path, CRAFTING), 4)
    assert s.get_completed_skills().keys() == {skill.name for skill in SKILLS[:4]}
    for row in s.store.skills():
        assert list(row.dependencies) == dependencies(row.spec, SKILLS[3::-1], CRAFTING)


def described(path: Path, *skills: Skill) -> KnowledgeBase:
    path.write_text(yaml.safe_dump({"skills": [skill.as_dict() for skill in skills]}))
    return KnowledgeBase(path, CRAFTING)


def test_a_skill_that_is_mended_in_the_file_is_trained_anew_as_it_is_now(tmp_path: Path, scripted) -> None:
    """And what waits follows: after the change the table needs saplings, which another skill collects."""

    mended = threading.Event()

    def not_as_it_was(folder: Path, attempt: int) -> None:
        if not mended.is_set():
            raise NotLearnedError("not learned")
        launcher.finish(folder, attempt)

    launcher = scripted(not_as_it_was)
    wrong = a_skill("Gather", "wood"), a_skill("Place Table", "table", {"wood": 1})
    right = (
        a_skill("Gather", "drink"),
        a_skill("Place Table", "table", {"sapling": 1}),
        a_skill("Seek", "sapling"),
    )
    s = SkillScheduler(tmp_path / "run", 2, 0.2, launcher=launcher)
    assert not s.run(described(tmp_path / "skills.yaml", *wrong))
    assert {row.name: row.status for row in s.store.skills()} == {
        "Gather": "failed",
        "Place Table": "blocked",
    }
    used = s.store.skill("Gather").budget_used
    mended.set()
    assert s.run(described(tmp_path / "skills.yaml", *right))
    assert [row.spec for row in s.store.skills()] == [*right]
    assert s.store.skill("Place Table").dependencies == ("Seek",)
    assert s.store.skill("Gather").budget_total == used + s.config.total_timesteps
    with pytest.raises(
        ConfigError, match="'Gather' is completed, and its description has changed: undo the change"
    ):
        s.run(described(tmp_path / "skills.yaml", *wrong))
    assert [row.spec for row in s.store.skills()] == [*right]


def test_a_skill_that_is_no_longer_in_the_file_is_named(tmp_path: Path, scripted, caplog) -> None:
    s = SkillScheduler(tmp_path / "run", 2, 0.2, launcher=scripted())
    for skill in SKILLS[:2]:
        s.add_skill(skill.name, skill)
    assert s.run(described(tmp_path / "skills.yaml", SKILLS[0]))
    assert f"not described any more, but still trained: {SKILLS[1].name!r}; " in caplog.text


def test_a_file_without_skills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no skills, and nothing would be trained"):
        described(tmp_path / "skills.yaml")


def test_a_target_brings_only_what_it_needs() -> None:
    base = KnowledgeBase(knowledge_base("crafting"), CRAFTING, target="Make Wood Sword")
    assert [skill.name for skill in base.skills] == ["Collect Wood", "Place Table", "Make Wood Sword"]


def test_a_knowledge_base_that_cannot_be_reached_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "skills.yaml"
    path.write_text("skills: [{name: A, gain: {table: 1}, done: {feature: table}, requirements: {iron: 1}}]")
    with pytest.raises(ConfigError, match="'iron', which cannot be had"):
        KnowledgeBase(path, CRAFTING)


def test_a_world_without_skills_of_its_own_is_told_to_name_a_file() -> None:
    with pytest.raises(ConfigError, match="no skills come with the world 'corridor'; name a YAML file"):
        knowledge_base("corridor")


def test_fewer_than_no_skills_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_nodes must be at least 0, got -1"):
        KnowledgeBase(knowledge_base("crafting"), CRAFTING, max_nodes=-1)


class Recording:
    """A proposer that notes what was completed whenever it was asked."""

    def __init__(self, skills) -> None:
        self.left, self.asked = list(skills), []

    def next_skill(self, known, completed, failed):
        self.asked.append((list(completed), dict(failed)))
        return self.left.pop(0) if self.left else None


def test_proposing_pauses_while_the_next_skill_needs_one_in_training(tmp_path: Path, scripted) -> None:
    by_name = {skill.name: skill for skill in SKILLS}
    order = ["Collect Wood", "Drink Water", "Place Table", "Collect Sapling"]
    proposer = Recording([by_name[name] for name in order])
    launcher = scripted()
    launcher.gate.clear()
    s = SkillScheduler(tmp_path, 4, 0.2, launcher=launcher)

    def let_go() -> None:
        while len(proposer.asked) < 3:
            time.sleep(0.01)
        time.sleep(0.3)  # in which a fourth would be asked for
        launcher.gate.set()

    threading.Thread(target=let_go, daemon=True).start()
    assert s.run(proposer)
    # Three proposals at once; the fourth only when the wood that the table needs was there.
    assert [len(completed) for completed, _ in proposer.asked[:3]] == [0, 0, 0]
    assert "Collect Wood" in proposer.asked[3][0]
    assert len(s.get_completed_skills()) == 4


def test_a_failure_opens_the_frontier_again_and_the_proposer_is_told(tmp_path: Path, scripted) -> None:
    def fail(folder, attempt):
        raise RuntimeError("too hard")

    by_name = {skill.name: skill for skill in SKILLS}
    proposer = Recording([by_name["Collect Wood"], by_name["Place Table"]])
    s = SkillScheduler(tmp_path, 2, 0.2, max_retries=0, launcher=scripted(fail))
    assert not s.run(proposer, 5)
    assert proposer.asked[-1][1]["Collect Wood"] == "too hard"


class Breaks(Recording):
    """A proposer whose server is gone in the end."""

    def next_skill(self, known, completed, failed):
        if not self.left:
            raise EngineError("the server is gone")
        return super().next_skill(known, completed, failed)


CIRCLE = replace(SKILLS[0], name="Sow", requirements={"sapling": 1}, gain={"sapling": 1})


@pytest.mark.parametrize(
    ("proposer", "error", "message"),
    [
        (Breaks(SKILLS[:1]), EngineError, "the server is gone"),
        (Recording([SKILLS[0]] * 9), ConfigError, "named 'Collect Wood', which is among the skills already"),
        (Recording([SKILLS[0], CIRCLE]), ConfigError, "skills wait for each other: Sow -> Sow"),
    ],
)
def test_an_error_of_proposing_comes_out_after_what_was_queued(
    tmp_path: Path, scripted, proposer: Recording, error: type[Exception], message: str
) -> None:
    s = SkillScheduler(tmp_path, 2, 0.2, launcher=scripted())
    with pytest.raises(error, match=message):
        s.run(proposer, 5)
    assert list(s.get_completed_skills()) == ["Collect Wood"]


def test_no_more_than_max_nodes_are_proposed(tmp_path: Path, scripted) -> None:
    s = SkillScheduler(tmp_path, 2, 0.2, launcher=scripted())
    assert s.run(KnowledgeBase(knowledge_base("crafting"), CRAFTING, 3), 3)
    assert len(s.store.skills()) == 3


def test_what_a_model_proposed_is_kept_and_proposed_again_without_it(server: Server, tmp_path: Path) -> None:
    record = tmp_path / "proposals.jsonl"
    table = {
        "name": "Place Table",
        "requirements": {"wood": 2},
        "gain": {"table": 1},
        "done": {"feature": "table"},
    }
    server.replies = [
        json.dumps(WOOD),
        json.dumps({**table, "horizon": 10**12}),
        json.dumps(table),
        '{"name": null}',
    ]
    model, known = LanguageModel("m", server.url, CRAFTING, record=record), []
    while (skill := model.next_skill(known, [], {})) is not None:
        known.append(skill)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["refused"] is not None for row in rows] == [False, True, False, False]
    assert "horizon must be at most 10000" in rows[1]["refused"]
    assert rows[1]["reply"] == json.dumps({**table, "horizon": 10**12})
    with record.open("a") as file:
        file.write('{"skill": {"name": "cut sho')  # a kill came between
    replay, again = Replay(record, CRAFTING), []
    while (skill := replay.next_skill(again, [], {})) is not None:
        again.append(skill)
    assert again == known
    assert len(server.asked) == 4


def test_what_was_proposed_again_after_a_kill_is_replayed_once(tmp_path: Path) -> None:
    record = tmp_path / "proposals.jsonl"
    water = {"name": "Drink Water", "gain": {"drink": 1}, "done": {"feature": "drink"}}
    rows = [{**WOOD, "horizon": 50}, water, WOOD]  # the first was never used: its run was ended before
    record.write_text("".join(json.dumps({"skill": row}) + "\n" for row in rows))
    replay = Replay(record, CRAFTING)
    assert [(skill.name, skill.horizon) for skill in replay.skills] == [
        ("Drink Water", 100),
        ("Collect Wood", 100),
    ]


def test_a_proposal_after_one_that_a_kill_cut_short_is_replayed(server: Server, tmp_path: Path) -> None:
    record = tmp_path / "proposals.jsonl"
    record.write_text('{"skill": {"name": "cut sho')
    server.replies = [json.dumps(WOOD)]
    LanguageModel("m", server.url, CRAFTING, record=record).next_skill([], [], {})
    assert [skill.name for skill in Replay(record, CRAFTING).skills] == ["Collect Wood"]


@pytest.mark.parametrize("data", [b"", b"\x7fELF\xd0\x00", b'{"skill": "wood"}\n', b'{"skill": [1]}\n'])
def test_what_is_no_record_of_proposals_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "proposals.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match="is no record of proposals"):
        Replay(tmp_path / "proposals.jsonl", CRAFTING)
