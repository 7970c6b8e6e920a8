"""Stores that the real psi wrote, whole and damaged."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.command import PENSTOCK
from penstock.protocols.psi import PsiStoreReader
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter
from protocols.psi.damaged_stores import DAMAGES
from protocols.psi.judge import driver, needs_psi

pytestmark = needs_psi

MESSAGES = 700
STREAMS = ("I", "S", "B")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Let psi write two stores of 2,100 messages; one of them is closed in good order."""
    made = {}
    for closed in (True, False):
        folder = tmp_path_factory.mktemp("psi") / "store"
        with driver("Gen", 0, "Tcp", "mixed", folder, MESSAGES, 1000) as gen:
            gen.wait_for("READY")
            _wait_until_written(folder)
            if closed:
                gen.say("dispose")
                gen.wait_for("DISPOSED")
            gen.say("quit")
            gen.finish()
        (folder / "Gen.Live").unlink(missing_ok=True)
        if not closed:  # it has room for 256 MiB, which is slow to copy
            os.truncate(folder / "Gen.Data_000000.psi", 1 << 20)
        made[closed] = folder
    return made


def _wait_until_written(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with PsiStoreReader(folder) as store:
            if sum(1 for _ in store.messages()) == MESSAGES * len(STREAMS):
                return
        time.sleep(0.1)
    raise AssertionError("psi did not write its store")


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PENSTOCK, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "never closed"])
def test_a_whole_store_of_psi_is_exported_whole(
    tmp_path: Path, stores: dict[bool, Path], closed: bool
) -> None:
    done = penstock("psi-store", "export", stores[closed], tmp_path / "out", "-f", "csv")
    assert done.returncode == 0, done.stderr
    assert _rows(tmp_path / "out") == dict.fromkeys(STREAMS, MESSAGES)
    assert penstock("psi-store", "ls", stores[closed]).returncode == 0


def _rows(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            found[path.stem] = len(list(csv.reader(file))) - 1
    return found


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "never closed"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_of_a_damaged_store_of_psi_it_is_said_what_is_missing(
    tmp_path: Path, stores: dict[bool, Path], damage: str, closed: bool
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(stores[closed], folder)
    DAMAGES[damage](folder)
    refused = penstock("psi-store", "export", folder, tmp_path / "out", "-f", "csv")
    assert refused.returncode == 3, (refused.stdout, refused.stderr)
    assert "--salvage" in refused.stderr
    assert not (tmp_path / "out").exists()
    salvaged = penstock("psi-store", "export", folder, tmp_path / "out", "-f", "csv", "--salvage")
    assert salvaged.returncode == 3
    assert "penstock: Gen: " in salvaged.stderr
    got = sum(_rows(tmp_path / "out").values())
    assert got < MESSAGES * len(STREAMS)
    if damage in {"tail zeroed", "middle zeroed", "middle garbled", "data cut"}:
        assert got > MESSAGES // 4
    if "middle" not in damage:
        served = penstock("serve", "psi", folder, "--port", 0)
        assert served.returncode == 3, (served.stdout, served.stderr)
        listed = penstock("psi-store", "ls", folder, "--json")
        assert listed.returncode == 3
        json.loads(listed.stdout)


def test_what_is_left_of_a_store_of_psi_is_served_and_the_rest_is_lost(
    tmp_path: Path, stores: dict[bool, Path]
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(stores[True], folder)
    DAMAGES["tail zeroed"](folder)
    with subprocess.Popen(
        [PENSTOCK, "serve", "psi", str(folder), "--port", "0", "--salvage"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            with RemoteImporter("127.0.0.1", port, REPLAY_ALL, store=tmp_path / "got") as importer:
                got = sum(len(list(importer.open_stream(name))) for name in STREAMS)
            server.send_signal(signal.SIGTERM)
            said = server.stdout.read()
            assert server.wait(20) == 3
        finally:
            server.kill()
    lost = MESSAGES * len(STREAMS) - got
    assert lost > 0
    assert f"{lost:,} lost" in said
