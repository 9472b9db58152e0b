"""A start for the agents that ask for the weather: a small model, and demonstrations for it to imitate.

    python examples/gateway/weather_start.py runs/small     # a folder with random weights and SmolLM2's tokenizer

The sampler `demonstrations` asks the tool as it should be asked, and then takes one of the answers at random: what is
imitated is the form of calls and answers, and nothing of the task.
"""

import json
import sys

import transformers

from shoal.core.seeding import stream
from shoal.samplers.models import resolve_model
from shoal.samplers.registry import sampler
from shoal.samplers.sampler import Completion
from shoal.samplers.tokenizers import TemplateTokenizer

SKIES = ("rain", "snow", "sun", "wind")
ANSWERS = ("umbrella", "boots", "hat", "coat")
FIELDS = {"final_result": "bring", "final_answer": "answer"}
"""Tools by which a package wants the answer, and the argument that it stands in."""


def call(name, **arguments):
    """A call of a tool, as models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Demonstrations:
    """Asks for the weather; once a tool has told it, answers at random."""

    level, weights_version = "L2", 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, requests):
        """An answer to each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        prompt = self.tokenizer.decode(request.prompt_ids)
        since = prompt.rpartition("I go out.")[2]
        chosen = ANSWERS[int(stream(request.key.seed, "demonstration", *request.key.path).integers(4))]
        if not any(sky in since for sky in SKIES):
            said = call("weather")
        else:
            tool = next((tool for tool in FIELDS if tool in prompt), None)
            said = json.dumps({"bring": chosen}) if tool is None else call(tool, **{FIELDS[tool]: chosen})
        ids = (*self.tokenizer.encode(said), self.tokenizer.end_ids[0])
        return Completion(ids, (0.0,) * len(ids), "stop", 0)


@sampler("demonstrations")
def make_demonstrations(config, words, seed):
    """The sampler of `engine.name=demonstrations`, for the tokenizer of the folder `engine.model`."""
    folder = resolve_model(config.model)
    return Demonstrations(TemplateTokenizer(transformers.AutoTokenizer.from_pretrained(folder)))


def save_small_model(folder):
    """Write a model of two layers with random weights, and SmolLM2's tokenizer, into a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True, max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_small_model(sys.argv[1])
