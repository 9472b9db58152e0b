"""The agent of `frozen_lake_openai.py` as a graph of LangGraph: one node asks the model, another one moves."""

import random
from typing import TypedDict

import httpx
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]  # start, frozen, hole, goal
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
http = {
    "http_client": httpx.Client(),
    "http_async_client": httpx.AsyncClient(),
}  # made once: it takes a while


class Walk(TypedDict):
    """Where the agent is, and what it wants."""

    row: int
    column: int
    move: str
    steps: int
    model: ChatOpenAI
    rng: random.Random


def ask(state):
    """Ask for a move."""
    return {"move": state["model"].invoke("ABCDEFGHIJKLMNOP"[4 * state["row"] + state["column"]]).content}


def move(state):
    """Do it; an answer that is none is replaced by a random one."""
    down, right = MOVES[state["move"] if state["move"] in MOVES else state["rng"].choice("LDRU")]
    row, column = min(3, max(0, state["row"] + down)), min(3, max(0, state["column"] + right))
    return {"row": row, "column": column, "steps": state["steps"] + 1}


def ended(state):
    """Whether it is over: at a hole, at the goal, or after eight steps."""
    return END if LAKE[state["row"]][state["column"]] in "HG" or state["steps"] == 8 else "ask"


graph = StateGraph(Walk)
graph.add_node("ask", ask)
graph.add_node("move", move)
graph.add_edge(START, "ask")
graph.add_edge("ask", "move")
graph.add_conditional_edges("move", ended)
walk = graph.compile()


def play(task, base_url):
    """Walk from the start; the reward is 1 at the goal, else 0."""
    return begin(base_url, random.Random(task["seed"]), 0, 0)


def practise(task, base_url):
    """Walk from a square that the task's seed chooses, so that every square is learned."""
    rng = random.Random(task["seed"])
    squares = [(r, c) for r in range(4) for c in range(4) if LAKE[r][c] in "SF"]
    return begin(base_url, rng, *rng.choice(squares))


def begin(base_url, rng, row, column):
    """Run the graph from a square."""
    model = ChatOpenAI(base_url=base_url, api_key="none", model="shoal", max_completion_tokens=1, **http)
    last = walk.invoke({"row": row, "column": column, "steps": 0, "model": model, "rng": rng})
    return float(LAKE[last["row"]][last["column"]] == "G")
