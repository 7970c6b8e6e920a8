"""A client of LROSE's asks the server to register its queue with the data map, and it does."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import Unsupported
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_messages import encode_message, encode_messages, encode_write
from penstock.protocols.lrose.fmq_server import Registrations
from penstock.protocols.lrose.fmq_wire import Init, Op, OpenMode, encode_init
from penstock.registry import DataMapServer, MapServerOptions
from protocols.lrose.serving import Caller, served
from support.until import until

INIT = Init("q", OpenMode.READ_WRITE, OpenMode.READ_WRITE, num_slots=100, buf_size=100_000)
ON = DsMessage(Op.SET_REG_WITH_DMAP, 1, 1)
OFF = DsMessage(Op.SET_REG_WITH_DMAP, 0, 1)
WRITE = DsMessage(Op.WRITE)

#: Requests that write, each of which the server carries out in another way.
WAYS = {
    "at a glance": encode_write(9, b"plain", 1, 2)[20:],
    "several": encode_messages(WRITE, [b"a", b"b"], types=1, subtypes=2),
    "with a time": encode_message(WRITE, b"timed", 1, 2, uncompressed_len=5, time=77),
}


@pytest.fixture
def data_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DataMapClient]:
    for name in ("DATA_MAPPER_ACTIVE", "RAP_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    with DataMapServer(MapServerOptions(port=0)) as server:
        monkeypatch.setenv("DS_BASE_PORT", str(server.port - 4))
        yield DataMapClient("127.0.0.1", server.port)


def write(caller: Caller, payload: bytes) -> None:
    assert caller.ask(DsMessage.from_bytes(payload)).error == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_a_queue_is_registered_after_a_write_whichever_way_that_goes(
    data_map: DataMapClient, tmp_path: Path, layout: str, way: str
) -> None:
    with served(tmp_path, layout=layout) as server, Caller(server.port) as caller:
        assert caller.ask(encode_init(INIT._replace(url="fmq/dsr"))).error == 0
        write(caller, WAYS["at a glance"])
        assert caller.ask(ON).error == 0
        time.sleep(0.05)
        assert data_map.all() == ()
        write(caller, WAYS[way])
        until(lambda: data_map.all() != ())
        (entry,) = data_map.all()
        assert (entry.datatype, entry.dir, entry.forecast_lead_time) == ("fmq", "fmq/dsr", -1)
        assert entry.hostname == socket.gethostname()
        assert abs(entry.latest_time - time.time()) < 60


def test_nothing_is_registered_once_it_is_turned_off_or_another_queue_is_open(
    data_map: DataMapClient, tmp_path: Path
) -> None:
    with served(tmp_path) as server, Caller(server.port) as caller:
        for name, last in (("off", OFF), ("other", encode_init(INIT._replace(url="other")))):
            caller.ask(encode_init(INIT._replace(url=name)))
            assert caller.ask(ON).error == 0
            assert caller.ask(last).error == 0
            write(caller, WAYS["at a glance"])
            write(caller, WAYS["several"])
        time.sleep(0.3)
        assert data_map.all() == ()
        assert caller.ask(ON).error == 0
        write(caller, WAYS["at a glance"])
        until(lambda: [each.dir for each in data_map.all()] == ["other"])


def test_registering_needs_a_queue(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as caller:
        assert "INIT" in (caller.ask(ON).error_text or "")


def test_a_directory_that_is_reached_by_a_link_is_named_as_the_server_was_told(
    data_map: DataMapClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    with served(tmp_path / "data") as server, Caller(server.port) as caller:
        caller.ask(encode_init(INIT))
        caller.ask(ON)
        write(caller, WAYS["several"])
        until(lambda: [each.dir for each in data_map.all()] == ["q"])


def test_writes_go_on_while_there_is_no_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_BASE_PORT", "1")
    with served(tmp_path) as server, Caller(server.port) as caller:
        caller.ask(encode_init(INIT))
        caller.ask(ON)
        for _ in range(20):
            write(caller, WAYS["at a glance"])
        assert server.statistics().errors == 0


def test_only_so_many_queues_are_registered_at_a_time_and_those_at_rest_make_room() -> None:
    moment = 100.0
    registrations = Registrations(most=2, now=lambda: moment)
    one, again = registrations.get("a", 5), registrations.get("a", 5)
    assert one is again
    registrations.get("b", 5)
    registrations.put_back(one)
    with pytest.raises(Unsupported, match="2 queues"):
        registrations.get("c", 5)
    registrations.put_back(again)
    with pytest.raises(Unsupported):
        registrations.get("c", 5)  # what it does may not have come to its end
    moment += 60
    registrations.get("c", 5)
    with pytest.raises(Unsupported):
        registrations.get("a", 5)
    registrations.close()
