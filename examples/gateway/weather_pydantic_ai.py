"""The agent of `weather_agents.py` with Pydantic AI, whose structured output is a call of a tool."""

import random
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}
TOWNS = ["Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Pisa", "Riga"]
INSTRUCTIONS = """Say what to bring to a town. First ask for its weather:
<tool_call>
{"name": "weather", "arguments": {"town": "Rome"}}
</tool_call>
Then answer umbrella, boots, hat or coat:
<tool_call>
{"name": "final_result", "arguments": {"bring": "hat"}}
</tool_call>"""


class Advice(BaseModel):
    """What to bring."""

    bring: Literal["umbrella", "boots", "hat", "coat"]


agent = Agent(deps_type=dict, output_type=Advice, instructions=INSTRUCTIONS, retries=0)


@agent.tool
def weather(context: RunContext[dict], town: str) -> str:
    """The weather of a town."""
    return context.deps.get(town, "unknown")


async def play(task, base_url):
    """One question; the reward is 1 if the answer fits the weather, which only the tool tells."""
    rng = random.Random(task["seed"])
    skies = {town: rng.choice(sorted(NEEDED)) for town in TOWNS}
    town = rng.choice(TOWNS)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = OpenAIChatModel("shoal", provider=OpenAIProvider(openai_client=client))
        limits = UsageLimits(request_limit=3)
        try:
            result = await agent.run(f"I go to {town}.", model=model, deps=skies, usage_limits=limits)
        except (UnexpectedModelBehavior, UsageLimitExceeded):  # no call that fits, or no end of calls
            return 0.0
    return float(result.output.bring == NEEDED[skies[town]])
