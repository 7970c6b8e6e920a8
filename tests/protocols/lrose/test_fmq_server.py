"""The server keeps to its limits, and no client can hold up the others."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.endpoints import create, open_reader, open_writer
from penstock.core.errors import ConnectionLost, StorageError
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss
from penstock.protocols.lrose.ds_client import Connection, RequestRefused, client_count, ping
from penstock.protocols.lrose.ds_message import Category, CommonPart, DsMessage, ErrorCode
from penstock.protocols.lrose.fmq_messages import (
    Messages,
    decode_messages,
    encode_message,
    encode_messages,
)
from penstock.protocols.lrose.fmq_queues import ServedWide
from penstock.protocols.lrose.fmq_wire import Init, Op, OpenMode, encode_init
from penstock.protocols.lrose.sku import HTTP_REPLY, Frame, encode
from penstock.queue.classic.creation import open_device
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.options import WideOptions
from protocols.lrose.serving import Caller, served
from support.until import until

INIT = Init("fmqp:://h:1:q", OpenMode.READ_ONLY, OpenMode.READ_ONLY)
READ = DsMessage(Op.READ)


def is_closed(caller: Caller) -> bool:
    caller.socket.settimeout(20)
    try:
        return caller.socket.recv(1 << 20) == b""
    except ConnectionResetError:
        return True


def test_a_ping_is_answered_with_the_process_and_the_clients_are_counted(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert ping("127.0.0.1", server.port) == os.getpid()
        with Caller(server.port) as caller:
            caller.ask(READ)
            until(lambda: client_count("127.0.0.1", server.port) == 2)
        assert server.statistics().pings >= 2
    with pytest.raises(ConnectionLost):
        ping("127.0.0.1", server.port, 1)


def test_an_unknown_command_and_an_unknown_category_are_errors(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as caller:
        reply = caller.ask(DsMessage(9, category=Category.SERVER_STATUS))
        assert reply.error == ErrorCode.UNKNOWN_COMMAND
        reply = caller.ask(DsMessage(Op.READ, category=5))
        assert reply.error == ErrorCode.BAD_MESSAGE
        reply = caller.ask(DsMessage(12345))
        assert (reply.type, reply.sub_type, reply.error) == (Op.REPLY, 43000, -1)
        reply = caller.ask(READ)
        assert (reply.sub_type, reply.error) == (Op.READ, -1)
        assert "INIT" in (reply.error_text or "")


def test_what_gets_to_no_service_is_refused_by_a_reply_of_no_type(tmp_path: Path) -> None:
    with served(tmp_path, max_clients=1) as server, Caller(server.port) as caller:
        reply = caller.ask(DsMessage(Op.READ, category=5))
        assert (reply.type, reply.sub_type, reply.category) == (-1, -1, Category.GENERIC)
        with Caller(server.port) as another:
            assert (reply := another.ask(READ)).error == ErrorCode.SERVICE_DENIED
            assert (reply.type, reply.sub_type) == (-1, -1)
        caller.socket.sendall(encode(Frame(1, 1, b"no message")))
        reply = caller.hear()
        assert (reply.type, reply.error) == (-1, ErrorCode.BAD_MESSAGE)


@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_a_message_that_is_too_large_keeps_no_other_of_its_request_out(
    layout: str, tmp_path: Path
) -> None:
    """LROSE's clients that write many at once drop them all, whatever the answer."""
    sizes = [10, 9000, 9000, 20, 30, 9000]
    write = encode_messages(
        DsMessage(Op.WRITE), [bytes(size) for size in sizes], types=1, subtypes=0
    )
    with served(tmp_path, layout=layout) as server, Caller(server.port) as caller:
        init = INIT._replace(open_mode=OpenMode.CREATE, open_position=0, buf_size=8000)
        assert caller.ask(encode_init(init)).error == 0
        reply = caller.ask(DsMessage.from_bytes(write))
        assert (reply.sub_type, reply.error) == (Op.WRITE, -1)
        assert "9,000" in (reply.error_text or "")
        only = encode_messages(DsMessage(Op.WRITE), [bytes(9000)], types=1, subtypes=0)
        assert caller.ask(DsMessage.from_bytes(only)).error == -1
    with open_reader(f"fmq:{tmp_path}/q", start="start") as reader:
        assert [len(message.payload) for message in reader.available()] == [10, 20, 30]


def test_shutdown_is_not_answered_and_does_nothing(tmp_path: Path) -> None:
    shutdown = DsMessage(2, category=Category.SERVER_STATUS)
    with served(tmp_path) as server:
        with Caller(server.port) as caller:
            caller.say(shutdown)
            assert is_closed(caller)
        assert ping("127.0.0.1", server.port) == os.getpid()
        assert not server.stop_requested.is_set()
    with served(tmp_path, allow_shutdown=True) as server, Caller(server.port) as caller:
        assert caller.ask(shutdown).error == 0
        assert server.stop_requested.is_set()


def test_a_path_outside_of_the_root_is_refused_whatever_is_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    create(f"fmq:{tmp_path}/secret?layout=classic")
    (root / "way").symlink_to(tmp_path)
    with served(root) as server, Caller(server.port) as caller:
        for name in ("../secret", f"{tmp_path}/secret", "way/secret", "/etc/passwd", "a/../../x"):
            for mode in OpenMode:
                request = encode_init(INIT._replace(url=f"fmqp:://h:1:{name}", open_mode=mode))
                reply = caller.ask(request)
                assert reply.error == -1
                assert str(tmp_path) not in (reply.error_text or "").replace(name, "")
    assert [path.name for path in root.iterdir()] == ["way"]


def test_limits_of_new_queues_hold(tmp_path: Path) -> None:
    with served(tmp_path, max_queue=10_000, max_slots=10) as server, Caller(server.port) as caller:
        init = INIT._replace(open_mode=OpenMode.READ_WRITE, num_slots=5, buf_size=100)
        for wrong in (
            init._replace(num_slots=11),
            init._replace(num_slots=0),
            init._replace(buf_size=10_001),
            init._replace(buf_size=-1),
            init._replace(open_mode=5),
            init._replace(open_mode=-1),
        ):
            assert caller.ask(encode_init(wrong)).error == -1
    assert not list(tmp_path.iterdir())


def test_a_server_for_reading_takes_no_writers(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic")
    with served(tmp_path, read_only=True) as server:
        with pytest.raises(RequestRefused, match="reading only"):
            open_writer(f"{server.url}/q")
        open_reader(f"{server.url}/q").close()


def test_one_client_too_many_is_told_so(tmp_path: Path) -> None:
    with served(tmp_path, max_clients=2) as server:
        with Caller(server.port) as one, Caller(server.port) as two:
            one.ask(READ), two.ask(READ)
            with Caller(server.port) as three:
                assert three.ask(READ).error == ErrorCode.SERVICE_DENIED
                assert is_closed(three)
            assert ping("127.0.0.1", server.port) == os.getpid()
        until(lambda: server.statistics().clients == 0)
        with Caller(server.port) as four:
            assert four.ask(READ).error == -1
        assert server.statistics().clients_denied == 2


def test_a_length_beyond_the_limit_ends_the_connection_at_once(tmp_path: Path) -> None:
    with served(tmp_path, max_message=2000) as server:
        for data in (
            b"\xf0" * 8 + struct.pack(">3i", 1, 2001, 1),
            b"\xf6" * 8 + struct.pack(">3q", 1, 2**62, 1),
            b"GET / HTTP/1.1\r\n" + b"x" * 3000,
            os.urandom(100),
            encode(Frame(1, 1, b"no message")),
        ):
            with Caller(server.port) as caller:
                caller.socket.sendall(data)
                assert caller.hear().error == ErrorCode.BAD_MESSAGE
                assert is_closed(caller)
        until(lambda: server.statistics().clients == 0)
        assert server.held == 0
        assert server.statistics().clients_malformed == 5


def test_all_clients_together_may_hold_only_so_much(tmp_path: Path) -> None:
    part = b"\xf0" * 8 + struct.pack(">3i", 1, 50_000, 1) + bytes(40_000)
    with served(tmp_path, max_message=100_000, max_held=100_000) as server:
        callers = [Caller(server.port) for _ in range(4)]
        for caller in callers:
            caller.socket.sendall(part)
        until(lambda: server.statistics().clients_malformed >= 2)
        assert server.held <= 100_000
        for caller in callers:
            caller.socket.close()
        until(lambda: server.held == 0)


def test_silent_clients_are_cut_off_and_those_in_the_middle_of_a_frame(tmp_path: Path) -> None:
    with served(tmp_path, first_message="300ms", idle="800ms") as server:
        with Caller(server.port) as mute, Caller(server.port) as stuck, Caller(server.port) as idle:
            idle.ask(READ)
            stuck.socket.sendall(b"\xf0" * 8)
            assert is_closed(mute)
            assert is_closed(stuck)
            assert is_closed(idle)
        assert server.statistics().clients_timed_out == 3


def test_a_client_that_takes_no_replies_holds_up_nobody_and_no_memory(tmp_path: Path) -> None:
    with served(tmp_path, max_queue=1 << 27) as server:
        url = f"{server.url}/q"
        with open_writer(url, slots=2000, size="60M") as writer:
            writer.write_many([bytes(50_000)] * 1000)
            with Caller(server.port) as deaf:
                deaf.ask(encode_init(INIT))
                deaf.ask(DsMessage(Op.SEEK, 0))
                for _ in range(200):  # 50 MB of replies
                    deaf.say(READ)
                began = time.monotonic()
                for _ in range(20):
                    writer.write(b"quick")
                assert time.monotonic() - began < 10
                sent = server.statistics().bytes_out
                time.sleep(0.3)
                assert server.statistics().bytes_out - sent < 30e6
                until(lambda: server.unsent > 0)
                assert server.unsent < 3e6


def test_a_lock_that_somebody_holds_stops_that_writer_only(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/locked?layout=classic")
    create(f"fmq:{tmp_path}/free?layout=classic")
    with (
        served(tmp_path, lock_timeout="300ms") as server,
        open_writer(f"{server.url}/locked") as stopped,
        open_writer(f"{server.url}/free") as free,
    ):
        device = open_device(f"{tmp_path}/locked", writable=True)
        try:
            with device.locked(5):
                connection = stopped._link._connection  # type: ignore[attr-defined]
                request = encode_message(DsMessage(Op.WRITE), b"waits", 0, 0, uncompressed_len=5)
                connection.send(43000, request)
                began = time.monotonic()
                for _ in range(20):
                    free.write(b"quick")
                assert time.monotonic() - began < 5
                reply = DsMessage.from_bytes(connection.receive(20).payload)
                assert reply.error == -1
                connection.send(43000, request)
                time.sleep(0.05)
            assert DsMessage.from_bytes(connection.receive(20).payload).error == 0
        finally:
            device.close()
        with open_reader(f"{server.url}/locked") as reader:
            assert [m.payload for m in reader.available()] == [b"waits"]


def test_a_blocking_writer_waits_for_its_reader_and_others_go_on(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}/q"
        with open_writer(url, slots=5, blocking=True) as writer, open_reader(url) as reader:
            writer.write_many([b"%d" % n for n in range(4)])
            connection = writer._link._connection  # type: ignore[attr-defined]
            more = [b"%d" % n for n in range(4, 20)]
            connection.send(43000, encode_messages(DsMessage(Op.WRITE), more, types=0, subtypes=0))
            found: list[bytes] = []
            while len(found) < 20:
                message = reader.read(20)
                assert message is not None
                found.append(message.payload)
            assert found == [b"%d" % n for n in range(20)]
            assert reader.statistics().lost == 0
            assert DsMessage.from_bytes(connection.receive(20).payload).error == 0


def test_requests_behind_an_http_header_are_answered_behind_one(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as caller:
        post = b"POST / HTTP/1.0\r\nHost: x\r\n\r\n"
        caller.socket.sendall(post + encode(Frame(43000, 1, READ.to_bytes())))
        assert caller.socket.recv(len(HTTP_REPLY), socket.MSG_WAITALL) == HTTP_REPLY
        assert caller.hear().error == -1


def test_two_hundred_clients_are_served_at_once(tmp_path: Path) -> None:
    with served(tmp_path, max_clients=250) as server:
        create(f"{server.url}/q", slots=500)
        callers = [Caller(server.port) for _ in range(200)]
        try:
            for caller in callers:
                caller.say(encode_init(INIT))
            for caller in callers:
                assert caller.hear().error == 0
            assert server.statistics().clients >= 200
            with open_writer(f"{server.url}/q") as writer:
                writer.write_many([b"for all"] * 3)
            for caller in callers:
                caller.say(READ)
            for caller in callers:
                assert len(caller.hear().parts) == 6
        finally:
            for caller in callers:
                caller.socket.close()
        until(lambda: server.statistics().clients == 0)
        books = server.statistics()
        assert books.requests == books.replies + books.unanswered


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with (
        served(tmp_path) as server,
        pytest.raises(StorageError, match="listening"),
        served(tmp_path, port=server.port),
    ):
        pass


def test_a_server_stops_while_clients_wait(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        create(f"{server.url}/q")
        with Caller(server.port) as waiting, Caller(server.port) as idle:
            waiting.ask(encode_init(INIT._replace(is_ours=True)))
            waiting.say(DsMessage(Op.READ, -1, 20_000))
            idle.ask(READ)
            time.sleep(0.1)
            began = time.monotonic()
            server.close()
            assert time.monotonic() - began < 5
            assert is_closed(waiting)
            assert is_closed(idle)
        books = server.statistics()
        assert books.requests == books.replies + books.unanswered


def test_a_connection_that_is_not_answered_in_time_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with Connection("127.0.0.1", port, timeout=0.2) as connection:
            began = time.monotonic()
            with pytest.raises(ConnectionLost, match="no answer"):
                connection.call(0, DsMessage(0))
            assert time.monotonic() - began < 5
            assert connection.is_sent


def test_the_text_of_an_error_is_for_people(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as caller:
        reply = caller.ask(encode_init(INIT))
        part = reply.part(CommonPart.ERR_STRING)
        assert part is not None
        assert part.data.endswith(b"\0")
        assert part.text.startswith("there is no queue q")


def test_a_client_of_lroses_that_waits_for_a_queue_gets_it_when_it_is_there(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as one, Caller(server.port) as two:
        one.say(encode_init(INIT._replace(open_mode=OpenMode.BLOCKING_READ_ONLY)))
        two.say(encode_init(INIT._replace(open_mode=OpenMode.BLOCKING_READ_WRITE)))
        time.sleep(0.1)
        create(f"fmq:{tmp_path}/q?layout=classic")
        assert one.hear().error == 0
        assert two.hear().error == 0


def test_a_client_of_lroses_waits_while_a_queue_is_half_made(tmp_path: Path) -> None:
    with served(tmp_path) as server, Caller(server.port) as one, Caller(server.port) as two:
        create(f"fmq:{tmp_path}/q?layout=classic")
        buffer = (tmp_path / "q.buf").rename(tmp_path / "buffer")
        one.say(encode_init(INIT._replace(open_mode=OpenMode.BLOCKING_READ_ONLY)))
        two.say(encode_init(INIT._replace(open_mode=OpenMode.BLOCKING_READ_WRITE)))
        time.sleep(0.1)
        buffer.rename(tmp_path / "q.buf")
        assert one.hear().error == 0
        assert two.hear().error == 0


def test_a_wide_queue_that_another_process_writes_to_stops_only_its_own_clients(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as server, open_writer(f"fmq:{tmp_path}/wide") as holder:
        holder.write(b"mine")
        with open_writer(f"{server.url}/free") as free, Caller(server.port) as caller:
            init = INIT._replace(url="wide", open_mode=OpenMode.READ_WRITE)
            caller.say(encode_init(init))
            began = time.monotonic()
            free.write(b"quick")
            assert time.monotonic() - began < 0.8
            assert "one writer at a time" in (caller.hear().error_text or "")
        with open_reader(f"{server.url}/wide") as reader:
            assert len(list(reader.available())) == 1


def test_writers_of_a_wide_queue_go_over_to_the_one_that_a_client_makes_anew(
    tmp_path: Path,
) -> None:
    with served(tmp_path, layout="wide") as server:
        url = f"{server.url}/q"
        with open_writer(url) as one:
            one.write(b"old")
            with open_writer(url, create="always") as two:
                two.write(b"new")
                one.write(b"newer")
        with open_reader(f"fmq:{tmp_path}/q") as reader:
            assert [m.payload for m in reader.available()] == [b"new", b"newer"]


class _Recreating(list[bytes]):
    """Payloads of which the third is taken only after another client has recreated the queue."""

    path = ""

    def __getitem__(self, place: Any) -> Any:
        if place == 2 and self.path:
            path, self.path = self.path, ""
            options = WideOptions(slots=16, size=8000, writers="many")
            create_from_options(path, options, replace=True, writers_follow=True)
        return super().__getitem__(place)


def test_messages_before_one_that_is_too_large_are_appended_once_to_a_wide_queue_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = [b"old 0", b"old 1", b"new 2", b"new 3", bytes(9000), b"new 5"]
    write = encode_messages(DsMessage(Op.WRITE), payloads, types=range(6), subtypes=0)
    append = ServedWide.append

    def append_slowly(
        queue: ServedWide, messages: Messages, payloads: Sequence[bytes], first: int
    ) -> int:
        monkeypatch.undo()
        slow = _Recreating(payloads)
        slow.path = queue.path
        return append(queue, messages, slow, first)

    monkeypatch.setattr(ServedWide, "append", append_slowly)
    with served(tmp_path, layout="wide") as server, Caller(server.port) as caller:
        init = INIT._replace(open_mode=OpenMode.CREATE, open_position=0, buf_size=8000)
        assert caller.ask(encode_init(init)).error == 0
        assert "9,000" in (caller.ask(DsMessage.from_bytes(write)).error_text or "")
    with open_reader(f"fmq:{tmp_path}/q", start="start") as reader:
        assert [m.payload for m in reader.available()] == [b"new 2", b"new 3", b"new 5"]


@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_messages_before_a_damaged_one_are_sent_before_the_error(
    tmp_path: Path, layout: str
) -> None:
    sent = [b"message %d" % number for number in range(6)]
    more = "&crc=true" if layout == "wide" else ""
    with open_writer(f"fmq:{tmp_path}/q?layout={layout}{more}") as writer:
        writer.write_many(sent)
    file = tmp_path / ("q.fmq" if layout == "wide" else "q.buf")
    content = bytearray(file.read_bytes())
    cookie_size = 0 if layout == "wide" else 8
    content[content.index(sent[4]) - cookie_size] ^= 0xFF
    file.write_bytes(content)
    with served(tmp_path) as server:
        for start in (0, 2):
            with open_reader(f"{server.url}/q", start=start) as reader:
                assert [message.payload for message in reader.read_many(10)] == sent[start:4]
                for _ in range(2):
                    with pytest.raises(RequestRefused, match="damaged"):
                        reader.read_many(10)
        with open_reader(f"{server.url}/q?damaged=skip") as reader:
            assert [m.payload for m in reader.available()] == [*sent[:4], sent[5]]
            assert reader.statistics().losses == (Loss(4, 4, DropReason.DAMAGED),)


def test_a_queue_that_is_made_anew_before_the_first_read_is_read_from_its_start(
    tmp_path: Path,
) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=10&size=1000"
    with open_writer(url) as writer:
        writer.write_many([b"old"] * 5)
    with served(tmp_path) as server, Caller(server.port) as caller:
        # As LROSE's programs open a queue that they may also write to.
        init = INIT._replace(open_mode=OpenMode.READ_WRITE, open_position=OpenMode.READ_WRITE)
        assert not caller.ask(encode_init(init)).error
        create(url, replace=True)
        with open_writer(url) as writer:
            writer.write_many([b"new 0", b"new 1"])
        caller.say(READ)
        _, messages = decode_messages(caller.hear_frame().payload)
        assert messages.payloads == [b"new 0", b"new 1"]
