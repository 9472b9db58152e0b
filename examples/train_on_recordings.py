"""A new model learns from drawn recordings where to click: from pixels to weights."""

import sys
import tempfile
from pathlib import Path

from shoal.cli.main import main
from shoal.core.files import read_json
from shoal.splitting.synthetic import write_button_recordings


def run(folder: Path, screens: int = 440, epochs: int = 15) -> float:
    """Share of right answers on screens that were not trained on."""
    write_button_recordings(folder / "recordings", screens, seed=1)
    code = main(
        [
            "train-recorded", f"recordings={folder / 'recordings'}", f"run_dir={folder / 'run'}",
            f"train.epochs={epochs}", "train.learning_rate=1e-3", "train.minibatch_size=16", "heldout=0.1",
        ]
    )  # fmt: skip
    if code:
        sys.exit(code)  # it said why, or was interrupted
    return read_json(folder / "run" / "summary.json")["metrics"]["heldout_right"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        print(f"right on {run(place):.0%} of the screens that it was not trained on")
