"""The agent of `frozen_lake_openai.py` with OpenAI's Agents SDK."""

import random

import agents

LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]  # start, frozen, hole, goal
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
agents.set_tracing_disabled(True)


async def play(task, base_url):
    """Walk from the start; the reward is 1 at the goal, else 0."""
    return await walk(base_url, random.Random(task["seed"]), 0, 0)


async def practise(task, base_url):
    """Walk from a square that the task's seed chooses, so that every square is learned."""
    rng = random.Random(task["seed"])
    squares = [(r, c) for r in range(4) for c in range(4) if LAKE[r][c] in "SF"]
    return await walk(base_url, rng, *rng.choice(squares))


async def walk(base_url, rng, row, column):
    """Run the agent for each move; an answer that is none is replaced by a random one."""
    async with agents.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = agents.OpenAIChatCompletionsModel(model="shoal", openai_client=client)
        walker = agents.Agent(name="Walker", model=model, model_settings=agents.ModelSettings(max_tokens=1))
        for _ in range(8):
            here = "ABCDEFGHIJKLMNOP"[4 * row + column]
            try:
                move = (await agents.Runner.run(walker, here)).final_output
            except agents.ModelBehaviorError:  # the SDK's word for an empty answer
                move = ""
            down, right = MOVES[move if move in MOVES else rng.choice("LDRU")]
            row, column = min(3, max(0, row + down)), min(3, max(0, column + right))
            if LAKE[row][column] in "HG":
                return float(LAKE[row][column] == "G")
    return 0.0
