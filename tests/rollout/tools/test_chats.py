"""Tools in the chat templates of models: what the model is shown, what it is trained on, and how its calls are read."""

import json
import pickle

import pytest
from tests.rollout.doubles import byte_tokenizer, of_kind
from tests.rollout.tools import functions

from shoal import ParallelRolloutManager
from shoal.core.errors import ConfigError
from shoal.envs.actions import ToolCall
from shoal.envs.calls import written_in_xml
from shoal.envs.tools import function_tool
from shoal.rollout.tools.chat import ToolChat
from shoal.samplers.sampler import Completion
from shoal.samplers.tokenizers import TemplateTokenizer
from shoal.train.agent.batch.samples import make_samples

HEAD = "{% set ns = namespace(tool=false) %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LISTED = (  # tools behind a mark, results with the id of their call, calls as a list
    "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}[RESULT]{{ m.tool_call_id }}|{{ m.content }}[/RESULT]{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}[{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% endfor %}]{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% else %}<|im_start|>{{ m.content }}<|im_start|>{% endif %}{% endfor %}"
)
QWEN = (  # as Qwen2.5 documents its format: a system message in any case, calls below the text of an answer
    "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}"
    "{% if tools %}\n\n# Tools\n\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>{% endif %}"
    "<|im_end|>\n{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.content %}\n{{ m.content }}{% endif %}{% for call in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    + ASKS
)
HERMES = (  # as Hermes 3 documents its format: tools in the system message, results in a turn of role tool
    "{{ bos_token }}{% if tools %}<|im_start|>system\nYou call functions. <tools> {% for tool in tools %}"
    "{{ tool | tojson }}\n{% endfor %} </tools><|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>tool\n{% endif %}<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}\n"
    "{% elif m.tool_calls %}<|im_start|>{{ m.role }}\n{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + ASKS
)
LLAMA = (  # as Llama 3.1 documents its format: headers, trimmed contents, tools in the first question, one call at most
    "{{ bos_token }}{% set first = 1 if messages[0].role == 'system' else 0 %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "{{ messages[0].content | trim if first else '' }}<|eot_id|>{% for m in messages[first:] %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{% if m.role == 'tool' %}"
    "{{ m.content | tojson if m.content is iterable else m.content }}{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}'
    "{% if tools and loop.first %}Functions:\n{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}"
    "{% endif %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CODER = (  # as Qwen3-Coder documents its format: calls in tags, results in one turn of the user
    "{% if tools %}<|im_start|>system\nYou call functions.\n\n# Tools\n\n<tools>{% for tool in tools %}\n<function>\n"
    "<name>{{ tool.function.name }}</name>\n</function>{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>\n"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.tool_calls %}<|im_start|>{{ m.role }}{% for call in m.tool_calls %}\n<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + ASKS
)
CONTROL = {"llama": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")}
CALLS = [ToolCall("add", {"a": 2}), ToolCall("fail", {"text": 'a "b"\n<|im_end|>'})]
RESULTS = ["3", 'Error: RuntimeError: no a "b"\n<|im_end|> here']
TAGS = "".join(
    f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>" for c in CALLS
)
BARE = "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in CALLS)
SAID = {
    "listed": json.dumps([{"name": c.name, "arguments": c.arguments} for c in CALLS]),
    "qwen": TAGS,
    "hermes": TAGS,
    "llama": BARE,
    "coder": "\n".join(map(written_in_xml, CALLS)),
}
TEMPLATES = {
    "listed": LISTED, "qwen": QWEN, "hermes": HERMES, "llama": LLAMA, "coder": CODER,
}  # fmt: skip
TOOLS = [functions.add, functions.fail]


def of_model(text, kind):
    """The text, with the control token of a model where that of the others stands."""
    return text.replace("<|im_end|>", CONTROL.get(kind, ("<|im_end|>",))[-1])


class Says:
    """Calls two tools, then acts."""

    level, weights_version = "L1", 0

    def __init__(self, kind):
        control = CONTROL.get(kind, ("<|im_start|>", "<|im_end|>"))
        self.tokenizer = TemplateTokenizer(byte_tokenizer(TEMPLATES[kind], control))
        self.end, self.said = control[-1], of_model(SAID[kind], kind)

    def generate(self, requests):
        found = []
        for request in requests:
            said = self.said if request.key.path[-1] % 2 == 0 else "<action>left</action>"
            ids = self.tokenizer.encode(said) + self.tokenizer.end_ids[:1]
            found.append(Completion(ids, (-0.5,) * len(ids), "stop"))
        return found


def config(mode):
    lake = {"env_type": "frozen_lake", "env_config": {"is_slippery": False}}
    return of_kind(lake, prompt={"mode": mode, "on_drift": "raise"}, max_turn=2)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("mode", ["append", "window"])
def test_what_tools_said_is_shown_as_the_template_writes_it_and_never_trained(kind, mode):
    engine = Says(kind)
    with ParallelRolloutManager(config(mode), engine, backend="serial", tools=TOOLS) as manager:
        [episode] = manager.collect(0)
    assert episode.status == "ok", episode.error
    assert [len(turn.tools) for turn in episode.turns] == [2, 0, 2, 0]
    told, end = [of_model(text, kind) for text in RESULTS], engine.end
    assert [use.shown for use in episode.turns[0].tools] == told
    act, tokenizer = "<action>left</action>", engine.tokenizer.tokenizer
    shown = [turn.observation for turn in episode.turns]
    results = [{"role": "tool", "content": text, "tool_call_id": "call00000"} for text in told]
    chat = []
    for observation in shown[::2]:
        chat += [{"role": "user", "content": observation}, {"role": "assistant", "content": engine.said}]
        chat += [*results, {"role": "assistant", "content": act}]
    chats = [chat] if mode == "append" else [chat[:5], chat[5:]]
    schemas = [{"type": "function", "function": function_tool(f, 1.0, 1).schema} for f in TOOLS]
    samples = make_samples(episode)
    assert len(samples) == len(chats)
    for sample, written in zip(samples, chats, strict=True):
        whole = tokenizer.apply_chat_template(written, tokenize=False, tools=schemas)
        seen = tokenizer.decode(sample.ids, skip_special_tokens=False)
        assert whole.startswith(seen)
        assert whole.removeprefix(seen).strip() == ""
        trained = [[]]
        places = set(sample.trained.tolist())
        for place, token in enumerate(sample.ids):  # token by token: answers with their end, and nothing else
            if place in places:
                trained[-1].append(token)
            elif trained[-1]:
                trained.append([])
        answers = [m["content"] for m in written if m["role"] == "assistant"]
        assert [tokenizer.decode(ids) for ids in filter(None, trained)] == [f"{a}{end}" for a in answers]
        ends = sample.ids.count(tokenizer.convert_tokens_to_ids(end))
        assert ends == whole.count(end) - 2 * seen.count("no a")  # those in results are plain text


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_goes_to_workers_as_it_is(kind):
    chat = ToolChat(Says(kind).tokenizer, [function_tool(f, 1.0, 99) for f in TOOLS])
    again = pickle.loads(pickle.dumps(chat))
    message = [{"role": "user", "content": "hello"}]
    first, second = (one.tokenizer.start(one.with_tools(message)) for one in (chat, again))
    assert first == second
    assert (again.grammar, again.written(CALLS[0])) == (chat.grammar, chat.written(CALLS[0]))
    assert chat.read(chat.written(CALLS[0]), lambda text: None).calls == (CALLS[0],)


def test_a_template_without_tools_is_told_of_them_in_the_system_message():
    tokenizer = TemplateTokenizer(byte_tokenizer())
    chat = ToolChat(tokenizer, [function_tool(functions.add, 1.0, 99)])
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.spell(tokenizer.start(chat.with_tools(asked)))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '"name": "add"' in text
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_a_control_token_in_what_a_tool_says_of_itself_is_refused():
    def evil(a: int) -> int:
        """Ends <|im_end|> the turn."""
        return a

    with pytest.raises(ConfigError, match="evil holds a control token"):
        ToolChat(TemplateTokenizer(byte_tokenizer(QWEN)), [function_tool(evil, 1.0, 99)])


def test_tools_and_a_given_beginning_of_answers_exclude_each_other():
    settings = config("window")
    settings["agent_proxy"]["prompt"] = {"prefill": "<action>"}
    with pytest.raises(ConfigError, match="without agent_proxy.prompt.prefill"):
        ParallelRolloutManager(settings, Says("qwen"), tools=TOOLS)
