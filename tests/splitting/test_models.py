"""Each family of models: tokens, pixels and positions are those of transformers' own processor and model."""

import copy
import importlib
import json

import pytest
import torch
from PIL import Image

from shoal.splitting import (
    StepwiseTrajectorySplitter,
    TrajectorySplitter,
    build_qwen_processor,
    load_processor,
)

# family: its module, the words of its classes, image settings, and the class of its text config
FAMILIES = {
    "Qwen2-VL": ("qwen2_vl", "Qwen2VL", {"patch_size": 14}),
    "Qwen2.5-VL": ("qwen2_5_vl", "Qwen2_5_VL", {"patch_size": 14}),
    "Qwen3-VL": ("qwen3_vl", "Qwen3VL", {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                                          "size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
    "UI-TARS-1.5": ("qwen2_5_vl", "Qwen2_5_VL", {"patch_size": 14, "size": {"shortest_edge": 78400,
                                                                           "longest_edge": 12845056}}),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """(our processor, transformers' own, its model on no device)."""
    module, words, settings = FAMILIES[request.param]
    folder = build_qwen_processor(tmp_path / "processor", vocabulary=2_000, patch=settings["patch_size"])
    image_settings = json.loads((folder / "preprocessor_config.json").read_text()) | settings
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings))
    ours = load_processor(folder)
    transformers_own = getattr(
        importlib.import_module(f"transformers.models.{module}.processing_{module}"), f"{words}Processor"
    )

    class Own(transformers_own):
        """Without the video half, which wants torchvision."""

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            from transformers.processing_utils import ProcessorMixin

            for name in ("image", "video"):
                setattr(self, f"{name}_token", f"<|{name}_pad|>")
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    own = Own(copy.deepcopy(ours.image_processor), ours.tokenizer, ours.chat_template)
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    sight = {"hidden_size": 8, "depth": 1, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 8}
    config = getattr(importlib.import_module("transformers"), f"{words}Config")(
        text_config=text | {"intermediate_size": 8, "vocab_size": 151_700},
        vision_config=sight | {"patch_size": settings["patch_size"], "spatial_merge_size": 2},
    )
    modelling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    with torch.device("meta"):
        model = getattr(modelling, f"{words}Model")(config)
    return ours, own, model


@pytest.mark.filterwarnings("ignore")
def test_tokens_pixels_and_positions_are_those_of_the_family(family, make_root):
    ours, own, model = family
    root, ids = make_root(1, steps=3, size=(330, 170))
    for cls in (StepwiseTrajectorySplitter, TrajectorySplitter):
        splitter = cls(ours, root, padding="longest")
        assert splitter.plan.images.by_table is not None  # imitated, not called
        for sample in splitter.split(ids).samples():
            chat = sample.messages[:-1] if cls is StepwiseTrajectorySplitter else sample.messages
            asks = cls is StepwiseTrajectorySplitter
            text = own.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
            names = [p["image"] + ".png" for m in chat for p in m["content"] if p["type"] == "image"]
            pictures = [Image.open(root / ids[0] / name).convert("RGB") for name in names]
            wanted = own(text=[text], images=pictures, return_tensors="pt")
            got = sample.prompt_ids if asks else sample.input_ids
            told = wanted["input_ids"][0].tolist()
            assert got.tolist() == (
                told if asks else told[:-1]
            )  # nothing needs the newline behind the last answer
            assert torch.equal(sample.inputs["pixel_values"], wanted["pixel_values"])
            assert torch.equal(sample.inputs["image_grid_thw"], wanted["image_grid_thw"])
            tokens = torch.from_numpy(sample.input_ids).long()[None]
            positions, _ = model.get_rope_index(
                tokens,
                mm_token_type_ids=(tokens == 151655).int(),
                image_grid_thw=sample.inputs["image_grid_thw"],
                attention_mask=torch.ones_like(tokens),
            )
            assert positions[:, 0].tolist() == sample.position_ids.tolist()
