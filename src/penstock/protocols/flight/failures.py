"""How does an error travel to the other side, and stay the error that it is?"""

from __future__ import annotations

from typing import Final

from penstock.core import errors as core
from penstock.core.errors import PenstockError
from penstock.core.overflow import QueueFull
from penstock.protocols.flight.errors import AccessRefused, HoldLost, ServerBusy, UnknownWriter
from penstock.protocols.flight.wire import Failure

__all__ = ["describe_error", "error_from"]

#: The errors that may come from a server, and the fields of each. Nothing else is ever made from
#: what a server says: a name from outside picks a row of this table, and no more.
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
        (QueueFull, ("capacity",)),
        (AccessRefused, ()),
        (HoldLost, ("name",)),
        (ServerBusy, ("limit",)),
        (UnknownWriter, ()),
    )
}
_INT64: Final = range(-(2**63), 2**63)

#: Characters of a message and of a field: an error goes into a header of the call's answer, which
#: gRPC limits to 8 KiB.
_LONGEST_MESSAGE: Final = 1500
_LONGEST_FIELD: Final = 200


def describe_error(error: PenstockError) -> Failure:
    """Say an error: its nearest known kind, its message, its hint and its fields."""
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
    # A file name may have bytes that are no text; those cannot be in JSON.
    plain = text.encode(errors="backslashreplace").decode()
    return plain if len(plain) <= length else plain[: length - 1] + "…"


def error_from(failure: Failure) -> PenstockError:
    """Make the error that the other side said."""
    kind, fields = _KINDS.get(failure.kind, (PenstockError, ()))
    error = kind.__new__(kind)
    error.args = (failure.message,)
    error.hint = failure.hint
    for field in fields:
        setattr(error, field, failure.fields.get(field))
    return error
