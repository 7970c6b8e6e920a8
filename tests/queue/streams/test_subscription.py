"""A subscription finds its streams, also those that it could not open at first."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from penstock.core.errors import StorageError
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import StreamId
from penstock.queue.streams import OutputStream
from penstock.queue.subscription import Subscription, requests_for
from support.descriptors import starved

if TYPE_CHECKING:
    from pathlib import Path

OURS = StreamId.generate(1, 2, "here", "temperature")
THEIRS = StreamId.generate(1, 2, "here", "pressure")


def test_a_stream_that_appears_while_no_descriptor_is_left_is_read_later(tmp_path: Path) -> None:
    with Subscription("archive", directory=tmp_path) as subscription:
        subscription.add(*requests_for(device=2))
        with OutputStream.create(OURS, owner="app", directory=tmp_path) as stream:
            with starved(os.getpid()), contextlib.suppress(StorageError):
                assert subscription.read(timeout=0.1) is None
            with starved(os.getpid(), spare=1), contextlib.suppress(StorageError):
                assert subscription.read(timeout=0.1) is None  # it finds it, and cannot open it
            stream.write(b"21.5")
            message = subscription.read(timeout=10)
            assert message is not None
            assert message.payload == b"21.5"


def test_a_stream_whose_reader_was_another_process_is_read_when_that_has_left(
    tmp_path: Path,
) -> None:
    with (
        OutputStream.create(OURS, owner="app", directory=tmp_path) as stream,
        OutputStream.create(THEIRS, owner="app", directory=tmp_path) as other,
        Subscription("archive", directory=tmp_path, policy=OverflowPolicy.BLOCK) as subscription,
    ):
        stream.write(b"old")
        with OutputStream.open(OURS, "end", directory=tmp_path, hold="archive"):
            subscription.add(*requests_for(device=2))
            other.write(b"1013")
            message = subscription.read(timeout=10)
            assert message is not None
            assert message.payload == b"1013"
        stream.write(b"21.5")
        message = subscription.read(timeout=10)
        assert message is not None
        assert message.payload == b"21.5"


@pytest.mark.parametrize("left", [0, 12_288])
@pytest.mark.parametrize("policy", [None, OverflowPolicy.DROP_OLDEST, OverflowPolicy.DROP_NEWEST])
@pytest.mark.parametrize("by_batch", [False, True])
def test_what_waited_in_a_stream_that_cannot_be_read_any_more_is_counted_as_lost(
    tmp_path: Path, left: int, policy: OverflowPolicy | None, by_batch: bool
) -> None:
    with (
        OutputStream.create(OURS, owner="app", directory=tmp_path) as stream,
        OutputStream.create(THEIRS, owner="app", directory=tmp_path) as other,
        Subscription(
            "archive",
            directory=tmp_path,
            queue_size=None if policy is None else 6,
            policy=policy or OverflowPolicy.DROP_OLDEST,
        ) as subscription,
    ):
        subscription.add(*requests_for(device=2))
        stream.write_many([b"%d" % i for i in range(10)])
        assert subscription.read(timeout=10) is not None
        (file,) = (path for path in tmp_path.glob(f"*{OURS.hex()}*.fmq"))
        os.truncate(file, left)
        if by_batch:
            with subscription.receive_batch(100, timeout=0) as lent:
                assert lent is None
        assert subscription.read(timeout=0) is None
        found = subscription.statistics()
        assert (found.messages, found.lost, found.backlog) == (1, 9, 0)
        other.write(b"1013")
        message = subscription.read(timeout=10)
        assert message is not None
        assert message.payload == b"1013"
