from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.command import PENSTOCK, run
from penstock import open_reader, open_writer
from penstock.core.overflow import OverflowPolicy
from penstock.queue.streams import InputStream, OutputStream
from penstock.queue.subscription import Subscription, requests_for
from protocols.jrtc.forwarded import EXAMPLE, HOST, STATUS, UP, send, smo, stream_of
from support.until import until


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PENSTOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=20)


def _collector(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    (folder / "example.pb").write_bytes(EXAMPLE)
    process = _start(
        *("serve", "collector", "--port", "0", "--grpc-port", "-1"),
        *("--schema", f"{folder}/example.pb", "--stream", f"{STATUS}=example:status"),
        *arguments,
    )
    assert process.stderr is not None
    found = re.search(r"collecting at 127.0.0.1:(\d+)", process.stderr.readline())
    assert found is not None
    return process, int(found[1])


def test_a_stream_is_forwarded_and_collected_by_two_commands(tmp_path: Path) -> None:
    collector, port = _collector(tmp_path)
    forwarder = _start(
        *("jrtc", "forward", "--directory", str(tmp_path), "--quiet"),
        *("--to", f"2=jrtc+udp://{HOST}:{port}", "--to", f"4=log:{tmp_path}/kept"),
    )
    assert forwarder.stdout is not None
    assert collector.stdout is not None
    assert forwarder.stdout.readline().startswith("forwarding streams of fwd_dst 2 to jrtc+udp:")
    forwarder.stdout.readline()
    with (
        OutputStream.create(STATUS, owner="a codelet", directory=tmp_path) as stream,
        OutputStream.create(stream_of("kept", 4), owner="a codelet", directory=tmp_path) as kept,
    ):
        stream.write_many([UP] * 3)
        kept.write(b"x")
        lines = [json.loads(collector.stdout.readline()) for _ in range(3)]
        out, _ = _stop(forwarder)
    assert [(line["id"], line["_stream_id"]) for line in lines] == [(7, str(STATUS))] * 3
    assert "4 messages taken, 4 forwarded" in out
    assert forwarder.returncode == 0
    _, said = _stop(collector)
    assert "3 datagrams, 3 collected" in said
    assert collector.returncode == 0


def test_what_is_lost_is_in_the_exit_code_unless_it_is_kept(tmp_path: Path) -> None:
    collector, port = _collector(tmp_path, "--out", f"json:{tmp_path}/lines", "--quiet")
    send(port, STATUS + b"\xff")
    send(port, STATUS + UP)
    until(lambda: (tmp_path / "lines").stat().st_size)
    _, said = _stop(collector)
    assert "1 collected, 0 malformed, 0 unknown stream, 1 undecodable" in said
    assert collector.returncode == 3
    dead = f"log:{tmp_path}/dead"
    collector, port = _collector(
        tmp_path, "--out", f"json:{tmp_path}/more", "--quiet", "--dead", dead
    )
    send(port, STATUS + b"\xff")
    send(port, STATUS + UP)
    until(lambda: (tmp_path / "more").stat().st_size)
    assert "1 dead letters" in _stop(collector)[1]
    assert collector.returncode == 0
    with open_reader(dead) as letters:
        assert letters.read(0) is not None


def test_commands_come_to_a_forwarder(tmp_path: Path) -> None:
    commands = stream_of("commands", 1)
    (tmp_path / "forward.yaml").write_text(
        f"directory: {tmp_path}\ncontrol:\n  tcp_port: 0\n  udp_port: 0\n  allow: [{commands}]\n"
    )
    with InputStream.create(commands, owner="a codelet", directory=tmp_path) as stream:
        forwarder = _start("jrtc", "forward", str(tmp_path / "forward.yaml"))
        assert forwarder.stdout is not None
        assert "20788" in forwarder.stdout.readline()
        found = re.search(r"TCP (\d+), UDP (\d+)", forwarder.stdout.readline())
        assert found is not None
        send(int(found[2]), commands + b"go", STATUS + b"no")
        url = f"jrtc+tcp://{HOST}:{found[1]}?stream={commands}"
        assert run("put", url, "--text", "stop").returncode == 0
        assert {stream.read(10).payload for _ in range(2)} == {b"go", b"stop"}  # type: ignore[union-attr]
        out, _ = _stop(forwarder)
    assert "commands: 2 delivered, 1 refused" in out


def test_schemas_of_the_command_are_known_before_the_first_message_is_taken(
    tmp_path: Path,
) -> None:
    (tmp_path / "example.pb").write_bytes(EXAMPLE)
    with (
        smo() as (url, bodies),
        OutputStream.create(STATUS, owner="x", directory=tmp_path, hold="forwarder-2") as stream,
    ):
        (tmp_path / "forward.yaml").write_text(f"destinations: {{2: '{url}'}}\npolicy: block\n")
        # It was there before: what is written now waits for the next one of its name.
        with Subscription("forwarder-2", directory=tmp_path, policy=OverflowPolicy.BLOCK) as past:
            past.add(*requests_for(destinations=2))
        stream.write_many([UP] * 1000)
        command = ("jrtc", "forward", f"{tmp_path}/forward.yaml", "--directory", str(tmp_path))
        wrong = run(*command, "--schema", f"{tmp_path}/example.pb", "--stream", f"{STATUS}=nope:x")
        assert wrong.returncode == 1
        forwarder = _start(
            *command, "--schema", f"{tmp_path}/example.pb", "--stream", f"{STATUS}=example:status"
        )
        until(lambda: sum(map(len, bodies)) == 1000)
        out, _ = _stop(forwarder)
    assert "1,000 messages taken, 1,000 forwarded" in out
    assert forwarder.returncode == 0


def test_a_second_signal_ends_a_forwarder_whose_destination_waits_for_ever(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/held?slots=16&hold=reader&keep=true"
    open_writer(url).close()
    with (
        open_reader(f"fmq:{tmp_path}/held?hold=reader") as reader,
        OutputStream.create(stream_of("x", 4), owner="x", directory=tmp_path) as stream,
    ):
        forwarder = _start("jrtc", "forward", "--directory", str(tmp_path), "--to", f"4={url}")
        assert forwarder.stdout is not None
        forwarder.stdout.readline()
        stream.write_many([b"x"] * 200)
        until(lambda: reader.newest_seq() == 15)
        began = time.monotonic()

        def is_over() -> bool:
            forwarder.send_signal(signal.SIGINT)
            return forwarder.poll() is not None

        until(is_over)
        forwarder.communicate()
    assert time.monotonic() - began < 10
    assert forwarder.returncode != 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jrtc", "forward", "--to", "0=log:/x"], b"names no destination"),
        (["jrtc", "forward", "--to", "2=nope://x"], b"nope"),
        (["serve", "collector", "--stream", "x"], b"names no message"),
        (["serve", "collector", "--port", "0", "--out", "json+udp://x"], b"host and port"),
    ],
)
def test_what_does_not_do_is_said_in_one_line(arguments: list[str], said: bytes) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
