"""The commands about logs: their output and their exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cli.command import fill, json_lines, run
from penstock import open_reader, open_writer
from penstock.cli.main import app
from penstock.core.errors import InvalidOption, InvalidURL, NotFound, PositionError
from penstock.core.units import format_time
from support.log_files import SMALL, disk, segment_files

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

COUNT = 50
SECOND = 1_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of 50 messages in 7 segments, appended a second apart."""
    log = tmp_path / "log"
    with open_writer(f"log:{log}?{SMALL}") as writer:
        for i in range(COUNT):
            writer.write(b"message %d" % i, type=1, created_ns=i * SECOND)
    open_writer(f"log:{log}").close()  # what is sealed is known to be on the disk now
    return log


def command(*arguments: str) -> Result:
    """Run `penstock log` in this process: a real one takes long to begin."""
    return CliRunner().invoke(app, ["log", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def as_json(*arguments: str, code: int = 0) -> Any:
    done = command(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


# --- real processes ---


def test_create_put_cat_info_and_cp_work_with_logs(tmp_path: Path) -> None:
    url = f"log:{tmp_path / 'log'}"
    made = run("create", f"{url}?{SMALL}&retain=1M")
    assert made.returncode == 0
    assert b": log, in files, in segments of 8 slots, 8.0 KiB" in made.stdout
    put = run("put", url, *(f"--text=message {i}" for i in range(20)))
    assert put.stdout.startswith(b"20 messages written")
    assert len(segment_files(tmp_path / "log")) == 3
    shown = json_lines(run("cat", url, "--json", "--from", "15").stdout)
    assert [m["seq"] for m in shown] == [15, 16, 17, 18, 19]
    info = json.loads(run("info", url, "--json").stdout)
    assert (info["layout"], info["count"], info["oldest_seq"]) == ("log", 20, 0)
    assert info["details"]["segments"] == 3
    assert info["details"]["retain"] == 1 << 20
    assert info["details"]["bytes_on_disk"] == disk(*segment_files(tmp_path / "log"))
    queue, copy = f"fmq:{tmp_path / 'queue'}", f"log:{tmp_path / 'copy'}"
    assert run("cp", url, queue).stdout.startswith(b"20 messages copied")
    assert run("cp", queue, copy).stdout.startswith(b"20 messages copied")
    cursor = f"{copy}?cursor=me"
    assert run("cat", cursor, "--raw", "--count", "3").stdout == b"message 0message 1message 2"
    assert run("cat", cursor, "--raw", "--count", "1").stdout == b"message 3"


def test_losses_to_retention_are_named_by_cat(path: Path) -> None:
    done = run("log", "trim", f"log:{path}", "--before", "20")
    assert done.stdout.startswith(b"2 segments removed: 16 messages, ")
    done = run("cat", f"log:{path}", "--from", "10", "--raw")
    assert done.returncode == 3
    assert b"6 messages lost (seq 10 to 15): retention" in done.stderr


def test_a_log_that_is_not_there_is_an_error_on_one_line(tmp_path: Path) -> None:
    done = run("log", "verify", f"log:{tmp_path / 'none'}")
    assert done.returncode == 1
    assert b"there is no log at" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert not (tmp_path / "none").exists()


# --- ls ---


def test_ls_lists_the_segments(path: Path) -> None:
    done = command("ls", f"log:{path}")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "segment", "messages", "numbers", "first", "appended", "last", "appended", "on", "disk",
        "state",
    ]  # fmt: skip
    assert lines[1].split()[:7] == [
        "0", "8", "0", "to", "7", format_time(0), format_time(7 * SECOND),
    ]  # fmt: skip
    assert lines[1].split()[-1] == "sealed"
    assert lines[7].split()[-1] == "live"
    assert lines[8].startswith("7 segments, 50 messages, ")


def test_ls_prints_json(path: Path) -> None:
    found = as_json("ls", f"log:{path}")
    assert len(found) == 7
    assert found[1] == {
        "path": str(segment_files(path)[1]),
        "first_seq": 8,
        "state": "sealed",
        "bytes_on_disk": disk(segment_files(path)[1]),
        "oldest_seq": 8,
        "youngest_seq": 15,
        "count": 8,
        "oldest_time_ns": 8 * SECOND,
        "youngest_time_ns": 15 * SECOND,
        "bytes": 8 * 64,
    }
    segment_files(path)[2].write_bytes(b"rubbish")
    found = as_json("ls", f"log:{path}")
    assert found[2]["state"] == "damaged"
    assert "is damaged" in found[2]["damage"]
    assert "damaged" in command("ls", f"log:{path}").stdout


# --- trim ---


def test_trim_removes_and_says_what(path: Path) -> None:
    url = f"log:{path}"
    assert command("trim", url).stdout.startswith("0 segments removed: 0 messages, 0 B; ")
    done = command("trim", url, "--before", "17")
    assert done.stdout.startswith("2 segments removed: 16 messages, ")
    done = command("trim", url, "--before", "1970-01-01T00:00:24Z")
    assert done.stdout.startswith("1 segment removed: 8 messages, ")
    trimmed = as_json("trim", url, "--retain-age", "7d")
    assert (trimmed["segments"], trimmed["messages"], trimmed["held_by"]) == (3, 24, None)
    assert trimmed["left"] == disk(*segment_files(path))
    with open_reader(url) as reader:
        assert [m.seq for m in reader.available()] == [48, 49]
    fill(url, 50)
    assert command("trim", url, "--retain", "40k").exit_code == 0
    assert disk(*segment_files(path)) <= 40 << 10


def test_trim_leaves_what_is_held(path: Path) -> None:
    open_writer(f"log:{path}?hold=archive").close()
    done = command("trim", f"log:{path}", "--retain", "0")
    assert done.exit_code == 0
    assert done.stdout.startswith("0 segments removed")
    assert "the cursor archive has not passed it" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--before", "soon"), PositionError),
        (("--retain", "much"), InvalidOption),
        (("--retain-age", "-1"), InvalidOption),
        (("--before", "start"), SystemExit),
    ],
)
def test_trim_refuses_what_it_does_not_understand(
    path: Path, arguments: tuple[str, ...], error: type[BaseException]
) -> None:
    done = command("trim", f"log:{path}", *arguments)
    assert isinstance(done.exception, error)
    assert len(segment_files(path)) == 7


# --- verify ---


def test_verify_names_what_is_not_whole(path: Path) -> None:
    url = f"log:{path}"
    done = command("verify", url)
    assert (done.exit_code, done.stdout) == (0, "7 segments, 50 messages: all whole\n")
    files = segment_files(path)
    with files[2].open("r+b") as segment:
        segment.seek(-8192 + 3 * 64, 2)  # a message's bytes: the buffer is the end of the file
        segment.write(b"?")
    files[4].write_bytes(b"rubbish")
    files[5].unlink()
    done = command("verify", url)
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert f"{files[2]}: message 19 is not as its writer made it" in lines[0]
    assert f"{files[4]}: " in lines[1]
    found = as_json("verify", url, code=1)
    assert (found["segments"], found["messages"]) == (6, 34)
    assert [fault["segment"] for fault in found["faults"]] == [16, 32]


def test_verify_names_a_gap(path: Path) -> None:
    segment_files(path)[3].unlink()
    done = command("verify", f"log:{path}")
    assert done.exit_code == 1
    assert "messages 24 to 31 are missing before it" in done.stderr


# --- what they cannot do ---


@pytest.mark.parametrize("name", ["ls", "trim", "verify"])
def test_another_scheme_is_refused(tmp_path: Path, name: str) -> None:
    fill(f"fmq:{tmp_path / 'queue'}", 3)
    assert isinstance(command(name, f"fmq:{tmp_path / 'queue'}").exception, InvalidURL)
    assert isinstance(command(name, f"log:{tmp_path / 'none'}").exception, NotFound)


def test_info_says_in_words_what_a_log_is(path: Path) -> None:
    with open_writer(f"log:{path}?retain=1M&retain_age=7d&hold=archive,spark"):
        pass
    shown = CliRunner().invoke(app, ["info", f"log:{path}"]).stdout
    for words in ("keeps at most  1.0 MiB", "keeps for      7 d", "archive, spark"):
        assert words in shown, shown
    assert "[" not in shown
    assert "{" not in shown
