"""A task of Inspect as a program: its solver asks the model, its scorer pays."""

import json
import os
import tempfile

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message

samples = [Sample(f"Say {word}.", target=word, id=word) for word in ("a", "b", "c", "d")]
words = inspect_ai.Task(dataset=samples, solver=[system_message("One word."), generate()], scorer=includes())


def play(task, base_url):
    """One sample of the task; a failed one is no reward of 0."""
    with tempfile.TemporaryDirectory() as folder:
        (log,) = inspect_ai.eval(
            words,
            sample_id=samples[task["seed"] % len(samples)].id,
            model="openai-api/shoal/shoal",
            model_base_url=base_url,
            model_args={"api_key": "none"},
            max_tokens=8,
            display="none",
            log_dir=folder,
        )
        if log.status != "success":
            raise RuntimeError(log.error)
        return float(log.samples[0].scores["includes"].value == "C")


if __name__ == "__main__":
    print(json.dumps({"reward": play(json.loads(input()), os.environ["OPENAI_BASE_URL"])}))
