"""Opening, creating, waiting, and what is said when it cannot be."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import (
    InvalidOption,
    NotFound,
    PenstockError,
    create,
    describe,
    open_reader,
    open_writer,
)
from penstock.core.errors import (
    AlreadyExists,
    DamagedQueue,
    InvalidURL,
    StorageError,
    UnknownScheme,
)
from penstock.queue.classic.device import shared_memory_key
from support.queue_files import (
    QueueBytes,
    check_queue,
    numbered,
    read_all,
    reader_of,
    seqs,
    writer_of,
)
from support.unprivileged import run_without_rights

if TYPE_CHECKING:
    pass


def test_a_writer_creates_a_queue_that_is_missing_and_keeps_one_that_is_there(
    queue_path: str,
) -> None:
    with writer_of(f"{queue_path}/deep/down", slots=3, size=300) as writer:
        writer.write(b"0")
    with writer_of(f"{queue_path}/deep/down", slots=99, size=9999) as writer:
        assert writer.write(b"1") == 1
    assert check_queue(f"{queue_path}/deep/down").nslots == 3


def test_a_writer_that_always_creates_empties_the_queue(queue_path: str) -> None:
    with writer_of(queue_path, slots=3, size=300) as writer:
        writer.write(b"0")
    with writer_of(queue_path, slots=4, size=400, create="always") as writer:
        assert writer.write(b"anew") == 0
    assert read_all(queue_path) == {0: b"anew"}
    assert check_queue(queue_path).nslots == 4


def test_a_writer_that_never_creates_waits_as_long_as_it_is_told(queue_path: str) -> None:
    began = time.monotonic()
    with pytest.raises(NotFound):
        writer_of(queue_path, create="never", wait=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    timer = threading.Timer(0.1, lambda: writer_of(queue_path, slots=3, size=300).close())
    timer.start()
    with writer_of(queue_path, create="never", wait="true") as writer:
        assert writer.write(b"0") == 0
    timer.join()


def test_a_reader_waits_for_a_queue_as_long_as_it_is_told(queue_path: str) -> None:
    with pytest.raises(NotFound):
        reader_of(queue_path, wait=0.1)
    timer = threading.Timer(0.1, lambda: writer_of(queue_path, slots=3, size=300).close())
    timer.start()
    with reader_of(queue_path, wait="10s") as reader:
        assert reader.read(timeout=0) is None
    timer.join()


def test_creating_what_is_there_already_is_refused_and_harms_nothing(queue_url: str) -> None:
    create(queue_url)
    with open_writer(queue_url) as writer:
        writer.write(b"0")
    with pytest.raises(AlreadyExists) as caught:
        create(queue_url)
    assert caught.value.hint
    with open_reader(queue_url) as reader:
        assert reader.read(timeout=0) is not None
    create(queue_url, replace=True)
    with open_reader(queue_url) as reader:
        assert reader.read(timeout=0) is None


def test_a_user_who_may_only_read_can_read_and_is_told_that_he_cannot_write() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        path = f"{directory}/queue"
        with writer_of(path, slots=5, size=500, blocking=True, timeout=0.1) as writer:
            writer.write_many(numbered(0, 2))
        for part in ("stat", "buf"):
            Path(f"{path}.{part}").chmod(0o444)

        def check() -> None:
            with reader_of(path) as reader:
                assert seqs(reader.read_many(9)) == [0, 1, 2]  # and its progress is not told
            with pytest.raises(StorageError, match="Permission denied") as caught:
                writer_of(path)
            assert caught.value.hint is not None
            assert "permissions" in caught.value.hint
            with pytest.raises(StorageError):
                writer_of(f"{directory}/another", slots=5, size=500)

        run_without_rights(check)
        for part in ("stat", "buf"):
            Path(f"{path}.{part}").chmod(0o000)

        def check_closed() -> None:
            with pytest.raises(StorageError, match="Permission denied"):
                reader_of(path)
            with pytest.raises(StorageError):
                describe(f"fmq:{path}")

        run_without_rights(check_closed)
        assert QueueBytes.load(path).status.last_id_read == 0


def test_a_directory_in_the_place_of_a_queue_is_an_error_of_ours(queue_path: str) -> None:
    for part in ("stat", "buf"):
        Path(f"{queue_path}.{part}").mkdir()
    with pytest.raises(StorageError):
        reader_of(queue_path)
    with pytest.raises(StorageError):
        writer_of(queue_path)
    with pytest.raises(PenstockError):
        create(f"fmq:{queue_path}?layout=classic")


def test_a_missing_queue_is_named_with_what_to_do(queue_path: str) -> None:
    with pytest.raises(NotFound, match=f"no queue at {queue_path}") as caught:
        open_reader(f"fmq:{queue_path}")
    assert "penstock create" in str(caught.value.hint)
    assert isinstance(caught.value, FileNotFoundError)
    Path(f"{queue_path}.stat").touch()
    with pytest.raises(NotFound, match=r"queue\.buf is missing"):
        open_reader(f"fmq:{queue_path}")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("slots", 0),
        ("slots", "many"),
        ("size", 11),
        ("size", 2**31),
        ("compress", "zip"),
        ("create", "sometimes"),
        ("wait", "soon"),
        ("resume", "middle"),
        ("damaged", "repair"),
        ("type", "wind"),
        ("lock_timeout", -1),
        ("layout", "round"),
    ],
)
def test_an_option_that_does_not_fit_is_named(option: str, value: object, queue_path: str) -> None:
    classic = "" if option == "layout" else "layout=classic&"
    for opener in (open_writer, open_reader):
        with pytest.raises(InvalidOption, match=f"option {option}=") as caught:
            opener(f"fmq:{queue_path}?{classic}{option}={value}")
        assert caught.value.option == option
    assert not Path(f"{queue_path}.stat").exists()


def test_an_option_that_nobody_knows_is_named_with_the_nearest(queue_path: str) -> None:
    with pytest.raises(InvalidOption, match="no such option") as caught:
        open_writer(f"fmq:{queue_path}?slot=5")
    assert caught.value.hint == "did you mean slots?"


@pytest.mark.parametrize(
    "url",
    ["fmq:", "fmq:/", "fmq:/tmp/", "fmq://host/queue", "/tmp/queue", "fmq:/a?slots=1&slots=2", ""],
)
def test_a_url_that_names_no_queue_is_refused(url: str) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(InvalidURL):
            opener(url)


def test_an_unknown_scheme_is_refused_with_the_nearest(queue_path: str) -> None:
    with pytest.raises(UnknownScheme, match="fnq") as caught:
        open_reader(f"fnq:{queue_path}")
    assert "fmq" in str(caught.value.hint)


@pytest.mark.parametrize("key", ["0", "-1", "2147483647", "99999999999", "9" * 3000])
def test_a_number_that_is_no_shared_memory_key_is_refused(key: str, tmp_path: Path) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(InvalidURL, match="key"):
            opener(f"fmq:{tmp_path}/shmem_{key}")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("shmem_12300", 12300),
        ("a_shmem_12300abc", 12300),
        ("12300shmem", 12300),
        ("shmem_x_ +7", 7),
        ("shmem_12300__", 12300),  # LROSE counts no empty part
        ("shmem", None),
        ("shmem_", None),
        ("shmem_12300_x", None),
        ("queue_12300", None),
    ],
)
def test_a_name_tells_whether_a_queue_is_in_shared_memory(name: str, key: int | None) -> None:
    assert shared_memory_key(f"/shmem_1/{name}") == key


def test_a_name_too_long_for_the_system_is_an_error_of_ours(tmp_path: Path) -> None:
    for opener in (open_writer, open_reader):
        with pytest.raises(StorageError):
            opener(f"fmq:{tmp_path}/{'x' * 300}")


def test_a_queue_that_is_slow_in_the_making_is_waited_for(queue_path: str) -> None:
    """LROSE writes the slots one by one and the status last: a large queue takes its time."""
    with writer_of(queue_path, slots=10, size=5000) as writer:
        writer.write(b"there")
    stat = Path(f"{queue_path}.stat")
    whole = stat.read_bytes()
    stat.write_bytes(b"")
    with pytest.raises(DamagedQueue, match="status"):
        reader_of(queue_path)
    finish = threading.Timer(0.6, stat.write_bytes, args=(whole,))
    finish.start()
    with reader_of(queue_path, wait=10) as reader:
        message = reader.read(timeout=0)
        assert message is not None
        stat.write_bytes(b"")
        again = threading.Timer(0.6, stat.write_bytes, args=(whole,))
        again.start()
        assert reader.read(timeout=1) is None  # and no error
    finish.join()
    again.join()


@pytest.mark.parametrize("option", ["type=5", "resume=newest", "damaged=skip"])
def test_an_option_that_says_nothing_to_a_writer_is_refused(option: str, queue_url: str) -> None:
    with pytest.raises(InvalidOption, match="for readers"):
        open_writer(f"{queue_url}&{option}")


def test_a_place_where_no_file_can_be_made_is_an_error_of_ours() -> None:
    with pytest.raises(StorageError, match="creating /proc/queue"):
        open_writer("fmq:/proc/queue?layout=classic")
