"""`penstock run --metrics --reload`: asked by HTTP, and changed while it runs."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from penstock import open_writer
from support.spark_lives import Program, programs, running
from support.spark_streams import payloads

TEXT = """
pipeline: p
sources: {{a: {{url: "log:{0}/in"}}}}
stages: {{x: {{from: a, sql: "select concat('{1}', cast(payload as string)) as payload from a"}}}}
sinks: {{out: {{from: x, url: "log:{0}/out"}}}}
settings: {{master: "local[1]", trigger: 200ms, checkpoint: "{0}/checkpoints"}}
"""


def write(folder: Path, first: int, end: int) -> None:
    with open_writer(f"log:{folder}/in") as writer:
        writer.write_many([b"%d" % i for i in range(first, end)])


def wait_for(folder: Path, expected: list[bytes]) -> None:
    until = time.monotonic() + 100
    found: list[bytes] = []
    while (found := payloads(f"log:{folder}/out")) != expected:
        assert time.monotonic() < until, found
        time.sleep(0.2)


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.full
@pytest.mark.timeout(400)
def test_it_is_measured_and_takes_a_file_that_changes(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(TEXT.format(tmp_path, "old "))
    write(tmp_path, 0, 10)
    with programs() as started:
        options = ("--metrics", "0", "--reload")
        program: Program = started.add(running(tmp_path / "errors", file, *options))
        program.until(state="running", rows=10)
        metrics = program.logged(r"metrics are at (http://127\.0\.0\.1:\d+/metrics)")
        assert 'penstock_query_rows_total{query="p-out"} 10\n' in page(metrics)
        pages = program.logged(r"Spark's pages are at (http://(?:127\.0\.0\.1|localhost):\d+)")
        assert "p-out" in page(f"{pages}/StreamingQuery/")
        _check_loopback(int(pages.rpartition(":")[2]))
        file.write_text(TEXT.format(tmp_path, "new ").replace("from a", "from b"))
        program.logged(r"p\.yaml changed, (and is not taken: .*); what ran before goes on")
        write(tmp_path, 10, 20)
        old = [b"old %d" % i for i in range(20)]
        wait_for(tmp_path, old)
        file.write_text(TEXT.format(tmp_path, "new "))
        program.logged("(p.yaml changed; the batches under way are finished)")
        write(tmp_path, 20, 30)
        wait_for(tmp_path, [*old, *(b"new %d" % i for i in range(20, 30))])
        program.until(state="running", rows=10)  # counted from its beginning on
        assert 'penstock_query_rows_total{query="p-out"} 10\n' in page(metrics)
        program.process.send_signal(signal.SIGINT)
        assert program.wait()[-1]["event"] == "end"


def _check_loopback(port: int) -> None:
    """Make sure that nobody but this machine reaches a port."""
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening
    loopback = re.compile(r"0100007F:|0{24}01000000:|0{16}FFFF00000100007F:")
    assert all(loopback.match(one) for one in listening), listening
