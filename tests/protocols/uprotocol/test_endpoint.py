from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    InvalidOption,
    InvalidURL,
    MessageTooLarge,
    PositionError,
    StorageError,
    Unacknowledged,
)
from penstock.core.interfaces import Reader, Writer
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.protocols.uprotocol import UAttributes, UMessageType, UPriority, UUri
from support.mosquitto import Mosquitto, free_port, mosquitto
from support.mqtt_client import PlainClient
from support.until import until

TOPIC = "up://vehicle1/10AB/1/8001"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path) as running:
        yield running


def url(broker: Mosquitto, topic: str = TOPIC, **options: object) -> str:
    more = "".join(f"&{name}={quote(str(value))}" for name, value in options.items())
    return f"up+mqtt://127.0.0.1:{broker.port}/?topic={topic}{more}"


@contextlib.contextmanager
def zenoh_pair(topic: str = TOPIC) -> Iterator[tuple[Reader, Writer]]:
    place = f"up+zenoh://127.0.0.1:{free_port()}/?topic={topic}"
    with open_reader(f"{place}&listen=true") as reader, open_writer(place) as writer:
        yield reader, writer


def _fail_with(messages: list[Message]) -> None:
    raise KeyError(len(messages))


def read(reader: Reader, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        messages = reader.read_many(count, 10)
        assert messages
        found += [message.payload for message in messages]
    return found


def test_a_topic_of_a_broker_is_written_and_read(broker: Mosquitto) -> None:
    with (
        open_reader(url(broker)) as reader,
        open_writer(url(broker, priority="CS3", format="text", ttl="1m")) as writer,
    ):
        assert writer.write(b"one") == 0
        assert writer.write_many([b"two", b"three"]) == 2
        [message, *_] = reader.read_many(1, 10)
        assert message.payload == b"one"
        assert message.type == UMessageType.PUBLISH
        assert message.attributes is not None
        attributes = UAttributes.from_bytes(message.attributes)
        assert attributes.source == UUri.parse(TOPIC)
        assert attributes.priority == UPriority.CS3
        assert attributes.ttl == 60_000
        assert attributes.id is not None
        assert message.time_ns == attributes.id.time_ms * 1_000_000
        assert abs(message.time_ns - time.time_ns()) < 60e9
        assert read(reader, 2) == [b"two", b"three"]
        assert writer.statistics().messages == reader.statistics().messages == 3
        assert writer.statistics().bytes == reader.statistics().bytes == 11
    with pytest.raises(Closed):
        writer.write(b"")
    with pytest.raises(Closed):
        reader.read(0)


def test_a_topic_of_zenoh_is_written_and_read() -> None:
    with zenoh_pair() as (reader, writer):
        assert writer.write_many([b"%d" % n for n in range(2000)]) == 1999
        assert read(reader, 2000) == [b"%d" % n for n in range(2000)]


def test_a_message_keeps_its_time_and_a_recording_is_played_as_it_was(broker: Mosquitto) -> None:
    moment = 1_700_000_000_123_000_000
    with open_reader(url(broker, "up://*/FFFFFFFF/FF/FFFF")) as reader:
        with open_writer(url(broker)) as writer:
            writer.write(b"x", time_ns=moment)
            [message] = reader.read_many(1, 10)
            assert message.time_ns == moment
        with open_writer(url(broker, "up://other/1/1/9000", replay="true")) as writer:
            writer.write(b"x", attributes=message.attributes)
            writer.write(b"y")
            [same, other] = [reader.read_many(1, 10)[0] for _ in range(2)]
            assert same.attributes == message.attributes
            assert other.attributes is not None
            assert UAttributes.from_bytes(other.attributes).source == UUri("other", 1, 1, 0x9000)


def test_what_was_not_done_comes_again_in_the_next_session(broker: Mosquitto) -> None:
    lasting = url(broker, client_id="recorder")
    with open_writer(url(broker)) as writer:
        with open_reader(lasting):
            pass
        writer.write_many([b"%d" % n for n in range(10)])
        with pytest.raises(KeyError), open_reader(lasting) as reader:
            _fail_with(reader.read_many(5, 10))
        with open_reader(lasting) as reader:
            assert read(reader, 10) == [b"%d" % n for n in range(10)]
        writer.write(b"next")
        with open_reader(lasting) as reader:
            assert read(reader, 1) == [b"next"]


def test_a_reader_goes_back_to_what_it_read_last(broker: Mosquitto) -> None:
    with open_reader(url(broker)) as reader, open_writer(url(broker)) as writer:
        writer.write_many([b"%d" % n for n in range(4)])
        messages = reader.read_many(4, 10)
        reader.seek(messages[0].seq)
        assert reader.statistics().messages == 0
        assert reader.read_many(len(messages)) == messages
        reader.seek(messages[-1].seq)
        assert reader.read_many(1) == messages[-1:]
        assert reader.statistics().messages == len(messages)
        for bad in (Position.START, Position.sequence(99)):
            with pytest.raises(PositionError):
                reader.seek(bad)


def test_what_is_no_publish_of_the_topic_is_not_read(broker: Mosquitto) -> None:
    with (
        open_reader(url(broker)) as reader,
        open_writer(url(broker, "up://vehicle1/10AB/1/8002")) as other,
        open_writer(url(broker)) as writer,
    ):
        other.write(b"other")
        writer.write(b"mine")
        assert read(reader, 1) == [b"mine"]


def test_between_devices_a_topic_is_read_and_written_too(broker: Mosquitto) -> None:
    with (
        open_reader(url(broker, topics="d2d", authority="cloud")) as reader,
        open_writer(url(broker, topics="d2d", sink="cloud")) as writer,
    ):
        until(lambda: writer.write(b"x") is not None and reader.read(0.2))


def test_bad_urls_and_options_are_told(broker: Mosquitto) -> None:
    for bad in ("up+mqtt:/?topic=" + TOPIC, "up+zenoh:/?topic=" + TOPIC):
        with pytest.raises(InvalidURL):
            open_reader(bad)
    with pytest.raises(InvalidOption, match="topic"):
        open_reader(f"up+mqtt://127.0.0.1:{broker.port}/")
    with pytest.raises(InvalidOption, match="topic"):
        open_reader(url(broker, "nonsense"))
    for no_topic in ("up://vehicle1/10AB/1/0", "up://*/10AB/1/8001"):
        with pytest.raises(InvalidOption, match="not one topic"):
            open_writer(url(broker, no_topic))
    with pytest.raises(InvalidOption, match="format"):
        open_writer(url(broker, format="nonsense"))
    with pytest.raises(PositionError):
        open_reader(url(broker), Position.sequence(5))


def test_who_is_not_there_is_told_in_time() -> None:
    for scheme in ("up+mqtt", "up+zenoh"):
        place = f"{scheme}://127.0.0.1:{free_port()}/?topic={TOPIC}&wait=300ms"
        for open_one in (open_reader, open_writer):
            with pytest.raises(ConnectionLost) as told:
                open_one(place)
            assert "Errno" not in str(told.value)
            assert "listening there?" in str(told.value.hint)


def test_a_topic_or_an_authority_that_is_none_is_told_before_anybody_is_connected_to() -> None:
    nobody = f"up+mqtt://127.0.0.1:{free_port()}/"
    for options, option in (
        ("", "topic"),
        ("?topic=up://vehicle1/10AB/1", "topic"),
        ("?topic=up://vehicle1/10AB/1/1", "topic"),
        (f"?topic={TOPIC}&authority=*", "authority"),
        (f"?topic={TOPIC}&authority=Vehicle1", "authority"),
    ):
        with pytest.raises(InvalidOption) as told:
            open_reader(nobody + options)
        assert told.value.option == option
        assert told.value.hint


def test_what_is_no_message_of_the_topic_is_in_the_books_of_the_reader(broker: Mosquitto) -> None:
    plain = PlainClient(broker.port)
    with open_reader(url(broker)) as reader:
        for _ in range(3):
            plain.client.publish("vehicle1/10AB/0/1/8001", b"garbage", 1)
        until(lambda: reader.statistics().filtered == 3)
        assert reader.read(0) is None
    plain.close()


def test_a_message_that_does_not_fit_is_refused(broker: Mosquitto) -> None:
    with open_writer(url(broker, largest="1000")) as writer:
        with pytest.raises(MessageTooLarge):
            writer.write(bytes(2000))
        assert writer.statistics().refused == 1
        writer.write(b"small")


def test_a_broker_that_goes_is_told_with_what_was_acknowledged(broker: Mosquitto) -> None:
    with open_writer(url(broker, wait="200ms")) as writer:
        writer.write(b"1")
        broker.kill()
        with pytest.raises(Unacknowledged) as error:
            writer.write_many([b"2", b"3"])
        assert (error.value.acknowledged, error.value.in_doubt) == (0, 2)
        assert writer.statistics().messages == 1
        assert writer.statistics().refused == 2


def test_zenoh_waits_for_somebody_who_listens_unless_told_otherwise() -> None:
    place = f"127.0.0.1:{free_port()}/?topic={TOPIC}&wait=200ms"
    with (
        open_writer(f"up+zenoh://{place}&listen=true") as writer,
        pytest.raises(Unacknowledged, match="nobody subscribes"),
    ):
        writer.write(b"1")
    with open_writer(f"up+zenoh://{place}&listen=true&unheard=true") as writer:
        writer.write(b"1")


def test_cp_publishes_a_stream_and_records_a_topic(broker: Mosquitto, tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/x") as writer:
        writer.write_many([b"%d" % n for n in range(1000)])
    command = "import sys; from penstock.cli import main; sys.exit(main())"
    recorder = subprocess.Popen(
        [sys.executable, "-c", command, "cp", url(broker), f"log:{tmp_path}/y", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((tmp_path / "y").exists, 30)  # by then it listens
        subprocess.run(
            [sys.executable, "-c", command, "cp", f"log:{tmp_path}/x", url(broker)],
            check=True,
            capture_output=True,
            timeout=60,
        )

        def recorded() -> int:
            with open_reader(f"log:{tmp_path}/y") as reader:
                return len(reader.read_many(5000))

        until(lambda: recorded() == 1000, 30)
        recorder.send_signal(signal.SIGINT)
        out, err = recorder.communicate(timeout=30)
        assert "1,000 messages copied" in out + err
    finally:
        recorder.kill()
        recorder.communicate()
    with open_reader(f"log:{tmp_path}/y") as reader:
        messages = reader.read_many(5000)
    assert [message.payload for message in messages] == [b"%d" % n for n in range(1000)]
    assert all(message.attributes for message in messages)


def test_nobody_is_told_the_password(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}/?topic={TOPIC}&wait=100ms"
    with pytest.raises(ConnectionLost) as lost:
        open_reader(f"up+mqtt://{nobody}&username=me&password=hunter2&largest=1000")
    assert "hunter2" not in str(lost.value)
    assert "largest=1000" in str(lost.value)
    with pytest.raises(InvalidURL, match="user before the host") as refused:
        open_reader(f"up+mqtt://me:hunter2@{nobody}")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(StorageError):
        open_reader(f"up+mqtt://{nobody}&password_file={tmp_path}/none")


def test_a_password_is_read_from_a_file(tmp_path: Path) -> None:
    passwords, mine = tmp_path / "passwords", tmp_path / "mine"
    subprocess.run(
        ["mosquitto_passwd", "-b", "-c", str(passwords), "me", "secret"],
        check=True,
        capture_output=True,
        timeout=30,
    )
    passwords.chmod(0o644)
    with mosquitto(tmp_path, [f"password_file {passwords}"], is_open=False) as broker:
        mine.write_text("secret\n")
        place = url(broker, username="me", password_file=mine, wait="2s")
        with open_writer(place) as writer:
            writer.write(b"x")
        mine.write_text("wrong\n")
        with pytest.raises(ConnectionLost, match="refuses") as told:
            open_writer(place)
        assert "username=" in str(told.value.hint)


def test_a_reader_says_that_a_link_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    place = f"up+zenoh://127.0.0.1:{free_port()}/?topic={TOPIC}"
    with open_reader(f"{place}&listen=true") as reader:
        with open_writer(place) as writer:
            writer.write(b"1")
            assert read(reader, 1) == [b"1"]

        def has_said() -> bool:
            assert reader.read(0) is None
            return "lost a link" in caplog.text

        until(has_said)
