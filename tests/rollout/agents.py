"""Functions that play an episode with two sub-agents; the task says which of them asks first."""

import json
import urllib.request


def ask(base_url, messages):
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions", body, {"content-type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]


def alike(task, base_url, begin="begin"):
    """Both ask the same, and go on differently."""
    chats = {}
    for name in task["task"]:
        messages = [{"role": "user", "content": begin.format(name=name)}]
        chats[name] = [*messages, {"role": "assistant", "content": ask(base_url, messages)}]
    for name in task["task"]:
        ask(base_url, [*chats[name], {"role": "user", "content": f"result of {name}"}])
    return 1


def named(task, base_url):
    """Each says its name from the first."""
    return alike(task, base_url, "begin, {name}")
