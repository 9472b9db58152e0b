"""An agent with OpenAI's Agents SDK: it asks a tool for the weather, and answers in JSON what to bring."""

import random
from typing import Literal

import agents
from pydantic import BaseModel

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}
TOWNS = ["Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Pisa", "Riga"]
INSTRUCTIONS = """Say what to bring to a town. First ask for its weather:
<tool_call>
{"name": "weather", "arguments": {"town": "Rome"}}
</tool_call>
Then answer {"bring": "umbrella"}, {"bring": "boots"}, {"bring": "hat"} or {"bring": "coat"}."""
agents.set_tracing_disabled(True)


class Advice(BaseModel):
    """What to bring."""

    bring: Literal["umbrella", "boots", "hat", "coat"]


@agents.function_tool
def weather(context: agents.RunContextWrapper[dict], town: str) -> str:
    """The weather of a town."""
    return context.context.get(town, "unknown")


async def play(task, base_url):
    """One question; the reward is 1 if the answer fits the weather, which only the tool tells."""
    rng = random.Random(task["seed"])
    skies = {town: rng.choice(sorted(NEEDED)) for town in TOWNS}
    town = rng.choice(TOWNS)
    async with agents.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = agents.OpenAIChatCompletionsModel(model="shoal", openai_client=client)
        agent = agents.Agent(
            name="Adviser", instructions=INSTRUCTIONS, tools=[weather], output_type=Advice, model=model
        )
        try:
            result = await agents.Runner.run(agent, f"I go to {town}.", context=skies, max_turns=3)
        except (agents.ModelBehaviorError, agents.MaxTurnsExceeded):  # no JSON, or no end of calls
            return 0.0
    return float(result.final_output.bring == NEEDED[skies[town]])
