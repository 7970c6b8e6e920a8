"""What the command shows to a person: values, lines, and the losses that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import fill, json_lines, run
from penstock import PenstockError
from penstock.cli.message_text import payload_text
from penstock.cli.output import name_losses, one_line
from penstock.core.errors import ConfigError, ConfigErrors, StorageError
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics


def shown(payload: bytes) -> str:
    return payload_text(payload, 48)


@pytest.mark.parametrize("ahead", range(4))
def test_text_that_is_cut_ends_with_a_whole_character(ahead: int) -> None:
    for character, size in (("é", 2), ("気", 3), ("🌧", 4)):
        text = "x" * ahead + character * 40
        whole = "x" * ahead + character * ((48 - ahead) // size)
        assert shown(text.encode()) == whole + "…"


def test_text_that_ends_within_a_character_is_no_text() -> None:
    assert shown("é".encode()) == "é"
    assert shown("é".encode()[:1]) == "c3"
    assert shown(b"\xff" * 50) == " ".join(["ff"] * 16) + "…"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PenstockError("bad", hint="do good"), "bad (hint: do good)"),
        (
            ConfigErrors(
                [ConfigError("a", 1, "x", "bad"), ConfigError("a", 2, "y", "odd", hint="z")]
            ),
            "a:1: x: bad; a:2: y: odd (z) (hint: 2 things are to be mended)",
        ),
        (
            ConfigError("a", 1, "x", "bad"),
            "a:1: x: bad (hint: mend it in the file, then try again)",
        ),
        (PenstockError("in\ntwo"), "in two (hint: --debug shows where it comes from)"),
        (OSError(28, "full", "/x"), "/x: full (hint: free some space, or write to another place)"),
        (OSError(5, "input/output"), "input/output (hint: --debug shows where it comes from)"),
        (
            StorageError("reading", "/x", OSError(2, "gone")),
            "reading /x: gone (hint: look at the path)",
        ),
        (MemoryError(), "there is not enough memory (hint: --debug shows where it comes from)"),
        (KeyError("x"), "KeyError: 'x' (hint: --debug shows where it comes from)"),
    ],
)
def test_any_error_is_told_on_one_line_with_a_hint(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_how_far_it_came_is_told_with_the_error() -> None:
    error = PenstockError("bad", hint="do good")
    error.add_note("5 messages written")
    assert one_line(error) == "bad; 5 messages written (hint: do good)"


# --- losses -------------------------------------------------------------------------------------


def statistics(ranges: int) -> ReaderStatistics:
    """Return the books of a reader that lost two messages of every ten."""
    ledger = LossLedger()
    for number in range(ranges):
        ledger.add(Loss(number * 10, number * 10 + 1, DropReason.OVERRUN))
    return ReaderStatistics(0, 0, ledger.total, 0, 0, None, 0, ledger.ranges())


def named(ranges: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    name_losses(statistics(ranges))
    return capsys.readouterr().err.splitlines()


def test_cat_names_each_loss_once_and_then_the_total(queue_url: str) -> None:
    fill(queue_url, 50)
    done = run("cat", queue_url, "--from", "10", "--json")
    assert done.returncode == 3
    assert [m["seq"] for m in json_lines(done.stdout)] == list(range(30, 50))
    assert done.stderr.splitlines() == [
        b"penstock: 20 messages lost (seq 10 to 29): overrun",
        b"penstock: 20 messages lost in all",
    ]


def test_cp_names_each_loss_once_and_then_the_total(queue_url: str, tmp_path: Path) -> None:
    fill(queue_url, 50)
    done = run("cp", queue_url, f"fmq:{tmp_path / 'copy'}", "--from", "10")
    assert done.returncode == 3
    assert done.stdout.startswith(b"20 messages copied")
    assert done.stderr.splitlines() == [
        b"penstock: 20 messages lost (seq 10 to 29): overrun",
        b"penstock: 20 messages lost in all",
    ]


def test_a_loss_is_named_although_the_command_fails_later(queue_url: str, tmp_path: Path) -> None:
    fill(queue_url, 50)
    small = f"fmq:{tmp_path / 'small'}?layout=classic&size=20"
    done = run("cp", queue_url, small, "--from", "10")
    assert done.returncode == 1
    *losses, error = done.stderr.splitlines()
    assert losses[0] == b"penstock: 20 messages lost (seq 10 to 29): overrun"
    assert b"does not fit" in error
    assert b"; 0 messages copied" in error


def test_nothing_is_said_of_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert named(0, capsys) == []


def test_twenty_ranges_are_named_and_the_rest_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(named(20, capsys)) == 21
    lines = named(25, capsys)
    assert lines[0] == "penstock: 2 messages lost (seq 0 to 1): overrun"
    assert lines[19] == "penstock: 2 messages lost (seq 190 to 191): overrun"
    assert lines[20:] == ["penstock: and 5 more ranges", "penstock: 50 messages lost in all"]


def test_ranges_that_the_ledger_forgot_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = named(1003, capsys)
    assert (
        lines[0] == "penstock: 6 messages lost early on: only the last 1,000 ranges are remembered"
    )
    assert lines[1] == "penstock: 2 messages lost (seq 30 to 31): overrun"
    assert lines[-2:] == ["penstock: and 980 more ranges", "penstock: 2,006 messages lost in all"]
