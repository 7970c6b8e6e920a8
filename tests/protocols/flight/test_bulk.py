"""Many messages of all kinds, both ways: byte for byte what they were."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock import Message, StreamId, batch_from_messages, open_reader, open_writer
from penstock.core.batch import messages_from_batch
from protocols.flight.serving import server_process


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_100_000_messages_pass_both_ways(tmp_path: Path, kind: str) -> None:
    _pass_both_ways(tmp_path, kind, 100_000)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_million_messages_pass_both_ways(tmp_path: Path, kind: str) -> None:
    _pass_both_ways(tmp_path, kind, 1_000_000)


def _pass_both_ways(root: Path, kind: str, count: int) -> None:
    rng = random.Random(kind)
    size = "&slots=1048576&size=256M" if kind == "fmq" else ""
    ids = [None, *(StreamId(rng.randbytes(16)) for _ in range(5))]
    noise = rng.randbytes(1 << 16)
    written = 0
    with server_process(root) as server:
        url = f"{server.url}bulk?kind={kind}"
        with open_writer(url + size) as writer, open_reader(url) as reader:
            while written < count:
                # Most messages of a telemetry stream have neither a stream of their own nor
                # attributes; one batch in five has both.
                has_more = written % 50_000 == 0
                messages = []
                for seq in range(written, written + 10_000):
                    at = rng.randrange(60_000)
                    payload = noise[at : at + rng.randrange(120)]
                    own = noise[at : at + seq % 40] if has_more and seq % 3 else None
                    stream = ids[seq % 6] if has_more else None
                    kinds = rng.randrange(-(2**31), 2**31), seq % 11
                    messages.append(Message(seq, -seq, 0, *kinds, stream, own, payload))
                last = writer.write_batch(batch_from_messages(messages))
                written += 10_000
                assert last == written - 1
                got: list[Message] = []
                while len(got) < len(messages):
                    batch = reader.read_batch(3000, timeout=10)
                    got += (m._replace(created_ns=0) for m in messages_from_batch(batch))
                assert got == messages
            assert reader.read(0) is None
            assert reader.statistics()[2:5] == (0, 0, 0)
            assert writer.statistics().messages == reader.statistics().messages == count
