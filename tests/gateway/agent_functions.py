"""Functions that play an episode by asking the model; some misbehave."""

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request

PLAYED = []
SECOND = threading.Event()


def ask(base_url, messages):
    body = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions", body, {"content-type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]


def play(task, base_url):
    said, messages = [], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{task.get('task', 'go')} {turn}"})
        said.append(ask(base_url, messages))
        messages.append({"role": "assistant", "content": said[-1]})
    return sum("a" in text for text in said) / 3


async def play_async(task, variables):
    said = await asyncio.gather(
        *(
            asyncio.to_thread(ask, variables["OPENAI_BASE_URL"], [{"role": "user", "content": f"go {n}"}])
            for n in range(3)
        )
    )
    return {"reward": sum("a" in text for text in said) / 3, "success": "a" in said[0]}


def asks_in_turn(base_url):
    for word in "fbea":
        ask(base_url, [{"role": "user", "content": word}])
    return 1


async def asks_at_once(base_url):
    """All have begun to ask before any asks."""
    ready = threading.Barrier(4)

    def one(word):
        ready.wait()
        ask(base_url, [{"role": "user", "content": word}])

    await asyncio.gather(*(asyncio.to_thread(one, word) for word in "fbea"))
    return 1


def forks(base_url):
    """Asks two agents the same, and goes on with one of two questions; each letter `a` pays."""
    said = []
    for agent in ("Walk.", "Swim."):
        messages = [{"role": "system", "content": agent}, {"role": "user", "content": "begin"}]
        for _ in range(2):
            said.append(ask(base_url, messages))
            way = "left" if said[-1] < "H" else "right"
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": way}]
    return sum("a" in text.lower() for text in said)


def alike(task, base_url, begin="begin"):
    """Two sub-agents ask the same, in the order of the task, and go on differently."""
    chats = {}
    for name in task["task"]:
        messages = [{"role": "user", "content": begin.format(name=name)}]
        chats[name] = [*messages, {"role": "assistant", "content": ask(base_url, messages)}]
    for name in task["task"]:
        ask(base_url, [*chats[name], {"role": "user", "content": f"result of {name}"}])
    return 1


def named(task, base_url):
    """Each sub-agent says its name from the first."""
    return alike(task, base_url, "begin, {name}")


def counts(base_url):
    """How many episodes this process has played, and its number, as a reward and in what it asks."""
    PLAYED.append(0)
    ask(base_url, [{"role": "user", "content": f"{os.getpid()} {len(PLAYED)}"}])
    return len(PLAYED)


def dies(base_url):
    ask(base_url, [{"role": "user", "content": "go"}])
    os._exit(4)


def hangs(base_url):
    ask(base_url, [{"role": "user", "content": "go"}])
    time.sleep(1000)


def fails_once(base_url, task):
    """Dies in the first try at each task, which it marks in a file."""
    ask(base_url, [{"role": "user", "content": "go"}])
    mark = os.path.join(os.environ["MARKS"], str(task["seed"]))
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(4)
    return 1


def nonsense(base_url):
    ask(base_url, [{"role": "user", "content": "go"}])
    return "good"


def asks_late(base_url):
    """A thread of the first episode asks when the second one plays, and writes down how it is answered."""
    ask(base_url, [{"role": "user", "content": "go"}])
    mark = os.path.join(os.environ["MARKS"], "late")

    def late():
        SECOND.wait()
        code = 200
        try:
            ask(base_url, [{"role": "user", "content": "late"}])
        except urllib.error.HTTPError as error:
            code = error.code
        with open(f"{mark}.new", "w") as file:
            file.write(str(code))
        os.rename(f"{mark}.new", mark)

    if not PLAYED:
        threading.Thread(target=late, daemon=True).start()
    else:
        SECOND.set()
        while not os.path.exists(mark):
            time.sleep(0.01)
    PLAYED.append(0)
    return 1


no_function = 7
