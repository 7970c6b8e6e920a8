"""An error arrives as the error that it was."""

from __future__ import annotations

import errno

import pytest

from penstock.core import errors as core
from penstock.core.errors import PenstockError
from penstock.core.overflow import QueueFull
from penstock.protocols.flight.errors import (
    AccessRefused,
    HoldLost,
    ServerBusy,
    ServerStopping,
    describe_error,
    error_from,
)
from penstock.protocols.flight.wire import Failure

ERRORS: list[PenstockError] = [
    core.NotFound("there is none", hint="make one"),
    core.MessageTooLarge(10, 5),
    core.InvalidOption("slots", "x", "is no number"),
    core.DamagedQueue("/a", "magic", 0, "1", "2"),
    core.CursorInUse("archive", 12),
    core.StorageError("writing", "/a", OSError(errno.ENOSPC, "No space left on device")),
    core.WriteTimeout("waited"),
    core.PositionError("no such place"),
    QueueFull(7),
    AccessRefused("no"),
    HoldLost("archive"),
    ServerBusy(3),
    ServerStopping(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_kind_message_hint_and_fields(error: PenstockError) -> None:
    arrived = error_from(Failure.from_bytes(describe_error(error).to_bytes()))
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.hint) == (str(error), error.hint)
    fields = {name: value for name, value in vars(error).items() if name != "__notes__"}
    assert {name: getattr(arrived, name) for name in fields} == fields
    if isinstance(error, OSError):
        assert isinstance(arrived, OSError)
        assert arrived.errno == error.errno


def test_an_unknown_kind_is_an_error_without_fields() -> None:
    for kind in ("SystemExit", "FlightServer", "", "__class__"):
        error = error_from(Failure(kind=kind, message="m", fields={"args": "x"}))
        assert type(error) is PenstockError
        assert str(error) == "m"


def test_only_the_fields_of_a_kind_are_set() -> None:
    error = error_from(Failure(kind="NotFound", message="m", fields={"__class__": "x", "hint": 1}))
    assert type(error) is core.NotFound
    assert error.hint is None


def test_a_kind_that_has_no_name_here_arrives_as_its_nearest() -> None:
    class Special(core.Unsupported):
        pass

    assert type(error_from(describe_error(Special("s")))) is core.Unsupported


def test_what_is_long_or_no_text_is_cut_and_escaped() -> None:
    failure = describe_error(core.NotFound("\udcff" + "x" * 100_000, hint="y" * 100_000))
    assert len(failure.to_bytes()) < 4096
    assert failure.message.startswith("\\udcff")
