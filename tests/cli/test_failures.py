"""Whatever goes wrong, the command says it on one line and never shows a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli.command import PENSTOCK, fill, run
from penstock import open_reader, open_writer


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell, with `$0` for penstock and `$1`… for the arguments."""
    return subprocess.run(
        ["sh", "-c", command, PENSTOCK, *arguments], capture_output=True, timeout=30, check=False
    )


def assert_one_line(done: subprocess.CompletedProcess[bytes], complaint: bytes) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith(b"penstock: ")
    assert complaint in done.stderr
    assert b"(hint: " in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_text_of_any_bytes_is_written_as_it_was_typed(queue_url: str) -> None:
    assert run("put", queue_url, "--text", os.fsdecode(b"\xff\xe9")).returncode == 0
    with open_reader(queue_url) as reader:
        assert [m.payload for m in reader.available()] == [b"\xff\xe9"]


def test_a_queue_whose_name_is_no_text_can_be_made(tmp_path: Path) -> None:
    done = run("create", f"fmq:{tmp_path}/" + os.fsdecode(b"\xff"))
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\udcff" in done.stdout


def test_json_lines_from_a_closed_standard_input_are_refused(queue_url: str) -> None:
    done = shell('"$0" put "$1" --jsonl - <&-', queue_url)
    assert_one_line(done, b"standard input is closed; 0 messages written")


def test_output_that_is_not_taken_is_said_once(queue_url: str) -> None:
    fill(queue_url, 5)
    full = b"writing to standard output: No space left on device"
    assert_one_line(shell('"$0" cat "$1" > /dev/full', queue_url), full)
    closed = b"writing to standard output: it is closed"
    assert_one_line(shell('"$0" cat "$1" >&-', queue_url), closed)
    put = shell('"$0" put "$1" --text hello > /dev/full', queue_url)
    assert_one_line(put, b"No space left on device; 1 message written (5 B)")


def test_a_closed_standard_error_does_not_send_notes_into_the_output(queue_url: str) -> None:
    fill(queue_url, 50)
    done = shell('"$0" cat "$1" --from 10 --raw 2>&-', queue_url)
    assert done.returncode == 3
    assert done.stdout == b"".join(b"message %d" % i for i in range(30, 50))


@pytest.mark.parametrize("command", ["put", "cp"])
def test_an_error_half_way_says_how_many_came_before_it(
    command: str, queue_url: str, tmp_path: Path
) -> None:
    small = f"fmq:{tmp_path / 'small'}?layout=classic&size=100"
    if command == "put":
        done = run("put", small, "--text", "small", "--text", "x" * 500, "--text", "small")
        assert_one_line(done, b"does not fit: the limit is 88; 1 message written (5 B) (hint: ")
    else:
        with open_writer(queue_url) as writer:
            writer.write_many([b"small", b"x" * 500, b"small"])
        done = run("cp", queue_url, small)
        assert_one_line(done, b"does not fit: the limit is 88; 1 message copied (5 B) (hint: ")
