"""The server answers LROSE's own clients as LROSE's own server did, byte for byte."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from penstock.core.endpoints import open_reader
from penstock.protocols.lrose.fmq_messages import decode_messages
from penstock.protocols.lrose.fmq_wire import PartType
from protocols.lrose.recordings import frames_of, messages_of, recording
from protocols.lrose.serving import served
from support.recipes import payload

#: The path in the recordings, and one of the same length below the root of the test.
RECORDED, SERVED = b"/tmp/fq/srv/rq", b"some/where/q-1"


def replay(port: int, name: str, cuts: int) -> bytes:
    """Send what the client sent, in pieces, and return what comes back."""
    sent = recording(f"{name}.c2s").replace(RECORDED, SERVED)
    expected = len(recording(f"{name}.s2c"))
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        for at in range(0, len(sent), cuts):
            connection.sendall(sent[at : at + cuts])
        received = b""
        while len(received) < expected:
            data = connection.recv(65536)
            assert data, f"closed after {len(received)} of {expected} bytes"
            received += data
        connection.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            received += connection.recv(65536)
    return received


def blanked(data: bytes, *, keep_times: bool = False) -> bytes:
    """Return the bytes without the process id of a ping, and without the clock."""
    blank = bytearray(data)
    start = 0
    for frame in frames_of(data):
        start += 20
        size = len(frame.payload)
        count = int.from_bytes(frame.payload[36:40])
        for part in range(count):
            head = 64 + 24 * part
            kind = int.from_bytes(frame.payload[head : head + 4])
            at = start + int.from_bytes(frame.payload[head + 4 : head + 8])
            if kind == PartType.INFO and not keep_times:
                blank[at + 24 : at + 28] = bytes(4)
            elif kind == 32:
                blank[at : at + 4] = bytes(4)
        start += size
    return bytes(blank)


@pytest.mark.parametrize("cuts", [1 << 20, 1000, 7])
@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_recorded_sessions_get_the_recorded_replies(tmp_path: Path, layout: str, cuts: int) -> None:
    with served(tmp_path, layout=layout) as server:
        for name in ("fmq_00", "fmq_01", "fmq_02", "fmq_03", "fmq_04", "fmq_05"):
            replies = blanked(replay(server.port, name, cuts))
            if layout == "classic" or name != "fmq_05":
                assert replies == blanked(recording(f"{name}.s2c")), name
                continue
            # A wide queue has its own ways to compress, so these come back as they were.
            ours, theirs = messages_of(replies), messages_of(recording("fmq_05.s2c"))
            assert [m._replace(parts=()) for m in ours] == [m._replace(parts=()) for m in theirs]
            _, found = decode_messages(ours[2].to_bytes())
            assert found.payloads[4] == payload("text", 5, 2000)
            assert found.ids == list(range(6))
    url = f"fmq:{tmp_path}/{SERVED.decode()}"
    with open_reader(url) as reader:
        assert [m.size for m in reader.available()] == [10, 33, 2000, 0, 2000, 21]
