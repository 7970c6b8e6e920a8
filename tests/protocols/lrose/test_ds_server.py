"""What a client may hold of the server's time and memory is limited, and so is that of all."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import latest, serve
from penstock.core.endpoints import open_writer
from penstock.core.units import parse_duration
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.datamapper_wire import (
    DATAMAPPER_TYPE,
    DataSetInfo,
    MapRequest,
    RequestKind,
)
from penstock.protocols.lrose.ds_message import Category, DsMessage
from penstock.protocols.lrose.ds_server import ServingOptions
from penstock.protocols.lrose.fmq_server import FmqServerOptions
from penstock.protocols.lrose.fmq_wire import Init, Op, OpenMode, encode_init
from penstock.protocols.lrose.ldata_wire import LdataMessage, Mode
from penstock.protocols.lrose.sku import encode_header
from penstock.registry import DataMapServer, LdataServer, LdataServerOptions, MapServerOptions
from protocols.lrose.serving import Caller, served
from support.threads import own_threads
from support.until import until

INIT = Init("q", OpenMode.READ_ONLY, OpenMode.READ_ONLY)
READ = DsMessage(Op.READ)
WEEK = 7 * 86400
HEAD = b"\xf0" * 8 + struct.pack(">3i", 1, 1_000_000, 1)


def seconds_until_cut_off(caller: Caller, data: bytes, pause: float = 0.05) -> float:
    """Send a bit of data at a time, and return how long that went well."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 20:
            caller.socket.sendall(data)
            time.sleep(pause)
    return time.monotonic() - began


# --- time -----------------------------------------------------------------------------------


def test_a_client_may_be_silent_for_weeks(tmp_path: Path) -> None:
    """LROSE's never connect again: after a cut, a program that writes once a day dies."""
    fmqp, ldatap = FmqServerOptions(root=tmp_path), LdataServerOptions(root=tmp_path)
    assert min(fmqp.idle, ldatap.idle) > 2 * WEEK
    for command in (vars(serve)["_serve_fmqp"], latest.serve_ldata):
        said = inspect.signature(command).parameters["idle"].default
        assert parse_duration(said) == fmqp.idle


def test_a_client_that_sends_its_first_request_byte_by_byte_is_cut_off(tmp_path: Path) -> None:
    with served(tmp_path, first_message="500ms") as server, Caller(server.port) as caller:
        caller.socket.sendall(HEAD)
        assert seconds_until_cut_off(caller, b"x") < 10
        assert server.statistics().clients_timed_out == 1


def test_a_client_that_sends_a_later_request_byte_by_byte_is_cut_off(tmp_path: Path) -> None:
    with served(tmp_path, first_message="500ms") as server, Caller(server.port) as caller:
        caller.ask(READ)
        time.sleep(1)  # it may be silent between two requests
        caller.ask(READ)
        caller.socket.sendall(HEAD)
        assert seconds_until_cut_off(caller, b"x") < 10
        assert server.statistics().clients_timed_out == 1


def test_a_large_request_may_take_longer_if_it_comes_on(tmp_path: Path) -> None:
    with served(tmp_path, first_message="1s") as server, Caller(server.port) as caller:
        caller.socket.sendall(HEAD)
        for _ in range(20):
            caller.socket.sendall(bytes(50_000))
            time.sleep(0.1)
        assert caller.hear().error != 0  # it is no message, but all of it came
        assert server.statistics().clients_timed_out == 0


def test_a_half_request_behind_one_that_takes_long_has_its_time_after_that(tmp_path: Path) -> None:
    with served(tmp_path, first_message="1s") as server, Caller(server.port) as caller:
        open_writer(f"{server.url}/q").close()
        caller.ask(encode_init(INIT._replace(is_ours=True)))
        caller.say(DsMessage(Op.READ, -1, 2000))  # wait so long for a message
        caller.socket.sendall(HEAD)
        assert caller.hear().error == 0
        time.sleep(0.1)
        assert server.statistics().clients_timed_out == 0
        until(lambda: server.statistics().clients_timed_out == 1)


def test_a_client_too_many_cannot_stay_by_sending_bytes(tmp_path: Path) -> None:
    with (
        served(tmp_path, first_message="500ms", max_clients=1) as server,
        Caller(server.port) as first,
        Caller(server.port) as denied,
    ):
        first.ask(READ)
        denied.socket.sendall(HEAD)
        assert seconds_until_cut_off(denied, b"x") < 10
        first.ask(READ)


# --- memory ---------------------------------------------------------------------------------


def test_replies_that_nobody_takes_are_limited_over_all_clients(tmp_path: Path) -> None:
    with served(tmp_path, max_queue=1 << 27, max_unsent="20M") as server:
        with open_writer(f"{server.url}/q", slots=100, size="30M") as writer:
            writer.write_many([bytes(9_000_000)] * 2)
        callers = [Caller(server.port) for _ in range(8)]
        most = 0

        def unsent() -> int:
            nonlocal most
            most = max(most, server.unsent)
            return most

        for caller in callers:
            caller.socket.settimeout(20)
            caller.ask(encode_init(INIT))
            caller.ask(DsMessage(Op.SEEK, 0))
            replies = server.statistics().replies
            caller.say(READ)
            until(lambda n=replies: server.statistics().replies > n)  # type: ignore[misc]
            unsent()
        assert 0 < unsent() <= 20 << 20
        until(lambda: server.statistics().clients_behind >= 4)
        with Caller(server.port) as other:
            assert other.ask(encode_init(INIT)).error == 0
        for caller in callers:
            caller.socket.close()
        until(lambda: server.statistics().clients == 0)
        books = server.statistics()
        assert books.requests == books.replies + books.unanswered


def test_a_client_that_does_not_take_its_last_reply_is_cut_off_too() -> None:
    # A map ends the conversation with its reply.
    options = MapServerOptions(port=0, idle="500ms")  # type: ignore[arg-type]
    with DataMapServer(options) as server:
        infos = [DataSetInfo(datatype="t", dir=f"d{n}", hostname="h") for n in range(9000)]
        DataMapClient("127.0.0.1", server.port).register_full(infos)
        with Caller(server.port) as deaf:
            deaf.say(MapRequest(RequestKind.REQ_ALL).to_message(), DATAMAPPER_TYPE)
            until(lambda: server.statistics().clients_timed_out == 1)
            until(lambda: server.statistics().clients == 0)


# --- books ----------------------------------------------------------------------------------


def test_a_refusal_is_counted_as_an_error_however_the_service_tells_it(tmp_path: Path) -> None:
    ldata = LdataServerOptions(root=tmp_path, port=0)
    outside = LdataMessage(mode=Mode.OPEN, url="ldatap:://localhost::../x").to_message()
    unknown = DsMessage(DATAMAPPER_TYPE, 1)
    everything = MapRequest(RequestKind.REQ_ALL).to_message()
    elsewhere = MapRequest(RequestKind.REQ_ALL, (), ("other",)).to_message()
    for make, request, errors in (
        (lambda: LdataServer(ldata), outside, 1),
        (lambda: DataMapServer(MapServerOptions(port=0)), unknown, 1),
        (lambda: DataMapServer(MapServerOptions(port=0)), elsewhere, 1),
        (lambda: DataMapServer(MapServerOptions(port=0)), everything, 0),
    ):
        with make() as server, Caller(server.port) as caller:
            assert caller.ask(request).error == 0
            books = server.statistics()
            assert (books.requests, books.replies, books.errors) == (1, 1, errors)
    with served(tmp_path) as fmq, Caller(fmq.port) as caller:
        caller.ask(READ)
        caller.ask(DsMessage(9, category=Category.SERVER_STATUS))
        caller.ask(DsMessage(0, category=Category.SERVER_STATUS))
        assert (fmq.statistics().replies, fmq.statistics().errors) == (3, 2)


# --- threads --------------------------------------------------------------------------------


def test_a_server_that_was_closed_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = own_threads()
    with served(tmp_path) as server, open_writer(f"{server.url}/q") as writer:
        writer.write(b"x")
        assert own_threads() - before
    assert not own_threads() - before


# --- settings -------------------------------------------------------------------------------


def test_the_port_is_so_much_above_ds_base_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_BASE_PORT", raising=False)
    assert FmqServerOptions(root=tmp_path).port == 5443
    monkeypatch.setenv("DS_BASE_PORT", "7000")
    assert FmqServerOptions(root=tmp_path).port == 7013
    assert ServingOptions().port == 0


# --- the machine ----------------------------------------------------------------------------

_SERVICES = {
    "fmqp": ["--root", "{root}"],
    "ldata": ["--root", "{root}", "--no-register"],
    "datamapper": [],
}


@contextlib.contextmanager
def service(name: str, root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `penstock serve NAME`, and tell its port."""
    command = [str(Path(sys.executable).with_name("penstock")), "serve", name, "--port", "0"]
    places = [each.format(root=root) for each in _SERVICES[name]]
    process = subprocess.Popen(
        [*command, *places, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield process, int(re.findall(r":(\d+)", line)[-1])
    finally:
        process.kill()
        process.communicate()


def seconds_of_processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("name", ["fmqp", "ldata", "datamapper"])
def test_without_descriptors_clients_wait_and_the_log_says_so_once(
    tmp_path: Path, name: str
) -> None:
    with service(name, tmp_path) as (process, port):
        first = Caller(port)  # the first one has it open what it needs from then on
        first.say(DsMessage(0, category=Category.SERVER_STATUS))
        first.hear()
        # Its own descriptor is one of them.
        taken = len(os.listdir(f"/proc/{process.pid}/fd")) - 1  # noqa: PTH208 - /proc
        first.socket.close()
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (taken + 4, taken + 4))
        callers = [Caller(port) for _ in range(30)]
        try:
            for caller in callers[:3]:
                caller.say(DsMessage(0, category=Category.SERVER_STATUS))
                caller.hear()
            began = seconds_of_processor(process.pid)
            time.sleep(1.5)
            assert seconds_of_processor(process.pid) - began < 0.3
            for caller in callers[:-2]:
                caller.socket.close()
            # Those who waited have their turn.
            callers[-1].socket.settimeout(20)
            callers[-1].say(DsMessage(0, category=Category.SERVER_STATUS))
            assert callers[-1].hear().error == 0
        finally:
            for caller in callers:
                caller.socket.close()
        process.terminate()
        _, said = process.communicate(timeout=20)
    assert "Traceback" not in said
    assert said.count("accepting clients is not possible now") == 1
    assert len(said) < 5_000


@pytest.mark.parametrize("name", ["fmqp", "ldata", "datamapper"])
def test_a_server_that_other_machines_can_reach_says_what_they_may_do(
    tmp_path: Path, name: str
) -> None:
    said = {}
    for host in ("127.0.0.1", "0.0.0.0"):
        with service(name, tmp_path, "--host", host, "--quiet") as (process, _):
            process.terminate()
            said[host] = process.communicate(timeout=20)[1]
    assert "anybody who can reach it can read" in said["0.0.0.0"]
    assert "anybody" not in said["127.0.0.1"]


@pytest.mark.parametrize("name", ["fmqp", "ldata", "datamapper"])
def test_a_request_in_pieces_is_acknowledged_piece_by_piece(tmp_path: Path, name: str) -> None:
    # As LROSE's clients write one: each piece waits for the acknowledgement of the one before,
    # for which the kernel would take 40 ms.
    request = DsMessage(0, category=Category.SERVER_STATUS).to_bytes()
    head = encode_header(0, 1, len(request))
    with service(name, tmp_path) as (_, port), Caller(port) as caller:
        began = time.monotonic()
        for _ in range(60):
            for piece in (head[:8], head[8:], request):
                caller.socket.sendall(piece)
            assert caller.hear().error == 0
        assert time.monotonic() - began < 60 * 0.04 / 2
