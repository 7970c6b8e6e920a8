"""A protocol gives a session; who may come, for how long, and what is counted is the server's."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from penstock.core.errors import Malformed, StorageError
from penstock.protocols.connection import Connection
from penstock.protocols.datagrams import Datagrams, DatagramServer, DatagramSocket
from penstock.protocols.server import (
    Conversation,
    End,
    Limits,
    Refused,
    Server,
    Session,
    listen_tcp,
    listen_unix,
)
from penstock.protocols.web import WebServer
from support.certificates import Authority
from support.until import until

log = logging.getLogger("tests.server")
HOST = "127.0.0.1"


class Echo(Session):
    """Answers each line with itself; some lines are special."""

    made: list[Echo]

    def __init__(self, connection: Connection, server: Callable[[], Server]) -> None:
        super().__init__(connection)
        self._server = server
        self.calls = 0
        self.is_closed = False
        Echo.made.append(self)

    def serve(self) -> bool:
        self.calls += 1
        view = memoryview(bytearray(1 << 16))
        said = bytearray()
        while True:
            count = self.connection.receive(view, None if said else 0.25)
            if count is None:
                return True
            if not count:
                return False
            said += view[:count]
            while (end := said.find(b"\n") + 1) > 0:
                self.connection.welcome()
                line = bytes(said[:end])
                del said[:end]
                if not self._answer(line):
                    return False

    def _answer(self, line: bytes) -> bool:
        match line:
            case b"malformed\n":
                raise Malformed("line", "word", "another", "malformed")
            case b"fail\n":
                raise ZeroDivisionError("a fault")
            case b"bye\n":
                return False
            case b"slow\n":
                time.sleep(0.5)
            case b"much\n":
                self.connection.send(bytes(10_000_000))
            case _ if line.startswith(b"token "):
                self._server().check_token(line[6:-1])
        self.connection.send(line)
        return True

    def close(self) -> None:
        self.is_closed = True


@contextlib.contextmanager
def served(
    sockets: list[socket.socket] | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    token: bytes | None = None,
    turn_away: bool = False,
    **limits: object,
) -> Iterator[Server]:
    Echo.made = []
    made: list[Server] = []

    def refuse(connection: Connection) -> None:
        connection.receive(memoryview(bytearray(100)))
        connection.send(b"too many\n")

    made.append(
        Server(
            "echo",
            sockets or listen_tcp(HOST, 0),
            lambda connection: Echo(connection, lambda: made[0]),
            Limits(**limits),  # type: ignore[arg-type]
            log=log,
            tls=tls,
            token=token,
            turn_away=(lambda it: Conversation(it, refuse)) if turn_away else None,
        )
    )
    with made[0].start() as server:
        yield server
    books = server.statistics()
    assert books.accepted == books.open + sum(books.refused.values()) + sum(books.ended.values())
    assert books.open == 0
    assert all(session.is_closed for session in Echo.made)


class Client:
    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection((HOST, server.port), 10)

    def ask(self, line: bytes) -> bytes:
        self.socket.sendall(line)
        return self.hear()

    def hear(self) -> bytes:
        return self.socket.makefile("rb").readline()

    def is_over(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_client_that_goes_quiet_gives_its_thread_back_and_is_served_again() -> None:
    with served() as server, Client(server) as client:
        assert client.ask(b"one\n") == b"one\n"
        until(lambda: "echo-client" not in names())
        assert client.ask(b"two\n") == b"two\n"
        (session,) = Echo.made
        assert session.calls == 2
        until(lambda: server.statistics().bytes_out == 8)
        books = server.statistics()
        assert (books.accepted, books.open, books.bytes_in) == (1, 1, 8)


def test_bytes_that_come_at_any_time_are_never_lost_between_thread_and_door() -> None:
    with served() as server, Client(server) as client:
        for number in range(12):
            time.sleep(number % 4 * 0.09)  # about the time after which a session gives back
            line = b"%d\n" % number
            assert client.ask(line) == line


def test_each_end_is_counted_by_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with served(first_message=0.4, idle=0.4) as server:
        clients = [Client(server) for _ in range(6)]
        left, malformed, failed, _silent, half, idle = clients
        assert idle.ask(b"x\n") == b"x\n"
        left.socket.sendall(b"bye\n")
        malformed.socket.sendall(b"malformed\n")
        failed.socket.sendall(b"fail\n")
        half.socket.sendall(b"x")
        assert all(client.is_over() for client in clients)
        ended = server.statistics().ended
        assert {reason: count for reason, count in ended.items() if count} == {
            End.LEFT: 1,
            End.MALFORMED: 1,
            End.FAILED: 1,
            End.TIMED_OUT: 3,
        }
        for client in clients:
            client.socket.close()
    assert caplog.text.count("Traceback") == 1


def test_a_client_too_many_is_turned_away_and_told_so_if_there_is_a_way() -> None:
    with served(max_clients=1) as server, Client(server) as first:
        assert first.ask(b"x\n") == b"x\n"
        with Client(server) as second:
            assert second.is_over()
        assert server.statistics().refused[End.CLIENTS] == 1
    with served(max_clients=1, turn_away=True) as server, Client(server) as first:
        assert first.ask(b"x\n") == b"x\n"
        with Client(server) as second:
            assert second.ask(b"x\n") == b"too many\n"
            assert second.is_over()
        assert server.statistics().refused[End.CLIENTS] == 1
        assert first.ask(b"y\n") == b"y\n"


def test_who_is_slow_with_a_first_message_makes_room_for_who_is_not() -> None:
    with (
        served(max_clients=2) as server,
        Client(server) as one,
        Client(server) as two,
        Client(server) as good,
    ):
        one.socket.sendall(b"x")
        two.socket.sendall(b"x")
        until(lambda: len(Echo.made) == 2)
        time.sleep(0.05)
        assert good.ask(b"x\n") == b"x\n"
        until(lambda: server.statistics().ended[End.CROWDED_OUT] == 1)


def test_who_is_good_waits_for_a_place_while_the_slow_have_not_been_heard_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = Echo.serve

    def serve_late(self: Echo) -> bool:
        time.sleep(0.1)  # as on a busy machine: its byte waits to be received
        return serve(self)

    monkeypatch.setattr(Echo, "serve", serve_late)
    with served(max_clients=1) as server, Client(server) as slow, Client(server) as good:
        slow.socket.sendall(b"x")
        until(lambda: len(Echo.made) == 1)
        assert good.ask(b"x\n") == b"x\n"
        assert server.statistics().refused[End.CLIENTS] == 0
        until(lambda: server.statistics().ended[End.CROWDED_OUT] == 1)


def test_of_many_that_say_nothing_the_oldest_make_room() -> None:
    with served(max_newcomers=4) as server:
        clients = [Client(server) for _ in range(8)]
        assert clients[-1].ask(b"x\n") == b"x\n"
        assert clients[0].is_over()
        assert server.statistics().ended[End.CROWDED_OUT] >= 3
        for client in clients:
            client.socket.close()


def test_a_token_is_asked_for() -> None:
    with served(token=b"secret") as server:
        with Client(server) as client:
            assert client.ask(b"token secret\n") == b"token secret\n"
        for wrong in (b"token wrong\n", b"token \n"):
            with Client(server) as client:
                client.socket.sendall(wrong)
                assert client.is_over()
        assert server.statistics().refused[End.TOKEN] == 2
        with pytest.raises(Refused, match="a token is needed"):
            server.check_token(b"")


def test_an_encrypted_client_is_served_and_a_plain_one_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    trusting = ssl.create_default_context(cafile=authority.certificate)
    with served(tls=context, first_message=1.0) as server:
        with Client(server) as client:
            client.socket = trusting.wrap_socket(client.socket, server_hostname=HOST)
            assert client.ask(b"one\n") == b"one\n"
            until(lambda: "echo-client" not in names())
            assert client.ask(b"two\n") == b"two\n"
        with Client(server) as plain, Client(server) as silent:
            plain.socket.sendall(b"x\n")
            assert plain.hear() != b"x\n"
            silent.socket.sendall(b"\x16")
            assert silent.is_over()


def test_a_client_in_the_middle_of_a_handshake_makes_room_or_is_stopped(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    trusting = ssl.create_default_context(cafile=authority.certificate)
    with served(tls=context, max_clients=1) as server:
        with Client(server) as slow, Client(server) as good:
            slow.socket.sendall(b"\x16\x03\x01")
            until(lambda: "echo-client" in names())
            time.sleep(0.05)
            good.socket = trusting.wrap_socket(good.socket, server_hostname=HOST)
            assert good.ask(b"x\n") == b"x\n"
            assert slow.is_over()
        until(lambda: server.statistics().ended[End.CROWDED_OUT] == 1)
        until(lambda: server.statistics().open == 0)
        with Client(server) as slow:
            slow.socket.sendall(b"\x16\x03\x01")
            until(lambda: "echo-client" in names())
            time.sleep(0.05)
            began = time.monotonic()
            assert server.stop(5)
            assert time.monotonic() - began < 4
            assert server.statistics().ended[End.STOPPED] == 1


def test_who_takes_nothing_is_cut_off_when_all_have_too_much_to_take() -> None:
    with served(max_unsent=25_000_000) as server:
        clients = [Client(server) for _ in range(4)]
        for client in clients:
            client.socket.sendall(b"much\n")
        until(lambda: server.statistics().ended[End.BEHIND] >= 2)
        assert 0 < server.statistics().unsent <= 25_000_000
        with Client(server) as other:
            assert other.ask(b"x\n") == b"x\n"
        for client in clients:
            client.socket.close()


def test_who_takes_nothing_for_too_long_is_cut_off() -> None:
    with served(stalled=0.3) as server, Client(server) as client:
        client.socket.sendall(b"much\n")
        until(lambda: server.statistics().ended[End.TIMED_OUT] == 1)


def test_what_is_being_answered_when_it_stops_is_answered() -> None:
    with served() as server, Client(server) as busy, Client(server) as quiet:
        assert quiet.ask(b"x\n") == b"x\n"
        busy.socket.sendall(b"slow\n")
        until(lambda: len(Echo.made) == 2)
        time.sleep(0.1)
        assert server.stop(5)
        assert busy.hear() == b"slow\n"
        assert quiet.is_over()
        assert server.statistics().ended[End.STOPPED] == 2
        with pytest.raises(OSError, match="refused"):
            Client(server)


def test_what_takes_too_long_when_it_stops_is_cut() -> None:
    with served() as server, Client(server) as deaf:
        deaf.socket.sendall(b"much\n")
        until(lambda: server.statistics().unsent > 0)
        began = time.monotonic()
        assert server.stop(0.2)
        assert time.monotonic() - began < 5


def test_who_does_not_end_is_told_by_every_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.protocols.server._LAST", 0.01)
    with served() as server, Client(server) as busy:
        busy.socket.sendall(b"slow\n")
        until(lambda: Echo.made and Echo.made[0].calls)
        time.sleep(0.05)
        assert not server.stop(0.01)
        assert not server.stop(0.01)
        until(lambda: server.stop(0.01))


def test_sockets_that_find_no_descriptor_at_the_same_time_pause_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sockets = [*listen_tcp(HOST, 0), *listen_tcp(HOST, 0)]
    clients = [socket.create_connection(each.getsockname(), 10) for each in sockets]
    accept = socket.socket.accept
    is_short = True

    def short(listener: socket.socket) -> tuple[socket.socket, object]:
        if is_short:
            raise OSError(errno.EMFILE, "no descriptor is left")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    with served(sockets) as server:
        until(lambda: server._paused_until is not None)
        time.sleep(0.3)  # and again, several times
        is_short = False
        for client in clients:
            client.sendall(b"hello\n")
            assert client.recv(100) == b"hello\n"
            client.close()
        assert server._door.error is None


def test_a_thread_that_is_about_to_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Connection.close

    def close_slowly(connection: Connection) -> None:
        time.sleep(0.1)
        close(connection)

    monkeypatch.setattr(Connection, "close", close_slowly)
    with served() as server, Client(server) as client:
        client.socket.sendall(b"bye\n")
        until(lambda: server.statistics().accepted and not server.statistics().open)
        assert server.stop()
        assert "echo-client" not in names()


def test_many_threads_may_stop_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shut = Server._shut

    def shut_slowly(server: Server) -> None:
        time.sleep(0.05)
        shut(server)

    monkeypatch.setattr(Server, "_shut", shut_slowly)
    for is_started in (True, False):
        server = Server(
            "x",
            listen_tcp(HOST, 0),
            lambda it: Conversation(it, lambda _: None),
            Limits(),
            log=log,
        )
        if is_started:
            server.start()
        with ThreadPoolExecutor(4) as pool:
            stops = [pool.submit(server.stop) for _ in range(4)]
        assert all(each.result() for each in stops)


def test_a_web_server_that_does_not_start_gives_its_sockets_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocols.web._STARTING", 0.2)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_application.py").write_text("import time\ntime.sleep(1)\napp = None\n")
    port = 0
    for app in ("no_application:app", "slow_application:app"):
        with pytest.raises(StorageError, match="did not begin") as error:
            WebServer(app, HOST, port, name="web", log=log, extra="x")
        port = int(error.value.path.rpartition(":")[2])
        assert "web" not in names()
        for each in listen_tcp(HOST, port):
            each.close()


def test_a_unix_socket_is_its_owners_however_long_its_path_is(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    with served(listen_unix(folder / "socket")) as server:
        assert server.port == 0
        assert (folder / "socket").stat().st_mode & 0o777 == 0o600
        with pytest.raises(StorageError, match="in use"):
            listen_unix(folder / "socket")


def test_it_listens_at_all_addresses_of_a_host_or_at_none() -> None:
    sockets = listen_tcp("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        with pytest.raises(StorageError, match="in use") as taken:
            listen_tcp("localhost", sockets[0].getsockname()[1])
        assert "stop what listens there" in (taken.value.hint or "")
        with pytest.raises(StorageError) as missing:
            listen_tcp("192.0.2.1", 0)
        assert "no such address" in (missing.value.hint or "")
    finally:
        for each in sockets:
            each.close()


def test_a_server_that_was_never_started_gives_its_sockets_back() -> None:
    sockets = listen_tcp(HOST, 0)
    Server("x", sockets, lambda it: Conversation(it, lambda _: None), Limits(), log=log).close()
    assert sockets[0].fileno() == -1


def test_a_datagram_server_goes_on_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    sock = DatagramSocket.bind(HOST, 0)

    def handle(found: Datagrams) -> None:
        if found.whole[0][0] == b"fail":
            raise ZeroDivisionError("a fault")
        sock.send(found.whole)

    with (
        DatagramServer("datagrams", sock, handle, log=log).start() as server,
        DatagramSocket.connect(HOST, server.port) as client,
    ):
        client.send([(b"fail", None)])
        until(lambda: server.failures == 1)
        client.send([(b"hello", None)])
        assert client.receive(timeout=5).whole[0][0] == b"hello"
        assert server.statistics()[:2] == (2, 9)
    assert "datagrams fails, and tries again" in caplog.text
    assert sock.socket.fileno() == -1
