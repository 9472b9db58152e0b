"""Run by a Python that has vLLM: its answers before and after new weights, a restart, and the end, as JSON."""

import json
import sys
from pathlib import Path

import msgspec

from shoal.rollout.samplers.sampler import Key, Request, Sampling

SCALE = 0.98
QUESTIONS = (("What is the capital of France?", 8), ("Name three colours.", 12), ("Count: 1, 2, 3,", 10))


def questions(tokenizer, stop=()):
    """What is asked, greedily."""
    return [
        Request(
            tokenizer.start([{"role": "user", "content": text}]), Key(0, (0, i, 0, 0)), Sampling(n, 0.0, stop)
        )
        for i, (text, n) in enumerate(QUESTIONS)
    ]


def main(model: Path) -> None:
    """Ask at each stage."""
    from safetensors.torch import load_file

    from shoal.rollout.samplers.vllm import VllmEngine

    engine = VllmEngine(model, dtype="float32", enforce_eager=True, max_model_len=1024)
    asked = questions(engine.tokenizer)
    said = {"first": engine.generate(asked), "stop": engine.generate(questions(engine.tokenizer, (",",)))}
    weights = {
        name: tensor.float() * SCALE for name, tensor in load_file(model / "model.safetensors").items()
    }
    engine.load_weights(weights, 3)
    said["weights"] = engine.generate(asked)
    engine.restart()
    said["restarted"] = engine.generate(asked)
    engine.close()
    engine.close()
    Path(sys.argv[2]).write_text(
        json.dumps({name: [msgspec.structs.asdict(c) for c in found] for name, found in said.items()})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
