"""A client may make queues, also in the place of queues; it may not destroy anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.endpoints import create, open_reader, open_writer
from penstock.protocols.lrose.errors import RequestRefused
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
