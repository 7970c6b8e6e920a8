from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import Closed, NotFound, Unacknowledged
from penstock.protocols.uprotocol import UCode, UMessage, UStatus, UStatusError, UUri
from penstock.protocols.uprotocol.endpoint import MqttTopicOptions
from penstock.protocols.uprotocol.mqtt_wire import REFUSED
from penstock.protocols.uprotocol.topic_writer import TopicWriter
from penstock.protocols.uprotocol.transports import InProcessBus, InProcessLeg, not_tried_after
from support.mosquitto import free_port
from support.until import until

TOPIC = "up://vehicle1/10AB/1/8001"
COMMAND = [sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main())"]


class Recorder:
    """A process that listens for a topic of zenoh, and records it in a log."""

    def __init__(self, directory: Path) -> None:
        self._port = free_port()
        self.place = f"up+zenoh://127.0.0.1:{self._port}/?topic={TOPIC}"
        self._log = f"log:{directory}/recorded"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [*COMMAND, "cp", f"{self.place}&listen=true", self._log, "--follow"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def await_listening(self) -> None:
        def is_listening() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return True
            return False

        until(is_listening, 60)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)

    def payloads(self) -> list[bytes]:
        with contextlib.suppress(NotFound), open_reader(self._log) as reader:
            return [message.payload for message in reader.read_many(100_000)]
        return []


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    made.start()
    try:
        yield made
    finally:
        made.kill()


def test_what_was_on_its_way_when_the_receiver_was_killed_is_published_again(
    recorder: Recorder,
) -> None:
    wanted = [b"%d" % n for n in range(2000)]
    with open_writer(f"{recorder.place}&wait=40s&settle=2s") as writer:
        for at in range(0, 2000, 20):
            if at == 1000:
                # What it had for longer than `settle` and did not record would be lost with it.
                until(lambda: len(set(recorder.payloads())) == 1000, 60)
            writer.write_many(wanted[at : at + 20])
            if at == 1000:
                recorder.kill()
                recorder.start()
        writer.flush()
        assert writer.statistics().messages == 2000
        assert writer.statistics().refused == 0
        until(lambda: len(set(recorder.payloads())) == len(wanted), 60)
    # Twice is allowed; what comes for the first time is in order.
    assert list(dict.fromkeys(recorder.payloads())) == wanted


def test_what_cannot_be_published_again_is_told_by_flush_and_by_close(recorder: Recorder) -> None:
    recorder.await_listening()
    writer = open_writer(f"{recorder.place}&wait=2s&settle=20s")
    writer.write_many([b"1", b"2"])
    recorder.kill()
    with pytest.raises(Unacknowledged, match="of 2 it is not known") as told:
        writer.flush()
    assert (told.value.acknowledged, told.value.in_doubt) == (0, 2)
    assert told.value.hint
    # Nothing of a call is tried before what has to be published again.
    with pytest.raises(Unacknowledged) as told:
        writer.write(b"3")
    assert (told.value.acknowledged, told.value.in_doubt) == (0, 2)
    assert (writer.statistics().messages, writer.statistics().refused) == (2, 1)
    began = time.monotonic()
    with pytest.raises(Unacknowledged):
        writer.close()
    assert time.monotonic() - began < 5
    writer.close()
    with pytest.raises(Closed):
        writer.flush()


def test_what_ends_a_with_is_not_hidden_by_what_is_in_doubt(recorder: Recorder) -> None:
    def write_and_fail() -> None:
        with open_writer(f"{recorder.place}&wait=2s&settle=20s") as writer:
            writer.write(b"1")
            recorder.kill()
            raise KeyError

    recorder.await_listening()
    with pytest.raises(KeyError):
        write_and_fail()


class Full(InProcessLeg):
    """A leg whose broker has no room."""

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        del address
        status = UStatus(UCode.RESOURCE_EXHAUSTED, f"{REFUSED} 0x97")
        return not_tried_after(status, len(messages) - 1)


def test_a_broker_without_room_does_not_make_a_message_too_large() -> None:
    options = MqttTopicOptions.model_validate({"topic": TOPIC})
    with TopicWriter("up+mqtt://x/", Full("full", InProcessBus()), options) as writer:
        with pytest.raises(UStatusError, match="RESOURCE_EXHAUSTED") as told:
            writer.write_many([b"1", b"2"])
        assert told.value.hint
        assert writer.statistics().refused == 2


def test_cp_fails_when_nobody_knows_what_became_of_the_last_messages(
    recorder: Recorder, tmp_path: Path
) -> None:
    with open_writer(f"log:{tmp_path}/source") as source:
        source.write_many([b"%d" % n for n in range(100)])
    recorder.await_listening()
    target = f"{recorder.place}&wait=2s&settle=20s"
    copying = subprocess.Popen(
        [*COMMAND, "cp", f"log:{tmp_path}/source", target], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(recorder.payloads()) == 100, 60)
        recorder.kill()
        _, said = copying.communicate(timeout=60)
    finally:
        copying.kill()
    assert copying.returncode == 1
    assert "of 100 it is not known" in said
