"""An agent with OpenAI's Agents SDK: it asks a tool for the weather, and answers in JSON what to bring."""

import random
from typing import Literal

import agents
from pydantic import BaseModel

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}
INSTRUCTIONS = """Say what to bring. First ask for the weather:
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>
Then answer what it is, and umbrella, boots, hat or coat:
{"weather": "...", "bring": "..."}"""
agents.set_tracing_disabled(True)


class Advice(BaseModel):
    """What to bring for which weather."""

    weather: Literal["rain", "snow", "sun", "wind"]
    bring: Literal["umbrella", "boots", "hat", "coat"]


@agents.function_tool
def weather(context: agents.RunContextWrapper[str]) -> str:
    """The weather."""
    return context.context


async def play(task, base_url):
    """One question; the reward is 1 if the answer fits the weather, which only the tool tells."""
    sky = random.Random(task["seed"]).choice(sorted(NEEDED))
    async with agents.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = agents.OpenAIChatCompletionsModel(model="shoal", openai_client=client)
        agent = agents.Agent(
            name="Adviser", instructions=INSTRUCTIONS, tools=[weather], output_type=Advice, model=model
        )
        try:
            result = await agents.Runner.run(agent, "I go out.", context=sky, max_turns=3)
        except (agents.ModelBehaviorError, agents.MaxTurnsExceeded):  # no JSON, or no end of calls
            return 0.0
    return float(result.final_output == Advice(weather=sky, bring=NEEDED[sky]))
