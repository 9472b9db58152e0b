"""A vault that is opened by tools, in a module that workers import."""

from shoal.envs import ToolEnv
from shoal.envs.actions import ToolCall
from shoal.envs.text import Outcome


class Vault(ToolEnv):
    """A note has the code; the vault has a dial or a keypad, never both."""

    instructions = "Open the vault."
    max_steps = 6

    def _start(self, rng):
        self.code = int(rng.integers(10))
        self.lock = self.dial if rng.integers(2) else self.keypad
        self.opened = False

    def observe(self):
        return f"A vault with a {self.lock.__name__}."

    def tools(self):
        return [self.note, self.lock]

    def note(self) -> str:
        """Read the note."""
        return f"the code is {self.code}"

    def dial(self, number: int) -> str:
        """Turn the dial.

        Args:
            number: from 0 to 9.
        """
        return self._try(number)

    def keypad(self, digit: int) -> str:
        """Press a key.

        Args:
            digit: from 0 to 9.
        """
        return self._try(digit)

    def _try(self, number):
        if not 0 <= number <= 9:
            raise ValueError("there are digits from 0 to 9")
        self.opened = number == self.code
        return "it opens" if self.opened else "it stays shut"

    def _outcome(self):
        return Outcome(float(self.opened), terminated=self.opened, success=self.opened)

    def expert_action(self):
        lock = self.lock.__name__
        argument = {"dial": "number", "keypad": "digit"}[lock]
        return ToolCall("note", {}), ToolCall(lock, {argument: self.code})
