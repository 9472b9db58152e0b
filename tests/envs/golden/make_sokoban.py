"""Records episodes of gym-sokoban 0.0.6 (`pip install gym-sokoban==0.0.6`) into `sokoban.json`.

Half of the actions are random; the other half follow a solution, so that boxes get onto targets, off them
again, and levels are solved. Run: `python tests/envs/golden/make_sokoban.py`.
"""

import json
import random
import warnings
from pathlib import Path

import numpy as np

warnings.filterwarnings("ignore")
from gym_sokoban.envs.sokoban_env import SokobanEnv as Original  # noqa: E402

from shoal.envs.sokoban import SokobanEnv, solve  # noqa: E402
from shoal.envs.sokoban.levels import level_from_state  # noqa: E402


def main() -> None:
    random.seed(7)
    np.random.seed(7)
    episodes = []
    for number in range(36):
        size, boxes = [(6, 1), (6, 2), (7, 2)][number % 3]
        original = Original(dim_room=(size, size), num_boxes=boxes, max_steps=40)
        fixed, state = original.room_fixed.tolist(), original.room_state.tolist()
        solution = list(solve(level_from_state(fixed, state)).actions)
        steps, done = [], False
        while not done:
            # After a wandering start the rest of a solution no longer fits; solve anew from there.
            if random.random() < 0.5:
                action = random.randint(1, 4)
            else:
                here = SokobanEnv.from_state(original.room_fixed, original.room_state)
                solution = here.solution("moves")
                action = solution.actions[0] if solution else random.randint(1, 4)
            _, reward, done, info = original.step(action, observation_mode="tiny_rgb_array")
            steps.append(
                {
                    "action": action,
                    "reward": round(float(reward), 9),
                    "done": bool(done),
                    "success": bool(original.boxes_on_target == boxes),
                    "moved": bool(info["action.moved_player"]),
                    "room_state": original.room_state.tolist(),
                }
            )
        episodes.append({"room_fixed": fixed, "room_state": state, "max_steps": 40, "steps": steps})
    path = Path(__file__).with_name("sokoban.json")
    path.write_text(json.dumps({"source": "gym-sokoban 0.0.6", "episodes": episodes}, separators=(",", ":")))
    assert sum(episode["steps"][-1]["success"] for episode in episodes) > 10


if __name__ == "__main__":
    main()
