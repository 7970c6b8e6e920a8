"""What does a program do that the operating system refuses calls to, one after the other?

`python -m support.fault_lives LIBRARY` serves runs of the scenarios below, each in a process of its
own. LIBRARY is `tests/faults/failing_calls.c`, built. In a run, one call fails, or all from one on:
a call of the system, or a native module's for memory. Then they work again, and the scenario looks
at what came of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import open_reader, open_writer
from penstock.core.errors import Closed, PenstockError
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.endpoint import check
from support.lives import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.message import Message
    from penstock.queue.cursors import Cursor

__all__ = ["SCENARIOS"]

_CANARY = b"nobody writes here " * 4096
_COUNT = 24


def payload(number: int) -> bytes:
    return f"message {number} ".encode() * 20


class Faults:
    """The library that lets calls fail."""

    def __init__(self, library: str) -> None:
        self._calls = ctypes.CDLL(library)
        self._calls.faults_begin.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_int)
        self._calls.faults_end.restype = self._calls.faults_refused.restype = ctypes.c_long

    def watch(self, folder: Path) -> None:
        """Put a canary in the place of every descriptor that is closed."""
        path = folder / "canary"
        path.write_bytes(_CANARY)
        self._canary = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._calls.faults_watch(self._canary)

    def begin(self, at: int, *, on: bool, memory: bool) -> None:
        self._calls.faults_begin(at, on, memory)

    def end(self) -> tuple[int, int]:
        """Return how many calls there were, and how many of them failed."""
        return self._calls.faults_end(), self._calls.faults_refused()

    def open(self) -> int:
        """Return how many descriptors are open that were opened since `watch`."""
        return int(self._calls.faults_open())

    def foreign(self) -> str | None:
        """Tell what was done to a file that is not the program's own."""
        text = ctypes.create_string_buffer(128)
        if self._calls.faults_stale(text, len(text)):
            return text.value.decode()
        if os.pread(self._canary, len(_CANARY) + 1, 0) != _CANARY:
            return "a foreign file was written"
        return None


class Run:
    """One run of a scenario: what was acknowledged, and what was refused by an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: list[str] = []
        #: Messages by number, and those whose call failed: they may be there, once.
        self.acknowledged: dict[int, bytes] = {}
        self.refused: list[bytes] = []
        #: What all writers counted.
        self.counted = 0

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return what this returns; None if it was refused in the way that it may be."""
        try:
            return action()
        except (PenstockError, MemoryError) as error:
            self.errors.append(type(error).__name__)
            return None


class Feed:
    """Writes to a stream, and opens it again when it has to."""

    def __init__(self, run: Run, url: str) -> None:
        self._run = run
        self._url = url
        self._writer: Writer | None = None

    def write(self, data: bytes) -> None:
        run = self._run
        if self._writer is None:
            self._writer = run.attempt(lambda: open_writer(self._url))
        if self._writer is None:
            return
        try:
            seq = self._writer.write(data)
        except (PenstockError, MemoryError) as error:
            run.errors.append(type(error).__name__)
            run.refused.append(data)
            if isinstance(error, Closed):
                self.close()
        else:
            assert seq not in run.acknowledged, f"number {seq} was given twice"
            run.acknowledged[seq] = data

    def flush(self) -> None:
        if self._writer is not None:
            self._run.attempt(self._writer.flush)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._run.attempt(writer.close)
            writer.close()  # twice is fine, also after an error
            self._run.counted += writer.statistics().messages


class Follower:
    """Reads a stream from its start, whatever happens."""

    def __init__(self, run: Run, url: str, *, again: bool = False) -> None:
        self._run = run
        self._url = url
        self.again = again  # it has a cursor: what was not confirmed comes again
        self._reader: Reader | None = None
        self.messages: list[Message] = []
        self.lost = 0

    def read(self) -> None:
        run = self._run
        if self._reader is None:
            start = self.messages[-1].seq + 1 if self.messages and not self.again else "start"
            self._reader = run.attempt(lambda: open_reader(self._url, start))
        if self._reader is not None:
            reader = self._reader
            try:
                self.messages += reader.read_many(5)
            except (PenstockError, MemoryError) as error:
                run.errors.append(type(error).__name__)
                if isinstance(error, Closed):
                    self.close()

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._run.attempt(reader.close)
            reader.close()
            self.lost += reader.statistics().lost

    def finish(self) -> None:
        """Read what is left, now that nothing fails any more."""
        before = -1
        while len(self.messages) > before:
            before = len(self.messages)
            self.read()
        self.close()
        self.read()
        self.close()


def check_stream(run: Run, url: str) -> list[Message]:
    """Go on with a stream as if nothing had been; make sure that it holds what it should."""
    with open_writer(url) as writer:
        last = writer.write(b"the last")
    with open_reader(url.partition("?")[0], "start") as reader:
        found = list(reader.available())
        assert reader.statistics().lost == 0, reader.statistics()
    stored = {message.seq: bytes(message.payload) for message in found}
    assert len(stored) == len(found), "a number twice"
    assert stored.pop(last) == b"the last"
    for seq, data in run.acknowledged.items():
        assert stored.get(seq) == data, f"message {seq} was acknowledged, and is not there"
    others = Counter(data for seq, data in stored.items() if seq not in run.acknowledged)
    assert others <= Counter(run.refused), "a message twice, or one that nobody wrote"
    assert run.counted == len(stored), f"{run.counted} were counted, {len(stored)} are there"
    return found


def check_follower(follower: Follower, found: list[Message]) -> None:
    seen = [message.seq for message in follower.messages]
    if follower.again:
        assert set(seen) == {message.seq for message in found}, "not all came"
    else:
        assert seen == [message.seq for message in found], "not each came once, in order"
    assert follower.lost == 0


def stream(run: Run, options: str, *, reader: str = "", again: bool = False) -> Callable[[], None]:
    """Write and read at the same time; close and open the writer in the middle."""
    kind, _, rest = options.partition(":")
    url = f"{kind}:{run.folder / 'stream'}"
    feed = Feed(run, f"{url}?{rest}")
    follower = Follower(run, f"{url}?{reader}".rstrip("?"), again=again)
    for number in range(_COUNT):
        feed.write(payload(number))
        if number % 4 == 3:
            follower.read()
        if number == _COUNT // 2:
            feed.flush()
            feed.close()
    follower.close()
    feed.close()

    def aftermath() -> None:
        found = check_stream(run, f"{url}?{rest}")
        follower.finish()
        check_follower(follower, found)
        if kind == "log":
            faults = [fault for checked in check(url) for fault in checked.faults]
            assert not faults, faults

    return aftermath


def replace(run: Run, options: str) -> Callable[[], None]:
    """Make a log anew over another that has messages."""
    url = f"log:{run.folder / 'stream'}?{options}"
    feed = Feed(run, url)
    for number in range(12):
        feed.write(payload(number))
    feed.close()
    emptied = run.attempt(lambda: open_writer(f"{url}&create=always"))
    if emptied is not None:
        run.acknowledged.clear()
        run.refused.clear()
        run.counted = 0
        run.attempt(emptied.close)

    def aftermath() -> None:
        if emptied is not None:
            check_stream(run, url)
        else:  # it may be empty or as it was, and opens
            with open_writer(url) as writer:
                writer.write(b"more")
            with open_reader(url.partition("?")[0], "start") as reader:
                found = [bytes(message.payload) for message in reader.available()]
            assert found == [b"more"] or found[:-1] == list(run.acknowledged.values())

    return aftermath


def moved(cursor: Cursor, seq: int) -> bool:
    cursor.move(seq, 7)
    return True


def cursors(run: Run) -> Callable[[], None]:
    """Move cursors of a file."""
    path = run.folder / "cursors"
    confirmed: dict[str, int] = {}
    for number in range(1, 5):
        file = run.attempt(lambda: CursorFile(str(path), 8))
        if file is None:
            continue
        for name in ("one", "two"):
            cursor = run.attempt(partial(file.claim, name))
            if cursor is not None:
                expected = confirmed.get(name, 0)
                assert run.attempt(partial(getattr, cursor, "seq")) in {expected, None}
                if run.attempt(partial(moved, cursor, number * 10)):
                    confirmed[name] = number * 10
                run.attempt(cursor.release)
        run.attempt(file.sync)
        run.attempt(file.close)
        file.close()

    def aftermath() -> None:
        with CursorFile(str(path), 8) as file:
            for name, seq in confirmed.items():
                entry = file.find(name)
                assert entry is not None
                assert (entry.seq, entry.epoch, entry.alive) == (seq, 7, False)

    return aftermath


def outbox(run: Run) -> Callable[[], None]:
    """Store, take and settle messages of an outbox, in two lives."""
    from penstock.dispatch.outbox import Entry, Outbox, Reason

    folder = run.folder / "outbox"
    stored: set[bytes] = set()
    maybe: Counter[bytes] = Counter()
    settled: set[bytes] = set()
    attempted: set[bytes] = set()

    def live(first: int) -> None:
        box = run.attempt(lambda: Outbox(folder, sync="batch", segment=1 << 13))
        if box is None:
            return
        for number in range(first, first + 30, 3):
            data = [payload(n) for n in range(number, number + 3)]
            entries = [Entry(n % 2, 0, 0, 0, 1, raw) for n, raw in enumerate(data)]
            before = len(run.errors)
            run.attempt(partial(box.append, entries))
            if len(run.errors) == before:
                stored.update(data)
            else:
                maybe.update(data)
        items = run.attempt(lambda: box.take(8)) or []
        attempted.update(item.raw for item in items)
        if run.attempt(lambda: box.settle(items, Reason.ACKED)) is not None:
            settled.update(item.raw for item in items)
        run.attempt(box.close)
        box.close()

    live(0)
    live(100)

    def aftermath() -> None:
        with Outbox(folder, sync="batch", segment=1 << 13) as box:
            found = Counter(item.raw for item in box.take(1000))
            books = box.books()
            assert books.queued == found.total()
            assert max(found.values(), default=1) == 1, "a message twice"
        missing = stored - attempted - set(found)
        assert not missing, f"{len(missing)} stored messages are not there"
        assert not settled & set(found), "a message comes again that was settled"
        assert set(found) <= stored | set(maybe)

    return aftermath


def group(run: Run, options: str) -> Callable[[], None]:
    """Read, acknowledge and give back messages as two members of a group, in two lives."""
    kind, _, rest = options.partition(":")
    url = f"{kind}:{run.folder / 'stream'}"
    feed = Feed(run, f"{url}?{rest}")
    settled: set[int] = set()
    maybe: set[int] = set()

    def live(first: int) -> None:
        members = [run.attempt(lambda: open_reader(f"{url}?group=us&sync=batch")) for _ in range(2)]
        for number in range(first, first + 24):
            feed.write(payload(number))
            member: Any = members[number % 2]
            if number % 3 or member is None:
                continue
            messages = run.attempt(partial(member.read_many, 5)) or []
            if number % 4 == 0 and messages:
                run.attempt(partial(member.nack, messages.pop()))
            numbers = {message.seq for message in messages}
            maybe.update(numbers)
            before = len(run.errors)
            run.attempt(partial(member.ack, messages))
            if len(run.errors) == before:
                assert not numbers & settled, "acknowledged twice"
                settled.update(numbers)
        for member in members:
            if member is not None:
                run.attempt(member.close)
                member.close()

    feed.write(payload(0))
    live(1)
    live(101)
    feed.close()

    def aftermath() -> None:
        found = {message.seq for message in check_stream(run, f"{url}?{rest}")}
        with open_reader(f"{url}?group=us") as reader:
            came = [message.seq for message in reader.read_many(1000)]
            assert reader.statistics().lost == 0
        assert len(set(came)) == len(came), "a message twice"
        assert not settled & set(came), "a message comes again that was settled"
        assert found - maybe <= set(came), "a message does not come that nobody acknowledged"
        assert set(came) <= found

    return aftermath


def store(run: Run) -> Callable[[], None]:
    """Write messages of two streams to a store."""
    from penstock.protocols.psi.store.catalog import psi_message
    from penstock.protocols.psi.store.streams import Store

    written: list[tuple[int, bytes]] = []
    maybe: Counter[tuple[int, bytes]] = Counter()
    place = run.folder / "rig"

    def append(made: Any, id: int, data: bytes) -> None:
        if run.attempt(lambda: made.append(id, data)) is not None:
            written.append((id, data))
        else:
            maybe[id, data] += 1

    for life in range(2):
        is_there = (place / "catalog" / "log.json").exists()
        make = (
            (lambda: Store.open(place, writable=True))
            if is_there
            else (lambda: Store.create(run.folder, "rig"))
        )
        made = run.attempt(make)
        if made is None:
            continue
        numbers = run.attempt(partial(made.add_stream, "Numbers", "int"))
        words = run.attempt(partial(made.add_stream, "Words", "string"))
        for number in range(6):
            for stream in (numbers, words):
                if stream is not None:
                    append(made, stream.id, bytes([life, number, 0, 0]))
        run.attempt(made.close)
        made.close()

    def aftermath() -> None:
        if not written:
            return
        with Store.open(place, writable=True) as made, made.reader() as reader:
            found = [psi_message(message) for message in reader.available()]
            counts = {stream.id: stream.messages for stream in made.streams()}
        stored = Counter((message.source_id, bytes(message.payload)) for message in found)
        assert not Counter(written) - stored, "a message that was acknowledged is not there"
        assert not stored - Counter(written) - maybe, "a message twice"
        assert counts == Counter(message.source_id for message in found)

    return aftermath


def stale(run: Run) -> Callable[[], None]:
    """Use a descriptor that was closed: this has to be found."""
    path = run.folder / "file"
    path.write_bytes(b"")
    descriptor = os.open(path, os.O_RDWR)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        os.fdatasync(descriptor)
        os.pwrite(descriptor, bytes(16), 400)
        os.close(descriptor)
    return lambda: None


_LOG = "log:segment=8k&segment_slots=8"
_RING = "fmq:layout=wide&slots=64&size=64k&readers=4"
SCENARIOS: dict[str, Callable[[Run], Callable[[], None]]] = {
    "log": lambda run: stream(run, f"{_LOG}&sync=1s"),
    "log, synced": lambda run: stream(run, f"{_LOG}&sync=batch"),
    "log, compressed": lambda run: stream(run, f"{_LOG}&sync=none&compress=lz4"),
    "log, retained": lambda run: stream(run, f"{_LOG}&sync=none&retain=1G&hold=me"),
    "log, consumer": lambda run: stream(run, f"{_LOG}&sync=none", reader="cursor=me", again=True),
    "log, replaced": lambda run: replace(run, "segment=8k&segment_slots=8&sync=none"),
    "ring": lambda run: stream(run, f"{_RING}&sync=1s"),
    "ring, synced": lambda run: stream(run, f"{_RING}&sync=batch&crc=true"),
    "ring, sparse": lambda run: stream(run, f"{_RING}&sparse=true"),
    "ring, held": lambda run: stream(run, f"{_RING}&hold=me", reader="hold=me", again=True),
    "ring, many writers": lambda run: stream(run, f"{_RING}&writers=many"),
    "classic": lambda run: stream(run, "fmq:layout=classic&slots=64&size=64k"),
    "cursors": cursors,
    "outbox": outbox,
    "log, group": lambda run: group(run, f"{_LOG}&sync=none"),
    "ring, group": lambda run: group(run, _RING),
    "store": store,
}


def run(scenario: str, folder: str, at: int, on: bool, memory: bool, report: str) -> None:
    """Run a scenario with call `at` failing (`on`: and all behind it), and report.

    `memory`: of those that ask for memory.
    """
    logging.disable()
    place = Path(folder)
    faults.watch(place)
    found: dict[str, object] = {}
    state = Run(place)
    try:
        faults.begin(at, on=on, memory=memory)
        try:
            aftermath = {**SCENARIOS, "a stale descriptor": stale}[scenario](state)
        finally:
            found["calls"], found["refused"] = faults.end()
        gc.collect()
        deadline = time.monotonic() + 40
        while (left_open := faults.open()) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that ends has some
        found["left_open"] = left_open
        aftermath()
    except BaseException:  # noqa: BLE001 - it is reported
        found["fault"] = traceback.format_exc()
    found["foreign"] = faults.foreign()
    found["errors"] = state.errors
    Path(report).write_text(json.dumps(found), encoding="utf-8")


def warm_up() -> None:
    """Import everything once: a module that cannot be read is another matter."""
    for scenario in SCENARIOS.values():
        with tempfile.TemporaryDirectory(prefix="penstock-test-", dir="/dev/shm") as folder:
            scenario(Run(Path(folder)))()


if __name__ == "__main__":
    if os.environ.get("LD_PRELOAD") != sys.argv[1]:
        environment = {**os.environ, "LD_PRELOAD": sys.argv[1]}
        arguments = [sys.executable, "-m", "support.fault_lives", *sys.argv[1:]]
        os.execve(sys.executable, arguments, environment)
    faults = Faults(sys.argv[1])
    warm_up()
    serve({"run": run}, ())
