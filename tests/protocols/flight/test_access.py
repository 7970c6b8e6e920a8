"""Who gets in, how many, and what comes of garbage: a clear error, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import flight

from penstock import Message, create, describe, open_reader, open_writer
from penstock.core.batch import BATCH_SCHEMA, batch_from_messages
from penstock.core.errors import (
    ConnectionLost,
    InvalidOption,
    InvalidURL,
    NotFound,
    PenstockError,
    StorageError,
)
from penstock.core.url import URL
from penstock.protocols.flight import AccessRefused, ServerBusy
from penstock.protocols.flight.access import Root, check_size
from penstock.protocols.flight.client import TOKEN_VARIABLE, Connection, Target, list_streams
from penstock.protocols.flight.server import FlightServer
from penstock.protocols.flight.wire import (
    ActionKind,
    Kind,
    OpenWriter,
    Piece,
    Put,
    Take,
    WriterOpened,
    encode_name,
)
from protocols.flight.serving import TOKEN, served
from support.waiting import SOON, background

ID = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def filled(root: Path, server: FlightServer) -> FlightServer:
    with open_writer(f"fmq:{root}/filled") as writer:
        writer.write(b"x")
    return server


def raw(server: FlightServer) -> Any:
    return flight.FlightClient(f"grpc://127.0.0.1:{server.port}")


def test_a_server_that_never_answers_is_not_listed_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"flight://127.0.0.1:{silent.getsockname()[1]}"
        call = partial(list_streams, url, call_timeout="500ms")
        with background(call) as listing, pytest.raises(ConnectionLost):
            listing.result(SOON)


# --- tokens ---------------------------------------------------------------------------------------


def test_a_token_lets_in_who_has_it(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another")
    create(f"fmq:{tmp_path}/a")
    with served(tmp_path, token_file=token_file) as server:
        url = f"{server.url}a"
        given: list[dict[str, Any]] = [{}, {"token_file": str(wrong)}]
        for options in given:
            for call in (open_reader, open_writer, describe, create):
                with pytest.raises(AccessRefused) as caught:
                    call(url, **options)
                assert "token_file" in str(caught.value.hint)
            with pytest.raises(AccessRefused):
                list_streams(server.url, **options)
        with open_writer(url, token_file=str(token_file)) as writer:
            writer.write(b"x")
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        with open_reader(url) as reader:
            assert reader.read(0) is not None
        assert server.statistics().messages_in == 1


def test_a_token_is_shown_nowhere(
    tmp_path: Path, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    create(f"fmq:{tmp_path}/a")
    with served(tmp_path, token_file=token_file) as server:
        with open_reader(f"{server.url}a", token_file=str(token_file)) as reader:
            target = Target.of(URL.parse(f"{server.url}a?token_file={token_file}"))
            shown = f"{reader!r} {vars(reader)!r} {Connection(target)!r} {target!r} {server!r}"
        with pytest.raises(AccessRefused) as caught:
            open_reader(f"{server.url}a")
    assert TOKEN not in shown + caplog.text + str(caught.value)


@pytest.mark.parametrize("content", ["", "\n", "two words", "ümlaut", "x" * 5000])
def test_a_token_that_cannot_be_one_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(InvalidOption) as caught, served(tmp_path, token_file=file):
        pass
    assert caught.value.option == "token_file"
    assert not content.strip() or content not in str(caught.value)
    with pytest.raises(InvalidOption):
        open_reader(f"flight://127.0.0.1:1/a?token_file={file}")


def test_a_missing_token_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="reading"):
        open_reader(f"flight://127.0.0.1:1/a?token_file={tmp_path}/none")


def test_more_than_one_token_is_none(tmp_path: Path, token_file: Path) -> None:
    with served(tmp_path, token_file=token_file) as server:
        header = (b"authorization", f"Bearer {TOKEN}".encode())
        with raw(server) as client:
            options = flight.FlightCallOptions(headers=[header])
            assert len(list(client.list_actions(options))) == len(ActionKind)
            options = flight.FlightCallOptions(headers=[header, header])
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.list_actions(options))


def test_others_are_not_served_without_a_token(tmp_path: Path, token_file: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with (
            pytest.raises(InvalidOption, match="other machines") as caught,
            served(tmp_path, host=host),
        ):
            pass
        assert "--insecure" in str(caught.value.hint)
    with served(tmp_path, host="0.0.0.0", insecure=True):
        pass
    with served(tmp_path, host="0.0.0.0", token_file=token_file):
        pass


# --- TLS ------------------------------------------------------------------------------------------


def test_everything_works_encrypted(
    tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    with served(tmp_path, tls_cert=cert, tls_key=key, token_file=token_file) as server:
        assert server.url.startswith("flight+tls://")
        options = {"ca": str(cert), "token_file": str(token_file)}
        with open_writer(f"{server.url}a", **options) as writer:
            writer.write_many([b"x"] * 1000)
        with open_reader(f"flight://localhost:{server.port}/a", tls=True, **options) as reader:
            assert len(list(reader.available())) == 1000
        assert describe(f"{server.url}a", **options).count == 1000
        assert [listed.messages for listed in list_streams(server.url, **options)] == [1000]
        with pytest.raises(AccessRefused):
            describe(f"{server.url}a", ca=cert)


def test_a_server_that_is_not_trusted_is_not_talked_to(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    with served(tmp_path, tls_cert=cert, tls_key=key) as server:
        with pytest.raises(ConnectionLost):
            describe(f"{server.url}a", call_timeout="2s")
        with pytest.raises(ConnectionLost) as caught:
            describe(f"flight://127.0.0.1:{server.port}/a", call_timeout="2s")
        assert "flight+tls" in str(caught.value.hint)


def test_certificate_and_key_come_together(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("x")
    with pytest.raises(InvalidOption, match="together"), served(tmp_path, tls_cert=file):
        pass


# --- limits ---------------------------------------------------------------------------------------


def test_there_is_a_limit_of_clients(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/a")
    with served(tmp_path, max_clients=2) as server:
        readers = [open_reader(f"{server.url}a", hold=f"n{i}") for i in range(2)]
        for _ in range(3):
            with pytest.raises(ServerBusy) as caught:
                describe(f"{server.url}a")
            assert caught.value.limit == 2
        assert server.statistics().refused == 3
        readers[0].close()
        deadline = time.monotonic() + SOON
        while server.statistics().clients > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert describe(f"{server.url}a").count == 0
        readers[1].close()


def test_many_clients_read_and_write_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with served(tmp_path) as server:

        def work(own: int) -> None:
            try:
                url = f"{server.url}s{own % 4}"
                with open_writer(f"{url}?size=4M") as writer:
                    for i in range(10):
                        writer.write_many([b"%d %d" % (own, i)] * 20)
                with open_reader(url) as reader:
                    mine = [m for m in reader.available() if m.payload.startswith(b"%d " % own)]
                assert len(mine) == 200
            except BaseException as error:  # noqa: BLE001 - whatever it is
                failures.append(error)

        threads = [threading.Thread(target=work, args=(own,)) for own in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        books = server.statistics()
    assert not failures
    assert (books.messages_in, books.clients, books.refused) == (24 * 200, 0, 0)
    assert books.clients_seen == 48


def test_a_client_may_not_make_a_queue_that_is_too_large(tmp_path: Path) -> None:
    with served(tmp_path, max_queue="1M") as server:
        for call in (create, open_writer):
            with pytest.raises(InvalidOption, match="at most"):
                call(f"{server.url}a?size=2M")
            with pytest.raises(InvalidOption, match="at most"):
                call(f"{server.url}a?kind=log&segment=1G")
        assert list(tmp_path.iterdir()) == []


def test_a_server_may_be_read_only(tmp_path: Path) -> None:
    with open_writer(f"fmq:{tmp_path}/a") as writer:
        writer.write(b"x")
    with served(tmp_path, read_only=True) as server:
        with open_reader(f"{server.url}a") as reader:
            assert reader.read(0) is not None
        for call in (
            lambda: open_writer(f"{server.url}a"),
            lambda: create(f"{server.url}b"),
            lambda: create(f"{server.url}a", replace=True),
            lambda: open_reader(f"{server.url}a", hold="archive"),
        ):
            with pytest.raises(AccessRefused, match="read-only"):
                call()
        assert describe(f"{server.url}a").count == 1


def test_a_port_that_is_taken_is_an_error(server: FlightServer, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f":{server.port}"), served(tmp_path, port=server.port):
        pass


def test_a_stalled_client_does_not_keep_the_server_from_stopping(tmp_path: Path) -> None:
    with open_writer(f"fmq:{tmp_path}/a?size=64M") as writer:
        writer.write_many([bytes(100_000)] * 500)
    with served(tmp_path) as server:
        reader = open_reader(f"{server.url}a", retry=0)
        assert reader.read(0) is not None  # and no more: the rest stays in the wire
        time.sleep(0.2)
        began = time.monotonic()
        server.stop(grace=0.5)
        assert time.monotonic() - began < SOON
        reader.close()


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["../secret", "%2e%2e/secret", "..%2Fsecret", "a/../../secret", "/etc/passwd", "link/secret"],
)
def test_nobody_gets_out_of_the_root(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with open_writer(f"fmq:{tmp_path}/secret") as writer:
        writer.write(b"secret")
    with served(folder) as server:
        for call in (open_reader, open_writer, describe, create):
            with pytest.raises(InvalidURL) as caught:
                call(f"{server.url}{path}")
            assert str(tmp_path) not in str(caught.value)
    assert describe(f"fmq:{tmp_path}/secret").count == 1


def test_errors_do_not_tell_the_servers_paths(filled: FlightServer, root: Path) -> None:
    (root / "broken.fmq").write_bytes(bytes(100_000))
    with pytest.raises(PenstockError) as caught:
        describe(f"{filled.url}broken")
    assert "broken" in str(caught.value)
    assert str(root) not in f"{caught.value} {caught.value.hint} {vars(caught.value)}"


# --- garbage --------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from(["ticket", "action", "command", "path"]))
def test_fuzz_garbage_gets_an_error_and_the_server_goes_on(
    filled: FlightServer, data: bytes, where: str
) -> None:
    with raw(filled) as client, pytest.raises(flight.FlightError) as caught:  # noqa: PT012
        if where == "ticket":
            client.do_get(flight.Ticket(data)).read_chunk()
        elif where == "action":
            list(client.do_action(flight.Action("locate", data)))
        elif where == "command":
            stream, _ = client.do_put(flight.FlightDescriptor.for_command(data), BATCH_SCHEMA)
            stream.close()
        else:
            name = data.decode(errors="replace")  # Flight itself takes nothing else
            client.get_flight_info(flight.FlightDescriptor.for_path(name))
    assert "internal" not in str(caught.value).lower()


def test_the_server_is_whole_after_garbage(filled: FlightServer) -> None:
    with raw(filled) as client:
        for ticket in (b"", b"{}", b"x" * 1_000_000, b'{"call": "take"}', b"[" * 10_000):
            with pytest.raises(flight.FlightServerError):
                client.do_get(flight.Ticket(ticket)).read_chunk()
        with pytest.raises(flight.FlightServerError, match="type should be"):
            list(client.do_action(flight.Action("shutdown", b"")))
    with socket.create_connection(("127.0.0.1", filled.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
    assert describe(f"{filled.url}filled").count == 1


def test_batches_that_are_not_right_are_refused(filled: FlightServer, root: Path) -> None:
    good = batch_from_messages([Message(0, 1, 1, 0, 0, None, None, b"x")])
    two = batch_from_messages([Message(0, 1, 1, 0, 0, None, None, b"x")] * 2)
    # Both ends are right; what lies between would be read from elsewhere in the memory.
    offsets = pa.py_buffer(struct.pack("<3i", 0, 1 << 30, 1))
    payloads = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"x")])
    lying = pa.RecordBatch.from_arrays([*two.columns[:-1], payloads], schema=BATCH_SCHEMA)
    nulls = pa.RecordBatch.from_arrays(
        [*good.columns[:-1], pa.array([None], pa.binary())],
        schema=BATCH_SCHEMA.set(7, pa.field("payload", pa.binary())),
    )
    other = pa.record_batch({"payload": [b"x"]})
    with raw(filled) as client:
        for batch, number in ((other, 1), (nulls, 1), (lying, 1)):
            with pytest.raises(flight.FlightError):
                _put(client, batch, Piece(number=number).to_bytes())
        for metadata in (b"", b"{}", b"garbage", Piece(number=7).to_bytes()):
            with pytest.raises(flight.FlightServerError):
                _put(client, good, metadata)
        _put(client, good, Piece(number=1).to_bytes())
    assert describe(f"fmq:{root}/filled").count == 2


def _put(client: Any, batch: Any, metadata: bytes) -> None:
    question = OpenWriter(stream="filled", writer=ID).to_bytes()
    action = flight.Action(ActionKind.OPEN_WRITER.value, question)
    opened = WriterOpened.from_bytes(next(iter(client.do_action(action))).body.to_pybytes())
    command = Put(writer=ID, instance=opened.instance, attempt=1).to_bytes()
    stream, answers = client.do_put(flight.FlightDescriptor.for_command(command), batch.schema)
    try:
        stream.write_with_metadata(batch, metadata)
        stream.done_writing()
        answers.read()
    finally:
        stream.close()


def test_a_plain_flight_client_can_list_and_read(filled: FlightServer) -> None:
    with raw(filled) as client:
        found = {b"/".join(info.descriptor.path): info for info in client.list_flights()}
        info = found[b"filled"]
        assert info.total_records >= 1
        assert info.schema == BATCH_SCHEMA
        table = client.do_get(info.endpoints[0].ticket).read_all()
        assert table.column("payload")[0].as_py() == b"x"
        info = client.get_flight_info(flight.FlightDescriptor.for_path("filled"))
        assert json.loads(info.endpoints[0].ticket.ticket)["stream"] == "filled"


@pytest.mark.parametrize(
    "end", ["x" * 3100, "a?type=%ff", "a?" + "&".join(f"o{i}=1" for i in range(70))]
)
def test_what_cannot_be_said_to_a_server_is_refused_here(end: str) -> None:
    with pytest.raises(InvalidURL):
        open_reader(f"flight://127.0.0.1:1/{end}")


@pytest.mark.parametrize("url", ["flight:/a", "flight://host", "flight://host:1/", "flight:///a"])
def test_a_url_without_host_or_stream_is_refused(url: str) -> None:
    with pytest.raises(InvalidURL) as caught:
        open_reader(url)
    assert "flight://host" in str(caught.value.hint)


@pytest.mark.parametrize(
    "stream",
    ["fmq:{}", "fmq:{}?compress=zstd", "fmq:{}?layout=classic", "log:{}?segment_slots=4"],
)
def test_a_read_only_server_changes_no_byte_of_what_it_reads(tmp_path: Path, stream: str) -> None:
    blocking = {"blocking": True} if "classic" in stream else {}
    with open_writer(stream.format(tmp_path / "a"), **blocking) as writer:
        writer.write_many([b"%d" % i for i in range(10)])
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    with served(tmp_path, read_only=True) as server:
        url = f"{server.url}a"
        with open_reader(url) as reader:
            assert len(list(reader.available())) == 10
            assert reader.read(0.4) is None  # sleeps over there
            for place in (3, "end", "last", "start"):
                reader.seek(place)
            assert reader.read(0) is not None
            now = [(path.stat().st_mtime_ns, path.read_bytes()) for path in files]
        assert describe(url).count == 10
        for name in ("hold", "cursor"):
            with pytest.raises(AccessRefused, match="read-only"):
                open_reader(url, **{name: "archive"})
            options = {name: "archive"}
            ticket = Take(stream="a", reader="0" * 32, options=options).to_bytes()
            client = flight.connect(f"grpc+tcp://127.0.0.1:{server.port}")
            with pytest.raises(flight.FlightUnauthorizedError, match="read-only"):
                client.do_get(flight.Ticket(ticket)).read_chunk()
            client.close()
    assert now == before
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in files] == before
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files


def test_a_reader_of_a_read_only_server_hears_of_new_messages(tmp_path: Path) -> None:
    with (
        open_writer(f"fmq:{tmp_path}/a") as writer,
        served(tmp_path, read_only=True) as server,
        open_reader(f"{server.url}a") as reader,
    ):
        with background(reader.read, SOON) as waiting:
            time.sleep(0.2)
            writer.write(b"x")
            assert isinstance(waiting.result(SOON), Message)
        assert describe(f"fmq:{tmp_path}/a").details["readers"] == []


# --- streams below the root -----------------------------------------------------------------------


@pytest.fixture
def served_root(tmp_path: Path) -> Root:
    folder = tmp_path / "root"
    folder.mkdir()
    create(f"fmq:{folder}/radar/beams?slots=8&size=4k")
    create(f"log:{folder}/radar/archive?segment=64k&segment_slots=16")
    create(f"fmq:{folder}/old?layout=classic&slots=8&size=4k")
    create(f"fmq:{tmp_path}/secret?slots=8&size=4k")
    return Root(folder)


def test_the_kind_is_what_is_there(served_root: Root) -> None:
    assert served_root.place("radar/beams", None).kind == "fmq"
    assert served_root.place("radar/archive", None).kind == "log"
    assert served_root.place("old", None).kind == "fmq"
    with pytest.raises(InvalidOption, match="of kind log"):
        served_root.place("radar/archive", Kind.QUEUE)


def test_what_is_missing_is_a_queue_unless_said_otherwise(served_root: Root) -> None:
    assert served_root.place("new", None, may_make=True).kind == "fmq"
    assert served_root.place("new", Kind.LOG, may_make=True).kind == "log"
    with pytest.raises(NotFound, match="no stream new"):
        served_root.place("new", None)


@pytest.mark.parametrize(
    "name",
    [
        "../secret", "radar/../../secret", "/etc/passwd", "", "/", "radar//beams", "./old",
        "%2e%2e/secret", "..%2fsecret", "radar%2f..%2f..%2fsecret", "a%00b", "a%0ab", "radar/",
        "radar/.", "x" * 300, "/".join("a" * 40), "y/" * 600 + "y", "%2fetc%2fpasswd",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(served_root: Root, name: str) -> None:
    with pytest.raises(InvalidURL):
        served_root.place(name, None, may_make=True)


def test_a_name_is_decoded_once(served_root: Root) -> None:
    place = served_root.place("%252e%252e", None, may_make=True)
    assert place.path == served_root.folder / "%2e%2e"


@pytest.mark.parametrize("ending", ["", ".fmq", ".stat", ".buf"])
def test_a_link_out_of_the_root_is_refused(served_root: Root, ending: str) -> None:
    (served_root.folder / f"link{ending}").symlink_to(served_root.folder.parent / f"secret{ending}")
    with pytest.raises(InvalidURL, match="leads out"):
        served_root.place("link", None, may_make=True)


def test_a_directory_that_is_a_link_out_of_the_root_is_refused(served_root: Root) -> None:
    (served_root.folder / "up").symlink_to(served_root.folder.parent)
    with pytest.raises(InvalidURL, match="leads out"):
        served_root.place("up/secret", None)
    assert "secret" not in [place.name for place in served_root.streams()]


def test_a_link_within_the_root_is_followed(served_root: Root) -> None:
    (served_root.folder / "alias").symlink_to(served_root.folder / "radar")
    assert served_root.place("alias/beams", None).kind == "fmq"


def test_a_segment_that_is_a_link_is_refused(served_root: Root, tmp_path: Path) -> None:
    (served_root.folder / "radar/archive/00000000000000000900.fmq").symlink_to(
        tmp_path / "secret.fmq"
    )
    with pytest.raises(InvalidURL, match="link"):
        served_root.place("radar/archive", None)


@pytest.mark.parametrize("name", ["shmem_10002", "radar/shmem_77"])
def test_shared_memory_is_not_below_the_root(served_root: Root, name: str) -> None:
    with pytest.raises(InvalidURL, match="shared memory"):
        served_root.place(name, None, may_make=True)


def test_a_segment_is_no_stream_of_its_own(served_root: Root) -> None:
    with pytest.raises(InvalidURL, match="inside of a log"):
        served_root.place(f"radar/archive/{0:020d}", None)


def test_streams_are_listed_by_name(served_root: Root) -> None:
    assert [place.name for place in served_root.streams()] == [
        "old",
        "radar/beams",
        "radar/archive",
    ]


def test_a_name_with_bytes_that_are_no_text_works(served_root: Root) -> None:
    path = os.fsdecode(b"r\xffdar")
    create(f"fmq:{served_root.folder}/r%ffdar?slots=8&size=4k")
    assert served_root.place(encode_name(path), None).path == served_root.folder / path
    assert "r%FFdar" in [place.name for place in served_root.streams()]


def test_the_root_itself_is_not_told(served_root: Root) -> None:
    assert served_root.hide(f"no queue at {served_root.folder}/radar/x") == "no queue at radar/x"
    assert (
        served_root.hide(f"looking at {served_root.folder}: refused")
        == "looking at the root: refused"
    )


@pytest.mark.parametrize("option", ["size", "segment", "slots", "segment_slots"])
def test_a_stream_that_is_too_large_is_refused(option: str) -> None:
    check_size({option: "100"}, 1 << 20)
    with pytest.raises(InvalidOption, match="at most"):
        check_size({option: "10M"}, 1 << 20)


@pytest.mark.parametrize("prefix", ["", "segment_"])
def test_the_slots_of_a_stream_count_for_its_size(prefix: str) -> None:
    size, slots = prefix.rstrip("_") or "size", f"{prefix}slots"
    check_size({size: "512K", slots: "8000"}, 1 << 20)
    with pytest.raises(InvalidOption, match="slots included"):
        check_size({size: "512K", slots: "8193"}, 1 << 20)  # which are rounded up to 16384
