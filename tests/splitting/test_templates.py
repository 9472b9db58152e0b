"""Templates that look back, processors of other kinds, tokenizers alone."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.splitting.chats import folder_of, rewrite, split_all
from tokenizers.processors import TemplateProcessing

from shoal.core.errors import ConfigError, DataError
from shoal.splitting import ChatReader, StepwiseTrajectorySplitter, TrajectorySplitter
from shoal.splitting.encode import ChatTemplate
from shoal.splitting.readers.recordings import Message

FORGETFUL = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- set c = m.content if m.content is string else m.content | map(attribute='text', default='') | join -%}
{%- if m.role == 'assistant' and not loop.last -%}{{- c.split('</think>')[-1] -}}
{%- else -%}
{%- if m.content is not string -%}{%- for p in m.content if p.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}{%- endfor -%}{%- endif -%}
{{- c -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@pytest.fixture
def forgetful(processor):
    """The processor with a template that drops the thoughts of all answers but the last."""
    changed = copy.copy(processor)
    changed.chat_template = FORGETFUL
    return changed


@pytest.fixture
def thoughts(tmp_path):
    chat = [{"role": "system", "content": "Act."}]
    for number in range(4):
        chat.append({"role": "user", "content": f"state {number}"})
        chat.append({"role": "assistant", "content": f"<think>hm {number}</think>go {number}"})
    (tmp_path / "thoughts.json").write_text(json.dumps(chat))
    return ChatReader(tmp_path / "thoughts.json")


def text_of(processor, ids):
    return processor.tokenizer.decode(np.asarray(ids).tolist())


def test_steps_under_a_forgetful_template_have_the_context_of_their_rollout(forgetful, thoughts):
    for number, sample in enumerate(split_all(forgetful, thoughts).samples()):
        wanted = forgetful.apply_chat_template(
            sample.messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert text_of(forgetful, sample.prompt_ids) == wanted
        assert text_of(forgetful, sample.response_ids) == f"<think>hm {number}</think>go {number}<|im_end|>"


def test_windows_under_a_forgetful_template_train_what_is_left_of_the_answers(forgetful, thoughts):
    batch = split_all(forgetful, thoughts, TrajectorySplitter, 3, 3)
    texts = []
    for sample in batch.samples():
        whole = forgetful.apply_chat_template(sample.messages, tokenize=False)
        assert text_of(forgetful, sample.input_ids) == whole.removesuffix("\n")
        assert text_of(forgetful, sample.prompt_ids).endswith("<|im_start|>assistant\n")
        texts.append(text_of(forgetful, sample.response_ids[sample.response_mask]))
    assert texts == [
        "go 0<|im_end|>go 1<|im_end|><think>hm 2</think>go 2<|im_end|>",
        "<think>hm 3</think>go 3<|im_end|>",
    ]
    assert batch["reward_tensor"].shape[1] == batch["response_mask"].shape[1]


def test_images_keep_their_places_under_a_forgetful_template(forgetful, make_root):
    root, ids = make_root(1, steps=3, size=(90, 60))
    batch = TrajectorySplitter(forgetful, root, 2, 2, padding="longest").split(ids)
    for sample in batch.samples():
        grids = sample.inputs["image_grid_thw"]
        assert (sample.input_ids == 151655).sum() == int(grids.prod(1).sum()) // 4
        assert len(sample.image_spans) == len(grids)


@pytest.mark.parametrize("looks_back", [False, True])
def test_a_window_ends_with_its_last_trained_answer_and_shows_no_image_behind_it(
    processor, forgetful, make_root, looks_back
):
    root, ids = make_root(1, steps=3, size=(90, 60))
    rewrite(root / ids[0], lambda messages: messages[-1].update(trained=False))
    splitter = TrajectorySplitter(forgetful if looks_back else processor, root, 3, 3, padding="longest")
    (sample,) = splitter.split(ids).samples()
    assert len(sample.images) == len(sample.image_spans) == len(sample.inputs["image_grid_thw"]) == 2
    assert sample.response_mask[-1]
    assert sample.messages[-1]["role"] == "assistant"
    assert text_of(processor, sample.response_ids).endswith("<|im_end|>")


def test_a_template_that_never_ends_an_answer_is_refused(processor, tmp_path):
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match="writes nothing at the end of an answer"):
        StepwiseTrajectorySplitter(tokenizer, tmp_path)


REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_a_system_role_splits_chats_without_one(processor, tmp_path):
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = REFUSES_SYSTEM
    chat = [("user", "Hello."), ("assistant", "Hi."), ("user", "Bye."), ("assistant", "Bye bye.")]
    for name, lead in (("plain", []), ("refused", [("system", "Be kind.")])):
        folder_of(tmp_path / name, [{"role": role, "content": text} for role, text in [*lead, *chat]])
    splitter = TrajectorySplitter(tokenizer, tmp_path, on_error="skip")
    batch = splitter.split(["plain", "refused"], [1.0, 1.0])
    assert [item.dataset_id for item in batch.skipped] == ["refused"]
    assert "System role not supported" in batch.skipped[0].reason
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in chat)
    ids = batch["input_ids"][0][batch["attention_mask"][0].bool()]
    assert tokenizer.decode(ids) == text.removesuffix("\n")
    with pytest.raises(DataError, match="'refused' cannot be split.*System role not supported"):
        TrajectorySplitter(tokenizer, tmp_path).split(["refused"], [1.0])


class Blurred:
    """A processor of another kind: its pixels are no table of 8-bit values."""

    def __init__(self, processor):
        self.inner, self.tokenizer, self.image_token = processor, processor.tokenizer, processor.image_token
        self.image_processor = BlurredImages(processor.image_processor)
        self.calls = 0

    def apply_chat_template(self, *args, **kwargs):
        return self.inner.apply_chat_template(*args, **kwargs)

    def __call__(self, text, images=None, **kwargs):
        self.calls += len(images or ())
        out = self.inner(text=text, images=images, **kwargs)
        if images:
            out["pixel_values"] = blur(out["pixel_values"])
        return out


class BlurredImages:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __call__(self, images, **kwargs):
        out = self.inner(images=images, **kwargs)
        out["pixel_values"] = np.asarray(blur(torch.as_tensor(out["pixel_values"])))
        return out


def blur(values):
    return (values + values.roll(1, dims=1)) / 2


@pytest.mark.parametrize("store", ["auto", "float32"])
def test_processors_of_other_kinds_see_each_image_once(processor, make_root, store):
    root, ids = make_root(1, steps=4, size=(90, 60))
    other = Blurred(processor)
    splitter = StepwiseTrajectorySplitter(other, root, store=store, padding="longest")
    other.calls = 0
    batch = splitter.split(ids)
    assert other.calls == 4
    plain = StepwiseTrajectorySplitter(processor, root, padding="longest").split(ids)
    for name in ("input_ids", "position_ids", "loss_mask"):
        assert torch.equal(batch[name], plain[name])
    for got, want in zip(batch["multi_modal_inputs"], plain["multi_modal_inputs"], strict=True):
        assert torch.equal(got["pixel_values"], blur(want["pixel_values"]))
        assert torch.equal(got["image_grid_thw"], want["image_grid_thw"])
    loaded = type(batch).load(batch.save(root / "saved"))
    assert torch.equal(
        loaded["multi_modal_inputs"][1]["pixel_values"], batch["multi_modal_inputs"][1]["pixel_values"]
    )


def test_what_a_tokenizer_puts_around_any_text_does_not_stand_around_each_image(processor, make_root):
    root, ids = make_root(1, steps=2, size=(90, 60))
    dressed = copy.deepcopy(processor)
    dressed.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|> <|im_end|>",
        special_tokens=[("<|im_start|>", 151644), ("<|im_end|>", 151645)],
    )
    other = Blurred(dressed)
    other.image_processor = object()  # without grids: what stands for an image are the processor's own tokens
    found, wanted = (
        StepwiseTrajectorySplitter(each, root, padding="longest").split(ids) for each in (other, processor)
    )
    assert torch.equal(found["input_ids"], wanted["input_ids"])
    assert all(sample.position_ids.tolist() == [[*range(sample.n_tokens)]] for sample in found.samples())


def test_eight_bit_stores_need_a_processor_that_allows_them(processor, make_root):
    root, _ = make_root(1, steps=1, size=(60, 60))
    with pytest.raises(ConfigError, match="store='auto'"):
        StepwiseTrajectorySplitter(Blurred(processor), root, store="u8")


def test_another_way_of_resampling_is_imitated_too(processor, make_root):
    root, ids = make_root(1, steps=2, size=(150, 110))
    other = copy.copy(processor)
    other.image_processor = copy.deepcopy(processor.image_processor)
    other.image_processor.resample = 2
    splitter = StepwiseTrajectorySplitter(other, root, store="u8", padding="longest")
    inputs = splitter.split(ids)["multi_modal_inputs"][1]
    images = [Image.open(path).convert("RGB") for path in sorted((root / ids[0]).glob("*.png"))]
    wanted = other.image_processor(images=images, return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], wanted["pixel_values"])
    assert torch.equal(inputs["image_grid_thw"], wanted["image_grid_thw"])


def test_a_tokenizer_alone_splits_text_with_plain_positions(processor, thoughts, make_root):
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = processor.chat_template
    batch, whole = split_all(tokenizer, thoughts), split_all(processor, thoughts)
    assert batch["position_ids"].ndim == 2
    assert torch.equal(batch["input_ids"], whole["input_ids"])
    assert torch.equal(batch["position_ids"], whole["position_ids"][:, 0])
    root, ids = make_root(1, steps=1, size=(60, 60))
    with pytest.raises(DataError, match="reads no images"):
        StepwiseTrajectorySplitter(tokenizer, root).split(ids)


def tokenizer_that_spaces(kind):
    """Put together as Llama's and Mistral's ("legacy", "always", "first"), RoBERTa's ("bytes"), Gemma's ("never")."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE(byte_fallback=True))
    if kind == "legacy":
        plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "bytes":
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        plain.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
    special = ["<end>", "<pad>", "<say>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    plain.train_from_iterator(["go on and on user assistant what now "] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", pad_token="<pad>", additional_special_tokens=["<say>"]
    )


@pytest.mark.parametrize("kind", ["legacy", "always", "first", "bytes", "never"])
def test_an_answer_has_the_tokens_of_its_chat_where_a_tokenizer_puts_spaces_before_texts(tmp_path, kind):
    tokenizer = tokenizer_that_spaces(kind)
    said = ["what now", "and!go on", "on", "on and on"]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    reader = ChatReader(tmp_path / "chat.json")
    for border, kept in ((">\\n", "true"), ("<say>", "true"), (">\\n", "loop.last or m.role == 'user'")):
        tokenizer.chat_template = (
            "{%- for m in messages -%}{{- '<say>' + m.role + '" + border + "' -}}{%- if " + kept + " -%}"
            "{{- m.content -}}{%- else -%}{{- m.content.split('!')[-1] -}}{%- endif -%}{{- '<end>' -}}"
            "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<say>assistant"
            + border
            + "' -}}{%- endif -%}"
        )
        for cls, upto in ((TrajectorySplitter, 4), (StepwiseTrajectorySplitter, 2)):
            made = split_all(tokenizer, reader, cls)
            whole = tokenizer.apply_chat_template(chat[:upto], tokenize=False)
            assert made.samples()[0].input_ids.tolist() == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["legacy", "first", "bytes"])
def test_no_space_stands_inside_a_control_token_that_is_spelled_out(kind):
    tokenizer = tokenizer_that_spaces(kind)
    tokenizer.chat_template = (
        "{{- messages[-1].content + '<end>' -}}{%- if add_generation_prompt -%}!{%- endif -%}"
    )
    ids = ChatTemplate(tokenizer).answer_ids(Message("assistant", "go <end> on"), None)
    spaces = "".join(tokenizer.convert_ids_to_tokens(ids.tolist())).replace("Ġ", "▁").count("▁")
    assert spaces == 2


def test_an_answer_is_no_part_of_a_token_of_its_header():
    tokenizer = tokenizer_that_spaces("legacy")
    tokenizer.chat_template = (
        "{{- messages[-1].content + '<end>' -}}{%- if add_generation_prompt -%}g{%- endif -%}"
    )
    assert tokenizer.tokenize("go") == ["▁go"]
    ids = ChatTemplate(tokenizer).answer_ids(Message("assistant", "o"), None)
    assert ids.tolist() == tokenizer.encode("o")


def chatml(before="", opens="<|im_start|>", asks="", else_asks=""):
    """A template like ChatML with something of its own."""
    return (
        "{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}{{- raise_exception('no user') -}}"
        "{%- endif -%}" + before + "{%- for m in messages -%}"
        "{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' -%}{{- '" + opens + "' -}}{%- endif -%}"
        "{{- m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n" + asks + "' -}}"
        "{%- else -%}{{- '" + else_asks + "' -}}{%- endif -%}"
    )


MISTRAL = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|im_start|>' + m.content + '<|im_start|>' -}}
{%- else -%}{{- ' ' + m.content + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}"""
KINDS = {  # what such templates write: the prompt of a step behind "state 0", what opens past answers, and an answer
    "wants a user's message": (chatml(opens=""), "<|im_start|>assistant\n", "go {}<|im_end|>"),
    "ends a chat that asks for nothing": (
        chatml(opens="", else_asks="<|endoftext|>"), "<|im_start|>assistant\n", "go {}<|im_end|>",
    ),
    "asks for thoughts": (
        chatml(opens="", asks="<|box_start|>\\n"), "<|im_start|>assistant\n<|box_start|>\n", "go {}<|im_end|>",
    ),
    "closes thoughts of past answers": (
        chatml(opens="<|box_start|><|box_end|>", asks="<|box_start|>\\n"),
        "<|im_start|>assistant\n<|box_start|>\n", "go {}<|im_end|>",
    ),
    "has no generation prompt": (MISTRAL, "", " go {}<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_templates_of_each_kind_are_split_as_they_write(processor, tmp_path, kind):
    template, asks, answer = KINDS[kind]
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = template
    chat = [] if template == MISTRAL else [{"role": "system", "content": "Act."}]
    for n in range(3):
        chat += [{"role": "user", "content": f"state {n}"}, {"role": "assistant", "content": f"go {n}"}]
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    reader = ChatReader(tmp_path / "chat.json")
    for n, step in enumerate(split_all(tokenizer, reader).samples()):
        prompt = tokenizer.decode(step.prompt_ids.tolist())
        assert prompt == tokenizer.apply_chat_template(
            step.messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert prompt.endswith(asks)
        assert tokenizer.decode(step.response_ids.tolist()) == answer.format(n)
    (window,) = split_all(tokenizer, reader, TrajectorySplitter, 3, 3).samples()
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert whole.startswith(tokenizer.decode(window.input_ids.tolist()))
    trained = tokenizer.decode(window.response_ids[window.response_mask].tolist())
    assert trained == "".join(answer.format(n) for n in range(3))
