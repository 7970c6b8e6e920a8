"""The command as scripts use it: real processes, their output and their exit codes."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cli.command import PENSTOCK, fill, json_lines, run
from penstock import open_reader, open_writer
from penstock.cli.commands import FAMILIES, Family
from penstock.cli.doctor import _extra
from penstock.cli.main import commands_of


def test_create_put_cat_and_info_work_together(queue_path: str) -> None:
    url = f"fmq:{queue_path}?layout=classic&slots=10&size=4k"
    assert run("create", url).returncode == 0
    put = run("put", url, "--text", "one", "--text", "two", "--type", "5", "--subtype", "-6")
    assert put.returncode == 0
    assert put.stdout.startswith(b"2 messages written")
    shown = json_lines(run("cat", url, "--json").stdout)
    assert [(m["seq"], m["type"], m["subtype"], m["size"]) for m in shown] == [
        (0, 5, -6, 3),
        (1, 5, -6, 3),
    ]
    assert list(shown[0]) == [
        "seq", "time_ns", "created_ns", "type", "subtype", "stream", "size", "payload_b64",
        "payload",
    ]  # fmt: skip
    assert base64.b64decode(shown[1]["payload_b64"]) == b"two"
    assert shown[0]["stream"] is None
    info = json.loads(run("info", url, "--json").stdout)
    assert (info["layout"], info["slots"], info["buffer_size"]) == ("classic", 10, 4096)
    assert (info["oldest_seq"], info["youngest_seq"], info["count"]) == (0, 1, 2)
    assert info["blocking"] is False
    assert b"seq 0 to 1" in run("info", url).stdout


def test_info_does_not_say_that_a_writer_waits_for_whoever_has_a_name(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with open_writer(url) as writer:
        writer.write(b"x")
        assert json.loads(run("info", url, "--json").stdout)["blocking"] is False
        with open_reader(f"{url}?hold=archive"):  # which this writer does not know
            shown = run("info", url).stdout
    assert b"by name: a writer with hold=NAME waits for archive" in shown
    assert b"the writer waits for its reader" not in shown


def test_put_takes_files_and_json_lines(queue_url: str, tmp_path: Path) -> None:
    binary = tmp_path / "beam.bin"
    binary.write_bytes(bytes(range(256)))
    lines = tmp_path / "messages.jsonl"
    lines.write_text(
        '{"payload_b64": "AAEC", "type": 7, "subtype": 8, "time_ns": 1700000000000000000}\n'
        "\n"
        '{"payload_b64": ""}'
    )
    done = run("put", queue_url, "--file", str(binary), "--jsonl", str(lines), "--type", "3")
    assert done.stdout.startswith(b"3 messages written")
    with open_reader(queue_url) as reader:
        first, second, third = reader.available()
    assert first.payload == binary.read_bytes()
    assert (second.payload, second.type, second.subtype) == (b"\0\1\2", 7, 8)
    assert second.time_ns == 1_700_000_000_000_000_000
    assert (third.payload, third.type) == (b"", 3)


def test_what_cat_prints_as_json_put_takes_back(queue_url: str, tmp_path: Path) -> None:
    fill(queue_url, 5)
    printed = run("cat", queue_url, "--json").stdout
    copy = f"fmq:{tmp_path / 'copy'}?layout=classic"
    assert run("put", copy, "--jsonl", "-", stdin=printed).returncode == 0
    assert run("cat", copy, "--raw").stdout == run("cat", queue_url, "--raw").stdout


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", b"line 2 should be a JSON object"),
        ("[1]", b"line 2 should be a JSON object"),
        ('{"text": "x"}', b"the key 'text'"),
        ('{"payload_b64": "???"}', b"line 2 payload_b64 should be base64"),
        ('{"payload_b64": "é"}', b"line 2 payload_b64 should be base64"),
        ("[" * 100_000, b"line 2 should be a JSON object"),
        ('{"payload_b64": "", "stream": "x"}', b"line 2 stream should be a stream id"),
        ('{"payload_b64": 5}', b"line 2 payload_b64 should be base64"),
        ('{"payload_b64": "", "type": 4294967296}', b"line 2 type should be a 32-bit number"),
        ('{"payload_b64": "", "time_ns": "now"}', b"line 2 time_ns should be a 64-bit number"),
    ],
)
def test_a_bad_json_line_is_named_and_the_rest_is_not_written(
    queue_url: str, line: str, complaint: bytes
) -> None:
    done = run("put", queue_url, "--jsonl", "-", stdin=b'{"payload_b64": ""}\n' + line.encode())
    assert done.returncode == 1
    assert complaint in done.stderr
    assert b"; 1 message written (0 B) (hint: a line is like" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_json_lines_from_a_pipe_are_written_as_they_come(queue_url: str) -> None:
    run("create", queue_url)
    with subprocess.Popen(
        [PENSTOCK, "put", queue_url, "--jsonl", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as putting:
        assert putting.stdin is not None
        with open_reader(queue_url) as reader:
            for number in range(3):
                text = base64.b64encode(b"%d" % number)
                putting.stdin.write(b'{"payload_b64": "%s"}\n' % text)
                putting.stdin.flush()
                message = reader.read(timeout=10)
                assert message is not None
                assert message.payload == b"%d" % number
        output, _ = putting.communicate(timeout=10)
    assert output.startswith(b"3 messages written")


def test_cat_starts_where_it_is_told(queue_url: str) -> None:
    fill(queue_url, 12)

    def seqs(*arguments: str) -> list[int]:
        return [m["seq"] for m in json_lines(run("cat", queue_url, "--json", *arguments).stdout)]

    assert seqs() == list(range(12))
    assert seqs("--from", "last") == [11]
    assert seqs("--from", "end") == []
    assert seqs("--from", "7") == [7, 8, 9, 10, 11]
    assert seqs("--from", "2000-01-01T00:00:00Z", "--count", "2") == [0, 1]
    assert seqs("--from", "2037-01-01T00:00:00Z") == []
    assert seqs("--count", "0") == []


def test_cat_prints_raw_and_hex(queue_url: str) -> None:
    fill(queue_url, 2)
    assert run("cat", queue_url, "--raw").stdout == b"message 0message 1"
    lines = run("cat", queue_url, "--hex").stdout.split()
    assert [bytes.fromhex(line.decode()) for line in lines] == [b"message 0", b"message 1"]


def test_cat_decodes_payloads_and_says_which_do_not(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with open_writer(url) as writer:
        for payload in (b'{"id": 7, "at": "2026-02-03", "cost": 1.50}', b"{", b'{"id": 8}'):
            writer.write(payload, type=3)
    options = '{format: json, schema: "id BIGINT, at DATE, cost DECIMAL(5,2)", keep: [seq, stream]}'
    done = run("cat", url, "--decode", options)
    good, bad, sparse = json_lines(done.stdout)
    assert good == {"seq": 0, "stream": None, "id": 7, "at": "2026-02-03", "cost": "1.50"}
    assert (bad["seq"], bad["id"]) == (1, None)
    assert bad["decode_error"].startswith("expected a JSON object")
    assert sparse == {"seq": 2, "stream": None, "id": 8, "at": None, "cost": None}
    assert done.returncode == 1
    done = run("cat", url, "--decode", "struct:<dHH", "--where", "f0 > 20")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"3 payloads do not decode" in done.stderr
    (row,) = json_lines(run("cat", url, "-n1", "--decode", "{format: struct, layout: 43s}").stdout)
    assert list(row) == ["seq", "time_ns", "created_ns", "type", "subtype", "f0"]
    assert bytes.fromhex(row["f0"]).startswith(b'{"id"')


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("json", 2, "takes a format"),
        ("{", 2, "takes a format"),
        ("{format: json, schema: a INT, on_error: fail}", 2, "no on_error"),
        ("{format: jsn}", 1, "did you mean json?"),
        ("{format: struct, layout: <d, keep: [sq]}", 1, "did you mean seq?"),
    ],
)
def test_cat_names_what_is_wrong_with_decoding(
    queue_url: str, options: str, code: int, said: str
) -> None:
    fill(queue_url, 1)
    done = run("cat", queue_url, "--decode", options)
    assert done.returncode == code
    assert said in done.stderr.decode()


def test_cat_shows_only_the_type_asked_for(queue_url: str) -> None:
    with open_writer(queue_url) as writer:
        for number in range(6):
            writer.write(b"%d" % number, type=number % 2)
    shown = json_lines(run("cat", queue_url, "--json", "--type", "1").stdout)
    assert [m["seq"] for m in shown] == [1, 3, 5]


def test_cat_follows_until_it_is_told_to_stop(queue_url: str) -> None:
    run("create", queue_url)
    with subprocess.Popen(
        [PENSTOCK, "cat", queue_url, "--follow", "--json"], stdout=subprocess.PIPE
    ) as following:
        assert following.stdout is not None
        with open_writer(queue_url) as writer:
            for number in range(3):
                writer.write(b"%d" % number)
                assert json.loads(following.stdout.readline())["seq"] == number
        following.send_signal(signal.SIGINT)
        assert following.wait(timeout=10) == 0


def test_cat_into_a_closed_pipe_ends_quietly(queue_url: str) -> None:
    url = queue_url.replace("slots=20&size=8192", "slots=20000&size=4M")
    fill(url, 20_000)
    with subprocess.Popen(
        [PENSTOCK, "cat", url, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as catting:
        assert catting.stdout is not None
        assert catting.stderr is not None
        catting.stdout.readline()
        catting.stdout.close()
        assert catting.stderr.read() == b""
        assert catting.wait(timeout=10) == 0


def test_cp_copies_and_says_how_much(queue_url: str, tmp_path: Path) -> None:
    fill(queue_url, 15)
    copy = f"fmq:{tmp_path / 'copy'}?layout=classic&compress=gzip"
    done = run("cp", queue_url, copy, "--from", "5")
    assert done.returncode == 0
    assert done.stdout.startswith(b"10 messages copied")
    with open_reader(copy) as reader:
        assert [m.payload for m in reader.available()] == [b"message %d" % i for i in range(5, 15)]


def test_cp_follows_until_it_is_told_to_stop(queue_url: str, tmp_path: Path) -> None:
    run("create", queue_url)
    copy = f"fmq:{tmp_path / 'copy'}?layout=classic"
    run("create", copy)
    with (
        subprocess.Popen([PENSTOCK, "cp", queue_url, copy, "--follow"]) as copying,
        open_reader(copy) as reader,
    ):
        try:
            fill(queue_url, 3)
            found = [m.payload for m in _wait_for(reader, 3)]
            assert found == [b"message %d" % i for i in range(3)]
        finally:
            copying.terminate()
        assert copying.wait(timeout=40) == 0


def _wait_for(reader: Any, count: int) -> list[Any]:
    messages: list[Any] = []
    deadline = time.monotonic() + 40
    while len(messages) < count and time.monotonic() < deadline:
        messages += reader.read_many(count - len(messages), timeout=1)
    return messages


def test_an_error_is_one_line_with_a_hint_and_exit_code_1(tmp_path: Path) -> None:
    done = run("cat", f"fmq:{tmp_path}/nothing")
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"there is no queue at" in done.stderr
    assert b"(hint: create it with: penstock create fmq:" in done.stderr


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for arguments in (["--debug", "cat"], ["cat", "--debug"]):
        done = run(*arguments, f"fmq:{tmp_path}/nothing")
        assert done.returncode == 1
        assert b"Traceback" in done.stderr
    done = run("--debug", "cat", "nothing://me:hunter2@host/x")
    assert b"Traceback" in done.stderr
    assert b"hunter2" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["cat"],
        ["nonsense"],
        ["put", "fmq:/x"],
        ["cat", "fmq:/x", "--json", "--raw"],
        ["cat", "fmq:/x", "--count", "many"],
        ["put", "fmq:/x", "--text", "x", "--type", "99999999999"],
        ["cat", "fmq:/x", "--type", "99999999999"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("/data/queue", b"write fmq:/data/queue"),
        ("fmqq:/data/queue", b"did you mean fmq:?"),
        ("fmq:/x?slot=5", b"did you mean slots?"),
        ("fmq:/x?slots=0", b"slots='0'"),
        ("fmq:/x?slots=5&size=nope", b"size"),
        ("fmq:/x?layout=long", b"layout"),
        ("fmq://host/x", b"has no host"),
        ("fmq:/x/", b"it names no queue"),
    ],
)
def test_a_url_that_cannot_be_opened_says_what_is_wrong(url: str, complaint: bytes) -> None:
    done = run("create", url)
    assert done.returncode == 1
    assert complaint in done.stderr


def test_create_does_not_empty_a_queue_unless_told_to(queue_url: str) -> None:
    fill(queue_url, 3)
    refused = run("create", queue_url)
    assert refused.returncode == 1
    assert b"--replace" in refused.stderr
    assert json.loads(run("info", queue_url, "--json").stdout)["count"] == 3
    assert run("create", queue_url, "--replace").returncode == 0
    assert json.loads(run("info", queue_url, "--json").stdout)["count"] == 0


def test_create_says_which_options_a_queue_does_not_keep(queue_url: str) -> None:
    done = run("create", f"{queue_url}&compress=gzip&blocking=true")
    assert done.returncode == 0
    assert done.stdout.startswith(b"created")
    assert done.stderr.count(b"\n") == 1
    assert b"give it to each writer: blocking, compress" in done.stderr
    assert run("create", queue_url, "--replace").stderr == b""


def test_a_damaged_queue_is_named_checked_and_repaired(queue_url: str, queue_path: str) -> None:
    fill(queue_url, 10)
    assert run("fmq", "check", queue_url).stdout.endswith(b"is whole: 10 messages\n")
    with Path(f"{queue_path}.buf").open("r+b") as buffer:
        buffer.seek(24 * 4)  # the fifth message's cookie
        buffer.write(b"\xde\xad\xbe\xef")
    checked = run("fmq", "check", queue_url)
    assert checked.returncode == 1
    assert b"message 4 cookie at byte 96" in checked.stderr
    assert b"fmq repair" in checked.stderr
    assert run("cat", queue_url).returncode == 1
    repaired = run("fmq", "repair", queue_url)
    assert repaired.stdout.startswith(b"9 messages kept, 1 could not be read")
    assert run("fmq", "check", queue_url).returncode == 0
    with open_reader(queue_url) as reader:
        kept = [m.payload for m in reader.available()]
    assert kept == [b"message %d" % i for i in range(10) if i != 4]


def test_doctor_tells_what_is_there() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert {"flight:", "fmq:", "log:"} <= set(findings["endpoints"]["found"].split(", "))
    assert findings["python"]["is_fine"] is True


def test_doctor_lists_the_libraries_of_extras() -> None:
    findings = {finding["what"]: finding for finding in json.loads(run("doctor", "--json").stdout)}
    assert {"textual", "mcap", "matplotlib"} <= set(findings)
    missing = _extra("there-is-none", "top", "penstock top")
    assert missing.is_fine is None  # not needed by what is installed
    assert missing.advice == "for penstock top: pip install 'penstock[top]'"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_the_help_of_a_command_fits_a_narrow_terminal(family: Family) -> None:
    for command in commands_of(family.module).values():
        first, *paragraphs = command.help.split("\n\n")
        assert "\n" not in first
        for paragraph in paragraphs:
            _, *examples = paragraph.splitlines()
            assert all(line.startswith(" ") for line in examples), paragraph
            assert all(len(line) < 80 for line in examples), paragraph


def test_doctor_shows_what_to_install_to_the_letter() -> None:
    done = run("doctor", PATH="/nowhere", JAVA_HOME="", COLUMNS="200")
    assert b"pip install 'penstock[spark]'" in done.stdout


def test_the_shell_completes_commands_and_options() -> None:
    def complete(words: str, position: int) -> list[bytes]:
        return run(
            _PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(position)
        ).stdout.split()

    assert {b"cat", b"cp", b"create"} <= set(complete("penstock c", 1))
    assert b"--follow" in complete("penstock cat --fo", 2)


def test_help_teaches() -> None:
    assert b"penstock put fmq:/tmp/demo/beams" in run("--help").stdout
    for command in ("put", "cat", "cp", "create", "info", "id", "fmq", "doctor"):
        assert run(command, "--help").returncode == 0
