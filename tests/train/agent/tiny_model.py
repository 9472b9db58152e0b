"""A Hugging Face model folder that is made in a moment."""

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers


def write_tiny_model(folder, unused=0):
    """A random two-layer model with a tokenizer of single characters and a chat template.

    Its network knows `unused` tokens more than the tokenizer, as those of Qwen do.
    """
    letters = ["<unk>", "<end>", *map(chr, range(32, 127)), "\n"]
    plain = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = transformers.Qwen2Config(
        vocab_size=len(letters) + unused, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
