"""Columns become the messages that one would make by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from penstock.core.message import Message
from penstock.queue.classic._rows import make_messages

COLUMNS: list[list[Any]] = [[7, 8], [10, 20], [1, -1], [2, -2], [b"", b"two"]]


def test_columns_become_messages() -> None:
    made = make_messages(Message, *COLUMNS)
    assert made == [
        Message(7, 10, 10, 1, 2, None, None, b""),
        Message(8, 20, 20, -1, -2, None, None, b"two"),
    ]
    assert [type(message) for message in made] == [Message, Message]
    assert made[1].payload == b"two"
    assert made[1]._replace(seq=9).seq == 9
    assert make_messages(Message, [], [], [], [], []) == []


def test_the_collector_does_not_look_at_messages() -> None:
    made = make_messages(Message, *COLUMNS)
    assert not any(map(gc.is_tracked, made))
    gc.collect()
    assert made[1].time_ns == 20


@pytest.mark.parametrize("column", range(5))
def test_columns_that_do_not_fit_each_other_are_refused(column: int) -> None:
    short = list(COLUMNS)
    short[column] = short[column][:1]
    with pytest.raises(ValueError, match="one length"):
        make_messages(Message, *short)
    short[column] = (1, 2)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="lists"):
        make_messages(Message, *short)


def test_what_is_no_kind_of_message_is_refused() -> None:
    for kind in (dict, Message(*range(8)), None):
        with pytest.raises(TypeError):
            make_messages(kind, *COLUMNS)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        make_messages(Message)  # type: ignore[call-arg]
