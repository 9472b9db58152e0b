"""An environment of `verifiers` 0.4 as a program: its harness asks the model, its task pays."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf

__all__ = ["Once", "Words"]  # how verifiers finds them
ASK = """
import sys, openai
url, key, model, text = sys.argv[1:]
messages = [{"role": "user", "content": text}]
openai.OpenAI(base_url=url, api_key=key).chat.completions.create(model=model, messages=messages, max_tokens=8)
"""


class Data(vf.TaskData):
    """What a task is."""

    answer: str


class Say(vf.Task[Data]):
    """Say a word."""

    @vf.reward
    async def says(self, trace: vf.Trace) -> float:
        """Pay for an answer that has the word."""
        return float(self.data.answer in trace.last_reply)


class Words(vf.Taskset[Say]):
    """The words."""

    def load(self):
        """All tasks."""
        return [Say(Data(prompt=f"Say {word}.", answer=word)) for word in ("a", "b", "c", "d")]


class Once(vf.Harness[vf.HarnessConfig]):
    """A program that asks once; verifiers' own ones install theirs by `uv`, or run in a container."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        """Run it; what it asks passes through verifiers to the model."""
        words = [sys.executable, "-c", ASK, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(words, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})


async def play(task, base_url):
    """One episode of the environment; a failed one is no reward of 0."""
    seat = {"harness": {"id": "words_verifiers"}, "runtime": {"type": "subprocess"}}
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "words_verifiers"}, agent=seat))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    model = vf.ModelContext(model="shoal", client=client, sampling=vf.SamplingConfig())
    tasks = list(env.taskset)
    async with env.serving():
        episode = await env.run_episode(tasks[task["seed"] % len(tasks)], model)
    if not episode.ok:
        raise RuntimeError(str(episode.errors or episode.traces[0].errors))
    return episode.traces[0].reward


if __name__ == "__main__":
    print(json.dumps({"reward": asyncio.run(play(json.loads(input()), os.environ["OPENAI_BASE_URL"]))}))
