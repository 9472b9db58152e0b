"""The agent of `frozen_lake_openai.py` with the package `anthropic`."""

import random

import anthropic

LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]  # start, frozen, hole, goal
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
client = anthropic.Anthropic(base_url="http://localhost", api_key="none")


def play(task, variables):
    """Walk from the start; the reward is 1 at the goal, else 0."""
    return walk(variables["ANTHROPIC_BASE_URL"], random.Random(task["seed"]), 0, 0)


def practise(task, variables):
    """Walk from a square that the task's seed chooses, so that every square is learned."""
    rng = random.Random(task["seed"])
    squares = [(r, c) for r in range(4) for c in range(4) if LAKE[r][c] in "SF"]
    return walk(variables["ANTHROPIC_BASE_URL"], rng, *rng.choice(squares))


def walk(base_url, rng, row, column):
    """Ask for each move; an answer that is none is replaced by a random one."""
    ask = client.with_options(base_url=base_url).messages.create
    for _ in range(8):
        here = "ABCDEFGHIJKLMNOP"[4 * row + column]
        answer = ask(model="shoal", messages=[{"role": "user", "content": here}], max_tokens=1)
        move = answer.content[0].text
        down, right = MOVES[move if move in MOVES else rng.choice("LDRU")]
        row, column = min(3, max(0, row + down)), min(3, max(0, column + right))
        if LAKE[row][column] in "HG":
            return float(LAKE[row][column] == "G")
    return 0.0
