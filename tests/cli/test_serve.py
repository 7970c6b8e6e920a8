"""`penstock serve flight`, and the other commands by its URLs: real processes on loopback."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import PENSTOCK, json_lines, run
from penstock import Message, StreamId, create, describe, open_reader, open_writer
from penstock.core.batch import batch_from_messages
from protocols.flight.serving import ServerProcess, server_process


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    with server_process(root) as server:
        yield server


def test_create_put_cat_and_info_work_by_url(server: ServerProcess, root: Path) -> None:
    url = f"{server.url}radar/beams"
    made = run("create", f"{url}?slots=64&size=64k")
    assert made.returncode == 0, made.stderr
    assert b"64 slots" in made.stdout
    put = run("put", url, "--text", "one", "--text", "two", "--type", "5")
    assert put.stdout.startswith(b"2 messages written")
    shown = json_lines(run("cat", url, "--json").stdout)
    assert [(m["seq"], m["type"], m["size"]) for m in shown] == [(0, 5, 3), (1, 5, 3)]
    info = json.loads(run("info", url, "--json").stdout)
    assert (info["url"], info["layout"], info["count"]) == (url, "wide", 2)
    assert describe(f"fmq:{root}/radar/beams").count == 2


def test_cat_follows_and_filters(server: ServerProcess, root: Path) -> None:
    url = f"{server.url}followed"
    create(url)
    arguments = [PENSTOCK, "cat", url, "--follow", "--raw", "--type", "2", "--count", "3"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as cat:
        with open_writer(f"fmq:{root}/followed") as writer:
            for i in range(6):
                writer.write(b"%d" % i, type=1 + i % 2)
        assert cat.stdout is not None
        assert cat.stdout.read() == b"135"
        assert cat.wait(10) == 0


def test_messages_are_copied_there_and_back(server: ServerProcess, tmp_path: Path) -> None:
    _copy_there_and_back(server, tmp_path, 5_000)


@pytest.mark.full
def test_a_million_messages_are_copied_there_and_back(
    server: ServerProcess, tmp_path: Path
) -> None:
    _copy_there_and_back(server, tmp_path, 1_000_000)


def _copy_there_and_back(server: ServerProcess, tmp_path: Path, count: int) -> None:
    rng = random.Random(3)
    streams = [None, *(StreamId(rng.randbytes(16)) for _ in range(3))]
    messages = [
        Message(
            i, 10**18 + i, 0, rng.randrange(-5, 5), i % 7, streams[i % 4],
            b"attributes %d" % i if i % 3 == 0 else None, rng.randbytes(i % 90),
        )
        for i in range(count)
    ]  # fmt: skip
    source, back = f"log:{tmp_path}/source", f"log:{tmp_path}/back"
    with open_writer(source) as writer:
        writer.write_batch(batch_from_messages(messages))
    there = f"{server.url}copies{count}?kind=log"
    for arguments in ((source, there), (there, back)):
        done = subprocess.run([PENSTOCK, "cp", *arguments], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{count:,} messages copied".encode())
    with open_reader(back) as reader:
        assert [m._replace(created_ns=0) for m in reader.available()] == messages


def test_losses_are_named_by_cat(server: ServerProcess, root: Path) -> None:
    url = f"{server.url}lossy"
    create(f"{url}?slots=16&size=4k")
    with open_writer(f"fmq:{root}/lossy") as writer:
        writer.write_many([b"x"] * 50)
    shown = run("cat", url, "--from", "10", "--json")
    seqs = [m["seq"] for m in json_lines(shown.stdout)]
    assert shown.returncode == 3
    assert f"seq 10 to {seqs[0] - 1}".encode() in shown.stderr
    assert seqs[-1] == 49


def test_an_error_of_the_server_is_one_line(server: ServerProcess) -> None:
    done = run("info", f"{server.url}nothing")
    assert done.returncode == 1
    assert done.stderr.startswith(b"penstock: there is no stream nothing")
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_and_leaves_everything_whole(tmp_path: Path, number: int) -> None:
    with server_process(tmp_path) as server:
        reader = open_reader(_made(server, "a"), hold="archive", retry=0)
        with open_writer(f"{server.url}a", retry=0) as writer:
            writer.write_many([b"x"] * 100)
            assert len(reader.read_many(10)) == 10
            began = time.monotonic()
            code, output, errors = server.stop(number)
            assert time.monotonic() - began < 10
        reader.close()
    assert code == 0, errors
    assert "100 appended" in output
    assert "connected" in errors  # a line for each connection
    assert "writes to a" in errors
    assert "Traceback" not in errors
    with open_writer(f"fmq:{tmp_path}/a", lock_timeout=0) as writer:
        assert writer.write(b"next") == 100


def _made(server: ServerProcess, name: str) -> str:
    open_writer(f"{server.url}{name}").close()
    return f"{server.url}{name}"


@pytest.mark.full
def test_a_stalled_client_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with open_writer(f"fmq:{tmp_path}/a?size=128M") as writer:
        writer.write_many([bytes(100_000)] * 1000)
    code = (
        "import sys, time, penstock; reader = penstock.open_reader(sys.argv[1]); "
        "reader.read(0); print('read', flush=True); time.sleep(60)"
    )
    with (
        server_process(tmp_path, "--quiet") as server,
        subprocess.Popen(
            [sys.executable, "-c", code, f"{server.url}a"], stdout=subprocess.PIPE
        ) as client,
    ):
        assert client.stdout is not None
        assert client.stdout.readline() == b"read\n"
        time.sleep(0.3)
        began = time.monotonic()
        code_of_server, output, errors = server.stop()
        assert time.monotonic() - began < 15
        client.kill()
    assert code_of_server == 0, errors
    assert "stopped" in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--root", "/nowhere"), b"no directory /nowhere"),
        (("--root", ".", "--host", "0.0.0.0"), b"--token-file"),
    ],
)
def test_what_is_wrong_with_its_arguments_is_one_line(
    arguments: tuple[str, ...], reason: bytes
) -> None:
    done = run("serve", "flight", *arguments)
    assert done.returncode == 1
    assert reason in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_token_is_given_by_the_environment(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-of-this-test")
    folder = tmp_path / "root"
    folder.mkdir()
    with server_process(folder, "--token-file", str(token)) as server:
        url = f"{server.url}a"
        refused = run("put", url, "--text", "x")
        assert refused.returncode == 1
        assert b"PENSTOCK_FLIGHT_TOKEN" in refused.stderr
        put = run("put", url, "--text", "x", PENSTOCK_FLIGHT_TOKEN="secret-of-this-test")
        assert put.returncode == 0
        assert describe(url, token_file=token).count == 1
        _, output, errors = server.stop()
    assert "secret" not in output + errors
