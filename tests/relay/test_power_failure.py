"""After a power failure at one side a relay goes on: nothing is skipped, nothing comes twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.relay import Relay, relay_options
from protocols.flight.serving import server_process
from relay.background import Background, fill, numbers, until
from support.log_files import after_power_failure
from support.power_cuts import forget_boot


class Machine:
    """A stream whose machine loses its power, with what was on the disk at some moment."""

    def __init__(self, kind: str, path: Path) -> None:
        self.url = f"{kind}:{path}"
        self._is_log = kind == "log"
        self._path = path if self._is_log else path.with_suffix(".fmq")
        self._image = path.with_name(f"{path.name}.image")

    def sync(self) -> None:
        """Keep what is there now: that is on the disk."""
        (shutil.copytree if self._is_log else shutil.copyfile)(self._path, self._image)

    def power_fails(self) -> None:
        if self._is_log:
            shutil.rmtree(self._path)
            shutil.copytree(self._image, self._path)
            after_power_failure(self._path)
        else:
            self._path.unlink()
            self._path.write_bytes(forget_boot(self._image.read_bytes()))


@pytest.fixture(params=["fmq", "log"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """A stream that has had 150 messages, of which 100 are on the disk."""
    root = tmp_path / "machine"
    root.mkdir()
    machine = Machine(request.param, root / "stream")
    with open_writer(machine.url) as writer:
        writer.write_many([b"message %d" % i for i in range(100)])
        machine.sync()
        writer.write_many([b"message %d" % i for i in range(100, 150)])
    return machine


def copy_once(source: str, target: str, state: Path, expected: int) -> None:
    options = relay_options(source=source, target=target, state=state, follow=False)
    with open_reader(source) as reader, open_writer(target) as writer:
        books = Relay(reader, writer, options).run()
    assert (books.copied, books.lost, books.in_doubt, books.held) == (expected, 0, 0, 0)


def test_a_source_that_lost_its_last_messages_is_copied_on_from_there(
    machine: Machine, tmp_path: Path
) -> None:
    target, state = f"log:{tmp_path}/target", tmp_path / "state"
    copy_once(machine.url, target, state, 150)
    machine.power_fails()
    fill(machine.url, 80, first=1000)
    copy_once(machine.url, target, state, 80)
    copy_once(machine.url, target, state, 0)
    assert numbers(target) == [*range(150), *range(1000, 1080)]


def test_a_relay_that_was_there_before_the_sources_writer_notes_the_right_numbers(
    machine: Machine, tmp_path: Path
) -> None:
    target, state = f"log:{tmp_path}/target", tmp_path / "state"
    copy_once(machine.url, target, state, 150)
    machine.power_fails()
    relay = Background(machine.url, target, state=state)  # nobody has recovered the stream yet
    until(lambda: relay.relay is not None and relay.relay._feed is not None)
    fill(machine.url, 80, first=1000)
    until(lambda: relay.copied() >= 80)
    books = relay.end()
    assert (books.copied, books.lost) == (80, 0)
    copy_once(machine.url, target, state, 0)
    fill(machine.url, 5, first=2000)
    copy_once(machine.url, target, state, 5)
    assert numbers(target) == [*range(150), *range(1000, 1080), *range(2000, 2005)]


def test_a_remote_reader_goes_on_where_the_source_was_cut(machine: Machine, tmp_path: Path) -> None:
    with server_process(tmp_path / "machine") as server:
        url = f"{server.url}stream"
        with open_reader(url) as reader:
            while reader.statistics().messages < 150:
                assert reader.read_batch(1000, 10).num_rows
            server.kill()
            machine.power_fails()
            fill(machine.url, 80, first=1000)
            server.start()
            got: list[bytes] = []
            while len(got) < 80:
                messages = reader.read_many(1000, 10)
                assert messages
                got += [message.payload for message in messages]
            assert got == [b"message %d" % i for i in range(1000, 1080)]
            assert reader.read(0) is None
            books = reader.statistics()
    assert (books.messages, books.lost) == (230, 0)


def test_a_relay_of_a_remote_source_goes_on_where_it_was_cut(
    machine: Machine, tmp_path: Path
) -> None:
    target, state = f"log:{tmp_path}/target", tmp_path / "state"
    with server_process(tmp_path / "machine") as server:
        url = f"{server.url}stream"
        relay = Background(url, target, state=state)
        until(lambda: relay.copied() >= 150)
        server.kill()
        machine.power_fails()
        fill(machine.url, 80, first=1000)
        server.start()
        until(lambda: relay.copied() >= 230)
        books = relay.end()
        assert (books.copied, books.lost, books.in_doubt) == (230, 0, 0)
        copy_once(url, target, state, 0)
    assert numbers(target) == [*range(150), *range(1000, 1080)]
