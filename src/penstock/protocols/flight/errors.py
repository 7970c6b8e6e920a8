"""How is an error sent to the other side, and raised there as the same error?"""

from __future__ import annotations

from typing import Final

from penstock.core import errors as core
from penstock.core.capabilities import StagingFull
from penstock.core.errors import ConnectionLost, PenstockError, ServerBusy
from penstock.core.overflow import QueueFull
from penstock.core.provenance import AnotherBatch
from penstock.protocols.flight.wire import Failure
from penstock.queue.append_once import Stranger

__all__ = [
    "AccessRefused",
    "HoldLost",
    "ServerBusy",
    "ServerStopping",
    "UnknownWriter",
    "describe_error",
    "error_from",
]


class AccessRefused(PenstockError, PermissionError):
    """The token is missing or wrong, or the server does not allow this request."""

    def __str__(self) -> str:
        return str(self.args[0])


class HoldLost(PenstockError):
    """The server no longer holds this name for this reader."""

    def __init__(self, name: str, *, hint: str | None = None) -> None:
        super().__init__(f"the name {name!r} is not held for this reader any more", hint=hint)
        self.name = name


class ServerStopping(ConnectionLost):
    """The server is being stopped. What it has not reported as appended is not."""

    def __init__(self, *, hint: str | None = None) -> None:
        super().__init__("the server", "it is being stopped", hint=hint)


class UnknownWriter(PenstockError):
    """The server does not know this writer: the server restarted, or the writer was idle."""


# --- on the way -----------------------------------------------------------------------------------


#: The errors that a server may send, and the fields of each. A name from outside only selects a
#: row of this table.
_KINDS: Final[dict[str, tuple[type[PenstockError], tuple[str, ...]]]] = {
    kind.__name__: (kind, fields)
    for kind, fields in (
        (core.AlreadyExists, ()),
        (core.Closed, ()),
        (core.CursorInUse, ("name", "pid")),
        (core.CursorTableFull, ("count",)),
        (core.DamagedQueue, ("what", "where", "expected", "found", "path", "field", "offset")),
        (core.InvalidOption, ("option", "value", "reason")),
        (core.InvalidStreamId, ("field", "value")),
        (core.InvalidURL, ("url",)),
        (core.LockTimeout, ()),
        (core.Malformed, ("what", "where", "expected", "found")),
        (core.MessageTooLarge, ("size", "limit")),
        (core.NotFound, ()),
        (core.Overrun, ("first", "last")),
        (core.PositionError, ("seq", "oldest", "end")),
        (core.StorageError, ("doing", "path", "errno")),
        (core.Unsupported, ()),
        (core.WriteTimeout, ()),
        (AnotherBatch, ("target", "batch", "planned", "delivered")),
        (QueueFull, ("capacity",)),
        (StagingFull, ("limit",)),
        (Stranger, ()),
        (AccessRefused, ()),
        (HoldLost, ("name",)),
        (ServerBusy, ("limit",)),
        (ServerStopping, ("server", "reason")),
        (UnknownWriter, ()),
    )
}
_INT64: Final = range(-(2**63), 2**63)

#: Most characters of a message and of a field: an error is sent in a header, which gRPC limits
#: to 8 KiB.
_LONGEST_MESSAGE: Final = 1500
_LONGEST_FIELD: Final = 200


def describe_error(error: PenstockError) -> Failure:
    """Encode an error: its nearest known class, its message, its hint and its fields."""
    for kind in type(error).__mro__:
        if _KINDS.get(kind.__name__, (None,))[0] is kind:
            name, fields = kind.__name__, _KINDS[kind.__name__][1]
            break
    else:
        name, fields = "PenstockError", ()
    said = {field: _plain(getattr(error, field, None)) for field in fields}
    hint = None if error.hint is None else _cut(error.hint, _LONGEST_MESSAGE // 3)
    message = _cut(str(error), _LONGEST_MESSAGE)
    return Failure(kind=name, message=message, hint=hint, fields=said)


def _plain(value: object) -> int | str | None:
    if value is None or (isinstance(value, int) and value in _INT64):
        return value
    return _cut(str(value), _LONGEST_FIELD)


def _cut(text: str, length: int) -> str:
    # A file name may have bytes that are not UTF-8, which JSON cannot hold.
    plain = text.encode(errors="backslashreplace").decode()
    return plain if len(plain) <= length else plain[: length - 1] + "…"


def error_from(failure: Failure) -> PenstockError:
    """Return the error that a `Failure` describes."""
    kind, fields = _KINDS.get(failure.kind, (PenstockError, ()))
    error = kind.__new__(kind)
    error.args = (failure.message,)
    error.hint = failure.hint
    for field in fields:
        setattr(error, field, failure.fields.get(field))
    return error
