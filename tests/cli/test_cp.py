"""`penstock cp` with all that a relay can do, as scripts use it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.command import PENSTOCK, count, fill, json_lines, run
from penstock import open_reader, open_writer


@pytest.fixture
def source(tmp_path: Path) -> str:
    return f"log:{tmp_path}/source"


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"log:{tmp_path}/target"


def test_an_interval_is_copied_and_the_books_are_json(source: str, target: str) -> None:
    fill(source, 100)
    done = run("cp", source, target, "--from", "10", "--to", "19", "--progress", "json")
    assert done.returncode == 0
    last = json_lines(done.stdout)[-1]
    assert (last["event"], last["state"]) == ("end", "done")
    assert (last["read"], last["copied"], last["held"], last["dropped"]) == (10, 10, 0, {})
    assert count(target) == 10


def test_a_new_queue_that_is_too_small_for_what_is_copied_is_told(
    source: str, tmp_path: Path
) -> None:
    small = f"fmq:{tmp_path}/small?slots=10"  # it has 16
    fill(source, 100)
    done = run("cp", source, small)
    assert done.returncode == 3
    assert b"the first 84 are overwritten" in done.stderr
    # One that was there is as somebody wanted it, and a live one is for readers that keep up.
    assert run("cp", source, small).returncode == 0
    assert run("cp", source, f"fmq:{tmp_path}/live?slots=10", "--speed", "1000").returncode == 0


def test_what_the_retention_of_a_new_log_removes_at_once_is_told_as_by_put(
    source: str, tmp_path: Path
) -> None:
    with open_writer(source) as writer:
        writer.write_many([bytes(1000)] * 3000)
    done = run("cp", source, f"log:{tmp_path}/small?retain=512k&segment=256k")
    assert done.returncode == 3
    assert b"of 3,000 messages are gone" in done.stderr
    assert run("cp", source, f"log:{tmp_path}/large?retain=10M&segment=256k").returncode == 0


def test_a_state_and_not_the_start_decides_where_a_copy_goes_on(
    source: str, target: str, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    fill(source, 10)
    run("cp", source, target, "--state", state)
    done = run("cp", source, target, "--state", state, "--from", "5")
    assert done.returncode == 0
    assert b"says where to go on" in done.stderr
    assert b"has no message" not in done.stderr


def test_with_a_state_it_goes_on_where_it_was(source: str, target: str, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    fill(source, 10)
    assert run("cp", source, target, "--state", state).stdout.startswith(b"10 messages copied")
    fill(source, 5)
    assert run("cp", source, target, "--state", state).stdout.startswith(b"5 messages copied")
    assert count(target) == 15


def test_what_the_policy_dropped_is_said(source: str, target: str) -> None:
    with open_writer(source) as writer:
        writer.write(b"old", time_ns=0)
        writer.write(b"new")
    done = run("cp", source, target, "--policy", "latency:1h")
    assert done.returncode == 0
    assert done.stdout == b"1 message copied (3 B), 1 dropped (expired)\n"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--policy", "often", b"queue-size:N"),
        ("--to", "later", b"is not a position"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line(
    option: str, value: str, said: bytes, source: str, target: str
) -> None:
    fill(source, 1)
    done = run("cp", source, target, option, value)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert said in done.stderr


def test_a_follower_with_a_quota_and_a_state_stops_within_a_batch_and_loses_nothing(
    source: str, target: str, tmp_path: Path
) -> None:
    fill(source, 1000)
    state = str(tmp_path / "state")
    command = [PENSTOCK, "cp", source, target, "--follow", "--state", state, "--quota", "1kB/s"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as copying:
        deadline = time.monotonic() + 20
        while count(target) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        copying.send_signal(signal.SIGTERM)
        assert copying.wait(10) == 0
    assert count(target) < 1000
    run("cp", source, target, "--state", state)
    with open_reader(target) as reader:
        payloads = [message.payload for message in reader.available()]
    assert payloads == [b"message %d" % i for i in range(1000)]


# --- penstock relay -------------------------------------------------------------------------------


def test_many_relays_of_a_file_run_each_for_itself(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(f"log:{tmp_path}/{name}", 50)
    file = tmp_path / "relays.yaml"
    file.write_text(
        f"""
state: positions
relays:
  first:  {{source: "log:{tmp_path}/a", target: "fmq:{tmp_path}/a2", follow: false}}
  second: {{source: "log:{tmp_path}/b", target: "log:{tmp_path}/b2", follow: false, end: 19}}
  broken: {{source: "log:{tmp_path}/none", target: "log:{tmp_path}/c2", follow: false}}
"""
    )
    done = run("relay", str(file), "--progress", "json")
    assert done.returncode == 1
    ends = {line["relay"]: line for line in json_lines(done.stdout) if line["event"] == "end"}
    assert (ends["first"]["state"], ends["first"]["copied"]) == ("done", 50)
    assert (ends["second"]["state"], ends["second"]["copied"]) == ("done", 20)
    assert ends["broken"]["state"] == "failed"
    assert "there is no log" in ends["broken"]["trouble"]
    assert count(f"fmq:{tmp_path}/a2") == 50
    assert sorted(p.name for p in (tmp_path / "positions").iterdir()) == [
        "first.relay",
        "second.relay",
    ]


def test_a_relay_waits_for_a_source_that_is_not_there_yet_and_stops_when_told(
    source: str, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "relays.yaml"
    file.write_text(f"relays:\n  late:\n    source: {source}\n    target: {target}\n")
    command = [PENSTOCK, "relay", str(file), "--progress", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as relaying:
        assert relaying.stdout is not None
        assert json.loads(relaying.stdout.readline())["state"] == "starting"
        fill(source, 30)
        deadline = time.monotonic() + 20
        while count(target) < 30:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        relaying.send_signal(signal.SIGTERM)
        lines = json_lines(relaying.stdout.read())
        assert relaying.wait(15) == 0
    assert (lines[-1]["state"], lines[-1]["copied"]) == ("stopped", 30)


def test_a_file_that_is_not_right_says_which_line(tmp_path: Path) -> None:
    file = tmp_path / "relays.yaml"
    file.write_text("relays:\n  one:\n    source: log:/a\n    target: log:/b\n    polcy: latest\n")
    done = run("relay", str(file), "--check")
    assert done.returncode == 1
    assert b"relays.yaml:5: relays.one.polcy: unknown key" in done.stderr
    assert b"did you mean policy?" in done.stderr
    file.write_text(file.read_text().replace("polcy", "policy"))
    assert run("relay", str(file), "--check").stdout == b"1 relay: one\n"


@pytest.mark.parametrize("more", ["", "?create=always", "?segment=1M"])
def test_a_stream_is_not_copied_to_itself(source: str, more: str) -> None:
    fill(source, 10)
    done = run("cp", source, source + more)
    assert done.returncode == 1
    assert b"is the stream that would be copied" in done.stderr
    assert count(source) == 10


def test_what_no_importer_took_is_a_loss(source: str) -> None:
    fill(source, 10)
    done = run("cp", source, "psi://127.0.0.1:0/Numbers?linger=200ms")
    assert done.returncode == 3
    assert b"10 messages copied" in done.stdout
    assert b"10 taken by nobody" in done.stdout
    done = run("cp", source, "psi://127.0.0.1:0/Numbers?linger=200ms", "--progress", "json")
    assert json_lines(done.stdout)[-1]["untaken"] == 10
    done = run("put", "psi://127.0.0.1:0/Numbers?linger=200ms", "--text", "one")
    assert done.returncode == 3


def test_a_relay_of_a_file_tells_what_no_importer_took(source: str, tmp_path: Path) -> None:
    fill(source, 10)
    file = tmp_path / "relays.yaml"
    target = "psi://127.0.0.1:0/Numbers?linger=200ms"
    relay = f"{{source: '{source}', target: '{target}', follow: false}}"
    file.write_text(f"relays:\n  out: {relay}\n")
    done = run("relay", str(file))
    assert done.returncode == 3, done.stderr
    assert b"10 taken by nobody" in done.stdout
