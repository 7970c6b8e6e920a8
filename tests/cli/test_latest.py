"""`penstock latest`, `penstock on` and `penstock serve ldata`, as people use them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.command import PENSTOCK, json_lines
from penstock import open_reader
from penstock.cli.main import app
from penstock.core.errors import InvalidURL, PenstockError

ENVIRONMENT = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data")


def write(directory: str, *names: str, slots: int = 2500) -> None:
    from penstock.registry.latest import LatestDataInfo
    from penstock.registry.latest_files import LatestSettings

    settings = LatestSettings(fmq_slots=slots)
    with LatestDataInfo(directory, settings=settings, register=None) as latest:
        for number, name in enumerate(names):
            (Path(directory) / name).write_text(name)
            latest.write(name, time=1705320000 + number)


def run(*arguments: str, **environment: str) -> Result:
    """Run a command in this process: a new one for each costs seconds on a busy machine."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120", **environment})


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [PENSTOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )


def test_what_is_written_is_read(data: str) -> None:
    (Path(data) / "a.nc").touch()
    wrote = run(
        *("latest", "write", data, f"{data}/a.nc", "--time", "2024-01-15T12:00:00Z"),
        *("--writer", "me", "--type", "mdv", "--lead", "1h", "--no-register"),
    )
    assert wrote.exit_code == 0, wrote.output
    line = run("latest", "read", data)
    assert line.stdout == f"2024-01-15T12:00:00Z+1 h  mdv  me  {data}/a.nc\n"
    (found,) = json_lines(run("latest", "read", data, "--json", "--forced").stdout_bytes)
    assert (found["valid_time"], found["file_ext"]) == (1705323600, "nc")


def test_a_file_or_directory_that_is_not_there_is_told(data: str, tmp_path: Path) -> None:
    wrote = run("latest", "write", data, "data/a.nc", "--no-register")
    assert wrote.exit_code == 0
    assert f"there is no file data/a.nc yet in {data}" in wrote.stderr
    missing = f"{tmp_path}/none"
    with start("latest", "watch", missing, "--count", "1") as watcher:
        assert watcher.stderr is not None
        assert watcher.stderr.readline().startswith(
            b"penstock: there is no directory " + missing.encode()
        )
        watcher.kill()
    with pytest.raises(InvalidURL, match="not a server") as error:
        open_reader("latest:ldatap://localhost:1/radar")
    assert error.value.hint == "penstock latest watch ldatap://localhost:1/radar"


def test_a_label_reads_on_and_nothing_new_is_an_exit_code(data: str, tmp_path: Path) -> None:
    write(data, "a", "b", "c")
    place = str(tmp_path)
    first = run("latest", "read", data, "--from-start", "--label", "x", TMP_DIR=place)
    assert first.stdout.endswith("/a\n")
    rest = run("latest", "read", data, "--all", "--label", "x", TMP_DIR=place)
    assert [line[-2:] for line in rest.stdout.splitlines()] == ["/b", "/c"]
    nothing = run("latest", "read", data, "--label", "x", TMP_DIR=place)
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "nothing new" in nothing.stderr


def test_watching_shows_files_as_they_come(data: str) -> None:
    watcher = start("latest", "watch", data, "--from-start", "--count", "2")
    time.sleep(0.2)
    write(data, "a", "b")
    output, _ = watcher.communicate(timeout=30)
    assert [line[-2:] for line in output.decode().splitlines()] == ["/a", "/b"]
    assert watcher.returncode == 0


def test_a_command_is_run_for_every_file_and_each_has_a_line(
    data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(data, "a", "b")
    record = tmp_path / "record"
    words = ("sh", "-c", f'cat "$1" >> {record}; echo said', "sh", "{path}")
    options = ("--from", "start", "--idle", "0.1s", "--json")
    done = run("on", data, *options, "--", *words)
    assert record.read_text() == "ab"
    lines = json_lines(done.stdout_bytes)
    assert [(line["what"], line["path"], line["count"]) for line in lines] == [
        ("done", f"{data}/a", 1),
        ("done", f"{data}/b", 1),
    ]
    assert capfd.readouterr().err == "said\nsaid\n"
    assert "2 done, 0 dead, 0 lost" in done.stderr


def test_files_that_were_overwritten_before_they_were_seen_end_it_with_3(data: str) -> None:
    words = ("on", data, "--from", "start", "--idle", "0.1s", "--", "true")
    write(data, "0", slots=10)
    assert run(*words).exit_code == 0
    write(data, *map(str, range(1, 26)))
    done = run(*words)
    assert done.exit_code == 3
    assert "10 done, 0 dead, 15 lost" in done.stderr


def test_files_given_up_are_listed_and_tried_again(data: str) -> None:
    write(data, "a", "b")
    options = ("--from", "start", "--idle", "0.1s", "--attempts", "2", "--backoff", "0")
    failed = run("on", data, *options, "--", "sh", "-c", "test {rel} != a")
    kinds = [line.split()[0] for line in failed.stdout.splitlines()]
    assert kinds == ["failed", "dead", "done"]
    listed = run("on", "--dead", data).stdout
    assert f"{data}/a  2 attempts  UNKNOWN: sh ended with status 1" in listed
    (letter,) = json_lines(run("on", "--dead", "--json", data).stdout_bytes)
    assert (letter["rel_data_path"], letter["attempts"]) == ("a", 2)
    again = run("on", "--dead", "--attempts", "1", data, "--", "false")
    assert (again.exit_code, "1 still dead" in again.stderr) == (1, True)
    again = run("on", "--dead", data, "--", "test", "-f", "{path}")
    assert (again.exit_code, "1 done, 0 still dead" in again.stderr) == (0, True)
    assert run("on", "--dead", data).stdout == ""


def test_a_command_without_words_or_with_wrong_ones_is_refused(data: str) -> None:
    for words, said in (((), "is empty"), (("--", "echo", "{what}"), "{what} is no field")):
        error = run("on", data, *words).exception
        assert isinstance(error, PenstockError)
        assert said in str(error)


def test_a_signal_ends_it_after_the_run_under_way(data: str, tmp_path: Path) -> None:
    write(data, "a", "b")
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    script = f"touch {begun}; sleep 0.5; echo $1 >> {ended}"
    worker = start("on", data, "--from", "start", "--", "sh", "-c", script, "sh", "{rel}")
    deadline = time.monotonic() + 20
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.send_signal(signal.SIGTERM)
    output, notes = worker.communicate(timeout=20)
    assert worker.returncode == 0
    assert ended.read_text() == "a\n"
    assert output.startswith(b"done")
    assert b"1 done" in notes


def test_a_directory_is_served_to_others(data: str) -> None:
    write(data, "a")
    server = start(
        "serve", "ldata", "--root", str(Path(data).parent), "--port", "0", "--no-register"
    )
    try:
        assert server.stdout is not None
        said = server.stdout.readline().decode()
        address = re.search(r"127\.0\.0\.1:\d+", said)
        assert address is not None, said
        place = f"ldatap://{address[0]}/data"
        assert run("latest", "read", place).stdout.endswith("  a\n")
        wrote = run("latest", "write", place, "b.nc", "--writer", "you")
        assert wrote.exit_code == 0, wrote.output
        (found,) = json_lines(run("latest", "read", place, "--json").stdout_bytes)
        assert (found["rel_data_path"], found["writer"]) == ("b.nc", "you")
        outside = run("latest", "read", f"ldatap://{address[0]}/../etc")
        assert "not below" in str(outside.exception)
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=20)
        assert b"stopped: " in output
    finally:
        server.kill()
        server.communicate()


def test_a_watch_goes_on_when_the_server_comes_back(data: str) -> None:
    from penstock.protocols.lrose.ds_server import DsServer
    from penstock.registry.latest_server import LdataServer, LdataServerOptions

    def serve(port: int) -> DsServer:
        options = LdataServerOptions(root=Path(data), port=port, datamapper=False)
        return LdataServer(options)

    (Path(data) / "sub").mkdir()
    write(f"{data}/sub", "a")
    server = serve(0)
    watching = start("latest", "watch", f"ldatap://127.0.0.1:{server.port}/sub", "--count", "3")
    assert watching.stdout is not None
    assert b"  a\n" in watching.stdout.readline()
    server.close()
    write(f"{data}/sub", "b", "c")
    time.sleep(1)
    with serve(server.port):
        output, said = watching.communicate(timeout=30)
    assert [line.split()[-1] for line in output.splitlines()] == [b"b", b"c"]
    assert said.count(b"it is tried again") == 1
    assert watching.returncode == 0
