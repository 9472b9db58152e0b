"""Prompts have the tokens that a chat has as a whole, with tokenizers that put a space before any text too."""

import pickle

import pytest
from msgspec import structs
from tests.rollout.doubles import byte_tokenizer, llama_engine, llama_requests
from tests.splitting.test_templates import tokenizer_that_spaces

from shoal.samplers.huggingface.engine import HuggingFaceEngine
from shoal.samplers.sampler import Sampling
from shoal.samplers.tokenizers import TemplateTokenizer, read_tokenizer

KINDS = ["legacy", "always", "first", "bytes", "never"]
HEADERS = ["'<say>' + m.role + '>\\n'", "m.role + '<say>'", "'<say>' + m.role + '> '"]


def template(header):
    """As those of TinyLlama and Phi-3 end a header, by a line; or by a control token; or by a space."""
    asked = header.replace("m.role", "'assistant'")
    return (
        f"{{%- for m in messages -%}}{{{{- {header} + m.content + '<end>' -}}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- {asked} -}}}}{{%- endif -%}}"
    )


def spelled(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_tokens_of_its_chat(kind, header):
    tokenizer = tokenizer_that_spaces(kind)
    tokenizer.chat_template = template(header)
    chat = [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(["what", "go on", "!on and"])
    ]
    ours = TemplateTokenizer(tokenizer)
    begun, said = ours.start(chat[:1]), ours.encode("go on")
    prompts = [(1, begun)]
    for answer in (said, (*said, tokenizer.eos_token_id)):  # cut off, and ended
        prompts.append((3, begun + answer + ours.extend(answer, chat[2])))
    for upto, ids in prompts:
        text = tokenizer.apply_chat_template(chat[:upto], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.encode(text, add_special_tokens=False)
        if header.endswith("> '"):  # where a space and a word may be one token, the text is the same
            assert spelled(tokenizer, ids) == spelled(tokenizer, whole)
        else:
            assert list(ids) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_the_template_behind_a_content_begins_with_no_space(kind):
    tokenizer = tokenizer_that_spaces(kind)
    tokenizer.chat_template = template(HEADERS[0]).replace("'<end>'", "'!user<end>'")
    chat = [{"role": "user", "content": "go"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert list(TemplateTokenizer(tokenizer).start(chat)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_token_in_a_message_is_text_behind_which_nothing_is_spaced_otherwise(kind):
    tokenizer = tokenizer_that_spaces(kind)
    tokenizer.chat_template = template(HEADERS[0])
    ids = TemplateTokenizer(tokenizer).start([{"role": "user", "content": "go<end>on"}])
    assert ids.count(tokenizer.eos_token_id) == 1
    spaces = spelled(tokenizer, ids).replace("Ġ", "▁").count("▁")
    plain = TemplateTokenizer(tokenizer).start([{"role": "user", "content": "go on"}])
    assert spaces == spelled(tokenizer, plain).replace("Ġ", "▁").count("▁") - 1


def test_every_end_that_a_model_declares_ends_an_answer(tmp_path):
    """As Qwen3, Gemma 3 and Phi do, whose `generation_config.json` lists several."""
    engine = llama_engine()
    engine.model.generation_config.eos_token_id = [1, 70, 71]
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.tokenizer.save_pretrained(tmp_path)
    assert set(TemplateTokenizer(read_tokenizer(tmp_path)).end_ids) == {
        1,
        70,
        71,
    }  # as servers and vLLM get it
    declared = HuggingFaceEngine(engine.model, byte_tokenizer())  # its tokenizer knows no folder
    assert set(declared.tokenizer.end_ids) == {1, 70, 71}
    assert set(pickle.loads(pickle.dumps(declared.tokenizer)).end_ids) == {1, 70, 71}
    asked = [structs.replace(r, sampling=Sampling(150, 1.0)) for r in llama_requests(engine, 30)]
    for loaded in (HuggingFaceEngine.load(tmp_path), declared):
        for answer in loaded.generate(asked):
            at = [place for place, token in enumerate(answer.token_ids) if token in (1, 70, 71)]
            assert at == ([len(answer.token_ids) - 1] if answer.finish == "stop" else [])
        assert {answer.token_ids[-1] for answer in loaded.generate(asked)} >= {70, 71}


def test_text_comes_back_with_its_spaces_whatever_the_tokenizer_is_set_to():
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True  # as those of BERT and Llama 2 are
    ours = TemplateTokenizer(tokenizer)
    for text in ('{"text": "Hello , world !"}', "print( 'a . b' ) # don 't", "no ? n't i 'm"):
        assert ours.decode(ours.encode(text)) == text


def test_a_tokenizer_ends_turns_alike_where_the_folder_of_its_model_is_not(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 70]}')
    here = TemplateTokenizer(read_tokenizer(tmp_path / "model"))
    sent = pickle.dumps(here)
    (tmp_path / "model").rename(tmp_path / "gone")  # as on another machine
    there, answer = pickle.loads(sent), (*here.encode("go"), 70)
    assert 70 in here.end_ids
    assert there.end_ids == here.end_ids
    message = {"role": "user", "content": "on"}
    assert there.extend(answer, message) == here.extend(answer, message)
