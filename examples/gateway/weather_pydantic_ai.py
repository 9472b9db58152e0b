"""The agent of `weather_agents.py` with Pydantic AI, whose structured output is a call of a tool."""

import random
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}
INSTRUCTIONS = """Say what to bring. First ask for the weather:
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>
Then answer what it is, and umbrella, boots, hat or coat:
<tool_call>
{"name": "final_result", "arguments": {"weather": "...", "bring": "..."}}
</tool_call>"""


class Advice(BaseModel):
    """What to bring for which weather."""

    weather: Literal["rain", "snow", "sun", "wind"]
    bring: Literal["umbrella", "boots", "hat", "coat"]


agent = Agent(deps_type=str, output_type=Advice, instructions=INSTRUCTIONS, retries=0)


@agent.tool
def weather(context: RunContext[str]) -> str:
    """The weather."""
    return context.deps


async def play(task, base_url):
    """One question; the reward is 1 if the answer fits the weather, which only the tool tells."""
    sky = random.Random(task["seed"]).choice(sorted(NEEDED))
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = OpenAIChatModel("shoal", provider=OpenAIProvider(openai_client=client))
        limits = UsageLimits(request_limit=3)
        try:
            result = await agent.run("I go out.", model=model, deps=sky, usage_limits=limits)
        except (UnexpectedModelBehavior, UsageLimitExceeded):  # no call that fits, or no end of calls
            return 0.0
    return float(result.output == Advice(weather=sky, bring=NEEDED[sky]))
