"""Makes the pictures of `docs/environments.md`: `python docs/make_pictures.py` (needs pillow)."""

from pathlib import Path

import numpy as np
from PIL import Image

from shoal.envs import make
from shoal.envs.pictures import TILE, picture_of

FOLDER = Path(__file__).parent / "pictures"


def beside(pictures: list[np.ndarray]) -> Image.Image:
    """Pictures in a row, bottoms aligned, with a gap between them."""
    height = max(picture.shape[0] for picture in pictures)
    gap = np.full((height, TILE // 2, 3), 255, np.uint8)
    row = []
    for picture in pictures:
        above = np.full((height - picture.shape[0], picture.shape[1], 3), 255, np.uint8)
        row += [np.vstack([above, picture]), gap]
    return Image.fromarray(np.hstack(row[:-1]))


def main() -> None:
    """Sokoban rooms of rising difficulty, a solution as an animation, and three lakes."""
    FOLDER.mkdir(exist_ok=True)
    kinds = [
        {"min_pushes": 3},
        {"num_boxes": 2, "min_pushes": 6},
        {"dim_room": (8, 8), "num_boxes": 3, "min_pushes": 14},
        {"dim_room": (10, 10), "num_boxes": 4, "min_pushes": 24, "search_depth": 60},
    ]
    rooms = []
    for kind in kinds:
        env = make("sokoban", **kind)
        rooms.append(picture_of(env.reset(seed=3)[0], "sokoban"))
    beside(rooms).save(FOLDER / "sokoban.png", optimize=True)

    env = make("sokoban", dim_room=(7, 7), num_boxes=2, min_pushes=8)
    frames = [picture_of(env.reset(seed=5)[0], "sokoban")]
    for action in env.solution("moves").actions:
        frames.append(picture_of(env.step(action)[0], "sokoban"))
    images = [Image.fromarray(frame).quantize(32) for frame in [*frames, *[frames[-1]] * 4]]
    images[0].save(FOLDER / "sokoban.gif", save_all=True, append_images=images[1:], duration=300, loop=0)

    lakes = [
        make("frozen_lake", desc="4x4"),
        make("frozen_lake", size=5, p=0.7),
        make("frozen_lake", desc="8x8"),
    ]
    shown = []
    for env in lakes:
        text, _ = env.reset(seed=2)
        shown.append(picture_of(text, "frozen_lake"))
    beside(shown).save(FOLDER / "frozen_lake.png", optimize=True)


if __name__ == "__main__":
    main()
