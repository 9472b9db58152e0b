"""An episode whose next prompt does not fit into the context ends as that, and everybody is told."""

from tests.records import exchanges

from shoal.cli.main import main
from shoal.core.data import read_trajectories
from shoal.train.agent.config import compose_config
from shoal.train.agent.trainer import AgentTrainer

SMALL = [
    "agent_proxy.prompt.mode=append", "agent_proxy.prompt.prefill=''", "agent_proxy.prompt.closing=''",
    "agent_proxy.max_tokens=4", "warmup.steps=0", "trainer.iterations=1", "trainer.tensorboard=false",
    "es_manager.train.env_groups=2", "engine.width=16", "es_manager.val.env_groups=2", "agent_proxy.max_turn=6",
    "algorithm.filter_groups.enable=false", "use_parallel_envs=false",
]  # fmt: skip


def play(folder, context):
    config = compose_config("demo", [*SMALL, f"engine.context={context}", f"run_dir={folder}"])
    with AgentTrainer(config) as trainer:
        *_, row = trainer.train()
    return row, list(read_trajectories(folder / "trajectories" / "train-000001.jsonl"))


def test_a_prompt_that_fills_the_context_in_a_later_turn_is_counted_and_shown_as_that(tmp_path, capsys):
    row, episodes = play(tmp_path / "roomy", 1000)
    assert "ended/context" not in row
    assert {t.ended for t in episodes} <= {"env", "turns"}
    first = max(len(exchanges(t)[0].prompt_ids) + len(exchanges(t)[0].response_ids) for t in episodes)

    row, episodes = play(tmp_path / "tight", first + 10)
    long = [t for t in episodes if not t.terminated]
    assert long
    assert all((t.ended, t.truncated, t.status, len(t.turns)) == ("context", True, "ok", 1) for t in long)
    assert row["ended/context"] == len(long) / len(episodes)
    assert main(["show", str(tmp_path / "tight"), "--file", "train-000001", "--worst"]) == 0
    assert "the prompt filled the context" in " ".join(capsys.readouterr().out.split())
