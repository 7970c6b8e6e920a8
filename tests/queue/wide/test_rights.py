"""Files that are made are their owner's, and no link makes them another file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock import InvalidOption, create, open_reader, open_writer
from penstock.core.whole_files import write_whole
from support.wide_opening import wide_writer


def rights(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


@pytest.fixture(autouse=True)
def _generous_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_queue_is_its_owners_unless_asked(queue_path: str) -> None:
    wide_writer(f"fmq:{queue_path}").close()
    assert rights(f"{queue_path}.fmq") == 0o600
    wide_writer(f"fmq:{queue_path}-shared?mode=0640").close()
    assert rights(f"{queue_path}-shared.fmq") == 0o640
    os.umask(0o077)
    create(f"fmq:{queue_path}-all?mode=666")
    assert rights(f"{queue_path}-all.fmq") == 0o666


def test_a_queue_that_takes_the_place_of_another_has_its_rights(queue_path: str) -> None:
    create(f"fmq:{queue_path}?mode=664")
    create(f"fmq:{queue_path}", replace=True)
    assert rights(f"{queue_path}.fmq") == 0o664
    create(f"fmq:{queue_path}?mode=600", replace=True)
    assert rights(f"{queue_path}.fmq") == 0o600


@pytest.mark.parametrize("mode", ["rw", "99", "7777", "-1", ""])
def test_rights_that_are_none_are_refused(queue_path: str, mode: str) -> None:
    with pytest.raises(InvalidOption, match="mode"):
        open_writer(f"fmq:{queue_path}?mode={mode}")


def test_a_log_is_its_owners_unless_asked(tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/log?sync=none") as writer:
        writer.write(b"one")
    assert rights(tmp_path / "log") == 0o700
    assert {rights(path) for path in (tmp_path / "log").glob("*.fmq")} == {0o600}
    with open_writer(f"log:{tmp_path}/shared?sync=none&mode=0644") as writer:
        writer.write(b"one")
    assert rights(tmp_path / "shared") == 0o755
    assert {rights(path) for path in (tmp_path / "shared").glob("*.fmq")} == {0o644}


def test_a_log_in_a_directory_that_was_there_has_the_rights_of_that(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir(mode=0o750)
    with open_writer(f"log:{tmp_path}/log?sync=none") as writer:
        writer.write(b"one")
    assert rights(tmp_path / "log") == 0o750
    assert {rights(path) for path in (tmp_path / "log").glob("*.fmq")} == {0o640}


def test_a_link_that_somebody_planted_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    log = tmp_path / "log"
    with open_writer(f"log:{log}?sync=none&segment_slots=2") as writer:
        writer.write_many([b"0", b"1"])
        (log / f".{2:020d}.fmq.{os.getpid()}.new").symlink_to(precious)
        (log / "log.json.new").symlink_to(precious)
        writer.write(b"2")
    with open_writer(f"log:{log}?retain=1G") as writer:  # which writes the settings
        writer.write(b"3")
    with open_reader(f"log:{log}", start="start") as reader:
        assert [message.payload for message in reader.available()] == [b"0", b"1", b"2", b"3"]
    (tmp_path / "note.new").symlink_to(precious)
    write_whole(tmp_path / "note", b"note", sync=False)
    assert (tmp_path / "note").read_bytes() == b"note"
    assert not (tmp_path / "note").is_symlink()
    assert precious.read_bytes() == b"precious"
