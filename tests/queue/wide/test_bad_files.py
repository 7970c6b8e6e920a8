"""Files that are no queues, or not now: a typed error, and what was stored is still there."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import (
    InvalidOption,
    PenstockError,
    Position,
    Unsupported,
    create,
    describe,
    open_reader,
    open_writer,
)
from penstock.core.batch import batch_from_messages
from penstock.core.errors import AlreadyExists, DamagedQueue, StorageError
from penstock.queue.endpoint import check
from penstock.queue.wide.writer import WideWriter
from support.small_disks import small_disk_at
from support.unprivileged import run_without_rights
from support.wide_files import SMALL, row, stored
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue


def writer_of(path: str, options: str = SMALL) -> WideWriter:
    return wide_writer(f"fmq:{path}?{options}")


# --- files that are no queues -----------------------------------------------------------------


def all_refuse(path: str, kind: type[PenstockError], match: str = ".") -> None:
    """Make sure that nobody opens what is at a path, and nobody changes it."""
    before = Path(f"{path}.fmq").read_bytes()
    for use in (
        lambda: open_reader(f"fmq:{path}"),
        lambda: open_reader(f"fmq:{path}?hold=archive"),
        lambda: open_writer(f"fmq:{path}"),
        lambda: open_writer(f"fmq:{path}?create=never"),
        lambda: describe(f"fmq:{path}"),
        lambda: check(f"fmq:{path}"),
    ):
        with pytest.raises(kind, match=match):
            use()
    with pytest.raises(AlreadyExists):
        create(f"fmq:{path}")
    assert Path(f"{path}.fmq").read_bytes() == before


def test_a_queue_of_a_newer_version_is_left_alone(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
    file = Path(f"{queue_path}.fmq")
    data = bytearray(file.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    file.write_bytes(data)
    all_refuse(queue_path, Unsupported, "version 2")
    with pytest.raises(Unsupported):
        create(f"fmq:{queue_path}", replace=True)
    assert file.read_bytes() == data
    data[8:12] = (1).to_bytes(4, "little")
    file.write_bytes(data)
    assert stored(queue_path) == [b"here"]


@pytest.mark.parametrize("length", [0, 1, 8, 100, 4095, 4096, 8192, 12_288, -1])
def test_a_file_that_was_cut_off_is_no_queue(queue_path: str, length: int) -> None:
    with writer_of(queue_path, f"{SMALL}&readers=4") as writer:
        writer.write(b"here")
    file = Path(f"{queue_path}.fmq")
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    all_refuse(queue_path, DamagedQueue)
    with pytest.raises(DamagedQueue) as caught:
        open_reader(f"fmq:{queue_path}")
    assert caught.value.hint
    file.write_bytes(whole)
    assert stored(queue_path) == [b"here"]
    file.write_bytes(whole[:length])
    with writer_of(queue_path, f"{SMALL}&create=always") as writer:  # asked for, so it goes
        writer.write(b"new")
    assert stored(queue_path) == [b"new"]


def test_a_file_longer_than_its_queue_is_a_queue(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
    with Path(f"{queue_path}.fmq").open("ab") as file:
        file.write(b"behind the end")
    with writer_of(queue_path) as writer:
        writer.write(b"more")
    assert stored(queue_path) == [b"here", b"more"]


@pytest.mark.parametrize(
    ("field", "offset", "value"),
    [
        ("magic", 0, b"\x89PNG\r\n\x1a\n"),
        ("version", 8, bytes(4)),
        ("slots", 24, (12).to_bytes(8, "little")),
        ("slots", 24, (1 << 41).to_bytes(8, "little")),
        ("buffer_size", 32, bytes(8)),
        ("buffer_size", 32, (5000).to_bytes(8, "little")),
        ("readers", 40, (1 << 17).to_bytes(4, "little")),
        ("compression", 44, (9).to_bytes(4, "little")),
        ("slots_offset", 48, bytes(8)),
        ("buffer_offset", 56, (1 << 63).to_bytes(8, "little")),
        ("file_size", 64, (1 << 20).to_bytes(8, "little")),
        ("tail", 192, (2).to_bytes(8, "little")),
        ("head", 128, (1 << 60).to_bytes(8, "little")),
    ],
)
def test_a_header_that_is_not_right_is_refused_by_the_name_of_its_field(
    queue_path: str, field: str, offset: int, value: bytes
) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
    file = Path(f"{queue_path}.fmq")
    data = bytearray(file.read_bytes())
    data[offset : offset + len(value)] = value
    file.write_bytes(data)
    all_refuse(queue_path, DamagedQueue, field)
    with pytest.raises(DamagedQueue) as caught:
        open_reader(f"fmq:{queue_path}")
    assert caught.value.path.startswith(queue_path)
    assert (caught.value.field, caught.value.offset) == (field, offset)


@pytest.mark.parametrize("method", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [0, 1, 99, 101, 300, 4096, 4097, 2**40, 2**63, 2**64 - 1])
def test_a_compressed_message_that_lies_about_its_length_is_damaged(
    queue_path: str, method: str, length: int
) -> None:
    with writer_of(queue_path, f"{SMALL}&compress={method}") as writer:
        writer.write_many([b"before", b"x" * 100, b"behind"])
    listing = list_queue(f"{queue_path}.fmq")
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        file.seek(listing.header.buffer_offset + listing.messages[1].position)
        file.write(length.to_bytes(8, "little"))
    with wide_reader(f"fmq:{queue_path}") as reader:
        assert [m.payload for m in reader.read_many(1)] == [b"before"]
        if length == 0:  # by the format, whatever comes behind it
            assert [m.payload for m in reader.read_many(9)] == [b"", b"behind"]
            return
        for _ in range(2):
            with pytest.raises(DamagedQueue, match="message 1"):
                reader.read(timeout=0)
    with wide_reader(f"fmq:{queue_path}?damaged=skip") as reader:
        messages = [*reader.read_many(9), *reader.read_many(9)]
        assert [m.payload for m in messages] == [b"before", b"behind"]
        assert reader.statistics().lost == 1


def test_a_directory_in_the_place_of_a_queue_is_an_error_of_ours(queue_path: str) -> None:
    Path(f"{queue_path}.fmq").mkdir()
    for use in (open_reader, open_writer, describe, check):
        with pytest.raises(StorageError) as caught:
            use(f"fmq:{queue_path}")
        assert caught.value.errno == errno.EISDIR
    with pytest.raises(PenstockError):
        create(f"fmq:{queue_path}")
    with pytest.raises(PenstockError):
        create(f"fmq:{queue_path}", replace=True)
    assert list(Path(queue_path).parent.iterdir()) == [Path(f"{queue_path}.fmq")]


def test_a_file_in_the_place_of_a_directory_is_an_error_of_ours(queue_path: str) -> None:
    Path(queue_path).write_text("a file")
    for use in (open_writer, create):
        with pytest.raises(StorageError):
            use(f"fmq:{queue_path}/deeper")
    assert Path(queue_path).read_text() == "a file"


def test_a_queue_of_the_other_layout_is_refused(queue_path: str) -> None:
    with writer_of(queue_path) as writer:
        writer.write(b"here")
    classic = f"{queue_path}-classic"
    with open_writer(f"fmq:{classic}?layout=classic&slots=5&size=4096") as old:
        old.write(b"classic")
    for path, layout in ((queue_path, "classic"), (classic, "wide")):
        for use in (open_reader, open_writer, describe):
            with pytest.raises(InvalidOption, match="layout"):
                use(f"fmq:{path}?layout={layout}")
    assert stored(queue_path) == [b"here"]
    with open_reader(f"fmq:{classic}") as reader:
        assert [m.payload for m in reader.read_many(5)] == [b"classic"]


# --- who may, and what there is room for ------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users can look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_queue_that_may_only_be_read_can_be_read(open_folder: Path) -> None:
    path = f"{open_folder}/queue"
    with writer_of(path) as writer:
        writer.write_many([b"1", b"2", b"3"])
        Path(f"{path}.fmq").chmod(0o444)

        def check_reading() -> None:
            with wide_reader(f"fmq:{path}") as reader:
                assert [m.payload for m in reader.read_many(2)] == [b"1", b"2"]
                message = reader.read(timeout=5)
                assert message is not None
                assert message.payload == b"3"
                assert reader.read(timeout=0.01) is None
                assert reader.read_batch(5, timeout=0.01).num_rows == 0
                reader.seek("last")
                assert reader.read_batch(5).num_rows == 1
                reader.acknowledge()
            assert check(f"fmq:{path}") == 3
            assert describe(f"fmq:{path}").count == 3
            with pytest.raises(Unsupported, match="held reader"):
                open_reader(f"fmq:{path}?hold=archive")
            with pytest.raises(StorageError, match="Permission denied") as caught:
                open_writer(f"fmq:{path}")
            assert caught.value.hint is not None
            assert "permissions" in caught.value.hint
            with pytest.raises(StorageError, match="Permission denied"):
                create(f"fmq:{path}-another")

        run_without_rights(check_reading)
        Path(f"{path}.fmq").chmod(0o000)

        def check_closed() -> None:
            for use in (open_reader, open_writer, describe, check):
                with pytest.raises(StorageError, match="Permission denied"):
                    use(f"fmq:{path}")

        run_without_rights(check_closed)
        assert writer.write(b"4") == 3
    assert stored(path) == [b"1", b"2", b"3", b"4"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_disk_at(tmp_path / "disk", "4m") as place:
        yield place


def test_a_queue_for_which_there_is_no_space_is_not_made(small_disk: Path) -> None:
    there = f"{small_disk}/there"
    with writer_of(there, "size=1M&slots=64") as writer:
        writer.write(b"here")
        for options in ("size=8M", "size=8M&create=always", "slots=1000000", "size=2T"):
            with pytest.raises(StorageError) as caught:
                writer_of(f"{small_disk}/deep/another", options)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.hint is not None
            assert "space" in caught.value.hint
        with pytest.raises(StorageError):
            create(f"fmq:{small_disk}/another?size=3900k")
        assert [p for p in small_disk.rglob("*") if p.is_file()] == [Path(f"{there}.fmq")]
        writer.write(bytes(1 << 20))  # all of the space that it has is its own
        writer.write(b"and more")
    assert stored(there) == [b"and more"]


def test_a_queue_that_cannot_be_replaced_for_want_of_space_stays(small_disk: Path) -> None:
    path = f"{small_disk}/queue"
    with writer_of(path, "size=2M&slots=64") as writer:
        writer.write(b"here")
    with pytest.raises(StorageError):
        create(f"fmq:{path}?size=3M", replace=True)
    assert stored(path) == [b"here"]
    with writer_of(path) as writer:
        assert writer.write(b"more") == 1


def fill(folder: Path) -> Path:
    """Leave no space at all."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


def test_a_sparse_queue_refuses_a_message_for_which_there_is_no_space(small_disk: Path) -> None:
    path = f"{small_disk}/queue"
    piece = bytes(range(256)) * 400
    with writer_of(path, "size=64M&slots=65536&sparse=true") as writer:
        written = 0
        with pytest.raises(StorageError) as caught:  # noqa: PT012
            while written < 1000:
                writer.write(piece)
                written += 1
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.hint is not None
        assert 20 < written < 42
        assert writer.statistics().messages == written
        assert writer.statistics().refused == 1
        assert stored(path) == [piece] * written
        filler = fill(small_disk)
        with pytest.raises(StorageError):
            writer.reserve(len(piece))
        with pytest.raises(StorageError):
            writer.write_batch(batch_from_messages([row(piece)]))
        with pytest.raises(StorageError):
            writer.write_many([piece] * 100)
        with open_reader(f"fmq:{path}", start=Position.LAST) as reader:
            message = reader.read(timeout=0)
            assert message is not None
            assert message.payload == piece
        filler.unlink()
        assert writer.write(b"there is space again") == writer.statistics().messages - 1
    assert stored(path)[-1] == b"there is space again"


def test_a_sparse_queue_with_a_full_disk_opens_again(small_disk: Path) -> None:
    path = f"{small_disk}/queue"
    with writer_of(path, "size=64M&slots=65536&sparse=true") as writer:
        writer.write(b"here")
    filler = fill(small_disk)
    with writer_of(path, "") as writer:
        with contextlib.suppress(StorageError):
            for _ in range(2000):  # what was got ahead for the first message may serve others
                writer.write(bytes(4000))
        written = writer.statistics().messages
        with pytest.raises(StorageError):
            writer.write(bytes(4 << 20))
    assert len(stored(path)) == 1 + written
    filler.unlink()
    with writer_of(path, "") as writer:
        assert writer.write(b"more") == 1 + written
