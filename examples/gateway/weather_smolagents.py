"""The agent of `weather_agents.py` with smolagents, whose answer is a call of the tool `final_answer`."""

import random
from typing import ClassVar

from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}
INSTRUCTIONS = """Say what to bring. First ask for the weather:
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>
Then answer what it is, and umbrella, boots, hat or coat:
<tool_call>
{"name": "final_answer", "arguments": {"answer": {"weather": "...", "bring": "..."}}}
</tool_call>"""

PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": INSTRUCTIONS}  # the package's own has 2,000 tokens


class Weather(Tool):
    """A tool that knows the weather of one episode."""

    name, description, output_type = "weather", "The weather.", "string"
    inputs: ClassVar = {}

    def __init__(self, sky):
        super().__init__()
        self.sky = sky

    def forward(self):
        """The weather."""
        return self.sky


def play(task, base_url):
    """One question; the reward is 1 if the answer fits the weather, which only the tool tells."""
    sky = random.Random(task["seed"]).choice(sorted(NEEDED))
    agent = ToolCallingAgent(
        tools=[Weather(sky)],
        model=OpenAIModel("shoal", api_base=base_url, api_key="none"),
        prompt_templates=PROMPTS,
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    return float(agent.run("I go out.") == {"weather": sky, "bring": NEEDED[sky]})
