"""The Qwen2.5-VL processor for still images; imports transformers, so import it only where one is needed."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5_VLProcessor
from transformers.processing_utils import ProcessorMixin


class StillImageProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without its video half, which wants torchvision even where there is no video."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts that are saved and loaded."""
        return ["image_processor", "tokenizer"]

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
