"""A machine loses power, and with it the last messages: who had seen them loses no other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.relay import Relay, RelayStatistics, relay_options
from penstock.relay.arrivals import TargetCut
from protocols.flight.serving import served
from support.machine import Machine


@pytest.fixture(params=["log", "fmq"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(request.param, tmp_path / "machine")


@pytest.fixture
def cut(machine: Machine) -> Callable[[], None]:
    """Write 100 that reach the disk and 50 that do not; called, lose these and write 80 more."""
    machine.write(*range(100))
    machine.sync()
    machine.write(*range(100, 150))

    def cut() -> None:
        machine.lose_power()
        machine.write(*range(1000, 1080))

    return cut


def relay(
    source: str,
    target: str,
    on_progress: Callable[[RelayStatistics], None] | None = None,
    **more: object,
) -> RelayStatistics:
    options = relay_options(source=source, target=target, follow=False, **more)
    with open_reader(source, options.start) as reader, open_writer(target) as writer:
        books = Relay(reader, writer, options, on_progress=on_progress).run()
    assert books.read == books.copied + sum(books.dropped.values()) + books.held
    return books


def test_a_copy_has_what_came_before_and_after(
    machine: Machine, cut: Callable[[], None], tmp_path: Path
) -> None:
    copy = Machine("log", tmp_path / "copy")
    relay(machine.url, copy.url, state=tmp_path / "state")
    cut()
    books = relay(machine.url, copy.url, state=tmp_path / "state")
    assert copy.numbers() == [*range(150), *range(1000, 1080)]
    assert (books.lost, books.in_doubt) == (0, 0)


def test_a_copy_that_was_behind_the_cut_gets_all_that_is_there(
    machine: Machine, cut: Callable[[], None], tmp_path: Path
) -> None:
    copy = Machine("log", tmp_path / "copy")
    relay(machine.url, copy.url, state=tmp_path / "state", end=29)
    cut()
    books = relay(machine.url, copy.url, state=tmp_path / "state")
    assert copy.numbers() == [*range(100), *range(1000, 1080)]
    assert books.lost == 0


def test_a_reader_on_another_machine_gets_all_that_came_afterwards(
    machine: Machine, cut: Callable[[], None], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as power, contextlib.ExitStack() as stack:
        port = power.enter_context(served(tmp_path / "machine")).port
        url = f"flight://127.0.0.1:{port}/stream?kind={machine.kind}"
        reader = stack.enter_context(open_reader(url))
        assert [int(message.payload) for message in reader.available()] == list(range(150))
        power.close()
        cut()
        power.enter_context(served(tmp_path / "machine", port=port))
        after: list[int] = []
        while len(after) < 80 and (message := reader.read(timeout=5)) is not None:
            after.append(int(message.payload))
        assert after == list(range(1000, 1080))
        assert reader.statistics().lost == 0
        assert reader.bounds().lineage[-1].end == 100


def test_a_target_gets_its_last_messages_again_when_the_relay_comes_back(
    machine: Machine, tmp_path: Path
) -> None:
    source = Machine("log", tmp_path / "source")
    source.write(*range(100))
    relay(source.url, machine.url, state=tmp_path / "state")
    machine.sync()
    source.write(*range(100, 150))
    relay(source.url, machine.url, state=tmp_path / "state")
    machine.lose_power()
    source.write(*range(150, 160))
    relay(source.url, machine.url, state=tmp_path / "state")
    # What was not synced by then is known only to the notes: it may come twice, and is counted.
    assert sorted(set(machine.numbers())) == list(range(160))


class FailingServer(Machine):
    """A machine that serves its stream, and loses power once, with 100 there and 50 on the disk."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        super().__init__("log", folder)
        self._folder, self._stack = folder, stack
        self.port = 0
        self._serve()
        self.is_cut = False

    def _serve(self) -> None:
        self.port = self._stack.enter_context(served(self._folder, port=self.port)).port

    @property
    def remote(self) -> str:
        return f"flight://127.0.0.1:{self.port}/stream?kind=log"

    def on_progress(self, books: RelayStatistics) -> None:
        if books.copied == 50:
            self.sync()
        elif books.copied == 100 and not self.is_cut:
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
    source = Machine("log", tmp_path / "source")
    source.write(*range(150))
    return source.url


def test_a_target_that_loses_power_meanwhile_gets_its_last_messages_again(
    tmp_path: Path, source: str, failing: FailingServer
) -> None:
    relay(source, failing.remote, failing.on_progress, batch=10, state=tmp_path / "state")
    assert failing.is_cut
    assert sorted(set(failing.numbers())) == list(range(150))


def test_without_a_state_it_is_said_how_many_are_gone(source: str, failing: FailingServer) -> None:
    with pytest.raises(TargetCut) as caught:
        relay(source, failing.remote, failing.on_progress, batch=10)
    assert caught.value.missing == 50
