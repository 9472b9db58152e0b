"""A model of which the answers are known, and ways to ask a gateway that know nothing of shoal."""

import json
import urllib.error
import urllib.request

import openai

from shoal.samplers.sampler import Completion
from shoal.samplers.tokenizers import TinyTokenizer

CHAT = {"model": "m"}
GO = [{"role": "user", "content": "go"}]


class Says:
    """Says one text, or what a function makes of the text of the prompt; keeps what it was asked."""

    def __init__(self, said, tokenizer=None, finish="stop"):
        self.tokenizer = tokenizer or TinyTokenizer()
        self.said, self.finish = said, finish
        self.requests, self.prompts = [], []

    async def sample(self, request):
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(request.prompt_ids))
        text = self.said(self.prompts[-1]) if callable(self.said) else self.said
        ids = self.tokenizer.encode(text)[: request.sampling.max_tokens]
        return Completion(ids, (-0.5,) * len(ids), self.finish, 7)


def by_end(texts):
    """What to say, by the words with which a prompt ends."""
    return lambda prompt: next(text for words, text in texts.items() if prompt.endswith(words))


def chat_of(*texts, **more):
    """The request of a chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **more}


async def handled(gateway, session, body, path="chat/completions"):
    """Status and answer of a gateway without a server."""
    return await gateway.handle(path, session, json.dumps(body).encode(), False)


def post(server, body, path="a/v1/chat/completions", headers=(), secret=None):
    """Status and answer of a server."""
    return post_to(
        f"{server.base}/{server.gateway.secret if secret is None else secret}/{path}", body, headers
    )


def post_to(address, body, headers=()):
    """Status and answer of an address."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"content-type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def client(server, session="a", **more):
    """The package of OpenAI."""
    return openai.OpenAI(
        base_url=server.variables(session)["OPENAI_BASE_URL"], api_key="x", max_retries=0, **more
    )
