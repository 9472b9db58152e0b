"""Tools with templates that write thoughts behind the last question only: what follows an answer is what they have.

None of them writes calls as they are read here (JSON in `<tool_call>`), so the tools stand in the system message.
"""

import pytest
from tests.rollout.doubles import TEMPLATE, byte_tokenizer, of_kind
from tests.rollout.tools import functions

from shoal import ParallelRolloutManager
from shoal.samplers.scripted import ScriptedEngine
from shoal.samplers.tokenizers import TemplateTokenizer

LAST = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user'ONLY %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"  # noqa: E501
THOUGHT = "{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}{% set why = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"  # noqa: E501
CALLS = "{% for call in m.tool_calls or [] %}<tool_call><function={{ call.function.name }}></function></tool_call>{% endfor %}"  # noqa: E501
RESULT = "<tool_response>\n{{ m.content }}\n</tool_response>"
TEMPLATES = {
    # Qwen 3.5: results are the user's, and do not count as a question; the answer begins in a thought
    "user": LAST.replace("ONLY", " and not m.content.startswith('<tool_response>')")
    + "{% for m in messages %}{% if m.role == 'assistant' %}" + THOUGHT + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ why }}\n</think>\n\n{% endif %}{{ said }}" + CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n" + RESULT + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    # GLM 4.5: each message of the user is a question; results have a header of their own, and answers have no end
    "observation": LAST.replace("ONLY", "") + "{% for m in messages %}{% if m.role == 'assistant' %}" + THOUGHT +
    "<|assistant|>\n<think>{{ why if loop.index0 > ns.last }}</think>\n{{ said }}" + CALLS +
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}\n" + RESULT +
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # Nemotron 3: an empty thought in each answer without one; results share a turn
    "empty thought": LAST.replace("ONLY", "") + "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% if '</think>' not in m.content %}<think></think>{{ m.content }}"
    "{% elif loop.index0 < ns.last %}<think></think>{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}" + CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}" + RESULT + "\n"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    # gpt-oss: the answer begins with its channel, which the template writes itself; no result without a call
    "channels": "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ raise_exception('there was no call') }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # DeepSeek-V3: thoughts are dropped everywhere; behind results there is no header
    "no thoughts": "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end|>{% elif m.role == 'tool' %}<|output|>{{ m.content }}<|outputs end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|><think>\n{% endif %}",
}  # fmt: skip
CONTROL = {
    "user": ("<|im_start|>", "<|im_end|>"),
    "observation": ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    "empty thought": ("<|im_start|>", "<|im_end|>"),
    "channels": ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
    "no thoughts": ("<|system|>", "<|user|>", "<|assistant|>", "<|output|>", "<|outputs end|>", "<|end|>"),
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
ACT = "<action>left</action>"
OWN_ROLE = ("observation", "empty thought")
"""Those before whose results of role tool alone an answer with thoughts stays as it is."""
REFUSAL = "{% if m.role == 'assistant' and '{' in m.content %}{{ raise_exception('no braces') }}{% endif %}"
OTHERS = {
    "rewrites": TEMPLATE.replace("{{ m.content }}", "{{ 'old ' if not loop.last }}{{ m.content }}"),
    "refuses": TEMPLATE.replace("{{ m.content }}", REFUSAL + "{{ m.content }}"),
}


def tokenizer_of(kind):
    if kind in OTHERS:
        return TemplateTokenizer(byte_tokenizer(OTHERS[kind]))
    return TemplateTokenizer(byte_tokenizer(TEMPLATES[kind], CONTROL[kind]))


def play(kind, mode, turns=1, on_drift="ignore", before="", calls=1):
    env = {"env_type": "frozen_lake", "env_config": {"is_slippery": False}}
    config = of_kind(env, prompt={"mode": mode, "on_drift": on_drift}, max_turn=turns)
    said = [before + CALL * calls, before + CALL * calls, before + ACT]
    engine = ScriptedEngine(lambda text, key: said[key.path[-1] % 3])
    engine.tokenizer = tokenizer_of(kind)
    with ParallelRolloutManager(config, engine, backend="serial", tools=[functions.add]) as manager:
        [episode] = manager.collect(0)
    return episode, engine.tokenizer


@pytest.mark.parametrize("mode", ["append", "window"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_an_episode_with_tools_is_played(kind, mode):
    episode, tokenizer = play(kind, mode)
    assert (episode.status, episode.error) == ("ok", None)
    assert [[use.shown for use in turn.tools] for turn in episode.turns] == [["3"], ["3"], []]
    assert [call.parent for call in episode.calls] == [None, 0, 1]
    role, result = ("tool", "3") if kind in OWN_ROLE else ("user", "<tool_response>\n3\n</tool_response>")
    chat = [{"role": "user", "content": "go"}, {"role": "assistant", "content": CALL}]
    chat.append({"role": role, "content": result, "tool_call_id": "a", "name": "add"})
    whole = tokenizer.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    behind = whole.split(CALL)[1]
    assert [tokenizer.spell(call.new_prompt_ids) for call in episode.calls[1:]] == [behind, behind]


@pytest.mark.parametrize(
    ("kind", "before"), [("user", "so\n</think>\n\n"), ("observation", "\n<think>so</think>\n")]
)
def test_a_loop_of_tools_stands_as_the_template_writes_it_thoughts_and_all(kind, before):
    episode, tokenizer = play(kind, "append", on_drift="raise", before=before, calls=2)
    assert (episode.status, episode.error) == ("ok", None)
    seen = tokenizer.spell(episode.prompt_ids(2))
    assert seen.count("so") == 2
    assert seen.count("<tool_response>\n3\n</tool_response>") == 4


def test_the_advice_of_an_error_fits_the_mode():
    episode, _ = play("user", "append", turns=2)
    assert (episode.status, len(episode.turns)) == ("engine_error", 3)  # the next question is not append-only
    assert "not append-only" in episode.error
    assert "use prompt.mode=window" in episode.error
    assert play("user", "window", turns=2)[0].status == "ok"
    for mode in ("append", "window"):
        episode, _ = play("rewrites", mode)
        assert (episode.status, len(episode.turns)) == ("engine_error", 1)
        assert "tools cannot be used with this model" in episode.error
        assert "old " in episode.error
        assert "prompt.mode" not in episode.error


def test_a_template_that_refuses_what_an_answer_holds_ends_episodes_only_if_asked(caplog):
    for on_drift, status in (("warn", "ok"), ("raise", "engine_error")):
        episode, _ = play("refuses", "append", on_drift=on_drift)
        assert episode.status == status
        assert "no braces" in (caplog.text if on_drift == "warn" else episode.error)


@pytest.mark.parametrize("mode", ["append", "window"])
def test_thoughts_that_the_template_drops_in_a_loop_of_tools_are_warned_of(mode, caplog):
    episode, _ = play("no thoughts", mode, on_drift="warn", before="so</think>")
    assert episode.status == "ok"
    assert caplog.text.count("the chat template does not write this chat as the model saw it") == 1
    assert play("no thoughts", mode, on_drift="raise", before="so</think>")[0].status == "engine_error"
