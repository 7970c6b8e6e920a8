"""`penstock chaos`: real processes between real sockets."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cli.command import PENSTOCK, OnTerminal, run
from penstock.relay.faults import DirectionCounters, Faults
from penstock.relay.faults.decisions import Dice, datagram_fate
from relay.faults.targets import (
    TcpTarget,
    UdpTarget,
    receive_exactly,
    tcp_client,
    udp_client,
)
from support.descriptors import cpu_seconds, starved
from support.until import until

SOON = 20


class Chaos:
    """A router in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: tuple[str, int]) -> None:
        self.process = process
        self.address = address

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=SOON)
        return self.process.returncode, output, errors

    def stop_and_count(self) -> dict[str, Any]:
        code, output, errors = self.stop()
        assert code == 0, errors
        counters: dict[str, Any] = json.loads(output)
        for direction in ("up", "down"):
            one = counters[direction]
            assert DirectionCounters(**one).accounted == one["arrived"]
        return counters


@contextlib.contextmanager
def chaos(transport: str, to: tuple[str, int], *options: str) -> Iterator[Chaos]:
    arguments = [PENSTOCK, "chaos", transport, "--to", f"{to[0]}:{to[1]}", *options]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stderr if "--json" in options else process.stdout
        assert said is not None
        line = said.readline()
        match = re.match(rf"routing {transport} 127.0.0.1:(\d+) -> 127.0.0.1:{to[1]}, seed", line)
        assert match, line
        yield Chaos(process, ("127.0.0.1", int(match[1])))
    finally:
        process.kill()
        process.communicate()


def test_datagrams_are_dropped_as_the_seed_says() -> None:
    sent = [b"%d" % n for n in range(200)]
    dice = Dice(7, 0, "up")
    expected = [
        data
        for n, data in enumerate(sent)
        if not datagram_fate(dice, n, Faults(drop=0.2)).is_dropped
    ]
    with (
        UdpTarget() as target,
        chaos(
            "udp", target.address, "--drop", "20%", "--seed", "7", "--one-way", "up", "--json"
        ) as router,
        udp_client(router.address) as client,
    ):
        for data in sent:
            client.send(data)
        until(lambda: len(target.received) >= len(expected))
        counters = router.stop_and_count()
    assert target.received == expected
    assert counters["unit"] == "datagrams"
    assert counters["up"]["arrived"] == 200
    assert counters["up"]["passed"] == len(expected)
    assert counters["clients"]["seen"] == 1


def test_all_faults_of_datagrams_can_be_asked_for() -> None:
    options = (
        "--listen 127.0.0.1:0 --drop 5% --duplicate 1% --delay 10ms±5ms --reorder 2% "
        "--garble 1% --rate 10M --cut-every 10s --seed 7 --max-clients 5 --idle 5s"
    )
    with (
        UdpTarget(echo=True) as target,
        chaos("udp", target.address, *options.split(), "--json") as router,
        udp_client(router.address) as client,
    ):
        for n in range(200):
            client.send(b"%d" % n)
        until(lambda: len(target.received) > 150)
        counters = router.stop_and_count()
    assert counters["up"]["delayed"] > 150


def test_connections_pass_and_are_cut_after_so_many_bytes() -> None:
    options = "--delay 2ms+-1ms --cut-after 1k --cut fin --one-way up --json"
    with (
        TcpTarget() as target,
        chaos("tcp", target.address, *options.split()) as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(bytes(3000))
        until(lambda: bool(target.ends))
        counters = router.stop_and_count()
    assert len(target.received[0]) == 1024
    assert counters["unit"] == "bytes"
    assert counters["clients"]["cut"] == 1


def test_a_half_open_connection_is_silent() -> None:
    with (
        TcpTarget() as target,
        chaos("tcp", target.address, "--half-open", "--json") as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(b"x")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        counters = router.stop_and_count()
    assert counters["up"]["passed"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_it_says_what_passed(number: int) -> None:
    with (
        TcpTarget() as target,
        chaos("tcp", target.address) as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(b"hello")
        assert receive_exactly(client, 5) == b"hello"
        code, output, errors = router.stop(number)
    assert (code, errors) == (0, "")
    assert re.search(r"passed +5 +5", output)
    assert "1 seen, 1 ended" in output


def test_it_ends_by_itself_and_warns_when_other_machines_can_reach_it() -> None:
    began = time.monotonic()
    done = run(
        "chaos", "udp", "--to", "127.0.0.1:9", "--listen", "0.0.0.0:0", "--for", "0.3s", "--json"
    )
    assert done.returncode == 0
    assert time.monotonic() - began >= 0.3
    assert json.loads(done.stdout)["clients"]["seen"] == 0
    assert b"other machines can reach 127.0.0.1:9" in done.stderr


def test_a_terminal_shows_a_live_table() -> None:
    with (
        TcpTarget() as target,
        OnTerminal("chaos", "tcp", "--to", f":{target.address[1]}", "--for", "1.5s") as command,
    ):
        while not (match := re.search(rb"127.0.0.1:(\d+) ->", command.seen)):
            assert command.read(), command.seen
        with tcp_client(("127.0.0.1", int(match[1]))) as client:
            client.sendall(b"123")
            assert receive_exactly(client, 3) == b"123"
        assert command.exit_code() == 0
    assert command.seen.count(b"arrived") > 2  # drawn again and again
    assert b"1 seen, 1 ended" in command.seen


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("udp", "--to", "127.0.0.1:9", "--drop", "5"), b"write 5% for percent"),
        (("tcp", "--to", "127.0.0.1:9", "--delay", "soon"), b"--delay='soon'"),
    ],
)
def test_what_is_wrong_with_its_arguments_is_one_line(
    arguments: tuple[str, ...], reason: bytes
) -> None:
    done = run("chaos", *arguments)
    assert done.returncode == 1
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_descriptors_a_router_waits_at_no_cost_and_routes_again_with_them() -> None:
    with TcpTarget() as target, chaos("tcp", target.address) as router:
        pid = router.process.pid
        with contextlib.ExitStack() as stack:
            with starved(pid):
                waiting = [
                    stack.enter_context(socket.create_connection(router.address, SOON))
                    for _ in range(30)
                ]
                time.sleep(0.5)
                before = cpu_seconds(pid)
                time.sleep(1)
                assert cpu_seconds(pid) - before < 0.25
            waiting[-1].sendall(b"hello")
            assert waiting[-1].recv(5) == b"hello"
        code, _, errors = router.stop()
    assert code == 0
    assert errors.count("not possible now") == 1
    assert "Traceback" not in errors
