"""Graphs that run: real processes between real queues, killed and stopped."""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock import open_writer
from penstock.core.dead_letter import DeadLetter
from penstock.core.endpoints import open_reader
from penstock.core.errors import ConfigError, StorageError
from penstock.protocols.lhhttt.journal import Journal
from penstock.workers.graph_run import GraphRun, NoWorker
from protocols.lhhttt.queues import Asker, served
from support.until import until
from workers.graphs import EXAMPLES, PATIENCE, graph_of, messages_of, put, running
from workers.test_programs import reverse

__all__ = ["reverse"]

FIVE = """
graph: five
vertices:
  split: {use: "work:by_parity", from: numbers, to: [even, odd], workers: 2}
  evens: {use: "work:slowly", from: even, to: joined, options: {mark: e}}
  odds: {use: "work:slowly", from: odd, to: joined, options: {mark: o}, workers: 2}
  last: {use: "work:slowly", from: joined, to: out}
  extra: {use: "work:same", from: out, to: end}
edges: {numbers: , even: , odd: {lb: 2}, joined: , out: , end: {url: "log:DIR/end"}}
"""


def kill_now_and_then(
    run: GraphRun, every: float, kills: int, seed: int, patience: float = PATIENCE
) -> int:
    """Kill some worker with -9 again and again, until all is done; return how many were."""
    rng = random.Random(seed)
    killed = 0
    deadline = time.monotonic() + patience
    while killed < kills or not run.is_done():
        assert time.monotonic() < deadline
        time.sleep(every)
        pids = [pid for some in run.pids().values() for pid in some]
        if killed < kills and pids:
            os.kill(rng.choice(pids), signal.SIGKILL)
            killed += 1
    return killed


def check_five(run: GraphRun, folder: Path, count: int) -> None:
    expected = {b"%d%b" % (number, b"eo"[number % 2 :][:1]) for number in range(count)}
    found = messages_of(f"log:{folder}/end")
    assert set(found) == expected
    books = run.statistics()
    assert books.lost == 0
    for name, edge in books.edges.items():
        assert (edge.held or 0) == 0, name
        if name != "end":
            assert edge.put == edge.done, name
    assert books.edges["numbers"].put == count
    # Who was killed between the two has stored results and not counted them; they came again.
    assert len(found) >= (books.edges["end"].put or 0) >= count


@pytest.mark.timeout(300)
def test_no_message_is_lost_when_workers_are_killed(tmp_path: Path) -> None:
    with running(tmp_path, FIVE) as run:
        put(run, "numbers", range(400))
        until(lambda: run.statistics().edges["joined"].put, PATIENCE)
        killed = kill_now_and_then(run, 0.25, 5, seed=1, patience=240)
    check_five(run, tmp_path, 400)
    assert sum(vertex.restarts for vertex in run.statistics().vertices.values()) >= killed - 1


@pytest.mark.full
@pytest.mark.timeout(300)
def test_no_message_is_lost_when_a_worker_is_killed_every_second(tmp_path: Path) -> None:
    with running(tmp_path, FIVE) as run:
        put(run, "numbers", range(10_000))
        assert kill_now_and_then(run, 1.0, 25, seed=2, patience=240) == 25
    check_five(run, tmp_path, 10_000)


def test_a_ping_becomes_a_pong_in_a_graph_that_is_a_circle(tmp_path: Path) -> None:
    text = """
graph: ping-pong
vertices: {pong: {use: "work:pong", from: table, to: table}}
edges: [table]
"""
    with running(tmp_path, text) as run:
        put(run, "table", ["ping"])
        until(lambda: (run.statistics().edges["table"].put or 0) > 50, PATIENCE)
    books = run.statistics().edges["table"]
    assert books.held == 1  # it is on the disk, and goes on with the next run
    assert books.done == (books.put or 0) - 1
    with running(tmp_path, text) as run:
        until(lambda: (run.statistics().edges["table"].put or 0) > 5, PATIENCE)
    assert run.statistics().edges["table"].recovered == 1


def test_a_worker_in_a_shell_and_one_in_c_work_between_functions(
    tmp_path: Path, reverse: str
) -> None:
    (tmp_path / "shout.sh").symlink_to(EXAMPLES / "shout.sh")
    text = f"""
graph: languages
vertices:
  shell: {{command: [./shout.sh], from: a, to: b, workers: 2}}
  c: {{command: ["{reverse}"], from: b, to: c}}
  python: {{use: "work:same", from: c, to: d}}
edges: {{a: , b: , c: , d: {{url: "log:DIR/d"}}}}
"""
    texts = [b"hello", b"", b"0", b"two\nlines"] * 30
    with running(tmp_path, text) as run:
        put(run, "a", texts)
        until(lambda: run.statistics().edges["b"].put, PATIENCE)
        os.kill(run.pids()["shell"][0], signal.SIGKILL)
        os.kill(run.pids()["c"][0], signal.SIGKILL)
        assert run.wait_until_done(PATIENCE)
    found = Counter(messages_of(f"log:{tmp_path}/d"))
    for payload, count in Counter(text.upper()[::-1] for text in texts).items():
        assert found.pop(payload) >= count
    assert not found


def test_results_pass_a_router_that_drops_a_fifth(tmp_path: Path) -> None:
    text = """
graph: lossy
vertices:
  double: {use: "work:double", from: a, to: b}
  same: {use: "work:same", from: b, to: c}
edges:
  a:
  b: {chaos: {drop: 20%, duplicate: 5%, seed: 3}}
  c: {url: "log:DIR/c"}
"""
    with running(tmp_path, text) as run:
        put(run, "a", range(100))
        assert run.wait_until_done(PATIENCE)
    assert sorted(map(int, set(messages_of(f"log:{tmp_path}/c")))) == list(range(0, 200, 2))
    books = run.statistics()
    assert books.edges["b"].put == 100  # what was sent again is not stored again
    faults = books.edges["b"].faults
    assert faults is not None
    assert faults.up.dropped > 0


def test_nothing_and_zero_are_results_and_none_is_not(tmp_path: Path) -> None:
    text = """
graph: falsy
vertices:
  empty: {use: "work:nothing_but", from: [a, b], to: out, options: {what: ""}}
  zero: {use: "work:nothing_but", from: c, to: out, options: {what: 0}}
  none: {use: "work:nothing_but", from: d, to: out, options: {what: null}}
edges: {a: , b: , c: , d: , out: {url: "log:DIR/out"}}
"""
    with running(tmp_path, text) as run:
        for edge in "abcd":
            put(run, edge, ["x", ""])
        assert run.wait_until_done(PATIENCE)
    assert sorted(messages_of(f"log:{tmp_path}/out")) == [b"", b"", b"", b"", b"0", b"0"]
    work = [vertex.work for vertex in run.statistics().vertices.values()]
    assert [each.done for each in work if each is not None] == [4, 2, 2]


def test_a_log_is_shared_by_workers_and_what_fails_goes_to_the_dead_letters(
    tmp_path: Path,
) -> None:
    text = """
graph: shared
vertices:
  check: {use: "work:fails_at", from: in, to: out, workers: 2, options: {at: "3"}}
edges:
  in: {url: "log:DIR/in", deliveries: 2, dead: "log:DIR/dead", lease: 5s}
  out: {url: "log:DIR/out"}
"""
    with open_writer(f"log:{tmp_path}/in") as writer:
        writer.write_many([b"%d" % number for number in range(8)])
    with running(tmp_path, text) as run:
        assert run.wait_until_done(PATIENCE)
    found = messages_of(f"log:{tmp_path}/out")
    assert sorted(found) == [b"%d" % number for number in range(8) if number != 3]
    with open_reader(f"log:{tmp_path}/dead") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert [letter.original.payload for letter in letters] == [b"3"]
    edge = run.statistics().edges["in"]
    assert (edge.done, edge.dead, edge.held) == (7, 1, 0)


def test_a_result_that_is_too_large_for_another_server_holds_up_no_other(tmp_path: Path) -> None:
    with served(tcp=True, max_message=2048) as server:
        text = f"""
graph: large
vertices:
  v: {{use: "work:long_at", from: in, to: out, options: {{at: "3", size: 5000}}}}
edges:
  in: {{url: "log:DIR/in", deliveries: 2, dead: "log:DIR/dead"}}
  out: {{url: "lhhttt+tcp://127.0.0.1:{server.port}"}}
"""
        with open_writer(f"log:{tmp_path}/in") as writer:
            writer.write_many([b"%d" % number for number in range(8)])
        with running(tmp_path, text) as run:
            assert run.wait_until_done(PATIENCE)
        counted = Counter(messages_of(f"lhhttt+tcp://127.0.0.1:{server.port}"))
    assert sorted(counted) == [b"%d" % number for number in range(8) if number != 3]
    assert max(counted.values()) <= 2  # once with the large one, and once alone
    with open_reader(f"log:{tmp_path}/dead") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert [letter.original.payload for letter in letters] == [b"3"]


def test_each_key_has_one_worker_behind_a_balancer(tmp_path: Path) -> None:
    text = """
graph: keyed
vertices: {remember: {use: "work:so_far", from: in, to: out, workers: 2}}
edges: {in: {lb: 2, by: key, key: "^."}, out: {url: "log:DIR/out"}}
"""
    with running(tmp_path, text) as run:
        put(run, "in", [f"{key}{number}" for number in range(3) for key in "abcd"])
        assert run.wait_until_done(PATIENCE)
    longest: dict[str, str] = {}
    for line in sorted(messages_of(f"log:{tmp_path}/out"), key=len):
        for seen in line.decode().split(","):
            longest[seen[0]] = line.decode()
    for key in "abcd":
        mine = [seen for seen in longest[key].split(",") if seen[0] == key]
        assert mine == [f"{key}{number}" for number in range(3)]


def test_a_worker_that_cannot_begin_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    for use, said in (
        ("use: 'work:doubel'", "double: work has no function doubel"),
        ("command: [./missing]", "missing cannot be started"),
        ("command: [./missing], speaks: udp", "double: .*missing cannot be started"),
    ):
        text = f"graph: g\nvertices: {{double: {{{use}, from: a, to: b}}}}\nedges: [a, b]\n"
        with running(tmp_path, text) as run, pytest.raises(NoWorker, match=said):
            until(lambda run=run: run.check(), PATIENCE)  # type: ignore[misc]


def test_it_is_not_done_while_a_worker_holds_a_message_of_a_queue_that_does_not_count_it(
    tmp_path: Path,
) -> None:
    with served() as server:
        text = f"""
graph: elsewhere
vertices: {{slow: {{use: "work:until_told", from: a, options: {{told: "DIR/told"}}}}}}
edges: {{a: {{url: "lhhttt://127.0.0.1:{server.port}?mode=reliable"}}}}
"""
        with open_writer(f"lhhttt://127.0.0.1:{server.port}") as writer:
            writer.write(b"x")
        with running(tmp_path, text) as run:
            until(lambda: server.statistics().queue.leased, PATIENCE)
            assert not run.wait_until_done(1.5)
            (tmp_path / "told").touch()
            assert run.wait_until_done(PATIENCE)
            assert server.statistics().queue.acked == 1


def test_it_is_not_done_while_a_queue_does_not_tell_what_it_holds(tmp_path: Path) -> None:
    with served() as server:
        text = f"""
graph: elsewhere
vertices: {{v: {{use: "work:same", from: a, to: b}}}}
edges: {{a: {{url: "lhhttt://127.0.0.1:{server.port}?mode=reliable&timeout=0.5s"}}, b: }}
"""
        run = running(tmp_path, text)
    with run:  # its queue is gone
        assert not run.wait_until_done(3)
        assert run.statistics().edges["a"].held is None


def test_what_a_stream_lost_before_a_run_is_not_counted_in_it(tmp_path: Path) -> None:
    text = """
graph: later
vertices: {v: {use: "work:same", from: a, to: b}}
edges: {a: {url: "log:DIR/a"}, b: }
"""
    with open_writer(f"log:{tmp_path}/a?segment=64k&retain=128k") as writer:
        writer.write(b"first")
        with open_reader(f"log:{tmp_path}/a?group=later"):
            pass  # whose messages retention removes
        writer.write_many([bytes(1000)] * 1000)
    for expected in ("lost", "none"):
        with running(tmp_path, text) as run:
            assert run.wait_until_done(PATIENCE)
        books = run.statistics()
        assert (books.lost > 0) == (expected == "lost")
        assert (books.edges["a"].done == 0) == (expected == "none")


def test_it_ends_in_time_also_when_a_worker_does_not_want_to(tmp_path: Path) -> None:
    (tmp_path / "stubborn.sh").write_text("#!/bin/bash\ntrap '' TERM\nwhile :; do sleep 0.1; done")
    (tmp_path / "stubborn.sh").chmod(0o755)
    text = """
graph: stubborn
vertices: {never: {command: [./stubborn.sh], from: a, to: b}}
edges: [a, b]
settings: {grace: 1s}
"""
    run = running(tmp_path, text)
    put(run, "a", ["x"])
    until(lambda: run.statistics().edges["a"].leased, PATIENCE)
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 4
    assert run.statistics().edges["a"].held == 1


def test_a_queue_that_no_edge_has_any_more_is_not_forgotten(tmp_path: Path) -> None:
    text = "graph: g\nvertices: {v: {use: 'work:same', from: a, to: b}}\nedges: {a: , b: LB}\n"
    with running(tmp_path, text.replace("LB", "{lb: 3}")) as run:
        put(run, "b", range(9))
    with pytest.raises(ConfigError, match=r"b\.2 holds 3 messages, and no edge has this queue"):
        running(tmp_path, text.replace("LB", "{lb: 2}"))


def test_what_is_in_memory_only_is_counted_as_lost_at_the_end(tmp_path: Path) -> None:
    text = """
graph: memory
vertices: {v: {use: "work:same", from: a, to: b}}
edges: {a: {durable: false}, b: {durable: false, transport: tcp}}
"""
    large = b"x" * 200_000  # more than a datagram holds
    with running(tmp_path, text) as run:
        put(run, "a", ["small"])
        with open_writer(f"lhhttt+tcp://{run.address('b')}") as writer:
            writer.write(large)
        until(lambda: run.statistics().edges["b"].put == 2, PATIENCE)
    assert run.statistics().lost == 2


def test_a_queue_that_cannot_be_closed_leaves_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
graph: memory
vertices: {v: {use: "work:same", from: a, to: b}}
edges: {a: , b: {durable: false}}
"""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    close = Journal.close

    def fail(journal: Journal) -> None:
        close(journal)
        raise StorageError("writing", "a", OSError(errno.ENOSPC, "No space left on device"))

    run = running(tmp_path, text)
    try:
        put(run, "a", ["message"])
        until(lambda: run.statistics().edges["b"].held == 1, PATIENCE)
        assert list(folder.glob("penstock-graph-*"))
        monkeypatch.setattr(Journal, "close", fail)
        with pytest.raises(StorageError, match="No space left"):
            run.close()
    finally:
        run.close()
    assert not list(folder.glob("penstock-graph-*"))
    assert run.statistics().lost == 1


def test_what_a_queue_takes_while_the_graph_closes_is_counted(tmp_path: Path) -> None:
    names = [f"e{number}" for number in range(4)]
    memory = ", ".join(f"{name}: {{durable: false}}" for name in names)
    text = f"""
graph: memory
vertices: {{v: {{use: "work:same", from: e0, to: e1}}}}
edges: {{{memory}}}
"""
    with running(tmp_path, text) as run:
        last = Asker(int(run.address(names[-1]).rpartition(":")[2]))
        closing = threading.Thread(target=run.close)
        acknowledged = 0
        with last:
            while last.socket.fileno() >= 0:
                try:
                    last.send(b"RPUT:c:%d:message" % (acknowledged + 1))
                    if last.is_silent(1.0) or not last.answer().startswith(b"OK:"):
                        break
                except ConnectionRefusedError:
                    break
                acknowledged += 1
                if acknowledged == 20:
                    closing.start()
        closing.join()
    books = run.statistics().edges[names[-1]]
    assert acknowledged > 20
    assert (books.put or 0) >= acknowledged
    assert books.lost == books.held == books.put


@pytest.mark.parametrize(
    ("edge", "said"),
    [
        ("{chaos: {drop: 120%}}", r"5: edges.a.chaos.drop: .*100%"),
        ("{chaos: {dorp: 20%}}", r"5: edges.a.chaos.dorp: unknown key"),
        ("{chaos: {half_open: true}}", "UDP has no connections"),
        ("{chaos: {seed: x}}", "should be a number"),
        ("{url: 'log:DIR/none', chaos: {drop: 1%}}", "no network to break"),
        ("{url: 'log:DIR/none'}", "there is no|No such|does not exist"),
        ("{url: 'fmq:DIR/classic'}", "cannot be shared"),
    ],
)
def test_an_edge_that_cannot_be_used_is_told_with_its_line(
    tmp_path: Path, edge: str, said: str
) -> None:
    text = f"""graph: g
vertices:
  v: {{use: "work:same", from: a, to: b}}
edges:
  a: {edge}
  b:
"""
    open_writer(f"fmq:{tmp_path}/classic?layout=classic&slots=20&size=8192").close()
    with pytest.raises(ConfigError, match=said) as caught:
        GraphRun(graph_of(tmp_path, text), state=str(tmp_path / "queues"))
    assert caught.value.line == 5
