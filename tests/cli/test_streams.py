"""The streams of a folder: `ls`, `rm` and `resize`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from cli.command import PENSTOCK, OnTerminal, fill, json_lines, run
from penstock import open_reader, open_writer
from penstock.cli.streams import found_at, look_at
from penstock.core.capabilities import InUse
from penstock.core.endpoints import remove, resize
from penstock.core.errors import NotFound
from penstock.protocols.psi.store.streams import Store
from support.unprivileged import run_without_rights
from support.until import until

VECTORS = Path(__file__).parents[1] / "vectors" / "psi"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(f"fmq:{tmp_path}/beams", 5)
    fill(f"log:{tmp_path}/archive", 7)
    fill(f"fmq:{tmp_path}/site/oslo/old?layout=classic", 3)
    fill(f"log:{tmp_path}/site/log", 2)
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def names(folder: Path, place: str, *, recursive: bool = False) -> list[str]:
    found = found_at(place, recursive=recursive)
    return [url.replace(str(folder), "") for url in found]


def test_streams_are_found_by_folder_pattern_and_url(folder: Path) -> None:
    assert names(folder, str(folder)) == ["log:/archive", "fmq:/beams"]
    below = ["log:/archive", "fmq:/beams", "log:/site/log", "fmq:/site/oslo/old"]
    assert names(folder, str(folder), recursive=True) == below
    assert names(folder, f"{folder}/b*") == ["fmq:/beams"]
    assert names(folder, f"{folder}/si*/l*") == ["log:/site/log"]
    assert names(folder, f"{folder}/*o*", recursive=True) == ["log:/site/log", "fmq:/site/oslo/old"]
    assert names(folder, f"fmq:{folder}/*") == ["fmq:/beams"]
    assert names(folder, f"{folder}/beams") == ["fmq:/beams"]
    assert names(folder, f"{folder}/none*") == []
    with pytest.raises(NotFound):
        names(folder, f"{folder}/none")


def test_a_list_says_who_writes_and_reads_and_who_is_dead(folder: Path) -> None:
    url = f"log:{folder}/archive"
    with open_writer(url) as writer, open_reader(url, cursor="live") as reader:
        with open_reader(url, cursor="dead") as dead:
            dead.read_many(1)
        writer.write(b"x")
        reader.read_many(3)
        shown = run("ls", str(folder), "-r", "--json")
        table = run("ls", str(folder))
    listed = {each["url"].rpartition("/")[2]: each for each in json_lines(shown.stdout)}
    assert set(listed) == {"beams", "archive", "old", "log"}
    found = listed["archive"]
    assert (found["kind"], found["messages"], found["writer"]) == ("log", 8, os.getpid())
    assert (found["dead"], found["lag"]) == (1, 8)
    assert {each["name"]: each["alive"] for each in found["readers"]} == {
        "live": True,
        "dead": False,
    }
    assert listed["old"]["kind"] == "classic"
    lines = table.stdout.decode().splitlines()
    assert lines[0].split() == [
        *("stream", "kind", "messages", "size", "rate", "newest", "writer", "readers", "lag")
    ]
    assert "1, 1 dead" in lines[1]
    assert str(os.getpid()) in lines[1]


def test_one_that_is_damaged_is_listed_and_named(folder: Path) -> None:
    (folder / "bad.fmq").write_bytes(b"nonsense" * 1000)
    shown = run("ls", str(folder))
    assert shown.returncode == 1
    assert b"damaged" in shown.stdout
    assert b"beams" in shown.stdout
    assert b"bad" in shown.stderr
    empty = run("ls", str(folder / "site" / "oslo"), "--json")
    assert json.loads(empty.stdout)["kind"] == "classic"


def test_a_store_is_one_line_whatever_is_in_it(folder: Path) -> None:
    with Store.create(folder, "rig") as store:
        numbers = store.add_stream("Numbers", "int")
        store.append(numbers.id, bytes(4))
    shutil.copytree(VECTORS / "store_basic", folder / "basic")
    (folder / "catalog").mkdir()  # a name that others use, too
    listed = {each["url"]: each for each in json_lines(run("ls", str(folder), "--json").stdout)}
    own, of_psi = listed[f"{folder}/rig"], listed[f"{folder}/basic"]
    assert (own["kind"], own["messages"]) == ("store", 1)
    assert of_psi["kind"] == "psi store"
    assert of_psi["bytes"] > 0
    assert len(listed) == 4
    assert names(folder, str(folder / "rig")) == ["/rig"]
    assert "/rig" in names(folder, str(folder), recursive=True)
    assert "log:/rig/data" not in names(folder, str(folder), recursive=True)


def test_what_a_person_may_not_read_does_not_hide_the_rest() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        fill(f"fmq:{folder}/beams", 5)
        fill(f"fmq:{folder}/open?mode=0644", 4)
        fill(f"log:{folder}/archive", 3)  # a folder of its owner's

        def check() -> None:
            listed = [look_at(url) for url in found_at(folder, recursive=True)]
            assert [(each.url.rpartition("/")[2], each.kind) for each in listed] == [
                ("beams", "unreadable"),
                ("open", "wide"),
            ]

        run_without_rights(check)


def test_a_thousand_streams_are_listed_in_less_than_a_second_of_work(tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/0?slots=64&size=64k", 5)
    whole = (tmp_path / "0.fmq").read_bytes()
    for number in range(1, 1000):
        (tmp_path / f"{number}.fmq").write_bytes(whole)
    began = time.process_time()
    listed = [look_at(url) for url in found_at(str(tmp_path))]
    assert time.process_time() - began < 1.0
    assert {(each.kind, each.messages) for each in listed} == {("wide", 5)}
    assert len(listed) == 1000


# --- rm -------------------------------------------------------------------------------------------


def test_all_of_a_stream_goes_and_nothing_else(folder: Path) -> None:
    url = f"fmq:{folder}/beams"
    with open_reader(url, group="g") as member:
        member.read(0)
    done = run("rm", url, f"log:{folder}/*", f"fmq:{folder}/site/oslo/old")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == [
        f"removed {url} (5 messages)",
        f"removed log:{folder}/archive (7 messages)",
        f"removed fmq:{folder}/site/oslo/old (3 messages)",
    ]
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert left[0] == "notes.txt"
    assert all(path.startswith("site/log/") for path in left[1:])
    gone = run("rm", url)
    assert gone.returncode == 1
    assert b"there is no queue" in gone.stderr


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_damaged_one_is_removed_by_force(tmp_path: Path, kind: str) -> None:
    url = f"{kind}:{tmp_path}/x"
    fill(url, 3)
    (path,) = tmp_path.rglob("*.fmq")
    with path.open("r+b") as file:
        file.seek(416)
        file.write(bytes(range(1, 61)))
    done = run("rm", url)
    assert done.returncode == 1
    assert path.exists()
    done = run("rm", url, "--force")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"removed {url} (damaged)\n"
    assert not path.exists()


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_one_in_use_stays_unless_it_is_forced(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{kind}:{tmp_path}/stream"
    with open_writer(url) as writer, open_reader(url, hold="r") as reader:
        writer.write(b"x")
        pid = os.getpid()
        with pytest.raises(InUse) as raised:
            remove(url)
        assert raised.value.users == [f"process {pid} writes", f"process {pid} reads as r"]
        reader.read(0)
        remove(url, force=True)
        assert list(tmp_path.iterdir()) == []
        until(lambda: writer.write(b"y") == 0 or None)  # it noticed, and began anew
        assert "removed" in caplog.text
        found = reader.read(timeout=10)
        assert found is not None
        assert found.payload == b"y"


def test_other_things_in_the_folder_of_a_log_stay(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "archive" / "mine.txt").write_text("x")
    remove(f"log:{folder}/archive")
    assert [path.name for path in (folder / "archive").iterdir()] == ["mine.txt"]
    assert "holds other things" in caplog.text


# --- resize ---------------------------------------------------------------------------------------


def test_a_queue_gets_larger_while_a_command_follows_it(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/queue?slots=16&size=4k"
    fill(url, 10)
    with OnTerminal("cat", f"fmq:{tmp_path}/queue", "--follow", "--delimiter", r"\n") as follower:
        follower.read_until(b"message 9")
        resize(f"fmq:{tmp_path}/queue", slots=1000, size="1M")
        with open_writer(f"fmq:{tmp_path}/queue") as writer:
            writer.write(b"and one more")
        follower.read_until(b"and one more")
        assert follower.seen.count(b"message 3") == 1


def test_who_reads_only_the_first_lines_of_a_list_is_no_error(folder: Path) -> None:
    call = f"{PENSTOCK} ls {folder} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["stream", "kind"]
