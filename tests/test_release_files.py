"""Files that release 0.1 wrote open, lose nothing, and can be gone on with."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.core.position import Position
from penstock.dispatch.outbox import Outbox
from penstock.protocols.psi.store.streams import Store
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log import recovery as log_recovery
from penstock.queue.log import segments as log_segments
from penstock.queue.wide import file as wide_file
from penstock.queue.wide.file import Header
from penstock.queue.wide.layout import PAGE

ARCHIVE = Path(__file__).parent / "fixtures" / "release-0.1" / "files.tar.gz"
NEXT_BOOT = bytes(range(16))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files as they were written; the relay's state names its streams relative to them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=[False, True], ids=["same boot", "next boot"])
def boot(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell whether the machine was started anew since the files were written."""
    header = (folder / "killed.fmq").read_bytes()[:PAGE]
    then = Header(header).boot_id
    now = NEXT_BOOT if request.param else then
    for module in (wide_file, log_recovery, log_segments):
        monkeypatch.setattr(module, "boot_id", lambda: now)
    return bool(request.param)


def payloads(url: str) -> list[bytes]:
    with open_reader(url, start="start") as reader:
        found = [message.payload for message in reader.available()]
        assert reader.statistics().lost == 0
    return found


def numbered(first: int, end: int) -> list[bytes]:
    return [f"message {number}".encode() for number in range(first, end)]


STREAMS = [
    ("fmq:plain", 4, 20),
    ("fmq:checked", 0, 10),
    ("fmq:compressed", 0, 10),
    ("fmq:many", 0, 10),
    ("fmq:classic", 0, 10),
    ("fmq:held", 0, 10),
    ("fmq:killed", 0, 10),
    ("log:log", 0, 40),
    ("log:log-zstd", 0, 40),
]


@pytest.mark.parametrize(("url", "first", "end"), STREAMS)
def test_every_message_is_read(url: str, first: int, end: int) -> None:
    assert payloads(url) == numbered(first, end)


@pytest.mark.usefixtures("boot")
@pytest.mark.parametrize(("url", "first", "end"), STREAMS)
def test_a_writer_goes_on(url: str, first: int, end: int) -> None:
    with open_reader(url, start="start") as reader:
        oldest = reader.bounds().oldest
    with open_writer(url) as writer:
        writer.write(f"message {end}".encode())
    found = payloads(url)
    assert found[-1] == numbered(end, end + 1)[0]
    if end - oldest < 16 or url.startswith("log:"):  # the ring has 16 places
        assert found == numbered(first, end + 1)


def test_a_held_reader_goes_on_where_it_was(boot: bool) -> None:
    if boot:
        with open_writer("fmq:held"):
            pass
    with open_reader("fmq:held?hold=archive") as reader:
        assert [message.payload for message in reader.available()] == numbered(4, 10)
        assert reader.statistics().lost == 0


def test_a_consumer_of_a_log_goes_on_where_it_was(boot: bool) -> None:
    if boot:
        with open_writer("log:log"):
            pass
    with open_reader("log:log?cursor=archive") as reader:
        assert [message.payload for message in reader.available()] == numbered(7, 40)
        assert reader.statistics().lost == 0


def test_cursors_stand_where_they_stood() -> None:
    with CursorFile("table.cursors") as table:
        found = {entry.name: (entry.epoch, entry.seq) for entry in table.entries()}
        assert found == {"one": (77, 1234), "two": (78, 5)}
        with table.claim("one") as cursor:
            assert (cursor.epoch, cursor.seq) == (77, 1234)
            cursor.move(1300)
    with CursorFile("table.cursors") as table, table.claim("one") as cursor:
        assert (cursor.epoch, cursor.seq) == (77, 1300)


def test_a_relay_goes_on_where_it_was(folder: Path) -> None:
    command = Path(sys.executable).with_name("penstock")
    streams = ["fmq:relay-source", "log:relay-target?segment=4k&segment_slots=16"]
    done = subprocess.run(
        [command, "cp", *streams, "--state", "relay.state"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "10 messages copied" in done.stderr + done.stdout
    assert payloads("log:relay-target") == numbered(0, 40)


@pytest.mark.usefixtures("boot")
def test_an_outbox_holds_what_was_not_settled() -> None:
    with Outbox("outbox", segment=1 << 16) as outbox:
        taken = outbox.take(100)
    assert [item.raw for item in taken] == numbered(5, 20)


def test_a_psi_store_holds_its_messages() -> None:
    with Store.open("psi/rig") as store, store.reader(Position.of("start")) as reader:
        assert len(list(reader.available())) == 10
