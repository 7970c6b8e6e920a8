"""A stream that somebody uses is not removed from under them, unless that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import open_reader, open_writer
from penstock.core import endpoints
from penstock.core.errors import LockTimeout
from penstock.queue import inventory

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.interfaces import StreamInfo, Writer


@pytest.mark.parametrize("url", ["fmq:{}/a", "fmq:{}/a?writers=many", "log:{}/a"])
def test_a_writer_that_comes_while_a_stream_is_looked_at_keeps_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url.format(tmp_path)
    open_writer(url).close()
    came: list[Writer] = []
    real = inventory.check_unused

    def come_behind(found: StreamInfo) -> None:
        real(found)
        came.append(open_writer(url))

    monkeypatch.setattr(inventory, "check_unused", come_behind)
    with pytest.raises(LockTimeout, match="writes to"):
        endpoints.remove(url)
    (writer,) = came
    with writer, open_reader(url.partition("?")[0]) as reader:
        writer.write(b"here")
        assert [message.payload for message in reader.available()] == [b"here"]
    monkeypatch.undo()
    endpoints.remove(url)
    assert list(tmp_path.iterdir()) == []
