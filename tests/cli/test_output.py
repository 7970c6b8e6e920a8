from __future__ import annotations

import pytest

from penstock import Message, PenstockError
from penstock.cli.output import message_line, one_line
from penstock.core.config import ConfigErrors
from penstock.core.errors import ConfigError


def shown(payload: bytes) -> str:
    message = Message(0, 0, 0, 0, 0, None, None, payload)
    return message_line(message).rpartition(" B  ")[2]


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
        (OSError(28, "no space", "/x"), "/x: no space (hint: --debug shows where it comes from)"),
        (OSError(28, "no space"), "no space (hint: --debug shows where it comes from)"),
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
