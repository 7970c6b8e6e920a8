"""A graph that runs for a test, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock import open_reader, open_writer
from penstock.core.worker_graph import WorkerGraph, load_graph
from penstock.workers.graph_run import GraphRun

EXAMPLES = Path(__file__).parents[2] / "examples" / "graphs"
#: Seconds that a graph may take on a busy machine.
PATIENCE = 60.0

FUNCTIONS = """
import os, time
from penstock.workers import To, worker

@worker
def double(text):
    return int(text) * 2

@worker
def same(text):
    return text

@worker
def pong(text):
    return {"ping": "pong", "pong": "ping"}[text]

@worker
def by_parity(text):
    return int(text), text

@worker
def slowly(text, mark=""):
    time.sleep(0.002)
    return f"{text}{mark}"

@worker
def until_told(text, told):
    while not os.path.exists(told):
        time.sleep(0.01)
    return None

@worker
def nothing_but(text, what):
    return what

@worker
def long_at(text, at, size):
    return "x" * size if text == at else text

@worker
def fails_at(text, at):
    if text == at:
        raise ValueError(f"not {at}")
    return text

@worker(state=list)
def so_far(text, state):
    state.append(text)
    return ",".join(state)
"""


def graph_of(folder: Path, text: str) -> WorkerGraph:
    """Write a graph and its functions into a folder, and load it."""
    (folder / "work.py").write_text(FUNCTIONS)
    file = folder / "graph.yaml"
    file.write_text(text.replace("DIR", str(folder)))
    return load_graph(file)


def running(folder: Path, text: str) -> GraphRun:
    return GraphRun(graph_of(folder, text), state=str(folder / "queues"))


def put(run: GraphRun, edge: str, messages: Iterable[bytes | str | int]) -> None:
    with open_writer(f"lhhttt://{run.address(edge)}") as writer:
        writer.write_many(
            [
                message if isinstance(message, bytes) else str(message).encode()
                for message in messages
            ]
        )


def messages_of(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return [message.payload for message in reader.available()]
