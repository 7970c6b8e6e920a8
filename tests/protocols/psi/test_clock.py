"""Clocks of two machines are compared, and one slow answer does not spoil it."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from penstock.core.errors import ConnectionLost, InvalidOption, Malformed
from penstock.protocols.psi.clock import (
    ClockSample,
    RemoteClock,
    RemoteClockServer,
    ask_clock,
    filtered_offset_ns,
)
from penstock.relay.faults import FaultRouter, Faults

HOUR = 3_600_000_000_000
HOST = "127.0.0.1"


def an_hour_ahead() -> int:
    return time.time_ns() + HOUR


def test_an_offset_is_found_by_repeated_samples() -> None:
    with (
        RemoteClockServer(HOST, 0, machine="rig", now_ns=an_hour_ahead) as server,
        RemoteClock(HOST, server.port, samples=5, every=0.05) as clock,
    ):
        assert clock.machine == "rig"
        assert not clock.is_this_machine
        assert abs(clock.offset_ns - HOUR) < 500_000_000
        assert clock.uncertainty_ns < 500_000_000
        assert abs(clock.now_ns() - an_hour_ahead()) < 1_000_000_000


def test_it_goes_on_when_the_server_is_gone() -> None:
    server = RemoteClockServer(HOST, 0, now_ns=an_hour_ahead)
    with RemoteClock(HOST, server.port, samples=2, every=0.05) as clock:
        server.close()
        deadline = time.monotonic() + 40
        while not clock.failures and time.monotonic() < deadline:
            time.sleep(0.02)
        assert clock.failures
        assert abs(clock.offset_ns - HOUR) < 500_000_000


def test_answers_that_were_held_up_do_not_count() -> None:
    good = [ClockSample(offset, 1000, "") for offset in (98, 100, 102)]
    late = [ClockSample(5_000_000, 10_000_000, ""), ClockSample(-9_000_000, 20_000_000, "")]
    assert filtered_offset_ns([*late, *good]) == 100
    assert filtered_offset_ns(late[:1]) == 5_000_000
    with pytest.raises(InvalidOption):
        filtered_offset_ns([])


def test_an_equal_delay_both_ways_does_not_move_the_offset() -> None:
    with (
        RemoteClockServer(HOST, 0, now_ns=an_hour_ahead) as server,
        FaultRouter.tcp((HOST, server.port), Faults(delay=0.1)) as router,
    ):
        sample = ask_clock(HOST, router.address[1])
        assert sample.round_trip_ns > 150_000_000
        assert abs(sample.offset_ns - HOUR) < 100_000_000


def test_garbage_and_silence_harm_nobody() -> None:
    with RemoteClockServer(HOST, 0) as server:
        with socket.create_connection((HOST, server.port)) as bad:
            bad.sendall(b"\7\7")
            assert bad.recv(10) == b""
        with socket.create_connection((HOST, server.port)):
            assert abs(ask_clock(HOST, server.port).offset_ns) < 1_000_000_000
    with pytest.raises(ConnectionLost):
        ask_clock(HOST, server.port, timeout=1)


def test_a_server_that_is_no_clock_is_a_clear_error() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionLost, match="no answer"):
            ask_clock(HOST, port, timeout=0.2)
        connection, _ = listener.accept()
        connection.close()

        def answer() -> None:
            peer, _ = listener.accept()
            peer.sendall(b"\xff" * 8 + b"\1x")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Malformed):
            ask_clock(HOST, port, timeout=5)
        thread.join(5)
