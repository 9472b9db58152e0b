"""A program that ends in one of many ways: which one says the number of its group, in the name of its session.

It is a function, `play`, and a command.
"""

import json
import os
import signal
import sys
import urllib.error
import urllib.request

GO = [{"role": "user", "content": "go"}]
LONG = [{"role": "user", "content": "x" * 3000}]


def ask(base_url, messages=GO, path="chat/completions", **more):
    body = json.dumps({"messages": messages, "max_tokens": 2, **more}).encode()
    request = urllib.request.Request(f"{base_url}/{path}", body, {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())


def swallowed(base_url, *words, **more):
    try:
        ask(base_url, *words, **more)
    except urllib.error.HTTPError:
        return True
    return False


def returns(url):
    ask(url)
    return 1.0


def raises_after_an_answer(url):
    ask(url)
    raise KeyError("garden")


def exits_after_an_answer(url):
    ask(url)
    sys.exit(3)


def raises_before_it_asks(url):
    raise KeyError("garden")


def raises_where_it_is_refused(url):
    ask(url, frequency_penalty=0.5)


def raises_at_the_end_of_its_calls(url):
    while True:
        ask(url)


def returns_at_the_end_of_its_calls(url):
    while not swallowed(url):
        pass
    return 0.25


def ends_without_a_result_at_the_end_of_its_calls(url):
    while not swallowed(url):
        pass


def asks_for_ever(url):
    while True:
        swallowed(url)


def raises_when_the_context_is_full(url):
    ask(url)
    ask(url, LONG)


def shortens_what_does_not_fit(url):
    ask(url)
    assert swallowed(url, LONG)
    ask(url, [{"role": "user", "content": "short"}])
    return 1.0


def begins_with_too_much(url):
    ask(url, LONG)


def swallows_a_refusal(url):
    ask(url)
    assert swallowed(url, tool_choice="required", tools=[])
    return 0.5


def asks_what_is_not_served(url):
    ask(url)
    assert swallowed(url, path="embeddings")
    assert swallowed(url.removesuffix("/v1"))  # as a program with a wrong base URL
    return 0.5


def swallows_all_refusals(url):
    assert swallowed(url, logit_bias={"5": 1})
    assert swallowed(url, logit_bias={"5": 1})
    return 1.0


def never_asks(url):
    return 1.0


def ends_without_a_result(url):
    ask(url)


def dies(url):
    ask(url)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


WAYS = [
    returns, raises_after_an_answer, exits_after_an_answer, raises_before_it_asks, raises_where_it_is_refused,
    raises_at_the_end_of_its_calls, returns_at_the_end_of_its_calls, ends_without_a_result_at_the_end_of_its_calls,
    asks_for_ever, raises_when_the_context_is_full, shortens_what_does_not_fit, begins_with_too_much,
    swallows_a_refusal, asks_what_is_not_served, swallows_all_refusals, never_asks, ends_without_a_result, dies,
]  # fmt: skip


def play(base_url):
    way = WAYS[int(base_url.split("/")[-2].split("-")[1])]
    with open(os.environ["PLAYED"], "a") as file:
        file.write(f"{way.__name__}\n")
    return way(base_url)


def warm(base_url):
    ask(base_url, temperature=0.7)
    return 1


if __name__ == "__main__":
    reward = play(os.environ["OPENAI_BASE_URL"])
    if reward is not None:
        sys.stdout.write(json.dumps({"reward": reward}))
