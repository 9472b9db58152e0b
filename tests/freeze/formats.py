"""Runs and batches as shoal writes them, and what becomes of them when they are gone on with.

`python -m tests.freeze.formats` was run once, on commit 572a022, the last of the first edition: it wrote `fixtures/`,
went on with a copy of each, and noted the sha256 of what came out. `test_formats.py` does the second half again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).with_name("fixtures")
RESULTS = FIXTURES / "results.json"
PPO = {
    "ppo-compiled": "--env CartPole-v1 --n-envs 4 --path compiled --seed 5",
    "ppo-torch": "--env Pendulum-v1 --n-envs 2 --path torch --seed 6 --normalize-obs True --normalize-reward True",
}
PPO_BOTH = (
    "--backend serial --preset none --n-steps 32 --batch-size 32 --hidden 8 --tensorboard False --eval-every 0 "
    "--eval-episodes 1 --checkpoint-every 128 --keep-checkpoints 2 --total-timesteps"
)
AGENT = (
    "--config-name demo-bandit seed=7 engine.width=8 engine.layers=1 engine.heads=2 engine.context=128 warmup.steps=60 "
    "warmup.learning_rate=0.01 algorithm.adv_estimator=gae agent_proxy.reward_normalization.grouping=state "
    "trainer.eval_every=2 trainer.save_every=1 trainer.keep_checkpoints=1 trainer.tensorboard=false "
    "es_manager.train.env_groups=8 es_manager.val.env_groups=8"
)
SKILLS = (
    "--seed 0 --num_envs 32 --num-steps 16 --layer_size 8 --bank-worlds 64 --evaluation_episodes 32 --min-success 0 "
    "--total_timesteps 4e4 --patience_frames 1e9 --evaluation-worlds 16"
)
DRAWN = ("*.png", "*.gif", "*.lock", "best")
"""What a run draws, and what nothing goes on from."""


def shoal(line: str) -> None:
    """Run a command here, silently; it must succeed."""
    from shoal.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(line.split())
    assert code == 0, said.getvalue()


def make_ppo(name: str) -> None:
    """A finished run of 256 steps with two checkpoints."""
    shoal(f"train-ppo --run-dir {name} {PPO[name]} {PPO_BOTH} 256")


def go_on_ppo(folder: Path) -> dict[str, bytes]:
    """The same run, 256 steps longer."""
    shoal(f"train-ppo --resume-from {folder} --run-dir {folder} --total-timesteps 512")
    newest = max((folder / "checkpoints").iterdir())
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def make_agent(name: str) -> None:
    """Two updates of a tiny engine with a critic."""
    shoal(f"train run_dir={name} trainer.iterations=2 {AGENT}")


def go_on_agent(folder: Path) -> dict[str, bytes]:
    """Two updates more."""
    shoal(f"train run_dir={folder} trainer.iterations=4 resume=true {AGENT}")
    newest = max((folder / "checkpoints").glob("step-*"))
    return {path.relative_to(newest).as_posix(): path.read_bytes() for path in newest.rglob("*.safetensors")}


def make_skills(name: str) -> None:
    """One skill of the crafting world and its expert."""
    shoal(f"skills train --graph-path {name} --max_nodes 1 {SKILLS}")


def go_on_skills(folder: Path) -> dict[str, bytes]:
    """The next skill, which starts from states that the first one's expert reaches."""
    shoal(f"skills train --graph-path {folder} --max_nodes 2 --resume {SKILLS}")
    return {"experts": "\n".join(sorted(path.name for path in (folder / "experts").iterdir())).encode()}


def make_batch(name: str) -> None:
    """A small batch of windows with pixels."""
    from shoal.splitting import TrajectorySplitter, build_qwen_processor, load_processor
    from shoal.splitting.synthetic import write_gui_recordings

    with tempfile.TemporaryDirectory() as temporary:
        root, processor = Path(temporary) / "recordings", Path(temporary) / "qwen"
        ids = write_gui_recordings(root, 2, steps=2, size=(56, 56), seed=3)
        kept = load_processor(build_qwen_processor(processor, vocabulary=20_000))
        splitter = TrajectorySplitter(kept, root, window_size=1, stride_size=1, padding="longest")
        splitter.split(ids, [1.0, 0.25]).save(name)


def go_on_batch(folder: Path) -> dict[str, bytes]:
    """Every tensor of the batch, and the files that it is saved to again."""
    from shoal.splitting import Batch

    batch = Batch.load(folder)
    content = {name: value.numpy().tobytes() for name, value in batch.items() if hasattr(value, "numpy")}
    for name in ("raw_messages", "dataset_ids"):
        content[name] = json.dumps(batch[name].tolist()).encode()
    for row, inputs in enumerate(batch["multi_modal_inputs"]):
        content |= {f"{name} {row}": value.numpy().tobytes() for name, value in dict(inputs).items()}
    again = batch.save(folder.with_name("again"))
    return content | {name: (again / name).read_bytes() for name in ("batch.safetensors", "batch.json")}


KINDS: dict[str, tuple[Callable[[str], None], Callable[[Path], dict[str, bytes]]]] = {
    **dict.fromkeys(PPO, (make_ppo, go_on_ppo)),
    "agent": (make_agent, go_on_agent),
    "skills": (make_skills, go_on_skills),
    "batch": (make_batch, go_on_batch),
}


def gone_on_with(name: str, place: Path) -> dict[str, str]:
    """The sha256 of what comes out of a copy of a fixture, made in `place`."""
    copy = place / name
    shutil.copytree(FIXTURES / name, copy)
    return {what: hashlib.sha256(data).hexdigest() for what, data in KINDS[name][1](copy).items()}


def arithmetic() -> dict[str, str]:
    """What the bytes of a training depend on beside shoal: versions, and how this processor rounds."""
    import torch

    rng = np.random.default_rng(0)
    rounded = hashlib.sha256()
    for rows, inner, columns in ((32, 4, 8), (64, 8, 8), (256, 32, 8), (512, 128, 64)):
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((rows, inner), (inner, columns)))
        c = torch.from_numpy(a) @ torch.from_numpy(b)
        for value in (
            a @ b,
            np.tanh(a),
            np.exp(a),
            c.numpy(),
            torch.tanh(c).numpy(),
            torch.softmax(c, 1).numpy(),
        ):
            rounded.update(value.tobytes())
        rounded.update(np.array([a.sum(), c.sum().item(), a.std(), (a * a).mean()]).tobytes())
    versions: dict[str, str] = {name: version(name) for name in ("numpy", "torch", "numba", "gymnasium")}
    return versions | {"rounding": rounded.hexdigest()}


def main() -> None:
    """Make the fixtures and note their results."""
    shutil.rmtree(FIXTURES, ignore_errors=True)
    FIXTURES.mkdir()
    os.chdir(FIXTURES)
    results: dict[str, Any] = {}
    for name, (make, _) in KINDS.items():
        make(name)
        for pattern in DRAWN:
            for path in (FIXTURES / name).rglob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in KINDS:
        with tempfile.TemporaryDirectory() as place:
            results[name] = gone_on_with(name, Path(place))
    RESULTS.write_text(json.dumps({"arithmetic": arithmetic(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
