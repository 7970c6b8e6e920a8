"""A subscription finds its streams, also those that it could not open at first."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

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
