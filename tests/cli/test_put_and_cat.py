"""Lines in and lines out: what people do with `put`, `cat` and `tail` in a shell."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from cli.command import PENSTOCK, OnTerminal, count, run
from penstock import open_reader, open_writer
from penstock.core.units import format_time

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"log:{tmp_path}/log"


def payloads(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return [message.payload for message in reader.available()]


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell, with `$P` for penstock."""
    environment = {**os.environ, "P": PENSTOCK, **variables}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, timeout=60, check=False, env=environment
    )


# --- put ------------------------------------------------------------------------------------------


def test_put_takes_the_lines_of_a_pipe(url: str) -> None:
    done = shell('seq 1 100000 | "$P" put "$URL"', URL=url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"100000 messages written")
    assert payloads(url) == [b"%d" % number for number in range(1, 100_001)]


@pytest.mark.parametrize(
    ("options", "sent", "stored"),
    [
        ([], b"a\nb", [b"a", b"b"]),
        ([], b"a\n\nb\n", [b"a", b"", b"b"]),
        (["--null"], b"a\nb\0c\0", [b"a\nb", b"c"]),
        (["--delimiter", ";"], b"a;b\n;", [b"a", b"b\n"]),
        (["--delimiter", r"\r\n"], b"a\r\nb\nc\r\n", [b"a", b"b\nc"]),
        (["--file", "-"], b"a\nb\n", [b"a\nb\n"]),
        (["--text", "-"], b"a\nb\n", [b"a", b"b"]),
        (["--text", "x", "--file", "-"], b"\0\xff", [b"x", b"\0\xff"]),
    ],
)
def test_put_takes_stdin_as_it_is_told(
    url: str, options: list[str], sent: bytes, stored: list[bytes]
) -> None:
    assert run("put", url, *options, stdin=sent).returncode == 0
    assert payloads(url) == stored


def test_an_ending_of_two_characters_may_come_in_two_parts(url: str) -> None:
    line = r"""(printf 'a\r'; sleep 0.3; printf '\nb\r\n') | "$P" put "$URL" --delimiter '\r\n'"""
    assert shell(line, URL=url).returncode == 0
    assert payloads(url) == [b"a", b"b"]


def test_json_lines_have_text_values_or_bytes(url: str) -> None:
    lines = b"""{"payload": "h\xc3\xa9"}
{"payload": {"a": [1, null]}, "type": 2}
{"payload": 5}
{"payload_b64": "AP8="}"""
    assert run("put", url, "--jsonl", "-", stdin=lines).returncode == 0
    assert payloads(url) == ["hé".encode(), b'{"a":[1,null]}', b"5", b"\x00\xff"]


def test_put_takes_several_files_of_json_lines(url: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_text(f'{{"payload": "{file.name}"}}\n')
    arguments = [f"--jsonl={file}" for file in files]
    assert run("put", url, *arguments).returncode == 0
    assert payloads(url) == [b"a", b"b"]
    done = run("put", url, "--jsonl", str(tmp_path / "none"), *arguments)
    assert (done.returncode, count(url)) == (1, 2)


def test_put_keeps_to_a_rate(url: str) -> None:
    done = shell('time -p (seq 1 30 | "$P" put "$URL" --rate 20) ', URL=url)
    took = float(done.stderr.split(b"real ")[1].split()[0])
    assert took >= 1.4
    assert len(payloads(url)) == 30


def test_a_new_queue_that_is_too_small_for_what_is_put_is_told(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?slots=64&size=64k"
    done = shell('seq 1 1000 | "$P" put "$URL"', URL=url)
    assert done.returncode == 3
    assert b"the first 936 are overwritten" in done.stderr
    assert b"penstock create" in done.stderr
    # One that was there is as somebody wanted it.
    assert shell('seq 1 1000 | "$P" put "$URL"', URL=url).returncode == 0


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_a_stream_that_is_removed_while_it_is_written_is_not_called_too_small(
    tmp_path: Path, kind: str
) -> None:
    url = f"{kind}:{tmp_path}/q"
    there = 'until ls "$PLACE"* > /dev/null 2>&1; do sleep .1; done; sleep 1'
    removed = f'(seq 1 6; {there}; rm -r "$PLACE"*; sleep .5; seq 7 9) | "$P" put "$URL"'
    done = shell(removed, URL=url, PLACE=f"{tmp_path}/q")
    assert done.returncode == 3
    assert b"was removed" in done.stderr
    assert b"overwritten" not in done.stderr


def test_standard_input_is_read_once(url: str) -> None:
    done = run("put", url, "--text", "-", "--file", "-", stdin=b"a\n")
    assert done.returncode == 2
    assert b"- is given twice" in done.stderr
    assert count(url) == 0


def test_put_without_anything_to_put_is_wrong_usage(url: str) -> None:
    assert shell('"$P" put "$URL" < /dev/null', URL=url).returncode == 2


# --- cat ------------------------------------------------------------------------------------------


@pytest.fixture
def readings(url: str) -> str:
    """Ten readings of two sensors, a second each, appended now."""
    with open_writer(url) as writer:
        for number in range(10):
            text = json.dumps({"sensor": "ab"[number % 2], "value": number})
            writer.write(text.encode(), number % 3, time_ns=1_000_000_000 * number)
    return url


def test_a_pipe_gets_whole_payloads_on_one_line_each(url: str) -> None:
    long = "é" * 300
    assert run("put", url, "-t", long, "-t", "a\tb\nc", "-t", "x").returncode == 0
    with open_writer(url) as writer:
        writer.write(bytes(range(256)))
    lines = run("cat", url).stdout.decode().splitlines()
    assert len(lines) == 4
    assert lines[0].endswith(long)
    assert lines[1].endswith(r"a\tb\nc")
    assert lines[3].endswith(bytes(range(256)).hex())


def test_lines_come_out_as_they_went_in(url: str) -> None:
    data = b"".join(b"%d\xff\n\0" % number for number in range(5000))
    assert run("put", url, "--null", stdin=data).returncode == 0
    assert run("cat", url, "--null").stdout == data
    assert run("cat", url, "--delimiter", r"\0").stdout == data


def test_cat_into_head_ends_with_0(url: str) -> None:
    assert shell('seq 1 200000 | "$P" put "$URL"', URL=url).returncode == 0
    line = '"$P" cat "$URL" | head -1; echo ${PIPESTATUS[@]}'
    done = shell(line, URL=url)
    assert done.stdout.splitlines()[-1] == b"0 0"
    assert done.stderr == b""


def test_a_format_has_fields(readings: str) -> None:
    shown = run("cat", readings, "-n", "1", "--format", r"%{seq}|%{time}|%{type}|%{payload}%%\n")
    assert shown.stdout == b'0|1970-01-01T00:00:00Z|0|{"sensor": "a", "value": 0}%\n'
    wrong = run("cat", readings, "--format", "%{nonsense}")
    assert wrong.returncode == 1
    assert b"there is no field 'nonsense'" in wrong.stderr


def test_json_has_the_payload_where_it_is_text_or_json(url: str) -> None:
    run("put", url, "-t", "plain", "-t", '{"a": 1}', "-t", "5")
    with open_writer(url) as writer:
        writer.write(b"\xff")
    shown = [json.loads(line) for line in run("cat", url, "--json").stdout.splitlines()]
    assert [line.get("payload", "none") for line in shown] == ["plain", {"a": 1}, "5", "none"]
    assert all("payload_b64" in line for line in shown)


@pytest.mark.parametrize(
    ("condition", "numbers"),
    [
        ("type == 2", [2, 5, 8]),
        ("type == 2 and seq > 2", [5, 8]),
        ("not (seq < 8)", [8, 9]),
        ('payload.sensor == "b" and payload.value in (1, 3, 4)', [1, 3]),
        ("2 <= seq < 4 or payload['value'] == 9", [2, 3, 9]),
        ("payload.missing > 3", []),
        ("payload.missing is null", list(range(10))),
        ("time >= '1970-01-01T00:00:08Z'", [8, 9]),
        ("seq % 5 == 0", [0, 5]),
    ],
)
def test_a_condition_chooses_messages(readings: str, condition: str, numbers: list[int]) -> None:
    shown = run("cat", readings, "--where", condition, "--format", r"%{seq}\n")
    assert shown.returncode == 0, shown.stderr
    assert [int(line) for line in shown.stdout.split()] == numbers


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("type = 2", "write == to compare"),
        ("nonsense == 2", "there is no field nonsense"),
        ("__import__('os')", "is not a comparison"),
        ("payload.__class__ and open('x')", "is not a comparison"),
        ("(", "where"),
        ("-" * 5000 + "1", "where"),
    ],
)
def test_what_is_no_condition_is_refused(readings: str, condition: str, said: str) -> None:
    done = run("cat", readings, "--where=" + condition)
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert done.stdout == b""


def test_decoded_columns_are_chosen_and_formatted(readings: str) -> None:
    decode = ["--decode", "json:sensor STRING, value BIGINT"]
    shown = run("cat", readings, *decode, "--where", "value >= 8")
    assert [json.loads(line)["sensor"] for line in shown.stdout.splitlines()] == ["a", "b"]
    shown = run("cat", readings, *decode, "--format", r"%{sensor}=%{value};")
    assert shown.stdout.startswith(b"a=0;b=1;a=2;")


def test_grep_looks_into_payloads(readings: str) -> None:
    shown = run("cat", readings, "--grep", '"value": [37]', "-n", "1", "--format", "%{seq}")
    assert shown.stdout == b"3"
    assert b"is no pattern" in run("cat", readings, "--grep", "(").stderr


# --- ranges ---------------------------------------------------------------------------------------


def numbers(url: str, *options: str) -> list[int]:
    done = run("cat", url, *options, "--format", r"%{seq}\n")
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_a_range_is_by_number_from_either_end(readings: str) -> None:
    assert numbers(readings, "--from", "-3") == [7, 8, 9]
    assert numbers(readings, "--from", "2", "--to", "4") == [2, 3]
    assert numbers(readings, "--from", "-5", "--to", "-3") == [5, 6]
    assert numbers(readings, "--from", "-100") == list(range(10))


def test_a_range_of_a_file_is_counted_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("payload\n" + "".join(f"{i}\n" for i in range(10)))
    assert numbers(f"csv:{file}", "--to", "-3") == list(range(7))


def test_a_range_is_by_when_it_was_appended_or_happened(readings: str) -> None:
    assert numbers(readings, "--from", "-10m", "--to", "now") == list(range(10))
    assert numbers(readings, "--from", "yesterday", "--to", "-10m") == []
    assert numbers(
        readings, "--by", "source", "--from", "1970-01-01T00:00:03Z", "--to", "1970-01-01T00:00:05Z"
    ) == [3, 4]


def test_the_time_that_was_asked_by_is_shown(readings: str) -> None:
    with open_reader(readings) as reader:
        message = reader.read(0)
    assert message is not None
    asked = run("cat", readings, "--from", "-10m", "-n", "1").stdout.decode()
    assert format_time(message.created_ns) in asked
    assert format_time(0) in run("cat", readings, "-n", "1").stdout.decode()


def test_an_empty_range_says_what_there_is(readings: str) -> None:
    done = run("cat", readings, "--from", "yesterday", "--to", "-10m")
    assert done.stdout == b""
    assert b"it has 0 to 9, appended from 20" in done.stderr


def test_tail_shows_the_last_ones(readings: str) -> None:
    shown = run("tail", readings, "-n", "2", "--format", r"%{seq}\n")
    assert shown.stdout == b"8\n9\n"
    assert len(run("tail", readings).stdout.splitlines()) == 10


# --- named places ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--to", "4"], [0, 1, 2, 3]),
        (["--where", "type == 2", "-n", "1"], [2]),
        (["--grep", "value", "-n", "3"], [0, 1, 2]),
        (["--decode", "json:value BIGINT", "--where", "value > 4", "-n", "1"], [5]),
        (["-n", "2"], [0, 1]),
    ],
)
@pytest.mark.parametrize("place", ["hold=me", "group=all"])
def test_what_was_not_shown_comes_the_next_time(
    readings: str, place: str, options: list[str], shown: list[int]
) -> None:
    named = f"{readings}?{place}"
    assert numbers(named, *options) == shown
    assert numbers(named) == list(range(shown[-1] + 1, 10))


def test_what_a_selection_takes_away_from_a_group_is_told(readings: str) -> None:
    done = run("cat", f"{readings}?group=all", "--grep", "nothing like it")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"shown, or passed over by --where and --grep, is taken away" in done.stderr


def test_an_empty_range_of_an_overwritten_queue_is_no_loss(tmp_path: Path) -> None:
    url, copy = f"fmq:{tmp_path}/q?slots=8", f"log:{tmp_path}/copy"
    with open_writer(url) as writer:
        writer.write_many([b"%d" % i for i in range(100)])
    for ends in (["5", "3"], ["5", "5"], ["2020-01-02T00:00Z", "2020-01-01T00:00Z"]):
        done = run("cat", url, "--from", ends[0], "--to", ends[1])
        assert (done.returncode, done.stdout) == (0, b"")
        assert (
            f"has no message from {ends[0]} to {ends[1]}: it has 92 to 99" in done.stderr.decode()
        )
        assert b"lost" not in done.stderr
    # `--to` of cp is the last that is copied.
    done = run("cp", url, copy, "--from", "5", "--to", "3")
    assert (done.returncode, done.stdout) == (0, b"0 messages copied (0 B)\n")
    assert b"lost" not in done.stderr
    assert run("cat", url, "--from", "5", "--to", "6").returncode == 3


def test_only_what_was_asked_for_can_be_lost(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?slots=8"
    with open_writer(url) as writer:
        writer.write_many([b"%d" % i for i in range(100)])
    for end, lost in (("50", 45), ("-50", 45), ("95", 87)):
        done = run("cat", url, "--from", "5", "--to", end)
        assert done.returncode == 3
        assert f"{lost} messages lost (seq 5 to {4 + lost})" in done.stderr.decode()
        assert f"{lost} messages lost in all" in done.stderr.decode()
    # `--to` of cp is the last that is copied.
    done = run("cp", url, f"log:{tmp_path}/copy", "--from", "5", "--to", "50")
    assert (done.returncode, done.stdout) == (3, b"0 messages copied (0 B), 46 lost\n")
    assert b"46 messages lost (seq 5 to 50)" in done.stderr


# --- what is wrong is said with what to do --------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [["--file", "none"], ["--file", "."], ["--jsonl", "none"], ["--text", "a", "--file", "none"]],
)
def test_a_file_that_cannot_be_read_leaves_no_new_queue(tmp_path: Path, option: list[str]) -> None:
    done = run("put", f"fmq:{tmp_path}/q", *option)
    assert done.returncode == 1
    assert b"0 messages written (0 B)" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_a_file_too(url: str) -> None:
    assert shell('"$P" put "$URL" --file <(printf one)', URL=url).returncode == 0
    assert payloads(url) == [b"one"]


def test_what_is_said_of_a_queue_that_is_too_small_helps(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    many = 'for i in 1 2 3; do head -c 8000000 /dev/zero; echo; done | "$P" put "$URL"'
    done = shell(many, URL=f"{url}?slots=64&size=16M")
    assert done.returncode == 3
    assert b"the queue holds 2 messages: the first 1 are overwritten" in done.stderr  # not 64
    advised = done.stderr.decode().rsplit(": penstock ", 1)[1].rstrip(")\n")
    assert shell(f'"$P" {advised}; {many}', URL=url).returncode == 0
    assert len(payloads(url)) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"$P" put "$URL" --file - <&-', "standard input is closed; 0 messages written"),
        ('"$P" put "$URL" --file none', "directory; 0 messages written (0 B) (hint: look"),
        ('"$P" cat "$URL" --from 99', "and the next is 10 (hint: --from end --follow waits"),
        ('"$P" rm "$URL.not"', "(hint: penstock ls shows what there is)"),
        ('"$P" resize "$URL" --slots 99', "(hint: copy it to a queue of the size that you want"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_do(readings: str, line: str, said: str) -> None:
    done = shell(line, URL=readings)
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("", "it is empty"),
        ("type = 1", "write == to compare"),
        ("type == 1 AND seq == 1", "write and, or, not, in and is null in small letters"),
        ("type == 1 && seq == 1", "write and, or, not"),
        ("type <> 1", "write != for unequal"),
        ("type ==", "invalid syntax"),
    ],
)
def test_a_condition_as_others_write_it_is_told_how_it_is_written_here(
    readings: str, condition: str, reason: str
) -> None:
    done = run("cat", readings, "--where", condition)
    assert done.returncode == 1
    assert f"option where={condition!r}: {reason} (hint: as in" in done.stderr.decode()


def test_text_beside_a_number_is_the_number_that_it_spells(url: str) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"9", b"10", b"-2.5e1", b"ten", b"1_0", b'{"v": "11"}'])
    for condition, expected in (
        ("payload > 9", [1]),
        ("10 == payload", [1]),
        ("payload < 0", [2]),
        ("payload != 9", [1, 2, 3, 4, 5]),
        ('payload == "9"', [0]),
        ("payload.v > 9", [5]),
    ):
        assert numbers(url, "--where", condition) == expected


def test_a_format_has_what_is_inside_of_json(url: str) -> None:
    with open_writer(url) as writer:
        writer.write(b'{"at": {"lat": 1.5}, "names": ["x", "y"]}')
        writer.write(b"no JSON")
    shown = run("cat", url, "--format", r"%{payload.at.lat} %{payload.names.1} %{payload.at}\n")
    assert shown.stdout == b'1.5 y {"lat": 1.5}\n  \n'
    wrong = run("cat", url, "--format", "%{payloads.at}")
    assert b"there is no field 'payloads.at' (hint: there are: seq" in wrong.stderr


def test_tail_takes_the_forms_of_cat(readings: str) -> None:
    assert run("tail", readings, "-n", "1", "--null").stdout == b'{"sensor": "b", "value": 9}\0'
    assert run("tail", readings, "-n", "1", "--hex").stdout.startswith(b"7b2273")


@pytest.mark.parametrize("command", ["info", "info --json", "ls", "ls --json", "doctor --json"])
def test_who_has_seen_enough_ends_what_only_shows(readings: str, command: str) -> None:
    name, *options = command.split()
    place = {"info": readings, "ls": str(readings).removeprefix("log:").rpartition("/")[0]}
    line = f'"$P" {name} {place.get(name, "")} {" ".join(options)}'
    done = shell(f"set -o pipefail; {line} | true; echo $?; {line} > /dev/full")
    assert done.stdout == b"0\n", done.stderr
    assert done.returncode == 1
    assert b"writing to standard output: No space left on device" in done.stderr


def test_a_condition_counts_with_numbers_alone(url: str) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"10", b"%z", b"7", b"ten"])
    for condition, expected in (
        ("payload % 5 == 0", [0]),
        ("payload + 1 == 8", [2]),
        ("-payload < 0", [0, 2]),
        ("payload * 2 == 'tenten'", []),  # or a line of text could fill the memory
        ("seq in (3)", [3]),  # as SQL has it: a list of one
        ("seq in 3", [3]),
        ('payload in ("ten")', [3]),
        ("seq not in (3)", [0, 1, 2]),
        ('"e" in payload', [3]),
    ):
        assert numbers(url, "--where", condition) == expected


@pytest.mark.parametrize("pager", ["true", "head -n 2"])
def test_who_leaves_the_pager_has_seen_enough(
    url: str, pager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"%d" % i for i in range(40_000)])
    monkeypatch.setenv("PAGER", pager)
    with OnTerminal("cat", url) as shown:
        assert (shown.exit_code(), shown.seen.count(b"\n")) == (0, 2 if "head" in pager else 0)


def test_lines_have_colours_on_a_terminal_and_never_in_a_pipe(
    readings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGER", "")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with OnTerminal("cat", readings) as shown:
        assert shown.exit_code() == 0
    assert b"\x1b[36m         0\x1b[0m  \x1b[2m1970-01-01T00:00:00Z" in shown.seen
    assert b"\x1b" not in shell('"$P" cat "$URL"', URL=readings).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    with OnTerminal("cat", readings) as plain:
        assert plain.exit_code() == 0
    assert b"\x1b" not in plain.seen
