"""A relay between any two protocols goes on after an outage of either side."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from penstock import open_reader, open_writer
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.protocols.psi import REPLAY_ALL, RemoteExporter, RemoteImporter, Store
from penstock.relay.faults import FaultRouter
from penstock.relay.faults.model import NO_FAULTS, Faults
from protocols.flight.serving import PENSTOCK, served
from relay.background import Background, fill, numbers
from support.mosquitto import free_port
from support.until import until

HOST = "127.0.0.1"
COUNT = 3_000


class Queues:
    """A server of LROSE's queues that can be away for a while."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self._options = {"root": root, "port": free_port()}
        self.server = FmqServer(FmqServerOptions.model_validate(self._options))

    def url(self, name: str) -> str:
        return f"fmqp://{HOST}:{self._options['port']}/{name}"

    def be_away(self, seconds: float = 0.3) -> None:
        self.server.close()
        time.sleep(seconds)
        self.server = FmqServer(FmqServerOptions.model_validate(self._options))


def test_a_server_of_lroses_queues_that_was_away_gets_everything(tmp_path: Path) -> None:
    source = f"log:{tmp_path}/source"
    fill(source, COUNT)
    queues = Queues(tmp_path / "root")
    try:
        target = queues.url("copy") + "?slots=16384&size=16M"
        relay = Background(source, target, batch=50, quota="60kB/s")
        for share in (4, 2):
            until(lambda: relay.copied() >= COUNT // share)  # noqa: B023
            queues.be_away()
        until(lambda: relay.copied() >= COUNT)
        books = relay.end()
        found = numbers(f"fmq:{tmp_path}/root/copy")
    finally:
        queues.server.close()
    assert (books.read, books.held, books.lost) == (COUNT, 0, 0)
    assert books.outages >= 1
    # What was on its way may be there twice, and is counted then.
    assert list(dict.fromkeys(found)) == list(range(COUNT))
    assert len(found) - COUNT <= books.in_doubt


def test_what_waits_at_a_server_that_was_cut_off_is_copied_once(tmp_path: Path) -> None:
    source, ring = f"log:{tmp_path}/source", f"fmq:{tmp_path}/root/ring?slots=8&size=64k&hold=slow"
    fill(source, 8)
    (tmp_path / "root").mkdir()
    open_writer(ring).close()
    with (
        served(tmp_path / "root", bulk_port="off") as server,
        FaultRouter.tcp((HOST, server.port)) as network,
        open_reader(ring) as slow,
    ):
        with open_writer(f"fmq:{tmp_path}/root/ring?hold=slow") as writer:
            writer.write_many([b"old"] * 8)  # now it is full
        target = f"flight://{HOST}:{network.address[1]}/ring?hold=slow"
        relay = Background(source, f"{target}&retry=1s")
        time.sleep(1)  # until the messages wait there
        network.set(Faults(refuse=1.0))
        network.cut_all()
        time.sleep(1.6)  # longer than the writer itself tries again
        network.set(NO_FAULTS)
        time.sleep(1.5)
        found: list[bytes] = []
        while len(found) < 16:
            found += [message.payload for message in slow.read_many(100, 20)]
        until(lambda: relay.copied() == 8)
        books = relay.end()
        found += [message.payload for message in slow.read_many(100, 1)]
    assert len(found) == 16
    assert (books.copied, books.in_doubt) == (8, 0)


def test_a_source_of_lroses_queues_that_was_away_looks_like_delay(tmp_path: Path) -> None:
    queues = Queues(tmp_path / "root")
    try:
        fill(f"fmq:{tmp_path}/root/beams?layout=classic&slots=16384&size=16M", COUNT)
        target = f"log:{tmp_path}/target"
        relay = Background(queues.url("beams"), target, batch=50, quota="60kB/s")
        for share in (4, 2):
            until(lambda: relay.copied() >= COUNT // share)  # noqa: B023
            queues.be_away()
        until(lambda: relay.copied() >= COUNT)
        books = relay.end()
    finally:
        queues.server.close()
    assert (books.copied, books.lost, books.held) == (COUNT, 0, 0)
    assert numbers(target) == list(range(COUNT))


def test_an_exporter_of_psi_that_was_away_looks_like_delay(tmp_path: Path) -> None:
    port = free_port()
    with Store.create(tmp_path, "rig") as store:
        stream = store.add_stream("Bytes", "byte[]")
        exporter = RemoteExporter(store, port)
        relay = Background(f"psi://{HOST}:{port}/Bytes", f"log:{tmp_path}/target", batch=50)
        for part in range(3):
            for i in range(part * 1000, (part + 1) * 1000):
                text = b"message %d" % i
                store.append(stream.id, b"\0\0\0\x80" + len(text).to_bytes(4, "little") + text)
            if part < 2:
                exporter.close()
                time.sleep(0.2)
                exporter = RemoteExporter(store, port)
        until(lambda: relay.copied() >= COUNT)
        books = relay.end()
        exporter.close()
    assert (books.copied, books.lost, books.held) == (COUNT, 0, 0)
    assert numbers(f"log:{tmp_path}/target") == list(range(COUNT))


def test_an_importer_of_psi_that_was_away_gets_everything_once(tmp_path: Path) -> None:
    source, port = f"log:{tmp_path}/source", free_port()
    fill(source, COUNT)
    target = f"psi://{HOST}:{port}/Bytes?store={tmp_path}/out"
    relay = Background(source, target, batch=50, quota="60kB/s")
    for share in (4, 2):
        with RemoteImporter(HOST, port, REPLAY_ALL, store=tmp_path / "in") as importer:
            until(lambda: importer.statistics().messages > 0)
            until(lambda: relay.copied() >= COUNT // share)  # noqa: B023
    until(lambda: relay.copied() >= COUNT)
    with RemoteImporter(HOST, port, REPLAY_ALL, store=tmp_path / "in") as importer:
        with importer.open_stream("Bytes", "byte[]") as stream:
            found: list[int] = []
            while len(found) < COUNT and (received := stream.read(15)) is not None:
                found.append(int(received.value.split()[1]))
        assert importer.statistics().lost == 0
    books = relay.end()
    assert found == list(range(COUNT))
    assert (books.copied, books.held) == (COUNT, 0)


def test_from_psi_to_lroses_queues_with_outages_of_both_sides(tmp_path: Path) -> None:
    port = free_port()
    queues = Queues(tmp_path / "root")
    with Store.create(tmp_path, "rig") as store:
        stream = store.add_stream("Bytes", "byte[]")
        exporter = RemoteExporter(store, port)
        try:
            target = queues.url("copy") + "?slots=16384&size=16M"
            relay = Background(f"psi://{HOST}:{port}/Bytes", target, batch=50)
            for part in range(3):
                for i in range(part * 1000, (part + 1) * 1000):
                    text = b"message %d" % i
                    payload = b"\0\0\0\x80" + len(text).to_bytes(4, "little") + text
                    store.append(stream.id, payload)
                if part == 0:
                    exporter.close()
                    exporter = RemoteExporter(store, port)
                elif part == 1:
                    queues.be_away()
            until(lambda: relay.copied() >= COUNT)
            books = relay.end()
            found = numbers(f"fmq:{tmp_path}/root/copy")
        finally:
            queues.server.close()
            exporter.close()
    assert (books.lost, books.held) == (0, 0)
    assert list(dict.fromkeys(found)) == list(range(COUNT))
    assert len(found) - COUNT <= books.in_doubt


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_cp_copies_over_tls_with_a_token_and_goes_on_where_it_was(tmp_path: Path) -> None:
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        ],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    source, root = f"log:{tmp_path}/source", tmp_path / "root"
    root.mkdir()
    tls = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with served(root, token_file=token, **tls) as server:
        assert server.url.startswith("flight+tls://")
        target = f"{server.url}copy?kind=log&ca={tls['tls_cert']}&token_file={token}"
        command = [PENSTOCK, "cp", source, target, "--state", str(tmp_path / "state")]
        for first in (0, 500):
            fill(source, 500, first)
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            assert "500 messages copied" in done.stdout
        plain = [*command[:3], target.replace("flight+tls:", "flight:"), "--give-up", "1s"]
        assert subprocess.run(plain, check=False, capture_output=True, timeout=60).returncode == 1
    assert numbers(f"log:{root}/copy") == list(range(1000))
