"""Programs that ask for their messages themselves: a small one, and the prototype's worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock import open_reader
from support.until import until
from workers.graphs import PATIENCE, messages_of, put, running

PROTOTYPE = os.environ.get("PENSTOCK_STREAMPY")

#: Knows the prototype's verbs and nothing else; its queues are in the environment.
PROGRAM = """
import os, socket, sys, time
def address(name):
    host, _, port = os.environ[name].rpartition(":")
    return host, int(port)
def ask(to, text):
    data = text.encode()
    hh = b"%x" % len(data)
    link.sendto(b"%x" % len(hh) + hh + data, to)
    answer = link.recv(65507)
    return answer[1 + int(answer[:1], 16):].decode()
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(5)
print("ready as", os.environ["PENSTOCK_VERTEX"], *sys.argv[1:], flush=True)
while True:
    text = ask(address("PENSTOCK_INPUT"), "GET")
    if text:
        ask(address("PENSTOCK_OUTPUT"), f"PUT:<{text}>")
    else:
        time.sleep(0.01)
"""


def test_a_program_gets_the_addresses_of_its_queues(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    text = f"""
graph: udp
vertices:
  brackets:
    command: ["{sys.executable}", "{tmp_path}/program.py", "--in", "{{input}}", "{{{{x}}}}"]
    speaks: udp
    from: a
    to: b
  last: {{use: "work:same", from: b, to: c}}
edges: {{a: {{lb: 2}}, b: , c: {{url: "log:DIR/c"}}}}
"""
    with running(tmp_path, text) as run:
        put(run, "a", range(40))
        until(lambda: run.statistics().edges["b"].put == 40, PATIENCE)
        assert run.wait_until_done(PATIENCE)
        address = run.address("a")
        assert f"ready as brackets --in {address} {{x}}" in run.said("brackets.0")
    assert sorted(messages_of(f"log:{tmp_path}/c")) == sorted(b"<%d>" % n for n in range(40))


@pytest.mark.skipif(PROTOTYPE is None, reason="PENSTOCK_STREAMPY names no folder")
def test_the_prototypes_worker_is_a_vertex(tmp_path: Path) -> None:
    text = f"""
graph: prototype
vertices:
  double:
    command: ["{PROTOTYPE}/worker", --input-address, "{{input}}", --output-address, "{{output}}",
              --output-type, queue, --function, double]
    speaks: udp
    from: a
    to: b
  split:
    command: ["{PROTOTYPE}/worker", --input-address, "{{b}}", --output-address, "{{c}}",
              --output-address, "{{d}}", --output-type, queue, --function, inputdoubler]
    speaks: udp
    from: b
    to: [c, d]
edges: [a, b, c, d]
"""
    with running(tmp_path, text) as run:
        put(run, "a", range(1, 101))
        until(lambda: run.statistics().edges["d"].put == 100, PATIENCE)
        for edge in ("c", "d"):
            with open_reader(f"lhhttt://{run.address(edge)}") as reader:
                found = [message.payload for message in reader.available()]
            assert found == [b"%d" % (2 * number) for number in range(1, 101)]


@pytest.mark.skipif(PROTOTYPE is None, reason="PENSTOCK_STREAMPY names no folder")
def test_the_prototypes_ping_pong_goes_on(tmp_path: Path) -> None:
    text = f"""
graph: ping-pong
vertices:
  pong:
    command: ["{PROTOTYPE}/worker", --input-address, "{{table}}", --output-address, "{{table}}",
              --output-type, queue, --function, pong]
    speaks: udp
    from: table
    to: table
edges: [table]
"""
    with running(tmp_path, text) as run:
        put(run, "table", ["ping"])
        until(lambda: (run.statistics().edges["table"].done or 0) > 100, PATIENCE)
