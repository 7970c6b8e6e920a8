"""Clients of a Spark Connect server read and write streams that the server has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.pipeline.source.ranges import ROW_SCHEMA
from support.exactly_once import check_stream, messages, write_messages
from support.spark_cluster import connect_server
from support.spark_lives import connecting, programs
from support.spark_streams import payloads

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_connect_client_follows_a_stream_reads_it_whole_and_writes(tmp_path: Path) -> None:
    source = f"fmq:{tmp_path}/in"
    write_messages(source, range(5_000))
    with connect_server(tmp_path) as remote, programs() as started:
        client = connecting(
            tmp_path / "errors",
            remote=remote,
            source=source,
            target=f"log:{tmp_path}/out",
            copied=f"log:{tmp_path}/copied",
            checkpoint=str(tmp_path / "checkpoint"),
        )
        read, followed, end = started.add(client).wait()
    assert read == {"event": "read", "rows": 5_000, "columns": ROW_SCHEMA.names}
    assert followed["batches"] >= 1
    assert end == {"event": "end"}
    check_stream(f"log:{tmp_path}/out", range(5_000))
    assert sorted(payloads(f"log:{tmp_path}/copied")) == sorted(
        payload.tobytes() for payload in messages(range(5_000))
    )
