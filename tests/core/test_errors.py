from __future__ import annotations

import copy
import errno
import pickle
from typing import TYPE_CHECKING

import pytest

from penstock.core import errors
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    ConfigError,
    ConfigErrors,
    ConnectionLost,
    CursorInUse,
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    InvalidStreamId,
    InvalidURL,
    LeaseLost,
    LockTimeout,
    Malformed,
    MessageTooLarge,
    NotFound,
    Overrun,
    PenstockError,
    PositionError,
    ServerBusy,
    StorageError,
    StreamIdCollision,
    Unacknowledged,
    UnknownScheme,
    Unsupported,
    WriteTimeout,
)
from penstock.core.overflow import QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG_ERROR = ConfigError("a.yaml", 3, "sources.0", "is missing", hint="add it")
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")

#: One of each, the fields it carries, and the built-in error that a caller may catch it as.
EXAMPLES: list[tuple[PenstockError, dict[str, object], type[Exception]]] = [
    (PenstockError("text"), {}, Exception),
    (InvalidURL("x", "no scheme"), {"url": "x"}, ValueError),
    (UnknownScheme("x:", "no endpoint"), {"url": "x:"}, ValueError),
    (
        InvalidOption("slots", "many", "is no number"),
        {"option": "slots", "value": "many", "reason": "is no number"},
        ValueError,
    ),
    (PositionError("text"), {}, ValueError),
    (ServerBusy(3), {"limit": 3}, Exception),
    (InvalidStreamId("ver", 99, "too large"), {"field": "ver", "value": 99}, ValueError),
    (
        StreamIdCollision("00", "a", "b"),
        {"stream": "00", "existing": "a", "refused": "b"},
        Exception,
    ),
    (
        CONFIG_ERROR,
        {"file": "a.yaml", "line": 3, "field": "sources.0", "reason": "is missing"},
        ValueError,
    ),
    (Unsupported("text"), {}, Exception),
    (
        Malformed("frame", "length", 4, 5),
        {"what": "frame", "where": "length", "expected": 4, "found": 5},
        ValueError,
    ),
    (CursorInUse("a", 7), {"name": "a", "pid": 7}, Exception),
    (CursorTableFull(8), {"count": 8}, Exception),
    (LeaseLost([(3, 4), (9, 9)]), {"ranges": ((3, 4), (9, 9)), "count": 3}, Exception),
    (
        DamagedQueue("/q", "magic", 0, 1, 2),
        {
            "path": "/q",
            "field": "magic",
            "offset": 0,
            "expected": 1,
            "found": 2,
            "where": "magic at byte 0",
        },
        ValueError,
    ),
    (NotFound("text"), {}, FileNotFoundError),
    (AlreadyExists("text"), {}, FileExistsError),
    (MessageTooLarge(2000, 1000), {"size": 2000, "limit": 1000}, ValueError),
    (Overrun(5, 9), {"first": 5, "last": 9}, Exception),
    (WriteTimeout("text"), {}, TimeoutError),
    (ConnectionLost("host:1", "no"), {"server": "host:1", "reason": "no"}, ConnectionError),
    (
        Unacknowledged("host:1", "no", acknowledged=3, in_doubt=4),
        {"server": "host:1", "acknowledged": 3, "in_doubt": 4},
        ConnectionError,
    ),
    (LockTimeout("text"), {}, TimeoutError),
    (Closed("text"), {}, Exception),
    (
        StorageError("writing to", "/q", NO_SPACE),
        {"doing": "writing to", "path": "/q", "errno": errno.ENOSPC},
        OSError,
    ),
    (QueueFull(5), {"capacity": 5}, Exception),
]

each_error = pytest.mark.parametrize(
    ("error", "fields", "builtin"), EXAMPLES, ids=[type(error).__name__ for error, *_ in EXAMPLES]
)


def all_fields(error: PenstockError) -> dict[str, object]:
    return vars(error) | {"errno": getattr(error, "errno", None)}


def test_there_is_an_example_of_every_error() -> None:
    here = {type(error).__name__ for error, *_ in EXAMPLES}
    assert here >= set(errors.__all__) - {"ConfigErrors"}  # of which there is a test below


@each_error
def test_an_error_is_of_the_tree_carries_its_fields_and_says_them(
    error: PenstockError, fields: dict[str, object], builtin: type[Exception]
) -> None:
    assert isinstance(error, PenstockError)
    assert isinstance(error, builtin)
    for name, value in fields.items():
        assert getattr(error, name) == value
    assert str(error)
    assert not str(error).startswith("(")


@each_error
@pytest.mark.parametrize(
    "clone",
    [
        copy.copy,
        copy.deepcopy,
        *(
            lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_an_error_pickles_and_copies_with_everything_it_carries(
    error: PenstockError,
    fields: dict[str, object],
    builtin: type[Exception],
    clone: Callable[[PenstockError], PenstockError],
) -> None:
    del fields, builtin
    again = clone(error)
    assert type(again) is type(error)
    assert again is not error
    assert str(again) == str(error)
    assert repr(again) == repr(error)
    assert all_fields(again) == all_fields(error)


def test_a_hint_and_notes_travel_too() -> None:
    error = MessageTooLarge(2, 1, hint="create it larger")
    error.add_note("while copying")
    again = pickle.loads(pickle.dumps(error))
    assert again.hint == "create it larger"
    assert again.__notes__ == ["while copying"]


def test_an_error_without_a_hint_has_none() -> None:
    assert all(error.hint is None for error, *_ in EXAMPLES if error is not CONFIG_ERROR)


def test_several_faults_of_a_file_travel_together() -> None:
    error = ConfigErrors([CONFIG_ERROR, ConfigError("a.yaml", 9, None, "is odd")])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert [fault.line for fault in again.errors] == [3, 9]


def test_an_error_of_the_system_says_what_was_done_and_why_it_failed() -> None:
    assert str(StorageError("writing to", "/q", NO_SPACE)) == (
        "writing to /q: No space left on device"
    )
    assert str(StorageError("reading", "/q", OSError("odd"))) == "reading /q: odd"
