"""The real psi at the other end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.command import PENSTOCK
from penstock.core.endpoints import open_reader
from penstock.core.errors import NotFound
from penstock.protocols.psi import REPLAY_ALL, DateTime, DateTimeKind, RemoteExporter
from penstock.protocols.psi.importer.client import RemoteImporter
from penstock.protocols.psi.store.streams import Store
from protocols.psi.judge import Driver, driver, free_port, needs_psi
from support.until import until

pytestmark = needs_psi

HOST = "127.0.0.1"
LAG_NS = 500_000_000


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PENSTOCK, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def values(imp: Driver, stream: str) -> list[int]:
    """Return the numbers that psi's importer printed of a stream."""
    lines = [line for line in imp.lines if line.startswith(f"MSG {stream} ")]
    return [int(line.rpartition("value=")[2]) for line in lines]


@pytest.mark.parametrize("is_restarted", [True, False], ids=["exporter restarted", "client cut"])
def test_after_an_outage_psi_gets_each_message_once_although_creation_lags(
    tmp_path: Path, is_restarted: bool
) -> None:
    port = free_port()
    with Store.create(tmp_path, "rig") as store:
        exporter = RemoteExporter(store, port)
        frames = exporter.exporter.write(None, "Frames", "int")
        results = exporter.exporter.write(None, "Results", "int")

        def post(first: int, count: int) -> None:
            for number in range(first, first + count):
                moment = time.time_ns() - LAG_NS
                # A result has the originating time of its frame, and comes when it is ready.
                frames.post(number, moment)
                results.post(number, moment)
                time.sleep(0.002)

        with driver("Imp", HOST, port, 30, "all", "v", "Frames:int", "Results:int") as imp:
            imp.wait_for("STREAM", count=2)
            post(0, 100)
            imp.wait_for("MSG Results", count=100)
            for cut in range(1, 4):
                if is_restarted:
                    exporter.close()
                    exporter = RemoteExporter(store, port)
                    frames = exporter.exporter.write(None, "Frames", "int")
                    results = exporter.exporter.write(None, "Results", "int")
                else:
                    for session in list(exporter._sessions.values()):
                        session.end()
                post(100 * cut, 100)
                imp.wait_for("MSG Results", count=100 * (cut + 1))
            time.sleep(0.3)
            imp.wait_for("MSG Frames", count=400)
            assert values(imp, "Frames") == list(range(400))
            assert values(imp, "Results") == list(range(400))
        exporter.close()


@pytest.fixture
def idle_exporter() -> Iterator[int]:
    """An exporter of psi that has sent all it will: 300 messages of three streams each."""
    port = free_port()
    with driver("Gen", port, "Tcp", "mixed", "-", 300, 100) as gen:
        gen.wait_for("READY")
        yield port


def test_info_leaves_the_only_data_connection_of_psis_exporter_to_others(
    tmp_path: Path, idle_exporter: int
) -> None:
    url = f"psi://{HOST}:{idle_exporter}/I"
    info = penstock("info", url, "--json")
    assert info.returncode == 0, info.stderr
    assert "System.Int32" in info.stdout
    copied = penstock("cp", url, f"log:{tmp_path}/copy")
    assert copied.returncode == 0, copied.stderr
    assert "300 messages copied" in copied.stdout


def test_a_second_client_of_an_idle_exporter_is_told_why_nothing_comes(
    tmp_path: Path, idle_exporter: int
) -> None:
    url = f"psi://{HOST}:{idle_exporter}/I"
    with open_reader(url) as first:
        assert first.read(10) is not None
        second = penstock("cp", url, f"log:{tmp_path}/copy")
    assert "one client at a time" in second.stderr


def test_dictionaries_and_times_are_read_by_psi_as_they_were_posted() -> None:
    port = free_port()
    generic = "System.Collections.Generic"
    with RemoteExporter(port=port) as exporter:
        write = exporter.exporter.write
        counts = write(None, "Counts", f"{generic}.Dictionary`2[[System.String],[System.Int32]]")
        times = write(None, "Times", "System.DateTime")
        counts.post({"a": 1, "b": 2})
        moments = [
            DateTime(0, DateTimeKind.UNSPECIFIED),
            DateTime(3155378975999999999, DateTimeKind.UNSPECIFIED),
            DateTime(638505760890000000, DateTimeKind.LOCAL),
            DateTime(638505760890000000, DateTimeKind.UTC),
        ]
        for moment in moments:
            times.post(moment)
        specs = "Counts:dict", "Times:datetime"
        with driver("Imp", HOST, port, 10, "all", "v", *specs) as imp:
            (line,) = imp.wait_for("MSG Counts")
            assert line.rpartition("value=")[2] == "[[a, 1],[b, 2]]"
            found = [line.rpartition("value=")[2] for line in imp.wait_for("MSG Times", count=4)]
            kinds = ("Unspecified", "Unspecified", "Local", "Utc")
            assert found == [f"{m.ticks}/{kind}" for m, kind in zip(moments, kinds, strict=True)]
            counts.post({"c": 3})  # its pipeline is still there
            imp.wait_for("MSG Counts", count=2)


def test_shared_objects_interfaces_and_arrays_of_times_of_psi_are_read_as_they_are(
    tmp_path: Path,
) -> None:
    port = free_port()
    with driver("Gen", port, "Tcp", "types", "-") as gen:
        gen.wait_for("READY")
        with RemoteImporter(HOST, port, REPLAY_ALL, store=tmp_path / "in") as importer:

            def read(name: str, count: int = 1) -> list[Any]:
                with importer.open_stream(name) as stream:
                    found = [stream.read(10) for _ in range(count)]
                return [received and received.value for received in found]

            assert read("shared") == [b"\x05\x06\x07"]
            dog, cat, nothing = read("animal", 3)
            assert (dog["$type"], dog["Name"]) == ("Dog", "rex")
            assert cat == {"$type": "Cat", "<Lives>k__BackingField": 9}
            assert nothing is None
            (moments,) = read("dtx")
            assert [(m.ticks, m.kind.name) for m in moments] == [
                (0, "UNSPECIFIED"),
                (3155378975999999999, "UNSPECIFIED"),
                (504595008000000000, "UNSPECIFIED"),
                (638396640000000000, "UTC"),
            ]
            (moments,) = read("ldt")
            assert [m.ticks for m in moments] == [3155378975999999999, 638397614450000000]
            # Nothing of another message lies behind them in the store.
            stored = [
                message
                for message in importer.store.reader().read_many(1000)
                if importer.store.catalog.stream(message.type).name in {"shared", "animal"}
            ]
            assert sorted(len(message.payload) for message in stored) == [4, 8, 19, 31]


def test_what_the_default_ring_forgot_of_psis_streams_is_counted() -> None:
    port, count = free_port(), 8000
    with driver("Gen", port, "Tcp", "mixed", "-", count, 8) as gen:
        gen.wait_for("READY")
        with RemoteImporter(HOST, port, REPLAY_ALL) as importer:
            until(lambda: importer.statistics().messages == 3 * count, 60)
            assert importer.statistics().lost == 0
            kept = 0
            for name in ("I", "S", "B"):
                with importer.open_stream(name) as stream:
                    while stream.read_messages(1000, 0.5):
                        pass
                    assert stream.messages + stream.lost == count
                    kept += stream.messages
            slots, _ = importer.store.capacity()
            assert kept == slots < 3 * count


def test_a_copy_from_psi_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    port = free_port()
    target = f"log:{tmp_path}/copy"
    copy = [
        PENSTOCK, "cp", f"psi://{HOST}:{port}/I", target, "--follow",
        "--state", str(tmp_path / "state"), "--progress", "none",
    ]  # fmt: skip
    with driver("Gen", port, "Tcp", "live", "-", 5, 10) as gen:
        gen.wait_for("READY")
        for goal in (100, 300, 500):
            with subprocess.Popen(copy) as process:
                try:
                    until(partial(_has, target, goal), 40)
                finally:
                    process.kill()
        with open_reader(target) as reader:
            values = [int.from_bytes(each.payload, "little") for each in reader.available()]
        assert values == list(range(len(values)))


def _has(url: str, count: int) -> bool:
    try:
        with open_reader(url) as reader:
            return reader.bounds().end >= count
    except NotFound:
        return False


def test_signs_of_life_do_not_grow_the_catalog_that_psi_keeps() -> None:
    port = free_port()
    with RemoteExporter(port=port, keep_alive=0.02) as exporter:
        numbers = exporter.exporter.write(None, "Numbers", "int")
        numbers.post(1)
        with driver("Imp", HOST, port, 20, "all", "v", "Numbers:int") as imp:
            imp.wait_for("MSG Numbers")

            def used() -> int:
                # psi's memory is here a file that is named after its process.
                (path,) = Path("/dev/shm/psi-judge").glob(f"{imp.process.pid}_*Catalog*")
                return len(path.read_bytes().rstrip(b"\0"))

            before = used()
            imp.wait_for("RemoteImporter meta update", count=len(imp.lines) + 50)
            assert used() == before > 0
