"""An environment of `verifiers` 0.1 as a program: its rollout asks the model, its rubric pays."""

import asyncio
import json
import os

import verifiers
from datasets import Dataset


def says(completion, answer):
    """Pay for an answer that has the word."""
    return float(answer in completion[-1]["content"])


words = Dataset.from_list([{"question": f"Say {word}.", "answer": word} for word in ("a", "b", "c", "d")])
env = verifiers.SingleTurnEnv(
    dataset=words, rubric=verifiers.Rubric(funcs=[says])
)  # or load_environment(NAME)


async def play(task, base_url):
    """One rollout of the environment; a failed one is no reward of 0."""
    rows = env.get_dataset()
    client = verifiers.ClientConfig(
        client_type="openai_chat_completions", api_base_url=base_url, api_key_var="OPENAI_API_KEY"
    )
    row = rows[task["seed"] % len(rows)]
    played = await env.run_rollout(row, client, "shoal", {"max_tokens": 8})
    if played.get("error"):
        raise RuntimeError(played["error"])
    return played["reward"]


if __name__ == "__main__":
    print(json.dumps({"reward": asyncio.run(play(json.loads(input()), os.environ["OPENAI_BASE_URL"]))}))
