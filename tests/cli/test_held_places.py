"""A reader with a named position passes over no message, wherever a command is told to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import count, fill, run


@pytest.fixture(params=["fmq", "log"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path}/stream"


@pytest.fixture
def held(url: str) -> str:
    """A named position behind the first three of ten messages."""
    fill(url, 10)
    held = f"{url}?hold=me"
    assert run("cat", held, "--raw", "-n", "3").stdout == b"message 0message 1message 2"
    return held


def shown(*arguments: str) -> list[bytes]:
    done = run(*arguments, "--delimiter", r"\n")
    assert done.returncode == 0
    return done.stdout.splitlines()


UNREAD = [b"message %d" % number for number in range(3, 10)]


@pytest.mark.parametrize(
    "command", [("tail", "-n", "2"), ("cat", "--from", "-2"), ("cat", "--from", "8")]
)
def test_what_it_has_not_read_comes_first(held: str, command: tuple[str, ...]) -> None:
    name, *options = command
    done = run(name, held, *options, "--delimiter", r"\n")
    assert done.stdout.splitlines() == UNREAD
    assert b"me has read all before 3, and goes on there" in done.stderr
    assert shown("cat", held) == []


def test_a_copy_of_the_last_messages_takes_all_that_it_has_not_read(
    held: str, tmp_path: Path
) -> None:
    copy = f"log:{tmp_path}/copy"
    assert run("cp", held, copy, "--from", "-2").stdout.startswith(b"7 messages copied")
    assert count(copy) == 7
    assert shown("cat", held) == []


def test_a_new_name_starts_where_it_is_told(url: str) -> None:
    fill(url, 10)
    assert shown("tail", f"{url}?hold=other", "-n", "2") == UNREAD[-2:]
    assert shown("cat", f"{url}?hold=another", "--from", "-3") == UNREAD[-3:]
