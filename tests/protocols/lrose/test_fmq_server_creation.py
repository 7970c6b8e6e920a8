"""A client may make queues, also in the place of queues; it may not destroy anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.endpoints import create, open_reader, open_writer
from penstock.protocols.lrose.ds_client import RequestRefused
from penstock.protocols.lrose.fmq_wire import Init, OpenMode, encode_init
from protocols.lrose.serving import Caller, served

CREATE = Init("n", OpenMode.CREATE, OpenMode.CREATE, num_slots=10, buf_size=10_000)
READ_WRITE = CREATE._replace(open_mode=OpenMode.READ_WRITE)


@pytest.mark.parametrize("layout", ["classic", "wide"])
@pytest.mark.parametrize("files", [["n.stat"], ["n.buf"], ["n.stat", "n.buf"], ["n.fmq"]])
def test_files_that_are_no_queue_are_not_overwritten(
    tmp_path: Path, files: list[str], layout: str
) -> None:
    for name in files:
        (tmp_path / name).write_text(f"precious {name}")
    with served(tmp_path, layout=layout) as server, Caller(server.port) as caller:
        for init in (CREATE, READ_WRITE):
            reply = caller.ask(encode_init(init))
            is_beside = files == ["n.buf"] and layout == "wide"  # whose file is n.fmq
            assert (reply.error == 0) == is_beside
            assert str(tmp_path) not in (reply.error_text or "")
        with pytest.raises(RequestRefused, match="no queue") if not is_beside else served(tmp_path):
            open_writer(f"{server.url}/n", create="always").close()
    assert [(tmp_path / name).read_text() for name in files] == [f"precious {n}" for n in files]


@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_a_queue_is_made_anew_and_so_is_one_whose_maker_died_over_it(
    tmp_path: Path, layout: str
) -> None:
    create(f"fmq:{tmp_path}/n?layout={layout}")
    with open_writer(f"fmq:{tmp_path}/n?layout={layout}") as writer:
        writer.write(b"old")
    for name in ("half.stat", "half.buf"):
        (tmp_path / name).write_bytes(bytes(1000))
    with served(tmp_path) as server:
        for name in ("n", "half", "missing"):
            with open_writer(f"{server.url}/{name}", create="always") as writer:
                writer.write(b"new")
            with open_reader(f"{server.url}/{name}", "start") as reader:
                assert [m.payload for m in reader.available()] == [b"new"]


def test_the_insides_of_a_log_are_no_queues_of_the_server(tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/site/log") as writer:
        writer.write_many([b"kept"] * 64)
    before = {file.name: file.read_bytes() for file in (tmp_path / "site/log").iterdir()}
    segment = "site/log/00000000000000000000"
    with served(tmp_path, layout="wide") as server, Caller(server.port) as caller:
        for name in (segment, f"{segment}.fmq", "site/log/new", "site/log/deeper/new"):
            for mode in OpenMode:
                reply = caller.ask(encode_init(CREATE._replace(url=name, open_mode=mode)))
                assert "inside of a log" in (reply.error_text or "")
            for call in (open_reader, open_writer, create):
                with pytest.raises(RequestRefused, match="inside of a log"):
                    call(f"{server.url}/{name}")
            with pytest.raises(RequestRefused, match="inside of a log"):
                open_writer(f"{server.url}/{name}", create="always")
    assert {file.name: file.read_bytes() for file in (tmp_path / "site/log").iterdir()} == before
    with open_reader(f"log:{tmp_path}/site/log", "start") as reader:
        assert len(list(reader.available())) == 64


@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_the_largest_queue_is_counted_with_its_slots(tmp_path: Path, layout: str) -> None:
    with served(tmp_path, layout=layout, max_queue="1M") as server:
        with pytest.raises(RequestRefused, match="at most 1,048,576 bytes, slots included"):
            open_writer(f"{server.url}/n?slots=20000&size=900K")
        assert list(tmp_path.iterdir()) == []
        open_writer(f"{server.url}/n?slots=1000&size=900K").close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 20
