"""Run by a Python that has vLLM: what it answers with adapters, new weights, of two versions, and after its death."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import msgspec

from shoal.samplers.sampler import Key, Request, Sampling

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


def in_order(engine):
    """Which of two requests was answered first: a long one, or a short one that was asked after it had begun."""
    ended, prompt = [], engine.tokenizer.start([{"role": "user", "content": "Count to a hundred."}])

    def ask(name, n):
        engine.generate([Request(prompt, Key(0, (0, n, 0, 0)), Sampling(n, 0.0))])
        ended.append(name)

    long = threading.Thread(target=ask, args=("long", 150))
    long.start()
    while not engine.llm.output_processor.has_unfinished_requests():
        time.sleep(0.01)
    ask("short", 2)
    long.join()
    return ended


def too_large(engine, adapter):
    """What is said of an adapter of a higher rank than there is room for."""
    other = adapter.with_name("too large")
    shutil.copytree(adapter, other)
    file = other / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 64}))
    try:
        engine.load_adapter(other, 9)
    except Exception as error:
        return str(error)
    return "nothing"


def kill_processes():
    """End all that vLLM has started."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()


def main(model: Path, target: Path, adapter: Path) -> None:
    """Ask at each stage."""
    import fake_vllm
    from safetensors.torch import load_file

    from shoal.samplers.asking import SamplerClient
    from shoal.samplers.versions import OneCopy
    from shoal.samplers.vllm import AsyncLLM, VllmEngine

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    engine = VllmEngine(model, **options, enable_lora=True, max_lora_rank=8)
    asked = questions(engine.tokenizer)
    said = {"first": engine.generate(asked), "stop": engine.generate(questions(engine.tokenizer, ("a",)))}
    order = in_order(engine)
    engine.load_adapter(adapter, 2)
    refused = too_large(engine, adapter)
    said["adapter"] = engine.generate(asked)
    weights = {
        name: tensor.float() * SCALE for name, tensor in load_file(model / "model.safetensors").items()
    }
    engine.load_weights(weights, 3)
    said["weights"] = engine.generate(asked)
    kill_processes()
    with SamplerClient(engine) as shared:
        said["died"] = shared.generate(asked)
    engine.close()
    engine.close()
    with OneCopy(VllmEngine(model, **options), 2) as two:
        two.load_weights({name: tensor / SCALE for name, tensor in weights.items()}, 4)
        two.load_weights(weights, 5)
        both = [msgspec.structs.replace(one, version=version) for one in asked for version in (4, 5)]
        answers = two.generate(both)
    said |= {"version 4": answers[::2], "version 5": answers[1::2]}
    found = {name: [msgspec.structs.asdict(c) for c in answers] for name, answers in said.items()}
    found |= {"order": order, "too large": refused, "unknown": fake_vllm.unknown_to(AsyncLLM)}
    target.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
