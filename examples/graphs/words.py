"""The functions of words.yaml: what each vertex does with a message."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.workers import To, worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@worker
def split(line: str) -> Iterator[To]:
    """Send each word to one of two outputs."""
    for word in line.replace(",", " ").split():
        yield To("numbers" if word.isdigit() else "words", word)


@worker(state=Counter)
def count(word: str, state: Counter[str]) -> str:
    """Count words; each worker process has its own words, and so its own counts."""
    state[word] += 1
    return f"{word} {state[word]}"


@worker(state=lambda: [0])
def add(number: str, state: list[int]) -> str:
    """Add numbers up."""
    state[0] += int(number)
    return f"sum {state[0]}"
