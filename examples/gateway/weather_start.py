"""A start for the agents that ask for the weather: a small model, and demonstrations for it to imitate.

    python examples/gateway/weather_start.py runs/small     # a folder with random weights and a small tokenizer

The sampler `demonstrations` asks the tool as it should be asked, repeats the weather, and brings one of the four things
at random: what is imitated is the form of calls and answers, and nothing of what is paid.
"""

import json
import sys
from pathlib import Path

import tokenizers
import transformers

from shoal.core.seeding import stream
from shoal.samplers.models import resolve_model
from shoal.samplers.registry import sampler
from shoal.samplers.sampler import Completion
from shoal.samplers.tokenizers import TemplateTokenizer

SKIES = ("rain", "snow", "sun", "wind")
THINGS = ("umbrella", "boots", "hat", "coat")
TOOLS = ("final_result", "final_answer")
"""Those by which a package wants the answer."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name, **arguments):
    """A call of a tool, as models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(tool):
    """By weather and thing, the answer in JSON: as it stands, or as what the package wants a tool to be called with."""
    advice = {(sky, thing): {"weather": sky, "bring": thing} for sky in SKIES for thing in THINGS}
    if tool is None:
        return {key: json.dumps(value) for key, value in advice.items()}
    if tool == "final_answer":
        return {key: call(tool, answer=value) for key, value in advice.items()}
    return {key: call(tool, **value) for key, value in advice.items()}


class Demonstrations:
    """Asks for the weather; once a tool has told it, repeats it, and brings something at random."""

    level, weights_version = "L2", 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, requests):
        """An answer to each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        prompt = self.tokenizer.decode(request.prompt_ids)
        since = prompt.rpartition("I go out.")[2]
        thing = THINGS[int(stream(request.key.seed, "demonstration", *request.key.path).integers(4))]
        sky = next((sky for sky in SKIES if sky in since), None)
        tool = next((tool for tool in TOOLS if tool in prompt), None)
        said = call("weather") if sky is None else answers(tool)[sky, thing]
        ids = (*self.tokenizer.encode(said), self.tokenizer.end_ids[0])
        return Completion(ids, (0.0,) * len(ids), "stop", 0)


@sampler("demonstrations")
def make_demonstrations(config, words, seed):
    """The sampler of `engine.name=demonstrations`, for the tokenizer of the folder `engine.model`."""
    folder = resolve_model(config.model)
    return Demonstrations(TemplateTokenizer(transformers.AutoTokenizer.from_pretrained(folder)))


def small_tokenizer():
    """A tokenizer of 1,024 pieces of the examples beside this file, to which whole parts of the answers are added.

    So a model of any size writes JSON: it chooses a call or an answer, a weather and a thing.
    """
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("weather_*.py"))]
    pieces.train_from_iterator(2 * texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.add_tokens(
        [*SKIES, call("weather"), *(part for tool in (None, *TOOLS) for part in parts(answers(tool)))]
    )
    return tokenizer


def parts(said):
    """The first halves of answers, which tell the weather, and the second ones, which tell what to bring."""
    halves = {tuple(text.partition('"bring"')[::2]) for text in said.values()}
    return sorted({first for first, _ in halves}) + sorted({'"bring"' + second for _, second in halves})


def save_small_model(folder):
    """Write a model with random weights, which looks back 64 tokens, and its tokenizer into a folder."""
    tokenizer = small_tokenizer()
    config = transformers.MistralConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, sliding_window=64, tie_word_embeddings=True, max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_small_model(sys.argv[1])
