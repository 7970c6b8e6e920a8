"""After a power failure at one side a relay goes on: nothing is skipped, nothing comes twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.queue.wide.arrow import slots_of
from penstock.queue.wide.file import QueueFile
from penstock.relay import Relay, RelayStatistics, relay_options
from penstock.relay.journal import TargetCut
from protocols.flight.serving import served, server_process
from relay.background import Background, fill, numbers
from support.machine import Machine
from support.mosquitto import free_port
from support.until import until


@pytest.fixture(params=["fmq", "log"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """A stream that has had 150 messages, of which 100 are on the disk."""
    machine = Machine(request.param, tmp_path / "machine")
    with open_writer(machine.url) as writer:
        writer.write_many([b"message %d" % i for i in range(100)])
        machine.sync()
        writer.write_many([b"message %d" % i for i in range(100, 150)])
    return machine


def relayed(
    source: str,
    target: str,
    on_progress: Callable[[RelayStatistics], None] | None = None,
    **more: object,
) -> RelayStatistics:
    options = relay_options(source=source, target=target, follow=False, **more)
    with open_reader(source) as reader, open_writer(target) as writer:
        return Relay(reader, writer, options, on_progress=on_progress).run()


def copy_once(source: str, target: str, state: Path, expected: int) -> None:
    books = relayed(source, target, state=state)
    assert (books.copied, books.lost, books.in_doubt, books.held) == (expected, 0, 0, 0)


def test_a_source_that_lost_its_last_messages_is_copied_on_from_there(
    machine: Machine, tmp_path: Path
) -> None:
    target, state = f"log:{tmp_path}/target", tmp_path / "state"
    copy_once(machine.url, target, state, 150)
    machine.lose_power()
    fill(machine.url, 80, first=1000)
    copy_once(machine.url, target, state, 80)
    copy_once(machine.url, target, state, 0)
    assert numbers(target) == [*range(150), *range(1000, 1080)]


def test_a_copy_that_was_behind_the_cut_gets_all_that_is_there(
    machine: Machine, tmp_path: Path
) -> None:
    target, state = f"log:{tmp_path}/target", tmp_path / "state"
    relayed(machine.url, target, state=state, end=29)
    machine.lose_power()
    fill(machine.url, 80, first=1000)
    copy_once(machine.url, target, state, 150)
    assert numbers(target) == [*range(100), *range(1000, 1080)]


def test_a_relay_that_was_there_before_the_sources_writer_notes_the_right_numbers(
    machine: Machine, tmp_path: Path
) -> None:
    target, state = f"log:{tmp_path}/target", tmp_path / "state"
    copy_once(machine.url, target, state, 150)
    machine.lose_power()
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
            machine.lose_power()
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
        machine.lose_power()
        fill(machine.url, 80, first=1000)
        server.start()
        until(lambda: relay.copied() >= 230)
        books = relay.end()
        assert (books.copied, books.lost, books.in_doubt) == (230, 0, 0)
        copy_once(url, target, state, 0)
    assert numbers(target) == [*range(150), *range(1000, 1080)]


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_a_target_gets_its_last_messages_again_when_the_relay_comes_back(
    tmp_path: Path, kind: str
) -> None:
    source, state = f"log:{tmp_path}/source", tmp_path / "state"
    target = Machine(kind, tmp_path / "target")
    fill(source, 100)
    relayed(source, target.url, state=state)
    target.sync()
    fill(source, 50, first=100)
    relayed(source, target.url, state=state)
    target.lose_power()
    fill(source, 10, first=150)
    books = relayed(source, target.url, state=state)
    # What was not synced by then is known only to the notes: it may come twice, and is counted.
    found = numbers(target.url)
    assert sorted(set(found)) == list(range(160))
    assert len(found) - len(set(found)) == books.in_doubt == 100


def test_a_target_that_does_not_sync_is_not_taken_to_have_what_was_flushed(tmp_path: Path) -> None:
    source, state = f"log:{tmp_path}/source", tmp_path / "state"
    target = Machine("fmq", tmp_path / "target")
    fill(source, 100)
    relayed(source, target.url, state=state)
    fill(source, 50, first=100)
    noted: list[bytes] = []
    relayed(source, target.url, lambda _: noted.append(state.read_bytes()), state=state, batch=10)
    state.write_bytes(noted[-1])  # as a relay that is killed leaves it
    target.forget_all_but(120)
    with contextlib.closing(QueueFile.open(f"{tmp_path}/target/stream", writable=True)) as file:
        slots_of(file)[:60] = 0  # pages get to the disk in any order
    books = relayed(source, target.url, state=state)
    found = numbers(target.url)
    assert sorted(set(found)) == list(range(150))
    assert len(found) - len(set(found)) == books.in_doubt == 60


@pytest.mark.parametrize(
    ("kind", "sync", "syncs"),
    [("log", {}, True), ("fmq", {}, False), ("log", {"sync": "none"}, False),
     ("fmq", {"sync": "1s"}, True)],
)  # fmt: skip
def test_a_writer_tells_whether_it_syncs_also_from_another_machine(
    tmp_path: Path, kind: str, sync: dict[str, str], syncs: bool
) -> None:
    with open_writer(f"{kind}:{tmp_path}/here", **sync) as writer:
        assert writer.syncs is syncs
    with (
        served(tmp_path) as server,
        open_writer(f"flight://127.0.0.1:{server.port}/there?kind={kind}", **sync) as writer,
    ):
        assert writer.syncs is syncs


def test_what_arrived_after_the_last_note_on_the_disk_does_not_come_twice(tmp_path: Path) -> None:
    source, state = f"log:{tmp_path}/source", tmp_path / "state"
    target = f"log:{tmp_path}/target"
    fill(source, 100)

    def power_fails(books: RelayStatistics) -> None:
        if books.copied == 30:  # a note of the thirty is there, and none that was made later
            on_disk.append(state.read_bytes())

    on_disk: list[bytes] = []
    relayed(source, f"{target}?sync=batch", power_fails, state=state, batch=10)
    fill(f"{target}", 1, first=1000)  # somebody else
    boot = slice(8192 - 16, 8192)
    assert any(on_disk[0][boot])
    state.write_bytes(on_disk[0][: boot.start] + b"an earlier boot." + on_disk[0][boot.stop :])
    fill(source, 10, first=100)
    copy_once(source, target, state, 10)
    assert numbers(target) == [*range(100), 1000, *range(100, 110)]
    copy_once(source, target, state, 0)
    assert not any(state.read_bytes()[boot]), "all is synced"


class FailingServer(Machine):
    """A machine that serves its stream, and loses power once, with 100 there and 50 on the disk."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        super().__init__("log", folder)
        self._folder, self._stack = folder, stack
        self.port = free_port()
        self._serve()
        self._is_synced = self.is_cut = False

    def _serve(self) -> None:
        self.port = self._stack.enter_context(served(self._folder, port=self.port)).port

    @property
    def remote(self) -> str:
        return f"flight://127.0.0.1:{self.port}/stream?kind=log"

    def on_progress(self, books: RelayStatistics) -> None:
        if books.copied >= 50 and not self._is_synced:
            self._is_synced = True
            self.sync()
        elif books.copied >= 100 and not self.is_cut:
            self.is_cut = True
            self._stack.close()
            self.lose_power()
            self._serve()


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[FailingServer]:
    with contextlib.ExitStack() as stack:
        yield FailingServer(tmp_path / "machine", stack)


@pytest.fixture
def source(tmp_path: Path) -> str:
    fill(f"log:{tmp_path}/source", 150)
    return f"log:{tmp_path}/source"


@pytest.mark.parametrize("policy", [None, "queue-throttled:10"])
def test_a_target_that_loses_power_meanwhile_gets_its_last_messages_again(
    tmp_path: Path, source: str, failing: FailingServer, policy: str | None
) -> None:
    books = relayed(
        source, failing.remote, failing.on_progress, batch=10, state=tmp_path / "state",
        policy=policy,
    )  # fmt: skip
    assert failing.is_cut
    assert sorted(set(numbers(failing.url))) == list(range(150))
    assert (books.read, books.held, books.dropped) == (books.copied, 0, {})


def test_a_relay_whose_source_is_idle_starts_again_when_its_target_was_cut(
    tmp_path: Path, source: str, failing: FailingServer
) -> None:
    fill(source, 50, first=150)
    stop = threading.Event()

    def on_progress(books: RelayStatistics) -> None:
        failing.on_progress(books)
        if failing.is_cut and 199 in numbers(failing.url):
            stop.set()

    options = relay_options(
        source=source, target=failing.remote, batch=10, state=tmp_path / "state", policy="unlimited"
    )
    with open_reader(source) as reader, open_writer(failing.remote) as writer:
        books = Relay(
            reader, writer, options, on_progress=on_progress, should_stop=stop.is_set
        ).run()
    assert sorted(set(numbers(failing.url))) == list(range(200))
    assert (books.read, books.held) == (books.copied, 0)


def test_without_a_state_it_is_said_how_many_are_gone(source: str, failing: FailingServer) -> None:
    with pytest.raises(TargetCut) as caught:
        relayed(source, failing.remote, failing.on_progress, batch=10)
    assert caught.value.missing == 50
