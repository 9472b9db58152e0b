"""A small model with random weights for `weather.yaml`, which speaks in the chat template of a model of your choice.

    python examples/tools/weather_model.py FOLDER chat_template.jinja

The template is one that writes calls as Qwen 3.5 to 3.8 do. Beside bytes and frequent words, the tokenizer has a piece
for the call that asks for the weather, and for each half of a call that names a weather or a thing. So a model of any
size writes calls, and chooses which.
"""

import sys
from pathlib import Path

import tokenizers
import transformers

WEATHER = "<tool_call>\n<function=weather>\n</function>\n</tool_call>"
SKY = "<tool_call>\n<function=bring>\n<parameter=weather>\n{}\n</parameter>\n"
THING = "<parameter=item>\n{}\n</parameter>\n</function>\n</tool_call>"


def small_tokenizer(template):
    """A tokenizer of 1,024 pieces of the template and of the example, and the parts of calls."""
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [template, Path(__file__).with_name("weather_env.py").read_text()]
    pieces.train_from_iterator(2 * texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=template,
    )  # fmt: skip
    skies = [SKY.format(sky) for sky in ("rain", "snow", "sun", "wind")]
    things = [THING.format(thing) for thing in ("umbrella", "boots", "hat", "coat")]
    tokenizer.add_tokens([WEATHER, *skies, *things])
    return tokenizer


def save_small_model(folder, template):
    """Write a model of one layer, which looks back 64 tokens, and its tokenizer into a folder."""
    tokenizer = small_tokenizer(template)
    config = transformers.MistralConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, sliding_window=64, tie_word_embeddings=True, max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_small_model(sys.argv[1], Path(sys.argv[2]).read_text())
