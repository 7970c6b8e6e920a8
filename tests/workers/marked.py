"""Functions for graphs that run by workers and on Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.core.message import Message
from penstock.workers import To, worker


@worker
def split(text: str) -> Iterator[tuple[str, str]]:
    for word in text.split():
        yield word, word


@worker
def mark(text: str, sign: str) -> list[object]:
    return [f"{sign}{text}", None, 0, ""]


@worker(takes="message")
def timed(message: Message) -> To:
    return To("out", b"%d " % message.time_ns + message.payload)


@worker(state=Counter)
def counted(text: str, state: Counter[str]) -> int:
    state[text] += 1
    return state[text]
