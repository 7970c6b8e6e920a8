"""Messages go to the newest segment, and to a new one when that is full; nothing is miscounted."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import StreamId, create, describe, open_reader, open_writer
from penstock.core.batch import batch_from_messages
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    InvalidOption,
    InvalidURL,
    LockTimeout,
    MessageTooLarge,
    NotFound,
    StorageError,
    Unsupported,
)
from penstock.core.message import Message
from penstock.queue.log.settings import load_settings
from penstock.queue.log.writer import Keeper, Unsynced
from support.log_files import (
    SMALL,
    disk,
    log_reader,
    log_writer,
    segment_files,
    stored,
    url_of,
)
from support.small_disks import small_disk_at

if TYPE_CHECKING:
    from collections.abc import Iterator


SIZES = "segment=8k&segment_slots=8"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "log"


def test_the_first_writer_makes_the_log_and_the_next_goes_on(path: Path) -> None:
    with log_writer(path) as writer:
        assert [writer.write(b"%d" % i) for i in range(20)] == list(range(20))
    with log_writer(path, "") as writer:
        assert writer.write(b"20") == 20
        assert writer.recovery.cut == 0
        assert not writer.recovery.set_aside
    assert stored(path) == [b"%d" % i for i in range(21)]
    assert [int(file.stem) for file in segment_files(path)] == [0, 8, 16]


def test_all_of_a_message_is_kept(path: Path) -> None:
    own, other = StreamId.generate(0, 1, "app", "own"), StreamId.generate(0, 1, "app", "other")
    with log_writer(path, f"{SMALL}&stream={own}") as writer:
        for _ in range(10):
            writer.write(b"x", 5, -6, 7, 8, other, b"header")
            writer.write(b"y")
    with log_reader(path) as reader:
        messages = list(reader.available())
    assert messages[18] == Message(18, 7, 8, 5, -6, other, b"header", b"x")._replace(
        created_ns=messages[18].created_ns
    )
    assert {message.stream for message in messages[1::2]} == {own}


def test_many_messages_at_once_go_over_several_segments(path: Path) -> None:
    payloads = [b"%d" % i * (i % 7) for i in range(50)]
    with log_writer(path) as writer:
        assert writer.write_many(payloads[:3]) == 2
        assert writer.write_many(payloads[3:], type=4) == 49
        assert writer.write_many([]) is None
        books = writer.statistics()
    assert (books.messages, books.refused, books.last_seq) == (50, 0, 49)
    assert books.bytes == sum(map(len, payloads))
    assert stored(path) == payloads
    assert len(segment_files(path)) == 7


def test_a_batch_goes_over_several_segments(path: Path) -> None:
    messages = [
        Message(0, i, 0, i, -i, None, b"a" * i if i % 2 else None, b"%d" % i) for i in range(30)
    ]
    with log_writer(path) as writer:
        assert writer.write_batch(batch_from_messages(messages)) == 29
        assert writer.write_batch(batch_from_messages([])) is None
    with log_reader(path) as reader:
        found = list(reader.available())
    assert [m._replace(seq=0, created_ns=0) for m in found] == messages


def test_a_reservation_may_be_in_a_new_segment(path: Path) -> None:
    with log_writer(path) as writer:
        for i in range(20):
            with writer.reserve(3000, type=i) as place:
                place.buffer[:] = bytes([i]) * 3000
        writer.reserve(3000).abort()
        assert writer.statistics().messages == 20
    assert stored(path) == [bytes([i]) * 3000 for i in range(20)]


def test_a_segment_is_full_by_bytes_or_by_messages(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many([bytes(8192), bytes(8192), *[b""] * 9, bytes(8192), bytes(1)])
    # Those of no bytes go to where they can be numbered.
    assert [int(file.stem) for file in segment_files(path)] == [0, 1, 9, 12]
    assert [len(payload) for payload in stored(path)] == [8192, 8192, *[0] * 9, 8192, 1]


def test_a_message_larger_than_a_segment_is_refused_and_nothing_else_happens(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write(b"before")
        with pytest.raises(MessageTooLarge) as caught:
            writer.write(bytes(8193))
        assert (caught.value.size, caught.value.limit) == (8193, 8192)
        assert caught.value.hint is not None
        assert "segment=" in caught.value.hint
        with pytest.raises(MessageTooLarge):
            writer.write_many([b"one", bytes(8193), b"not tried"])
        with pytest.raises(MessageTooLarge):
            writer.reserve(8193)
        writer.write(b"after")
        books = writer.statistics()
    assert stored(path) == [b"before", b"one", b"after"]
    assert (books.messages, books.refused) == (3, 4)
    assert len(segment_files(path)) == 1


@pytest.mark.parametrize("compress", ["none", "lz4", "zstd"])
def test_payloads_are_compressed_if_asked_for(path: Path, compress: str) -> None:
    payloads = [b"%d" % i * 400 for i in range(60)]
    with log_writer(path, f"segment=64k&segment_slots=16&compress={compress}") as writer:
        writer.write_many(payloads[:20])
        for payload in payloads[20:40]:
            writer.write(payload)
    with log_writer(path, "") as writer:
        writer.write_many(payloads[40:])
        assert writer.statistics().bytes == sum(map(len, payloads[40:]))
    assert stored(path) == payloads
    with log_reader(path) as reader:
        assert sum(reader.read_batch(7).num_rows for _ in range(12)) == 60
    assert describe(url_of(path)).details["compression"] == compress


def test_a_compressed_log_gives_no_places(path: Path) -> None:
    with log_writer(path, "compress=lz4") as writer, pytest.raises(Unsupported):
        writer.reserve(10)


def test_what_a_log_was_made_with_is_kept(path: Path) -> None:
    url = url_of(path, "segment=16k&segment_slots=100&crc=false&retain=1G&retain_age=7d&hold=a,b")
    create(url)
    with pytest.raises(AlreadyExists):
        create(url)
    with log_writer(path, "segment=1M&crc=true&compress=zstd") as writer:
        writer.write_many([b"x"] * 300)
    settings = load_settings(path)
    assert settings is not None
    assert (settings.segment, settings.segment_slots, settings.crc) == (16384, 100, False)
    assert (settings.retain, settings.retain_age, settings.hold) == (1 << 30, 604800, ("a", "b"))
    assert settings.compress == "none"
    assert [int(file.stem) for file in segment_files(path)] == [0, 128, 256]
    log_writer(path, "retain=none&hold=").close()
    settings = load_settings(path)
    assert settings is not None
    assert (settings.retain, settings.retain_age, settings.hold) == (None, 604800, ())


def test_a_sealed_segment_never_changes(path: Path) -> None:
    def digests() -> dict[str, str]:
        return {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in segment_files(path)[:-1]
        }

    with log_writer(path, f"{SIZES}&sync=batch") as writer:
        writer.write_many([b"x" * 100] * 20)
        before = digests()
        writer.write_many([b"y" * 100] * 20)
        after = digests()
    assert before.items() <= after.items()
    assert stored(path) == [b"x" * 100] * 20 + [b"y" * 100] * 20
    log_writer(path).close()
    assert after.items() <= digests().items()


def test_a_sealed_segment_takes_no_more_disk_than_its_messages(path: Path) -> None:
    with log_writer(path, "segment=16M&segment_slots=65536") as writer:
        writer.write(b"first" * 1000)
        assert disk(*segment_files(path)) > 64 << 10  # it gets space ahead
        writer.write(bytes(16 << 20))
        writer.write(b"third")
        first, second, third = segment_files(path)
        assert disk(first) <= 3 * 4096 + 8192
        assert disk(second) <= (16 << 20) + 3 * 4096
        assert first.stat().st_size == second.stat().st_size == third.stat().st_size
    # Slots that are used around the end of the table stay, too.
    log = path.with_name("another")
    with log_writer(log, "segment=16M&segment_slots=1024") as writer:
        writer.write_many([b"x"] * 1000)
        writer.write(bytes((16 << 20) - 65536))
        writer.write_many([b"%d" % i * 100 for i in range(200)])
        writer.write(bytes(16 << 20))
    assert [int(file.stem) for file in segment_files(log)] == [0, 1012, 1201]
    assert stored(log)[1001:-1] == [b"%d" % i * 100 for i in range(200)]


def test_times_never_go_back_whatever_the_clock_does(path: Path) -> None:
    future = 1 << 62
    with log_writer(path) as writer:
        writer.write(b"late", created_ns=future)
        writer.write_many([b"x"] * 20)
    with log_writer(path) as writer:
        writer.write(b"y")
        while writer.write(b"z") % 8 != 7:
            pass
    with log_writer(path) as writer:  # of a new, empty segment maybe
        writer.write_many([b"x"] * 20)
    with log_reader(path) as reader:
        assert {message.created_ns for message in reader.available()} == {future}


# --- one writer ---------------------------------------------------------------------------------


def test_a_second_writer_is_refused_with_the_name_of_the_first(path: Path) -> None:
    with log_writer(path) as writer:
        with pytest.raises(LockTimeout, match=f"process {os.getpid()} writes to"):
            log_writer(path, "lock_timeout=50ms")
        with pytest.raises(LockTimeout):
            create(url_of(path, "lock_timeout=50ms"), replace=True)
        assert describe(url_of(path)).details["writer_pid"] == os.getpid()
        writer.write(b"still")
    assert describe(url_of(path)).details["writer_pid"] is None
    assert stored(path) == [b"still"]


def test_a_writer_waits_for_the_one_before(path: Path) -> None:
    first = log_writer(path)
    closing = threading.Timer(0.3, first.close)
    closing.start()
    with log_writer(path, "lock_timeout=20s") as second:
        assert second.statistics().waited > 0.1
    closing.join()


def test_a_forked_process_is_no_writer(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write(b"before")
        child = os.fork()
        if child == 0:
            try:
                writer.write(b"never")
            except Closed:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        writer.write_many([b"x"] * 20)
        with pytest.raises(LockTimeout):
            log_writer(path, "lock_timeout=0")
    assert len(stored(path)) == 21


def test_a_closed_writer_says_so(path: Path) -> None:
    writer = log_writer(path)
    writer.close()
    writer.close()
    for use in (lambda: writer.write(b"x"), writer.flush, writer.sync):
        with pytest.raises(Closed):
            use()


# --- creating and not finding -------------------------------------------------------------------


def test_a_log_is_created_or_waited_for_as_asked(path: Path) -> None:
    with pytest.raises(NotFound, match="there is no log at"):
        log_writer(path, "create=never")
    with pytest.raises(NotFound):
        log_writer(path, "create=never&wait=50ms")
    assert not path.exists()
    making = threading.Timer(0.2, lambda: create(url_of(path)))
    making.start()
    log_writer(path, "create=never&wait=20s").close()
    making.join()
    with log_writer(path) as writer:
        writer.write(b"old")
    with log_writer(path, f"{SMALL}&create=always") as writer:
        assert writer.write(b"new") == 0
    assert stored(path) == [b"new"]


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-mother.txt").write_text("dear mother")
    with pytest.raises(AlreadyExists, match="other things"):
        log_writer(tmp_path / "letters")
    assert [file.name for file in (tmp_path / "letters").iterdir()] == ["to-mother.txt"]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        log_writer(tmp_path / "file")


@pytest.mark.parametrize(
    "options",
    ["slots=5", "segment=0", "segment=-1", "segment_slots=1", "retain=some", "retain_age=-1s",
     "hold=a,,b", "sync=often", "compress=gzip", "stream=x", "type=5", "cursor=a"],
)  # fmt: skip
def test_a_wrong_option_is_named(path: Path, options: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        log_writer(path, options)
    assert caught.value.option == options.partition("=")[0]
    assert not path.exists()


def test_a_wrong_url_is_named() -> None:
    for url in ("log:", "log:///", "log://host/path"):
        with pytest.raises(InvalidURL):
            open_writer(url)


# --- the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["none", "batch", "10ms", "1s", "0"])
def test_messages_are_synced_as_asked(path: Path, sync: str) -> None:
    with log_writer(path, f"{SIZES}&sync={sync}") as writer:
        for i in range(30):
            writer.write(b"%d" % i)
        writer.write_many([b"x"] * 30)
        writer.flush()
        writer.sync()
    assert len(stored(path)) == 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk_at(tmp_path / "disk", "1m") as place:
        yield place


def test_a_full_segment_that_could_not_be_synced_counts_as_synced_only_when_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_broken = os.fdatasync, True

    def sync(descriptor: int) -> None:
        if is_broken and Path(f"/proc/self/fd/{descriptor}").readlink() == first:
            raise OSError(errno.EIO, "the disk is broken")
        real(descriptor)

    with log_writer(path, f"{SIZES}&sync=batch") as writer:
        writer.write_many([b"%d" % i for i in range(8)])
        (first,) = segment_files(path)
        before = first.read_bytes()
        monkeypatch.setattr("os.fdatasync", sync)
        with pytest.raises(StorageError):
            writer.write(b"8")
        for _ in range(2):
            with pytest.raises(StorageError):
                writer.flush()
            assert any(_boot_id(first)), "a crash now needs recovery"
        is_broken = False
        writer.flush()
        assert not any(_boot_id(first))
        assert first.read_bytes()[4096:] == before[4096:]
        writer.write(b"8")
    assert stored(path) == [b"%d" % i for i in range(9)]


def test_messages_whose_sync_failed_are_written_again_before_a_sync_says_that_they_are_safe(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_writer(path, f"{SIZES}&sync=batch") as writer:
        with monkeypatch.context() as patch:
            patch.setattr("os.fdatasync", _broken)
            with pytest.raises(StorageError):
                writer.write(b"0")
        # The kernel has forgotten the pages that it could not write.
        (first,) = segment_files(path)
        again = _note_writes(monkeypatch)
        writer.flush()
        assert again[first] >= 4096
        assert not any(_boot_id(first))
        writer.flush()
        writer.write(b"1")
        assert len(segment_files(path)) == 2
    assert stored(path) == [b"0", b"1"]


@pytest.mark.parametrize("by", ["flush", "the background"])
def test_messages_whose_sync_failed_are_written_again_before_a_close_syncs_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    writer = log_writer(path, f"{SIZES}&sync={'1h' if by == 'flush' else '50ms'}")
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", _broken)
        writer.write(b"0")
        if by == "flush":
            with pytest.raises(StorageError):
                writer.flush()
        else:
            time.sleep(0.3)
    again = _note_writes(monkeypatch)
    # What failed in the background, and was told to nobody, is told now.
    with nullcontext() if by == "flush" else pytest.raises(StorageError):
        writer.close()
    (first,) = segment_files(path)
    assert again.get(first, 0) >= 4096
    assert any(_boot_id(first)), "a crash now needs a check"
    assert stored(path) == [b"0"]


def _broken(_: int) -> None:
    raise OSError(errno.EIO, "the disk is broken")


def _note_writes(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Return the bytes that are written to each file from now on, other than by its mapping."""
    written: dict[Path, int] = {}
    write = os.pwrite

    def note(descriptor: int, data: bytes, at: int) -> int:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        written[file] = written.get(file, 0) + len(data)
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", note)
    return written


def _boot_id(segment: Path) -> bytes:
    return segment.read_bytes()[400:416]


def test_a_full_disk_refuses_the_message_and_what_is_stored_stays(small_disk: Path) -> None:
    path = small_disk / "log"
    piece = bytes(range(256)) * 40
    with log_writer(path, "segment=64k&segment_slots=64") as writer:
        written = 0
        with pytest.raises(StorageError) as caught:  # noqa: PT012
            while written < 200:
                writer.write(piece)
                written += 1
        assert caught.value.errno == errno.ENOSPC
        assert 60 < written < 100
        books = writer.statistics()
        assert (books.messages, books.refused) == (written, 1)
        assert stored(path) == [piece] * written
        with pytest.raises(StorageError):
            writer.write_many([piece] * 100)
        segment_files(path)[0].unlink()
        segment_files(path)[1].unlink()
        writer.write(b"there is space again")
    assert stored(path)[-1] == b"there is space again"
    assert not list(path.glob(".*"))


def test_a_log_that_was_removed_is_made_again(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write(b"gone")
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        time.sleep(1.1)  # it looks once a second
        assert writer.write(b"first") == 0
    assert stored(path) == [b"first"]


def test_all_files_of_a_log_have_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = os.umask(0o022)
    try:
        with log_writer(log, f"{SMALL}&mode=0660&retain_age=1d") as writer:
            writer.write_many([b"x"] * 20)
            with open_reader(url_of(log, "hold=me")) as reader:
                reader.read(0)
            with open_reader(url_of(log, "group=g")) as member:
                member.read(0)
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in (log, *log.rglob("*"))}
    assert {path.name for path in found} >= {"log.json", "lock", "cursors", "g.lock", "g.state"}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o660}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o770}


def test_a_flush_syncs_the_segment_that_is_written_though_a_signal_came_when_it_was_begun(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with log_writer(path, f"{SIZES}&sync=1h") as writer:
        fill = [b"old"] * 8
        writer.write_many(fill)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.queue.log.writer.seal", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.write(b"interrupted")
        writer.write_many([b"new"] * 3)
        synced = _note_syncs(monkeypatch)
        writer.flush()
        *_, newest = segment_files(path)
        assert newest in synced
        books = writer.statistics()
    assert books.messages + books.refused == 12
    assert len(stored(path)) == books.messages


@pytest.mark.parametrize("then", ["flush", "next segment", "close"])
def test_a_segment_is_synced_though_a_signal_came_before_its_keeper_knew_of_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    def interrupt(keeper: Keeper, following: Unsynced) -> None:
        if following is not keeper._active:
            raise KeyboardInterrupt

    with log_writer(path, f"{SIZES}&sync=1h") as writer:
        writer.write_many([b"old"] * 8)
        with monkeypatch.context() as patch:
            patch.setattr(Keeper, "roll", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.write(b"interrupted")
        _, begun = segment_files(path)
        synced = _note_syncs(monkeypatch)
        writer.write_many([b"new"] * (10 if then == "next segment" else 3))
        if then != "close":
            writer.flush()
            assert begun in synced
    assert begun in synced
    assert not any(any(_boot_id(file)) for file in segment_files(path)), "a crash needs no check"


def _note_syncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that are synced from now on."""
    synced: list[Path] = []
    sync = os.fdatasync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", note)
    return synced
