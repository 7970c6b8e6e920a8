"""Streams behind the URLs of a source; live ones are copied to a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import open_reader
from penstock.core.errors import MessageTooLarge
from penstock.pipeline.source.inputs import LiveCopy
from penstock.protocols.jrtc.endpoint import DatagramReader
from protocols.jrtc.forwarded import HOST, STATUS, send
from support.until import until

if TYPE_CHECKING:
    from pathlib import Path


def live_reader() -> DatagramReader:
    reader = open_reader(f"jrtc+udp://{HOST}:0")
    assert isinstance(reader, DatagramReader)
    return reader


def test_messages_that_had_come_when_a_copy_is_stopped_are_in_its_log(tmp_path: Path) -> None:
    reader = live_reader()
    for at in range(0, 5000, 100):
        send(reader.port, *(STATUS + b"%d" % i for i in range(at, at + 100)))
    until(lambda: reader.statistics().backlog + reader.statistics().lost == 5000)
    assert not reader.statistics().lost
    copy = LiveCopy(reader, f"log:{tmp_path}/stage")
    copy.stop()
    with open_reader(copy.place) as log:
        assert [int(message.payload) for message in log.read_many(6000)] == list(range(5000))


def test_messages_that_a_stopped_copy_has_no_time_for_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.source.inputs._TIME_TO_STOP", 0.0)
    reader = live_reader()
    send(reader.port, *(STATUS for _ in range(100)))
    until(lambda: reader.statistics().backlog == 100)
    copy = LiveCopy(reader, f"log:{tmp_path}/stage")
    copy.stop()
    until(lambda: not copy._worker.is_alive)
    with open_reader(copy.place) as log:
        kept = len(log.read_many(200))
    assert kept + copy.lost.total == 100


def test_messages_that_had_come_when_a_copy_fails_are_counted_as_lost(tmp_path: Path) -> None:
    reader = live_reader()
    send(reader.port, *(STATUS + b"%d" % i for i in range(50)))
    send(reader.port, STATUS + bytes(20_000))
    send(reader.port, *(STATUS + b"%d" % i for i in range(50)))
    until(lambda: reader.statistics().backlog == 101)
    copy = LiveCopy(reader, f"log:{tmp_path}/stage?segment=16K")
    until(lambda: not copy._worker.is_alive)
    with pytest.raises(MessageTooLarge):
        copy.check()
    with open_reader(copy.place) as log:
        kept = len(log.read_many(200))
    assert copy.lost.total == 101 - kept
    again = LiveCopy(live_reader(), copy.place)
    again.stop()
    assert again.lost.earlier == 101 - kept
