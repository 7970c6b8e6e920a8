"""The commands about psi's stores, and the one that serves a store."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cli.command import PENSTOCK
from penstock.cli.main import app
from penstock.core.endpoints import open_reader
from penstock.core.errors import AlreadyExists, InvalidOption, NotFound
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter
from penstock.protocols.psi.store.streams import Store
from penstock.protocols.psi.ticks import DateTime, DateTimeKind
from protocols.psi.damaged_stores import DAMAGES, write_store

VECTORS = Path(__file__).parents[1] / "vectors" / "psi"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, ["psi-store", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"}
    )


def make_store(root: Path) -> Path:
    with Store.create(root, "rig") as store:
        numbers = store.add_stream("Numbers", "int")
        for i in range(10):
            store.append(numbers.id, bytes([i, 0, 0, 0]), 1_700_000_000_000_000_000 + i * 1000)
        store.end_streams()
    return root / "rig"


def test_ls_shows_stores_of_psi_and_of_ours(tmp_path: Path) -> None:
    done = command("ls", VECTORS)
    assert done.exit_code == 0, done.output
    assert "Floats" in done.output
    assert "System.Single" in done.output
    told = json.loads(command("ls", VECTORS / "store_basic", "--json").stdout)
    # That store was never closed: its messages are counted.
    assert all(row["messages"] > 0 and row["first_created"] for row in told)
    make_store(tmp_path)
    done = command("ls", tmp_path, "--json")
    (listed,) = json.loads(done.stdout)
    assert (listed["store"], listed["stream"], listed["messages"]) == ("rig", "Numbers", 10)
    assert listed["closed"]


@pytest.mark.parametrize("session", ["basic", "types"])
@pytest.mark.parametrize("format", ["csv", "parquet", "log"])
def test_every_stream_of_psis_own_stores_is_exported(
    tmp_path: Path, session: str, format: str
) -> None:
    store = VECTORS / f"store_{session}"
    listed = json.loads(command("ls", store, "--json").stdout)
    done = command("export", store, tmp_path / "out", "--format", format)
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.output.count(" messages to ") == len(listed)
    for row in listed:
        path = next(
            each
            for line in done.output.splitlines()
            if line.startswith(f"{row['stream']}: ")
            for each in [Path(line.rpartition(" messages to ")[2])]
        )
        assert path.exists()
        if format == "csv":
            with path.open(newline="") as file:
                assert len(list(csv.reader(file))) == row["messages"] + 1
        elif format == "parquet":
            assert pq.read_table(path).num_rows == row["messages"]
        else:
            with open_reader(f"log:{path}") as reader:
                assert len(list(reader.available())) == row["messages"]


def test_values_keep_their_types_and_times(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert command("export", store, tmp_path / "out", "--stream", "Numbers").exit_code == 0
    table = pq.read_table(tmp_path / "out" / "Numbers.parquet")
    assert table.column("value").to_pylist() == list(range(10))
    assert str(table.schema.field("value").type) == "int32"
    assert table.column("sequence_id").to_pylist() == list(range(1, 11))
    assert command("export", store, tmp_path / "csv", "-f", "csv").exit_code == 0
    rows = (tmp_path / "csv" / "Numbers.csv").read_text().splitlines()
    assert rows[0] == "originating_time,creation_time,sequence_id,value"
    assert rows[1].startswith("2023-11-14T22:13:20Z,")
    assert rows[1].endswith(",1,0")


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_half_a_character_is_exported_as_one_that_is_not_known(tmp_path: Path, format: str) -> None:
    with Store.create(tmp_path, "rig") as store:
        letters = store.add_stream("Letters", "char")
        for letter in (0xE9, 0xD800):
            store.append(letters.id, letter.to_bytes(2, "little"))
        store.end_streams()
    done = command("export", tmp_path / "rig", tmp_path / "out", "-f", format)
    assert done.exit_code == 0, (done.output, done.exception)
    path = tmp_path / "out" / f"Letters.{format}"
    if format == "parquet":
        assert pq.read_table(path).column("value").to_pylist() == ["é", "\ufffd"]
    else:
        assert path.read_text(encoding="utf-8").splitlines()[-1].endswith(",\ufffd")


def test_ls_shows_the_whole_name_of_a_generic_type(tmp_path: Path) -> None:
    name = "System.Collections.Generic.Dictionary`2[[System.String],[System.Int32]]"
    with Store.create(tmp_path, "rig") as store:
        store.add_stream("Counts", name)
    assert name in "".join(command("ls", tmp_path).output.split())


def test_what_is_not_there_or_is_there_already_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    out = tmp_path / "out"
    assert command("export", store, out).exit_code == 0
    assert isinstance(command("export", store, out).exception, AlreadyExists)
    assert isinstance(command("export", store, out, "--stream", "X").exception, NotFound)
    assert isinstance(command("export", store, out, "--format", "xml").exception, InvalidOption)
    assert isinstance(command("ls", tmp_path / "nothing").exception, NotFound)
    assert isinstance(command("ls", out).exception, NotFound)
    with Store.create(tmp_path, "other"):
        pass
    assert isinstance(command("export", tmp_path, out).exception, InvalidOption)


def test_serve_psi_serves_a_store_that_another_process_writes(tmp_path: Path) -> None:
    with Store.create(tmp_path, "rig") as store:
        numbers = store.add_stream("Numbers", "int")
        server = subprocess.Popen(
            [
                PENSTOCK,
                "serve",
                "psi",
                str(tmp_path / "rig"),
                "--port",
                "0",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            port = int(line.strip().rpartition(":")[2])
            with RemoteImporter("127.0.0.1", port, REPLAY_ALL) as importer:
                assert importer.wait_connected(20)
                store.append(numbers.id, b"\7\0\0\0")
                store.end_streams()
                with importer.open_stream("Numbers", "int") as stream:
                    assert [received.value for received in stream] == [7]
            server.send_signal(signal.SIGTERM)
            assert "1 messages sent" in server.stdout.read()
            assert server.wait(20) == 0
        finally:
            if server.poll() is None:
                server.kill()
            server.wait(10)
            assert server.stdout is not None
            server.stdout.close()


def test_serve_psi_serves_psis_own_files_by_name(tmp_path: Path) -> None:
    shutil.copytree(VECTORS / "store_types", tmp_path / "Oracle.0002")
    server = subprocess.Popen(
        [PENSTOCK, "serve", "psi", str(tmp_path), "--name", "Oracle", "--port", "0", "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().strip().rpartition(":")[2])
        with RemoteImporter("127.0.0.1", port, REPLAY_ALL) as importer:
            with importer.open_stream("string", "string", timeout=20) as stream:
                received = stream.read(20)
            assert received is not None
            assert isinstance(received.value, str)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        if server.poll() is None:
            server.kill()
        server.wait(10)
        assert server.stdout is not None
        server.stdout.close()


@pytest.mark.parametrize("damage", ["tail zeroed", "data missing", "catalog empty"])
def test_of_a_damaged_store_it_is_said_what_is_missing_and_the_exit_code_is_3(
    tmp_path: Path, damage: str
) -> None:
    folder = write_store(tmp_path / "s")
    DAMAGES[damage](folder)
    refused = command("export", folder, tmp_path / "out", "-f", "csv")
    assert refused.exit_code == 3
    assert "--salvage" in refused.stderr
    assert not (tmp_path / "out").exists()
    salvaged = command("export", folder, tmp_path / "out", "-f", "csv", "--salvage")
    assert salvaged.exit_code == 3
    assert "S: " in salvaged.stderr
    listed = command("ls", folder, "--json")
    assert listed.exit_code == 3
    json.loads(listed.stdout)
    if damage == "tail zeroed":
        assert "A: " in salvaged.stdout
        assert "of 1,000 messages are missing" in salvaged.stderr
    served = CliRunner().invoke(app, ["serve", "psi", str(folder), "--port", "0"])
    assert served.exit_code == 3
    assert "--salvage" in served.stderr


def test_times_in_arrays_and_members_are_exported_as_they_are(tmp_path: Path) -> None:
    store = VECTORS / "store_types"
    assert command("export", store, tmp_path / "out", "-f", "csv").exit_code == 0
    rows = (tmp_path / "out" / "nestedstruct.csv").read_text().splitlines()
    assert "2024-01-02T03:04:05Z" in rows[1]
    with Store.create(tmp_path, "rig") as made:
        stream = made.add_stream("Times", "System.DateTime[]")
        moments = [DateTime(0, DateTimeKind.UNSPECIFIED), DateTime(638397614450000001)]
        made.append(stream.id, made.catalog.codec(stream).encode(moments))
    assert command("export", tmp_path / "rig", tmp_path / "times", "-f", "csv").exit_code == 0
    with (tmp_path / "times" / "Times.csv").open(newline="") as file:
        *_, row = csv.reader(file)
    assert json.loads(row[-1]) == ["0001-01-01T00:00:00", "2024-01-02T03:04:05.0000001Z"]
