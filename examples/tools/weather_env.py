"""An env whose actions are calls of tools: ask for the weather, then say what it is and bring what fits it."""

from typing import Literal

from shoal.envs import ToolEnv
from shoal.envs.actions import ToolCall
from shoal.envs.text import Outcome

NEEDED = {"rain": "umbrella", "snow": "boots", "sun": "hat", "wind": "coat"}


class Weather(ToolEnv):
    """Paid if what is brought fits the weather, which only the tool tells."""

    instructions, max_steps = "Ask for the weather, then bring what fits it.", 3

    def _start(self, rng):
        self.sky = str(rng.choice([*NEEDED]))
        self.shown = str(rng.choice([*NEEDED.values()]))
        self.asked, self.brought = False, None

    def observe(self):
        """What the model is shown first."""
        return "I go out."

    def tools(self):
        """The tools of an episode."""
        return [self.weather, self.bring]

    def weather(self) -> str:
        """The weather."""
        self.asked = True
        return self.sky

    def bring(
        self,
        weather: Literal["rain", "snow", "sun", "wind"],
        item: Literal["umbrella", "boots", "hat", "coat"],
    ) -> str:
        """Bring one thing for a weather."""
        self.brought = weather, item
        return "It is over."

    def _outcome(self):
        right = self.brought == (self.sky, NEEDED[self.sky])
        return Outcome(float(right), terminated=self.brought is not None, success=right)

    def expert_action(self):
        """Calls as they should be written: what is brought is any thing, so nothing of the task is taught."""
        call = ToolCall("bring", {"weather": self.sky, "item": self.shown})
        return (call if self.asked else ToolCall("weather", {}),)
