"""The map hears of new files and of streams; nobody waits for it, and writers write as before."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.errors import Closed, InvalidOption, MessageTooLarge
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.ds_server import DsServer
from penstock.protocols.lrose.ldata_format import LatestInfo
from penstock.registry import DataMapServer, MapServerOptions, registered
from penstock.registry.registration import MapRegistrar, data_set_of
from penstock.relay import copy

# --- entries of latest_data_info ----------------------------------------------------------------


def test_many_directories_and_a_map_that_hangs_hold_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as hanging:
        port = hanging.getsockname()[1]
        register = MapRegistrar(DataMapClient("127.0.0.1", port, timeout=20))
        began = time.monotonic()
        for number in range(70):
            register(LatestInfo(latest_time=number), f"/data/{number}")
        assert time.monotonic() - began < 3
        register.close()
        assert time.monotonic() - began < 8


# --- streams ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATA_MAPPER_ACTIVE", "RAP_DATA_DIR", "DS_BASE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))


def map_server() -> DsServer:
    return DataMapServer(MapServerOptions(port=0))


def test_a_queue_is_registered_as_lroses_queues_register_themselves(tmp_path: Path) -> None:
    with map_server() as server:
        client = DataMapClient("127.0.0.1", server.port)
        url = f"fmq:{tmp_path}/fmq/dsr?layout=classic"
        with registered(open_writer(url), client=client) as writer:
            assert client.all() == ()
            writer.write(b"a beam")
        assert writer.registrations() == (1, 0, None)
        (entry,) = client.all()
        assert (entry.datatype, entry.dir, entry.forecast_lead_time) == ("fmq", "fmq/dsr", -1)
        assert entry.hostname == socket.gethostname()
        assert abs(entry.latest_time - time.time()) < 60


def test_it_writes_and_counts_as_the_writer_does(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a?size=64k"
    down = DataMapClient("127.0.0.1", 1)
    plain = open_writer(f"fmq:{tmp_path}/b?size=64k")
    with registered(open_writer(url), client=down, interval=0) as writer:
        for each in (plain, writer):
            each.write(b"one", 1, 2, 3)
            each.write_many([b"two", b"three"], 4)
            with open_reader(each.url.partition("?")[0], "start") as reader:
                batch = reader.read_batch(2)
            each.write_batch(batch)
            each.flush()
            with pytest.raises(MessageTooLarge):
                each.write(bytes(1 << 20))
        assert writer.statistics()._replace(waited=0) == plain.statistics()._replace(waited=0)
        assert writer.cannot_carry == plain.cannot_carry
        assert writer.url == url
    plain.close()
    with pytest.raises(Closed):
        writer.write(b"late")
    assert writer.registrations().registered == 0
    assert writer.registrations().failed > 0


def test_what_only_that_kind_of_writer_has_is_there_as_well(tmp_path: Path) -> None:
    with registered(open_writer(f"fmq:{tmp_path}/a")) as writer:
        assert callable(writer.reserve)
        with pytest.raises(AttributeError):
            writer.nothing_like_it  # noqa: B018


def test_a_file_is_whole_or_not_there_also_when_it_is_registered(tmp_path: Path) -> None:
    log, url = f"log:{tmp_path}/log", f"jsonl:{tmp_path}/file"
    with open_writer(log) as writer:
        writer.write_many([b"a", b"b"])
    nobody = DataMapClient("127.0.0.1", 1)
    with (
        pytest.raises(ZeroDivisionError),
        registered(open_writer(url), client=nobody) as writer,
    ):
        assert (writer.write_many([b"a"] * 10) or 0) // 0
    assert not (tmp_path / "file").exists()
    with (
        pytest.raises(InvalidOption, match="keeps nothing until it is finished"),
        open_reader(log, group="workers") as reader,
        registered(open_writer(url), client=nobody) as writer,
    ):
        copy(reader, writer)
    with open_reader(log) as reader, registered(open_writer(url), client=nobody) as writer:
        assert copy(reader, writer).copied == 2
    with open_reader(url) as reader:
        assert [message.payload for message in reader.available()] == [b"a", b"b"]


def test_a_writer_that_wrote_nothing_is_not_registered(tmp_path: Path) -> None:
    with map_server() as server:
        client = DataMapClient("127.0.0.1", server.port)
        with registered(open_writer(f"fmq:{tmp_path}/a"), client=client) as writer:
            assert writer.write_many([]) is None
        assert client.all() == ()


def test_a_map_that_is_down_costs_a_writer_next_to_nothing(tmp_path: Path) -> None:
    with registered(
        open_writer(f"fmq:{tmp_path}/a?slots=64"), client=DataMapClient("127.0.0.1", 1), interval=0
    ) as writer:
        began = time.monotonic()
        for _ in range(2000):
            writer.write(b"x")
        assert time.monotonic() - began < 5
    assert writer.statistics().messages == 2000


def test_the_map_may_be_told_other_names(tmp_path: Path) -> None:
    with map_server() as server:
        client = DataMapClient("127.0.0.1", server.port)
        with registered(
            open_writer(f"fmq:{tmp_path}/a"), client=client, directory="radar/x", datatype="iwrf"
        ) as writer:
            writer.write(b"x")
        assert [(each.datatype, each.dir) for each in client.all()] == [("iwrf", "radar/x")]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("fmq:{}/fmq/dsr?slots=5", ("fmq", "fmq/dsr")),
        ("fmq:{}/fmq/dsr.fmq", ("fmq", "fmq/dsr")),
        ("fmq:/elsewhere/dsr", ("fmq", "/elsewhere/dsr")),
        ("log:{}/beams", ("log", "beams")),
        ("flight://host:8815/beams?token_file=x", ("flight", "flight://host:8815/beams")),
    ],
)
def test_a_stream_has_a_name_on_the_map(
    url: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    assert data_set_of(url.format(tmp_path)) == expected


def test_a_machine_without_threads_costs_the_registration_and_not_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        with registered(open_writer(f"fmq:{tmp_path}/q")) as writer:
            assert writer.write(b"one") == 0
            assert writer.registrations().failed > 0
            assert "thread" in (writer.registrations().error or "")
    assert writer.statistics().messages == 1
