"""Whatever goes wrong, the command says it on one line and never shows a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import PENSTOCK, count, fill, run
from penstock import open_reader, open_writer
from penstock.core.errors import InvalidOption
from penstock.protocols.files.endpoint import check_replaceable
from support.small_disks import small_disk_at
from support.until import until


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
    assert_one_line(put, full + b"; 1 message written (5 B)")


def test_a_closed_standard_error_does_not_send_notes_into_the_output(queue_url: str) -> None:
    fill(queue_url, 50)
    done = shell('"$0" cat "$1" --from 10 --raw 2>&-', queue_url)
    assert done.returncode == 3
    assert done.stdout == b"".join(b"message %d" % i for i in range(30, 50))


def test_no_file_of_a_stream_takes_the_place_of_a_closed_standard_stream(tmp_path: Path) -> None:
    log, queue = f"log:{tmp_path}/log", f"fmq:{tmp_path}/queue"
    fill(log, 5)
    closed = b"writing to standard output: it is closed"
    assert_one_line(shell('"$0" cat "$1" >&-', log), closed)
    command = ['exec "$0" put "$1" --rate 0.1 -t a -t b <&- >&- 2>&-', PENSTOCK, queue]
    with subprocess.Popen(["sh", "-c", *command]) as process:
        try:
            until(lambda: count(queue) > 0)
            opened = [Path(f"/proc/{process.pid}/fd/{fd}").readlink() for fd in range(3)]
        finally:
            process.kill()
    assert opened == [Path(os.devnull)] * 3


def test_a_copy_that_ends_because_nobody_reads_its_progress_says_so(tmp_path: Path) -> None:
    source, target = f"log:{tmp_path}/a", f"log:{tmp_path}/b"
    fill(source, 400)  # for four seconds
    copy = '("$0" cp "$1" "$2" --progress json --quota 1k/s; echo $? >&2) | head -n 1'
    done = shell(copy, source, target)
    assert done.stdout.count(b"\n") == 1
    said, code = done.stderr.splitlines()
    assert said.startswith(b"penstock: writing to standard output: Broken pipe; ")
    assert b"%d messages copied" % count(target) in said
    assert code == b"1"


def test_nothing_is_said_to_be_written_to_a_file_that_is_not_there(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "64k") as disk:
        done = run("put", f"csv:{disk}/full", stdin=b"x" * 50 + b"\n" * 5000)
        assert_one_line(done, b"No space left on device; 0 messages written (0 B)")
        assert done.stdout == b""
        lines = b'{"payload": "a"}\nnonsense\n'
        done = run("put", f"jsonl:{disk}/bad", "--jsonl", "-", stdin=b"\n" * (1 << 17) + lines)
        assert b"; 0 messages written (0 B)" in done.stderr
        assert (done.returncode, done.stdout) == (1, b"")
        done = shell('"$0" put "$1" --text hello > /dev/full', f"csv:{disk}/whole")
        full = b"writing to standard output: No space left on device"
        assert_one_line(done, full + b"; 1 message written (5 B)")
        assert [path.name for path in disk.iterdir()] == ["whole"]


def test_nothing_is_said_to_be_copied_to_a_file_that_is_not_there(tmp_path: Path) -> None:
    lines = b'{"payload": "a"}\n' * 20_000  # more than are read at once
    (tmp_path / "bad").write_bytes(lines + b"nonsense\n")
    done = run("cp", f"jsonl:{tmp_path}/bad", f"csv:{tmp_path}/file")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"line 20001 should be a JSON object" in done.stderr
    assert b"; 0 messages copied (0 B)" in done.stderr
    done = run("cp", f"jsonl:{tmp_path}/bad", f"log:{tmp_path}/log")
    assert b"; %s messages copied (" % f"{count(f'log:{tmp_path}/log'):,}".encode() in done.stderr


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # Values of options: what is wrong, and no advice that does not help.
        ('"$0" create "fmq:$1/q?slots=0"', "should be from 2 to 1099511627776 (hint: change it,"),
        ('"$0" create "fmq:$1/q?layout=wde"', "should be 'wide' or 'classic' (hint: change it,"),
        ('"$0" create "fmq:$1/q?size=100T"', "File too large (hint: make it smaller)"),
        ('"$0" create "csv:$1/x"', "has nothing to create"),
        ('"$0" cat "log:$1/log?hold="', "option hold='': names nobody"),
        ('"$0" cp "log:$1/log" "log:$1/x" --batch 0', "must be greater than or equal to 1"),
        ('"$0" mon "log:$1/log" -i abc', "option interval='abc': expected a duration"),
        ('"$0" on "$1" --timeout abc -- true', "option timeout='abc': expected a duration"),
        ('"$0" on "$1" --backoff 5min -- true', "option backoff='5min': expected a duration"),
        ('"$0" log trim "log:$1/log" --retain-age 1w', "option retain_age='1w': expected a dur"),
        ('"$0" latest read "$1" --max-age abc', "option max_age='abc': expected a duration"),
        # Files of other tools.
        ('"$0" cp "log:$1/log" csv:-', "cat --json prints to standard output"),
        ('"$0" cp "log:$1/log" "csv:$1"', "is a folder (hint: give the name of a file in it)"),
        ('"$0" cp "log:$1/log" "csv:$1/pipe?replace=true"', "is no file that can be replaced"),
        ('"$0" cp "log:$1/log" "log:$1/x" --decode "json:v INT"', "--decode goes with parquet:"),
        ('"$0" rm "csv:$1/file"', "(hint: remove it where it is kept)"),
        # What is asked of messages.
        ('"$0" cat "log:$1/log" --format "%{seq} %{payload"', "'%{' is not closed (hint: as in"),
        ('"$0" cat "log:$1/log" --decode protobuf:a.desc', "names no message (hint: as in 'proto"),
        # Other things than they are taken for.
        ('"$0" fmq check "log:$1/log"', "is no queue (hint: write fmq:/path/name)"),
        ('"$0" put "log:$1/file" --text x', "File exists (hint: something else has this name"),
        ('"$0" latest read "$1/none"', "there is no directory"),
        ('"$0" radar plot "$1/none"', "there is no file at"),
        ('"$0" cat fmqp://host.invalid/x', "(hint: look at the name of the host)"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_what_to_do(line: str, said: str, tmp_path: Path) -> None:
    fill(f"log:{tmp_path}/log", 5)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    done = shell(line, str(tmp_path))
    assert_one_line(done, said.encode())
    assert b"--debug shows" not in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "line",
    [
        '"$0" put "log:$1/log" --rate inf --text x',
        '"$0" put "log:$1/log" --null --delimiter ";" --text x',
        '"$0" bench "log:$1/new" -n 10 --rate inf',
        '"$0" bench "log:$1/new" -n 10 --rate nan',
    ],
)
def test_options_that_mean_nothing_are_wrong_usage(line: str, tmp_path: Path) -> None:
    done = shell(line, str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", ["--help", "cat --help", "--version", "id explain " + 32 * "0"]
)
def test_who_has_seen_enough_of_the_help_ends_it(arguments: str) -> None:
    done = shell(f'("$0" {arguments}; echo $? >&2) | true')
    assert done.stderr == b"0\n"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null"])
def test_a_device_is_never_replaced_by_a_file(name: str) -> None:
    with pytest.raises(InvalidOption):
        check_replaceable(Path(name))  # not the command: that would do it


#: A command that calls Java, which dies without an answer.
BROKEN_CALL = """
import importlib, socket, threading

def app(**_):
    from py4j.java_gateway import GatewayParameters, JavaGateway

    def hang_up():
        while True:
            with server.accept()[0] as connection:
                connection.recv(1)

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=hang_up, daemon=True).start()
    JavaGateway(gateway_parameters=GatewayParameters(port=server.getsockname()[1])).jvm.System.gc()

main = importlib.import_module("penstock.cli.main")
main.app = app
main.main()
"""


def test_a_broken_call_to_java_is_told_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_CALL], capture_output=True, timeout=60, check=False
    )
    assert_one_line(done, b"Py4JError")


def test_a_stream_of_the_other_kind_is_pointed_out(tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/ring", 1)
    fill(f"log:{tmp_path}/log", 1)
    assert (
        f"there is a queue of this name: fmq:{tmp_path}/ring"
        in run("cat", f"log:{tmp_path}/ring").stderr.decode()
    )
    assert (
        f"a log is opened as log:{tmp_path}/log"
        in run("cat", f"fmq:{tmp_path}/log").stderr.decode()
    )
