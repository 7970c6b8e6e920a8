"""`penstock dispatch` and `penstock dead`: real processes, real rings, real kill -9."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from cli.command import PENSTOCK, json_lines, run
from penstock.cli.main import app
from penstock.core.errors import ConfigError, InvalidOption, NotFound
from penstock.dispatch.control import find_place
from penstock.protocols.uprotocol import SubscriptionStatus, UPayloadFormat, UUri, notification
from penstock.protocols.uprotocol.communication import Publisher
from support.bus_processes import BusProcess, bus_process, ring_entity
from support.until import until

TOPIC = "//vehicle1/10/1/8001"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bus.yaml"
    path.write_text(
        f"""\
dispatcher: test-bus
authority: vehicle1
state: ./state
legs:
  local:
    ring: {{receive: "fmq:{tmp_path}/rings/in", send: "fmq:{tmp_path}/rings/{{ue_id}}"}}
    authorities: [vehicle1]
retry: {{initial: 20ms, maximum: 100ms, max_attempts: 3}}
grace: 200ms
"""
    )
    return path


@pytest.fixture
def bus(file: Path) -> Iterator[BusProcess]:
    with bus_process(file) as process:
        yield process


def _status(place: Path) -> Any:
    return find_place(place).status()


def _done(*arguments: str) -> Any:
    """Run a command in this process: starting one takes a second, and there are many here."""
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def _said(*arguments: str) -> str:
    done = _done(*arguments)
    assert done.exit_code == 0, done.output
    said: str = done.stdout
    return said


def test_two_entities_talk_through_a_dispatcher_also_after_kill_9(
    bus: BusProcess, tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    topic = UUri.parse(TOPIC)
    with (
        ring_entity(rings, "vehicle1", 0x10) as sender,
        ring_entity(rings, "vehicle1", 0x20) as receiver,
    ):
        assert receiver.subscribe(topic) == SubscriptionStatus.SUBSCRIBED
        publisher = Publisher(sender.transport, sender.uris)
        for number in range(100):
            publisher.publish(0x8001, b"%d" % number)
        until(lambda: len(set(receiver.payloads)) == 100)
        second = run("dispatch", "run", str(bus.file))
        assert second.returncode == 1
        assert b"another process runs the dispatcher" in second.stderr
        bus.kill()
        for number in range(100, 200):
            publisher.publish(0x8001, b"%d" % number)  # they wait in its ring
        bus.start()
        status = json.loads(_said("dispatch", "status", str(bus.file), "--json"))
        assert status["pid"] == bus.process.pid
        until(lambda: len(set(receiver.payloads)) == 200)
        wanted = [b"%d" % number for number in range(200)]
        assert list(dict.fromkeys(receiver.payloads)) == wanted  # in order, some maybe twice
        said = bus.end()
    assert said.startswith("stopped: ")
    status = _status(tmp_path / "state")
    assert status["is_running"] is False
    assert status["books"]["copies"]["queued"] == 0
    assert status["books"]["problems"] == []


def test_a_topic_is_stopped_and_started_also_across_a_restart(
    bus: BusProcess, file: Path, tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    with (
        ring_entity(rings, "vehicle1", 0x10) as sender,
        ring_entity(rings, "vehicle1", 0x20) as receiver,
    ):
        receiver.subscribe(UUri.parse(TOPIC))
        assert "stopped up://vehicle1/10/1/8001" in _said("dispatch", "stop", str(file), TOPIC)
        publisher = Publisher(sender.transport, sender.uris)
        publisher.publish(0x8001, b"waits")
        until(lambda: _status(file)["books"]["copies"]["queued"] == 1)
        assert "stopped: up://vehicle1/10/1/8001" in _said("dispatch", "status", str(file))
        bus.end()
        bus.start()
        assert [one["topic"] for one in _status(file)["stopped"]] == ["up:" + TOPIC]
        assert _status(file)["books"]["copies"]["queued"] == 1
        assert receiver.payloads == []
        _said("dispatch", "start", str(file), TOPIC)
        until(lambda: receiver.payloads == [b"waits"])
        bus.end()


def test_a_dispatcher_that_does_not_run_is_stopped_by_its_file(
    bus: BusProcess, file: Path, tmp_path: Path
) -> None:
    bus.end()
    said = _said("dispatch", "stop", str(tmp_path / "state"), "/10/1/8001", "--json")
    assert json.loads(said) == {
        "stopped": "up://vehicle1/10/1/8001",
        "receiver": "up://*/FFFFFFFF/FF/FFFF",
        "is_running": False,
    }
    bus.start()
    assert len(_status(file)["stopped"]) == 1
    bus.end()
    _said("dispatch", "start", str(file), TOPIC)
    again = _done("dispatch", "start", str(file), TOPIC)
    assert again.exit_code == 1
    assert "was not stopped" in again.stderr


def test_dead_letters_are_listed_shown_retried_and_dropped(
    bus: BusProcess, file: Path, tmp_path: Path
) -> None:
    rings = tmp_path / "rings"
    late = UUri("vehicle1", 0x30, 1, 0)
    assert _said("dead", "retry", str(file), "--all").startswith("0 ")
    with pytest.raises(NotFound, match="there is no dead letter 12345"):
        _done("dead", "drop", str(file), "12345")
    with pytest.raises(InvalidOption) as caught:
        _done("dead", "retry", str(file))
    assert "--all" in str(caught.value.hint)
    with ring_entity(rings, "vehicle1", 0x10) as sender:
        for text in (b"one", b"two", b"three"):
            sender.transport.send(
                notification(
                    sender.uris.resource(0x8001), late, text, payload_format=UPayloadFormat.TEXT
                )
            )

        def letters() -> list[str]:
            return [str(letter.id) for letter in find_place(file).letters()]

        until(lambda: len(letters()) == 3)
        first, second, third = json_lines(_said("dead", "ls", str(file), "--json").encode())
        assert (first["code"], first["reason"], first["attempts"]) == (
            "UNAVAILABLE",
            "UNREACHABLE",
            3,
        )
        assert first["receiver"] == "up://vehicle1/30/1/0"
        by_code = _said("dead", "ls", str(file), "--code", "unavailable", "--limit", "2")
        assert by_code.count("UNAVAILABLE  notification of //vehicle1/10/1/8001") == 2
        assert _said("dead", "ls", str(file), "--receiver", "/31/1/0") == ""
        shown = json.loads(_said("dead", "show", str(file), str(first["number"])))
        assert bytes.fromhex(shown["payload"]) == b"one"
        assert shown["original"]["source"] == "up://vehicle1/10/1/8001"
        with ring_entity(rings, "vehicle1", 0x30) as there:
            there.transport.register_listener(UUri.ANY, there.hear, there.uris.source)
            assert _said("dead", "retry", str(file), first["id"]) == "1 retried\n"
            until(lambda: b"one" in there.payloads)
            assert _said("dead", "drop", str(file), str(second["number"])) == "1 dropped\n"
            assert letters() == [third["id"]]
            bus.end()
            assert "next start" in _said("dead", "retry", str(file), "--all")
            assert there.payloads == [b"one"]
            bus.start()
            until(lambda: there.payloads == [b"one", b"three"])
            assert letters() == []
        assert _status(file)["books"]["problems"] == []
        bus.end()


@pytest.mark.full
def test_more_dead_letters_than_one_question_holds_are_retried_and_dropped(
    bus: BusProcess, file: Path, tmp_path: Path
) -> None:
    count = 30_000
    spoofed, sink = UUri("vehicle2", 0x10, 1, 0x8001), UUri("vehicle1", 0x20, 1, 0)
    with penstock.open_writer(f"fmq:{tmp_path}/rings/in", hold="uprotocol", keep="true") as writer:
        for _ in range(0, count, 500):
            writer.write_many([notification(spoofed, sink).to_bytes() for _ in range(500)])
    until(lambda: _status(file)["books"]["messages"]["letters"] == count, 120)
    assert _said("dead", "drop", str(file), "--all", "--code", "UNAUTHENTICATED") == (
        "30,000 dropped\n"
    )
    assert _said("dead", "ls", str(file)) == ""
    with penstock.open_writer(f"fmq:{tmp_path}/rings/in", hold="uprotocol", keep="true") as writer:
        for _ in range(0, count, 500):
            writer.write_many([notification(spoofed, sink).to_bytes() for _ in range(500)])
    until(lambda: _status(file)["books"]["messages"]["letters"] == 2 * count, 120)
    assert _said("dead", "retry", str(file), "--all") == "30,000 retried\n"
    bus.end()
    books = _status(file)["books"]
    assert books["problems"] == []
    assert books["copies"]["stored"] == count


def test_bytes_that_are_no_message_can_be_looked_at(
    bus: BusProcess, file: Path, tmp_path: Path
) -> None:
    assert _said("dead", "ls", str(file), "--undecodable") == ""
    with penstock.open_writer(f"fmq:{tmp_path}/rings/in", hold="uprotocol", keep="true") as writer:
        writer.write_many([b"\xff\x00no message", b"\xfe" * 100_000])
    until(lambda: _said("dead", "ls", str(file), "--undecodable").count("\n") == 2)
    assert "12 bytes by local: ff 00 6e" in _said("dead", "ls", str(file), "--undecodable")
    first, second = json_lines(_said("dead", "ls", str(file), "--undecodable", "--json").encode())
    assert (first["bytes"], first["is_whole"], second["is_whole"]) == (12, True, False)
    shown = _said("dead", "show", str(file), str(first["number"]), "--undecodable")
    assert bytes.fromhex(json.loads(shown)["data"]) == b"\xff\x00no message"
    with pytest.raises(NotFound, match="there is no 17"):
        _done("dead", "show", str(file), "17", "--undecodable")
    with pytest.raises(InvalidOption, match="neither code nor receiver"):
        _done("dead", "ls", str(file), "--undecodable", "--code", "INTERNAL")
    status = _status(file)["books"]
    assert (status["messages"]["undecodable"], status["messages"]["quarantined"]) == (2, 2)
    assert status["problems"] == []
    assert "2 received, 0 refused, 2 undecodable, 0 stored" in _said(
        "dispatch", "status", str(file)
    )
    bus.end()


def test_a_choice_of_dead_letters_that_chooses_nothing_is_refused(
    bus: BusProcess, file: Path
) -> None:
    for command in (["ls"], ["retry", "--all"], ["drop", "--all"]):
        name, *more = command
        with pytest.raises(InvalidOption, match="there is no code UNAVAILBLE") as error:
            _done("dead", name, str(file), *more, "--code", "unavailble")
        assert error.value.hint == "did you mean UNAVAILABLE?"
    for option in (["--code", "UNAVAILABLE"], ["--receiver", "//vehicle1/20/1/0"]):
        with pytest.raises(InvalidOption, match="give ids, or --all"):
            _done("dead", "drop", str(file), "17", *option)
    assert _said("dead", "ls", str(file), "--code", "unavailable") == ""
    bus.end()


def test_a_file_is_checked_without_running_it(file: Path, tmp_path: Path) -> None:
    said = _said("dispatch", "run", str(file), "--check")
    assert said == "test-bus: authority vehicle1, legs local (ring)\n"
    assert not (tmp_path / "state").exists()
    file.write_text(file.read_text().replace("max_attempts: 3", "max_attempts: none"))
    with pytest.raises(ConfigError, match=r"bus\.yaml:8: retry\.max_attempts"):
        _done("dispatch", "run", str(file), "--check")
    with pytest.raises(NotFound, match="no dispatcher has run"):
        _done("dispatch", "status", str(tmp_path))


def test_a_file_that_a_leg_names_and_is_missing_is_told_with_its_line(tmp_path: Path) -> None:
    bus = tmp_path / "bus.yaml"
    bus.write_text("""
dispatcher: test-bus
authority: vehicle1
state: ./state
legs:
  cloud:
    mqtt: {url: "mqtts://broker:8883", topics: d2d,
           ca: ca.pem}
    authorities: [cloud]
""")
    with pytest.raises(
        ConfigError, match=r"bus\.yaml:8: legs\.cloud\.mqtt\.ca: .*/ca\.pem cannot be"
    ):
        _done("dispatch", "run", str(bus), "--check")


def test_progress_is_json_lines_and_sigterm_ends_it_with_the_books(file: Path) -> None:
    process = subprocess.Popen(
        [PENSTOCK, "dispatch", "run", str(file), "--progress", "json"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert b" runs as vehicle1" in process.stdout.readline()
    progress = json.loads(process.stdout.readline())
    assert progress["event"] == "progress"
    assert progress["legs"]["local"]["kind"] == "ring"
    process.terminate()
    end = json.loads(process.stdout.read().splitlines()[-1])
    assert (end["event"], end["books"]["problems"]) == ("end", [])
    assert process.wait(30) == 0
    process.stdout.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["dispatch"],
        ["dispatch", "run"],
        ["dispatch", "stop"],
        ["dead"],
        ["dead", "ls"],
        ["dead", "retry"],
    ],
)
def test_help_is_there_for_every_command(arguments: list[str]) -> None:
    assert "Usage: penstock" in _said(*arguments, "--help")
