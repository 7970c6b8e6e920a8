"""The server of a data map: real connections, LROSE's recorded sessions, limits, kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock import InvalidOption, PenstockError
from penstock.core.clock import ManualClock
from penstock.core.errors import ConnectionLost, StorageError
from penstock.core.options import parse_options
from penstock.core.url import URL
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.datamapper_wire import (
    DATAMAPPER_TYPE,
    INFO_SIZE,
    DataSetInfo,
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_client import RequestRefused, ping
from penstock.protocols.lrose.ds_message import DsMessage, Part
from penstock.registry import DataMapServer, MapServerOptions
from penstock.registry.data_map import DataMap, state_bytes
from penstock.registry.data_map_server import MapAnswers, RelayHost, server_port
from registry.map_process import map_process
from support.mutation import mutator, set_byte, truncate

# --- answers to requests ------------------------------------------------------------------------

WIRE = Path(__file__).parents[1] / "vectors" / "lrose" / "wire"
#: When the recorded server got its first registration, its questions, and its last registration:
#: from the fields of its replies and of its state file.
FIRST, ASKED, LAST = 0x6AF96FEF, 0x6AF96FF0, 0x6AF97009
FRAME = 20


def payload(name: str) -> bytes:
    return (WIRE / name).read_bytes()[FRAME:]


def answers(now: int = FIRST, max_entries: int = 100) -> tuple[MapAnswers, ManualClock]:
    clock = ManualClock(now * 10**9)
    return MapAnswers(DataMap(max_entries=max_entries, clock=clock), clock=clock), clock


def ask(of: MapAnswers, request: MapRequest) -> MapReply:
    return MapReply.from_message(of.reply_to(request.to_message()))


def test_the_recorded_sessions_get_the_recorded_replies_byte_for_byte() -> None:
    ours, clock = answers()
    for number in range(8):
        now = FIRST if number < 2 else LAST if number == 7 else ASKED
        clock.advance(now - clock.now_ns() // 10**9)
        request = DsMessage.from_bytes(payload(f"dmap_{number:02d}.c2s"))
        reply = ours.reply_to(request).to_bytes()
        assert reply == payload(f"dmap_{number:02d}.s2c"), number
    assert state_bytes(ours.map.all()) == (WIRE / "dmap_table.bin").read_bytes()
    assert ours.statistics() == (8, 3, 0, 5, 0, 0)


@pytest.mark.parametrize("number", range(8))
def test_a_recorded_request_is_written_byte_for_byte(number: int) -> None:
    recorded = payload(f"dmap_{number:02d}.c2s")
    request = MapRequest.from_message(DsMessage.from_bytes(recorded))
    assert request.to_message().to_bytes() == recorded


@pytest.mark.parametrize("number", range(8))
def test_a_recorded_reply_is_read_and_written_byte_for_byte(number: int) -> None:
    recorded = payload(f"dmap_{number:02d}.s2c")
    reply = MapReply.from_message(DsMessage.from_bytes(recorded))
    assert reply.error is None
    assert reply.to_message().to_bytes() == recorded


@pytest.mark.parametrize("kind", [each for each in RequestKind if each.name.startswith("REG_")])
def test_every_registration_gets_an_empty_reply_that_says_ok(kind: RequestKind) -> None:
    ours, _ = answers()
    info = DataSetInfo(dir="mdv/a", hostname="h", status="s")
    assert ask(ours, MapRequest(kind, (info,))) == MapReply(ReplyKind.REG_STATUS)
    assert [each.dir for each in ours.map.all()] == ["mdv/a"]
    assert ours.statistics().registered == 1


def test_full_entries_come_any_number_at_a_time() -> None:
    ours, _ = answers()
    infos = tuple(DataSetInfo(dir=str(i), latest_time=i) for i in range(10))
    assert ask(ours, MapRequest(RequestKind.REG_FULL, infos)).error is None
    assert ask(ours, MapRequest(RequestKind.REG_FULL)).error is None
    found = ask(ours, MapRequest(RequestKind.REQ_ALL))
    assert {each.dir: each.latest_time for each in found.infos} == {str(i): i for i in range(10)}
    assert {each.check_time for each in found.infos} == {FIRST}


def test_a_delete_is_answered_and_done() -> None:
    ours, _ = answers()
    for directory in ("a", "b"):
        ours.map.register_latest(DataSetInfo(dir=directory, datatype="t", hostname="h"))
    wanted = DataSetInfo(dir="a", datatype="all", hostname="all")
    assert ask(ours, MapRequest(RequestKind.DELETE, (wanted,))) == MapReply(ReplyKind.REG_STATUS)
    assert [each.dir for each in ours.map.all()] == ["b"]
    assert ours.statistics().deleted == 1


def test_a_full_map_is_told_to_the_client() -> None:
    ours, _ = answers(max_entries=1)
    ours.map.register_latest(DataSetInfo(dir="a"))
    reply = ask(ours, MapRequest(RequestKind.REG_LATEST_DATA, (DataSetInfo(dir="b"),)))
    assert reply.error is not None
    assert "full" in reply.error
    assert ours.statistics() == (1, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (DsMessage(43000), "type should be 3818000"),
        (DsMessage(DATAMAPPER_TYPE, 5), "subType"),
        (DsMessage(DATAMAPPER_TYPE, ReplyKind.REG_STATUS), "subType"),
        (DsMessage(DATAMAPPER_TYPE, RequestKind.REG_LATEST_DATA), "INFO parts"),
        (
            DsMessage(
                DATAMAPPER_TYPE, RequestKind.DELETE, parts=(Part(3818400, bytes(INFO_SIZE)),) * 2
            ),
            "INFO parts",
        ),
        (
            DsMessage(DATAMAPPER_TYPE, RequestKind.REG_FULL, parts=(Part(3818400, bytes(10)),)),
            "864",
        ),
    ],
)
def test_what_is_no_request_gets_an_error_in_words(message: DsMessage, reason: str) -> None:
    ours, _ = answers()
    reply = MapReply.from_message(ours.reply_to(message))
    assert reply.error is not None
    assert reason in reply.error
    assert len(ours.map) == 0
    assert ours.statistics().refused == 1


def test_the_hosts_that_a_question_has_to_pass_are_kept_in_order() -> None:
    request = MapRequest(RequestKind.REQ_ALL, (), ("gate", "inner"))
    message = request.to_message()
    assert message.parts == (Part(3818402, b"gate:inner\0"),)
    assert MapRequest.from_message(message) == request


def test_an_error_is_seen_in_the_flags_where_lroses_client_does_not_look() -> None:
    reply = MapReply(ReplyKind.WITH_INFO, error="no way")
    message = reply.to_message()
    assert (message.sub_type, message.flags) == (3818205, 3818303)
    assert message.parts == (Part(3818401, b"no way\0"),)
    assert MapReply.from_message(message) == reply
    wordless = MapReply.from_message(message._replace(parts=()))
    assert wordless.error == "it does not say why"


@pytest.mark.parametrize(
    "message",
    [
        DsMessage(1, ReplyKind.REG_STATUS, flags=3818302),
        DsMessage(DATAMAPPER_TYPE, RequestKind.REQ_ALL, flags=3818302),
        DsMessage(DATAMAPPER_TYPE, ReplyKind.REG_STATUS, flags=0),
        DsMessage(DATAMAPPER_TYPE, ReplyKind.WITH_INFO, flags=3818302, parts=(Part(3818400, b""),)),
    ],
)
def test_what_is_no_reply_is_refused(message: DsMessage) -> None:
    with pytest.raises(PenstockError):
        MapReply.from_message(message)


# --- bytes of no meaning --------------------------------------------------------------------

SEEDS = [
    *(payload(path.name) for path in sorted(WIRE.glob("dmap_*.c2s"))),
    *(
        MapRequest(kind, (DataSetInfo(dir="all", datatype="all", hostname="all", status="s"),))
        .to_message()
        .to_bytes()
        for kind in RequestKind
    ),
    MapRequest(RequestKind.REG_FULL, tuple(DataSetInfo(dir=d) for d in "abc"))
    .to_message()
    .to_bytes(),
    MapRequest(RequestKind.REQ_ALL, (), ("a", "b")).to_message().to_bytes(),
    *(payload(path.name) for path in sorted(WIRE.glob("dmap_*.s2c"))),
]
TELLING = (0, 1, -1, 2, 63, 64, 88, 863, 864, 865, 2**31 - 1, -(2**31), DATAMAPPER_TYPE,
           *RequestKind, 3818400, 3818402, 3818302)  # fmt: skip


def set_header_word(data: bytearray, _: int, chance: random.Random) -> None:
    if len(data) >= 4:
        # Mostly in the headers: what follows is text.
        word = chance.randrange(min(len(data), chance.choice((64, 136, 4000))) // 4) * 4
        value = chance.choice((*TELLING, chance.randint(-(2**31), 2**31 - 1)))
        data[word : word + 4] = struct.pack(">i", value)


def insert_noise(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.randbytes(chance.randrange(30))


def fill(data: bytearray, at: int, chance: random.Random) -> None:
    end = at + chance.randrange(1, 300)
    data[at:end] = chance.choice((b"\xff", b"x", b"\0")) * len(data[at:end])


mutated = mutator((1, 1, 2, 5), set_byte, set_header_word, truncate, insert_noise, fill)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(20_000, id="some"),
        pytest.param(1_000_000, id="all", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_fuzz_any_bytes_get_a_reply_or_a_typed_error(count: int) -> None:
    chance = random.Random(5)
    ours, _ = answers(max_entries=20)
    understood = 0
    for _ in range(count):
        data = mutated(chance.choice(SEEDS), chance)
        try:
            message = DsMessage.from_bytes(data)
        except PenstockError:
            continue
        with contextlib.suppress(PenstockError):
            MapReply.from_message(message)
        reply = ours.reply_to(message).to_bytes()
        understood += 1
        assert len(reply) < 20 * 1000
        MapReply.from_message(DsMessage.from_bytes(reply))
        assert len(ours.map) <= 20
        if chance.random() < 0.01:  # else a full map answers everything alike
            ours.map.delete("all", "all", "all")
    books = ours.statistics()
    assert books.requests == understood == sum(books[1:])
    assert min(books.registered, books.asked, books.refused, books.deleted) > count // 200
    state_bytes(ours.map.all())


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(20_000, id="some"),
        pytest.param(1_000_000, id="all", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_fuzz_an_entry_of_any_bytes_is_read_or_refused(count: int) -> None:
    chance = random.Random(6)
    table = (WIRE / "dmap_table.bin").read_bytes()
    read = 0
    for _ in range(count):
        at = chance.randrange(3) * INFO_SIZE
        data = mutated(table[at : at + INFO_SIZE], chance)
        if chance.random() < 0.8:
            data = data[:INFO_SIZE].ljust(INFO_SIZE, b"\0")
        try:
            info = DataSetInfo.read(data)
        except PenstockError:
            continue
        read += 1
        assert DataSetInfo.read(info.write()) == info
    assert read > count // 4


# --- the server ---------------------------------------------------------------------------------

SOON = 10.0


class Running:
    """A server, and a client of it."""

    def __init__(self, server: DataMapServer) -> None:
        self.server = server
        self.port = server.port
        self.client = DataMapClient("127.0.0.1", server.port)

    @staticmethod
    def wait_for(what: Callable[[], bool]) -> None:
        until = time.monotonic() + SOON
        while not what():
            assert time.monotonic() < until
            time.sleep(0.01)


@contextlib.contextmanager
def running(**options: object) -> Iterator[Running]:
    said = {name: str(value) for name, value in {"port": 0, **options}.items()}
    parsed = parse_options(URL("", "map", None, None, "", said), MapServerOptions)
    with DataMapServer(parsed) as server:
        yield Running(server)


def converse(port: int, data: bytes) -> bytes:
    """Send bytes, and return all that comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.sendall(data)
        received = bytearray()
        while piece := sock.recv(1 << 16):
            received += piece
    return bytes(received)


def without_clocks(reply: bytes) -> bytes:
    """Blank the times at which the server itself looked at its clock."""
    blank = bytearray(reply)
    parts = int.from_bytes(reply[20 + 36 : 20 + 40])
    for number in range(parts):
        header = 20 + 64 + 24 * number
        at = 20 + int.from_bytes(reply[header + 4 : header + 8])
        blank[at + 12 : at + 16] = blank[at + 28 : at + 32] = bytes(4)
    return bytes(blank)


def test_the_recorded_sessions_get_the_recorded_replies_on_the_wire() -> None:
    with running() as ours:
        for number in range(8):
            reply = converse(ours.port, (WIRE / f"dmap_{number:02d}.c2s").read_bytes())
            recorded = (WIRE / f"dmap_{number:02d}.s2c").read_bytes()
            assert without_clocks(reply) == without_clocks(recorded), number
        assert ours.server.map_statistics() == (8, 3, 0, 5, 0, 0)


def test_everything_that_can_be_registered_is_found_again() -> None:
    with running() as ours:
        client = ours.client
        client.register_latest("mdv/radar", 1_700_000_000, lead=600)
        client.register_status("mdv/radar", "good", "mdv")
        client.register_data_set(
            "mdv/radar", start_time=1, end_time=2, nfiles=3, total_bytes=4096.0
        )
        other = DataSetInfo(hostname="elsewhere", datatype="spdb", dir="spdb/x", latest_time=7)
        client.register_full([other])
        radar, full = client.all()
        assert (radar.latest_time, radar.forecast_lead_time, radar.status) == (
            1_700_000_000,
            600,
            "good",
        )
        assert (radar.start_time, radar.end_time, radar.nfiles, radar.total_bytes) == (
            1,
            2,
            3,
            4096,
        )
        assert radar.hostname == socket.gethostname()
        assert abs(radar.last_reg_time - time.time()) < 60
        assert abs(radar.check_time - time.time()) < 60
        assert full == DataSetInfo(
            hostname="elsewhere",
            datatype="spdb",
            dir="spdb/x",
            latest_time=7,
            check_time=full.check_time,
        )
        assert client.selected("spdb") == client.selected(directory="spdb/x") == (full,)
        assert client.selected("mdv", "spdb/x") == ()
        client.delete("all", "mdv/radar", "all")
        assert [each.dir for each in client.all()] == ["spdb/x"]
        assert ours.server.map_statistics() == (10, 4, 1, 5, 0, 0)


def test_an_error_of_the_server_is_noticed_by_the_client() -> None:
    with running(max_entries=1) as ours:
        ours.client.register_latest("a", 1)
        with pytest.raises(RequestRefused, match="full"):
            ours.client.register_latest("b", 1)
        ours.client.register_latest("a", 2)


def test_a_ping_is_answered_as_by_every_server() -> None:
    with running() as ours:
        assert ping("127.0.0.1", ours.port) == os.getpid()


def test_many_clients_at_once_lose_no_registration() -> None:
    with running() as ours, ThreadPoolExecutor(8) as pool:

        def register(number: int) -> None:
            for step in range(20):
                ours.client.register_latest(f"mdv/{number}", step)

        list(pool.map(register, range(16)))
        assert {each.dir: each.latest_time for each in ours.client.all()} == {
            f"mdv/{number}": 19 for number in range(16)
        }
        assert ours.server.map_statistics().registered == 320


def test_a_silent_client_holds_nobody_up_and_is_cut_off() -> None:
    with running(first_message="300ms") as ours:
        with socket.create_connection(("127.0.0.1", ours.port), 5) as silent:
            silent.sendall((WIRE / "dmap_00.c2s").read_bytes()[:100])
            ours.client.register_latest("a", 1)
            silent.settimeout(SOON)
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1000) == b""
        ours.wait_for(lambda: not ours.server.statistics().clients)


def test_a_request_larger_than_allowed_is_refused_before_it_comes() -> None:
    with running(max_message=2048) as ours:
        header = struct.pack(">8s3i", b"\xf0" * 8, 3818000, 1 << 30, 1)
        assert b"len should be" in converse(ours.port, header)
        ours.client.register_latest("a", 1)


def test_old_entries_are_purged() -> None:
    with running(purge_age="1s") as ours:
        now = int(time.time())
        ours.client.register_full(
            [
                DataSetInfo(dir="old", last_reg_time=now - 100),
                DataSetInfo(dir="new", last_reg_time=now + 1000),
            ]
        )
        ours.wait_for(lambda: len(ours.server.map) == 1)
        assert [each.dir for each in ours.client.all()] == ["new"]


# --- relays ---------------------------------------------------------------------------------


def test_questions_pass_through_the_hosts_that_are_allowed() -> None:
    with (
        running() as inner,
        running(relay=f"inner=127.0.0.1:{inner.port}") as middle,
        running(relay=f"middle=127.0.0.1:{middle.port},x") as gate,
    ):
        inner.client.register_latest("mdv/inner", 5)
        inner.client.register_latest("spdb/inner", 6)
        gate.client.register_latest("mdv/gate", 7)
        far = DataMapClient("127.0.0.1:middle:inner", gate.port)
        assert [each.dir for each in far.all()] == ["mdv/inner", "spdb/inner"]
        assert [each.latest_time for each in far.selected("spdb")] == [6]
        assert [each.dir for each in gate.client.all()] == ["mdv/gate"]
        assert gate.server.map_statistics().relayed == 2
        assert middle.server.map_statistics().relayed == 2
        assert inner.server.map_statistics().asked == 2


def test_a_question_to_any_other_host_is_refused() -> None:
    with running(relay="inner") as gate:
        far = DataMapClient("127.0.0.1:elsewhere", gate.port)
        with pytest.raises(RequestRefused, match="passes no questions on to elsewhere"):
            far.all()
        assert gate.server.map_statistics() == (1, 0, 0, 0, 0, 1)


def test_a_relay_that_is_away_is_an_error_in_words() -> None:
    with running(relay="inner=127.0.0.1:1") as gate:
        with pytest.raises(RequestRefused, match=r"127\.0\.0\.1:1 cannot be reached"):
            DataMapClient("127.0.0.1:inner", gate.port).all()
        gate.client.register_latest("a", 1)


def test_a_loop_of_relays_comes_to_an_end() -> None:
    with running() as probe:
        port = probe.port
    with running(port=port, relay=f"me=127.0.0.1:{port}") as gate:
        gate.client.register_latest("a", 1)
        assert len(DataMapClient("127.0.0.1:me:me:me", port).all()) == 1
        with pytest.raises(RequestRefused, match="8 hosts"):
            DataMapClient("127.0.0.1" + ":me" * 9, port).all()


@pytest.mark.parametrize("text", ["", "=h:1", "a=:1", "a=h:x", "a=h:99999", "a:b"])
def test_a_relay_host_is_written_as_a_name_or_with_its_address(text: str) -> None:
    with pytest.raises(InvalidOption):
        RelayHost.parse(text)


def test_relay_hosts_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_BASE_PORT", raising=False)
    assert RelayHost.parse("inner") == ("inner", "inner", 5434)
    assert RelayHost.parse("inner=10.0.0.7") == ("inner", "10.0.0.7", 5434)
    assert RelayHost.parse("inner=h:99") == ("inner", "h", 99)


# --- the state file -------------------------------------------------------------------------


def test_the_map_is_kept_when_the_server_ends(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(state=state) as ours:
        ours.client.register_latest("mdv/a", 5)
        assert not state.exists()  # its time has not come
    assert len(state.read_bytes()) == 864
    with running(state=state) as ours:
        (entry,) = ours.client.all()
        assert (entry.dir, entry.latest_time) == ("mdv/a", 5)


def test_lroses_state_file_is_taken_over(tmp_path: Path) -> None:
    state = tmp_path / "state"
    recorded = (WIRE / "dmap_table.bin").read_bytes()
    state.write_bytes(recorded)
    with running(state=state) as ours:
        assert [each.dir for each in ours.client.all()] == ["mdv/fcst", "mdv/remote", "mdv/test"]
    assert state.read_bytes() == recorded


def test_a_damaged_file_stays_until_the_map_is_saved(tmp_path: Path) -> None:
    state = tmp_path / "state"
    recorded = (WIRE / "dmap_table.bin").read_bytes()
    state.write_bytes(recorded + b"x")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StorageError, match="in use"), running(state=state, port=port):
            pass
    assert state.read_bytes() == recorded + b"x"
    with running(state=state) as ours:
        assert len(ours.client.all()) == 3
    assert state.read_bytes() == recorded
    assert (tmp_path / "state.damaged").read_bytes() == recorded + b"x"


def test_a_place_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no directory"), running(state=tmp_path / "no" / "f"):
        pass
    with pytest.raises(StorageError), running(state=tmp_path):
        pass


def test_a_file_that_cannot_be_saved_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with running(state=folder / "state", save_every="50ms") as ours:
        folder.rename(tmp_path / "away")
        ours.client.register_latest("a", 1)
        ours.wait_for(lambda: not ours.server._could_save)
        time.sleep(0.2)
        (tmp_path / "away").rename(folder)
        ours.wait_for(lambda: ours.server._could_save)
        assert len((folder / "state").read_bytes()) == 864
    assert caplog.text.count("not saved") == 1


def test_a_killed_server_leaves_a_whole_file_and_the_next_one_goes_on(tmp_path: Path) -> None:
    _kill_and_go_on(tmp_path, 2)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_server_killed_fifty_times_leaves_a_whole_file_each_time(tmp_path: Path) -> None:
    _kill_and_go_on(tmp_path, 50)


def _kill_and_go_on(tmp_path: Path, times: int) -> None:
    chance = random.Random(3)
    state = tmp_path / "state"
    saved = 0
    for life in range(times):
        with map_process("--state", str(state), "--save-every", "5ms") as server:
            client = DataMapClient("127.0.0.1", server.port)
            found = {each.dir: each.latest_time for each in client.all()}
            assert len(found) >= saved, life
            stop = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                writing = pool.submit(_register_until, stop, client, life)
                Running.wait_for(lambda: state.exists() and state.stat().st_size > 0)
                time.sleep(chance.random() * 0.3)
                server.process.send_signal(signal.SIGKILL)
                server.process.wait(10)
                stop.set()
                writing.result(SOON)
            assert len(state.read_bytes()) % 864 == 0
            saved = len(state.read_bytes()) // 864
            assert saved > 0
            assert {path.name for path in tmp_path.iterdir()} <= {"state", "state.new"}
        assert "damaged" not in server.errors


def _register_until(stop: threading.Event, client: DataMapClient, life: int) -> None:
    number = 0
    with contextlib.suppress(ConnectionLost):
        while not stop.is_set():
            client.register_latest(f"mdv/{life}/{number % 300}", number)
            number += 1


# --- ports ----------------------------------------------------------------------------------


def test_the_environment_moves_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMAP_PORT", raising=False)
    monkeypatch.delenv("DS_BASE_PORT", raising=False)
    assert server_port() == DataMapClient().port == 5434
    monkeypatch.setenv("DS_BASE_PORT", "15430")
    assert server_port() == DataMapClient().port == 15434
    monkeypatch.setenv("DMAP_PORT", "777")
    assert server_port() == 777
    assert DataMapClient().port == 15434
    monkeypatch.setenv("DMAP_PORT", "many")
    with pytest.raises(InvalidOption):
        server_port()


# --- bytes of no meaning --------------------------------------------------------------------


def test_fuzz_any_bytes_leave_the_server_as_it_was() -> None:
    chance = random.Random(8)
    sessions = [path.read_bytes() for path in sorted(WIRE.glob("dmap_*.c2s"))]
    with running(first_message="2s", idle="2s") as ours:
        ours.client.register_latest("mdv/kept", 42)
        for _ in range(300):
            data = bytearray(chance.choice(sessions))
            for _ in range(chance.randrange(1, 6)):
                data[chance.randrange(min(len(data), 120))] = chance.randrange(256)
            with socket.create_connection(("127.0.0.1", ours.port), 5) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(SOON)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(1 << 16):
                        pass
        assert 42 in [each.latest_time for each in ours.client.selected("mdv", "mdv/kept")]
        books = ours.server.map_statistics()
        assert books.requests == sum(books[1:])
