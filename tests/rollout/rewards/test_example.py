"""The example: a list of rewards says what is learned."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_rewards.py"


def test_the_example_trains_with_a_function_and_a_program(tmp_path):
    from examples.own_rewards import run

    rows = run(tmp_path / "run", iterations=2)
    assert len(EXAMPLE.read_text().splitlines()) < 60
    for row in rows:
        assert row["score/alive"] == row["turns"] / 20
        assert abs(row["reward"] - row["score/alive"] - 0.2 * row["score/varied"]) < 1e-9
        assert row["failed_episodes"] == 0
    assert rows[-1]["turns"] > rows[0]["turns"]
