from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import (
    InvalidStreamId,
    LockTimeout,
    Malformed,
    StorageError,
    StreamIdCollision,
)
from penstock.core.stream_id import ANY_DEVICE, ForwardDestination, StreamId, hash54
from penstock.core.stream_names import (
    MAX_FILE_BYTES,
    StreamNames,
    advice,
    default_names_file,
)

NONE, UDP = ForwardDestination.NONE, ForwardDestination.UDP
PATH = "Example://jbpf_agent/set/codelet"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "stream-names.json"


# --- registering ----------------------------------------------------------------------------


def test_registering_gives_the_id_of_the_parts() -> None:
    names = StreamNames()
    stream = names.register(UDP, 1, PATH, "ringbuf", ver=2)
    assert stream == StreamId.generate(UDP, 1, PATH, "ringbuf", ver=2)
    assert list(names) == [(PATH, "ringbuf")]


def test_one_name_is_used_on_many_devices_and_under_many_paths() -> None:
    names = StreamNames()
    names.register(NONE, 1, PATH, "one")
    names.register(NONE, 1, PATH, "one")
    names.register(UDP, 2, PATH, "one")
    names.register(NONE, 1, "Another://intraapp", "one")
    assert len(names) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [("one", "nne"), ("0", "1"), ("ul", "tl"), ("ringbuf", "singbuf"), ("s1", "q1")],
)
def test_a_name_with_the_filter_of_another_name_is_refused(first: str, second: str) -> None:
    names = StreamNames()
    stream = names.register(NONE, 1, PATH, first)
    with pytest.raises(StreamIdCollision) as caught:
        names.register(NONE, 1, PATH, second)
    assert caught.value.stream == str(stream)
    assert repr(first) in caught.value.existing
    assert repr(second) in caught.value.refused
    assert caught.value.hint == advice(second)
    assert list(names) == [(PATH, first)]


def test_a_colliding_name_is_refused_on_another_device_too() -> None:
    names = StreamNames()
    names.register(NONE, 1, PATH, "one")
    with pytest.raises(StreamIdCollision):
        names.register(UDP, 2, PATH, "nne")


def test_a_colliding_name_is_accepted_under_another_path() -> None:
    names = StreamNames()
    names.register(NONE, 1, PATH, "one")
    names.register(NONE, 1, "Another://intraapp", "nne")
    assert len(names) == 2


def test_a_path_with_the_filter_of_another_path_is_refused() -> None:
    names = StreamNames()
    names.register(NONE, 0, "one", "long enough")
    with pytest.raises(StreamIdCollision, match="path 'nne'"):
        names.register(NONE, 0, "nne", "some other name")
    assert list(names) == [("one", "long enough")]


@pytest.mark.parametrize(("fwd_dst", "device_id"), [(ForwardDestination.ANY, 1), (1, ANY_DEVICE)])
def test_a_request_cannot_be_registered_as_a_stream(fwd_dst: int, device_id: int) -> None:
    with pytest.raises(InvalidStreamId, match="leaves a field open"):
        StreamNames().register(fwd_dst, device_id, PATH, "name")


def test_short_names_are_allowed_but_advised_against() -> None:
    assert "short names" in (advice("ringbuf") or "")
    assert advice("ringbuf1") is None
    assert advice("通道通") is None, "the length that counts is in bytes"


# --- explaining -----------------------------------------------------------------------------


def test_a_known_id_is_explained_with_its_texts() -> None:
    names = StreamNames()
    meaning = names.explain(names.register(UDP, 5, PATH, "ringbuf"))
    assert meaning.destination == "udp"
    assert meaning.device == "device 5"
    assert meaning.path == PATH
    assert meaning.name == "ringbuf"


def test_an_unknown_id_is_explained_without_texts() -> None:
    meaning = StreamNames().explain(StreamId.generate(4, 0, "unheard", "of"))
    assert meaning.destination == "4"
    assert meaning.device == "the controller"
    assert meaning.path is None
    assert meaning.name is None


def test_a_request_is_explained_with_any_where_it_is_open() -> None:
    names = StreamNames()
    names.register(NONE, 1, PATH, "ringbuf")
    meaning = names.explain(StreamId.generate(None, None, PATH, None))
    assert (meaning.destination, meaning.device) == ("any", "any")
    assert (meaning.path, meaning.name) == (PATH, None)


def test_a_name_under_any_path_is_known_when_all_paths_agree_on_it() -> None:
    names = StreamNames()
    request = StreamId.generate(None, None, None, "one")
    names.register(NONE, 1, PATH, "one")
    names.register(NONE, 1, "Another://intraapp", "one")
    assert names.explain(request).name == "one"
    names.register(NONE, 1, "Third://intraapp", "nne")
    assert names.explain(request).name is None


# --- keeping --------------------------------------------------------------------------------


def test_a_missing_file_has_no_names(file: Path) -> None:
    assert list(StreamNames.load(file)) == []


# A name that shares its filter with another would be refused: that is tested above.
@given(
    st.lists(
        st.tuples(st.text(max_size=20), st.text(max_size=20)),
        unique_by=(lambda pair: hash54(pair[0]), lambda pair: hash54(pair[1])),
    )
)
def test_saved_names_are_loaded_again(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    file = tmp_path_factory.mktemp("names") / "names.json"
    names = StreamNames()
    for path, name in pairs:
        names.register(NONE, 0, path, name)
    names.save(file)
    assert list(StreamNames.load(file)) == list(names) == sorted(pairs)


def test_saving_leaves_one_file_and_nothing_unfinished(file: Path) -> None:
    names = StreamNames()
    names.register(NONE, 0, PATH, "ringbuf")
    names.save(file)
    names.save(file)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"version": 1}',
        b'{"version": 2, "paths": {}}',
        b'{"version": 1, "paths": []}',
        b'{"version": 1, "paths": {"p": "name"}}',
        b'{"version": 1, "paths": {"p": [1]}}',
        b'{"version": 1, "paths": {"p": [["name"]]}}',
        b'{"version": 1, "paths": {"p": ["one", "nne"]}}',
        b'{"version": 1, "paths": {"one": ["x"], "nne": ["y"]}}',
        b'{"version": 1, "paths": {"p": ["\\ud800"]}}',
    ],
    ids=lambda content: repr(content[:50]),
)
def test_a_malformed_file_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "names.json"
    file.write_bytes(content)
    with (
        pytest.raises(Malformed, match=r"names\.json") as caught,
        StreamNames.updating(file) as names,
    ):
        names.register(NONE, 0, PATH, "ringbuf")
    assert caught.value.hint is not None
    assert file.read_bytes() == content


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    document = json.dumps({"version": 1, "paths": {}}).encode()
    file.write_bytes(document.ljust(MAX_FILE_BYTES))
    assert len(StreamNames.load(file)) == 0
    file.write_bytes(document.ljust(MAX_FILE_BYTES + 1))
    with pytest.raises(Malformed, match="size"):
        StreamNames.load(file)


def test_names_that_would_not_be_read_again_are_not_saved(tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    names = StreamNames()
    names.save(file)
    saved = file.read_bytes()
    names.register(NONE, 0, "p" * MAX_FILE_BYTES, "ringbuf")
    with pytest.raises(StorageError, match="too large") as caught:
        names.save(file)
    assert caught.value.hint is not None
    assert file.read_bytes() == saved


def test_what_the_system_refuses_is_a_storage_error(tmp_path: Path) -> None:
    occupied = tmp_path / "a file"
    occupied.touch()
    with pytest.raises(StorageError):
        StreamNames.load(tmp_path)
    with pytest.raises(StorageError):
        StreamNames().save(tmp_path)
    with pytest.raises(StorageError), StreamNames.updating(occupied / "names.json"):
        pass
    assert set(tmp_path.iterdir()) == {occupied}


# --- updating together ----------------------------------------------------------------------


def test_an_update_that_fails_changes_nothing(file: Path) -> None:
    with StreamNames.updating(file) as names:
        names.register(NONE, 0, PATH, "kept")
    saved = file.read_bytes()

    def add_two_the_second_of_which_collides() -> None:
        with StreamNames.updating(file) as names:
            names.register(NONE, 0, PATH, "never saved")
            names.register(NONE, 0, PATH, "jept")

    with pytest.raises(StreamIdCollision):
        add_two_the_second_of_which_collides()
    assert file.read_bytes() == saved


def test_an_update_that_adds_nothing_does_not_write(file: Path) -> None:
    with StreamNames.updating(file) as names:
        names.register(NONE, 0, PATH, "ringbuf")
    before = file.stat()
    with StreamNames.updating(file) as names:
        names.register(NONE, 0, PATH, "ringbuf")
    assert file.stat().st_ino == before.st_ino


def test_an_update_gives_up_when_the_file_stays_locked(file: Path) -> None:
    with StreamNames.updating(file):
        pass
    with file.with_name(f"{file.name}.lock").open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(LockTimeout), StreamNames.updating(file, timeout=0.05):
            pass
    with StreamNames.updating(file, timeout=0):
        pass


def test_processes_that_register_at_once_lose_no_name(file: Path) -> None:
    script = """
import sys
from pathlib import Path
from penstock.core.stream_names import StreamNames
for number in range(20):
    with StreamNames.updating(Path(sys.argv[1])) as names:
        names.register(1, 0, f"path of {sys.argv[2]}", f"name number {number}")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen([sys.executable, "-c", script, str(file), worker], env=environment)
        for worker in "abcd"
    ]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0, 0, 0]
    assert list(StreamNames.load(file)) == sorted(
        (f"path of {worker}", f"name number {number}") for worker in "abcd" for number in range(20)
    )


# --- where ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"PENSTOCK_HOME": "/p", "XDG_STATE_HOME": "/x", "HOME": "/h"},
            "/p/stream-names.json",
        ),
        (
            {"PENSTOCK_HOME": "", "XDG_STATE_HOME": "/x", "HOME": "/h"},
            "/x/penstock/stream-names.json",
        ),
        ({"HOME": "/h"}, "/h/.local/state/penstock/stream-names.json"),
    ],
)
def test_the_file_is_in_the_first_home_that_is_set(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], expected: str
) -> None:
    for variable in ("PENSTOCK_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert default_names_file() == Path(expected)
