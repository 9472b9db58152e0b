"""The agent of `weather_agents.py` with smolagents, whose answer is a call of the tool `final_answer`."""

import random

from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}
TOWNS = ["Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Pisa", "Riga"]
INSTRUCTIONS = """Say what to bring to a town. First ask for its weather:
<tool_call>
{"name": "weather", "arguments": {"town": "Rome"}}
</tool_call>
Then answer umbrella, boots, hat or coat:
<tool_call>
{"name": "final_answer", "arguments": {"answer": "hat"}}
</tool_call>"""


class Weather(Tool):
    """A tool that knows the weather of one episode."""

    name, description, output_type = "weather", "The weather of a town.", "string"
    inputs = {"town": {"type": "string", "description": "Its name."}}

    def __init__(self, skies):
        super().__init__()
        self.skies = skies

    def forward(self, town):
        """The weather."""
        return self.skies.get(town, "unknown")


def play(task, base_url):
    """One question; the reward is 1 if the answer fits the weather, which only the tool tells."""
    rng = random.Random(task["seed"])
    skies = {town: rng.choice(sorted(NEEDED)) for town in TOWNS}
    town = rng.choice(TOWNS)
    agent = ToolCallingAgent(
        tools=[Weather(skies)],
        model=OpenAIModel("shoal", api_base=base_url, api_key="none"),
        prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": INSTRUCTIONS},  # its own has 2,000 tokens
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    return float(agent.run(f"I go to {town}.") == NEEDED[skies[town]])
