"""Every error that Penstock raises on purpose: one tree, each with fields and a hint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.redaction import as_written, is_secret, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AlreadyExists",
    "Closed",
    "ConfigError",
    "ConfigErrors",
    "ConnectionLost",
    "CursorInUse",
    "CursorTableFull",
    "DamagedQueue",
    "InvalidOption",
    "InvalidStreamId",
    "InvalidURL",
    "LeaseLost",
    "LockTimeout",
    "Malformed",
    "MessageTooLarge",
    "NotFound",
    "Overrun",
    "PenstockError",
    "PositionError",
    "ServerBusy",
    "StorageError",
    "StreamIdCollision",
    "Unacknowledged",
    "UnknownScheme",
    "Unsupported",
    "WriteTimeout",
]


class PenstockError(Exception):
    """The root of the tree. `hint` says what the person can do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(shown(message))
        self.hint = None if hint is None else shown(hint)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the class with the finished message, which is wrong for errors
        # with fields. Errors pass between processes: restore one field by field.
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state["errno"] = self.errno  # kept by the interpreter, outside __dict__
        return _blank, (type(self), self.args), state


def _blank(kind: type[PenstockError], args: tuple[object, ...]) -> PenstockError:
    """Construct an error without its fields: the first step of unpickling."""
    error = kind.__new__(kind)
    error.args = args
    return error


# --- what the caller asked for is not right -------------------------------------------------


class InvalidURL(PenstockError, ValueError):
    """The text is not an endpoint URL."""

    def __init__(self, url: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{url!r} is not a URL that Penstock can open: {reason}", hint=hint)
        self.url = shown(url)


class UnknownScheme(InvalidURL):
    """No installed endpoint has this scheme."""


class InvalidOption(PenstockError, ValueError):
    """An option has a value that does not fit, or no endpoint knows it."""

    def __init__(self, option: str, value: object, reason: str, *, hint: str | None = None) -> None:
        if is_secret(option.rpartition(".")[2]):
            value = None if value is None else "…"
        elif isinstance(value, str):
            value = shown(value)
        super().__init__(f"option {option}={value!r}: {reason}", hint=hint)
        self.option = option
        self.value = value
        self.reason = shown(reason)


class PositionError(PenstockError, ValueError):
    """The reader cannot be placed there.

    If a number is out of range: `seq` was requested, the stream has `oldest` to `end` - 1.
    """

    def __init__(
        self,
        message: str,
        *,
        seq: int | None = None,
        oldest: int | None = None,
        end: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.seq = seq
        self.oldest = oldest
        self.end = end


class InvalidStreamId(PenstockError, ValueError):
    """A field of a stream id is out of range, or the text is not a stream id."""

    def __init__(self, field: str, value: object, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"stream id, {field} = {value!r}: {reason}", hint=hint)
        self.field = field
        self.value = value


class StreamIdCollision(PenstockError):
    """Two different names give the same stream id."""

    def __init__(
        self, stream: str, existing: str, refused: str, *, hint: str | None = None
    ) -> None:
        super().__init__(
            f"{refused} has the stream id {stream}, which belongs to {existing}", hint=hint
        )
        self.stream = stream
        self.existing = existing
        self.refused = refused


class ConfigError(PenstockError, ValueError):
    """A fault in a configuration file, with the file, the line and the field.

    `column` is set if the fault is a known part of a long text.
    """

    def __init__(
        self,
        file: str,
        line: int | None,
        field: str | None,
        reason: str,
        *,
        hint: str | None = None,
        column: int | None = None,
    ) -> None:
        reason = as_written(reason)
        place = ":".join(str(part) for part in (file, line, column) if part is not None)
        what = reason if field is None else f"{field}: {reason}"
        super().__init__(f"{place}: {what}", hint=hint)
        self.file = file
        self.line = line
        self.column = column
        self.field = field
        self.reason = reason


class ConfigErrors(ConfigError):
    """Several faults in a configuration file; the fields are those of the first.

    `errors` has all of them, in the order of the file; the message has one per line.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(
            first.file,
            first.line,
            first.field,
            first.reason,
            hint=first.hint,
            column=first.column,
        )
        self.errors = tuple(errors)
        self.args = (
            "\n".join(
                str(error) if error.hint is None else f"{error} ({error.hint})" for error in errors
            ),
        )


class Unsupported(PenstockError):
    """The endpoint cannot do this."""


# --- what was found is not right ------------------------------------------------------------


class Malformed(PenstockError, ValueError):
    """Bytes from outside do not follow their format."""

    def __init__(
        self, what: str, where: str, expected: object, found: object, *, hint: str | None = None
    ) -> None:
        super().__init__(f"{what}: {where} should be {expected}, found {found}", hint=hint)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found


class DamagedQueue(Malformed):
    """A queue's bytes are not valid; has the field, its offset and its value."""

    def __init__(
        self,
        path: str,
        field: str,
        offset: int,
        expected: object,
        found: object,
        *,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            f"queue {path} is damaged", f"{field} at byte {offset}", expected, found, hint=hint
        )
        self.path = path
        self.field = field
        self.offset = offset


class NotFound(PenstockError, FileNotFoundError):
    """The URL names nothing that exists."""


class AlreadyExists(PenstockError, FileExistsError):
    """The URL names something that exists already."""


# --- what happened while it ran -------------------------------------------------------------


class MessageTooLarge(PenstockError, ValueError):
    """The message does not fit; nothing was written."""

    def __init__(self, size: int, limit: int, *, hint: str | None = None) -> None:
        super().__init__(
            f"a message of {size:,} bytes does not fit: the limit is {limit:,}", hint=hint
        )
        self.size = size
        self.limit = limit


class Overrun(PenstockError):
    """The writer overwrote messages while they were in use."""

    def __init__(self, first: int, last: int, *, hint: str | None = None) -> None:
        super().__init__(f"messages {first} to {last} were overwritten by the writer", hint=hint)
        self.first = first
        self.last = last


class WriteTimeout(PenstockError, TimeoutError):
    """The queue stayed full, or its reader stayed away, for the timeout."""


class LockTimeout(PenstockError, TimeoutError):
    """Another writer held the lock for the timeout."""


class Closed(PenstockError):
    """The reader or writer was closed."""


class CursorInUse(PenstockError):
    """Another reader has this named position; `pid` is 0 if its process is unknown."""

    def __init__(self, name: str, pid: int, *, hint: str | None = None) -> None:
        owner = f"process {pid}" if pid else "another process"
        super().__init__(f"the cursor {name!r} is in use by {owner}", hint=hint)
        self.name = name
        self.pid = pid


class LeaseLost(PenstockError):
    """Messages are no longer leased to this reader of a group; others may have got them.

    They may be processed twice. The other messages of the same call are settled.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], *, hint: str | None = None) -> None:
        count = sum(last - first + 1 for first, last in ranges)
        first, last = ranges[0][0], ranges[-1][1]
        which = (
            f"message {first} is" if count == 1 else f"{count:,} messages ({first} to {last}) are"
        )
        super().__init__(f"{which} not leased to this reader", hint=hint)
        #: The first and the last number of each run, and the number of messages.
        self.ranges = tuple(ranges)
        self.count = count


class CursorTableFull(PenstockError):
    """The table of named positions is full."""

    def __init__(self, count: int, *, hint: str | None = None) -> None:
        super().__init__(f"all {count} cursors are taken", hint=hint)
        self.count = count


class ConnectionLost(PenstockError, ConnectionError):
    """The server cannot be reached, or the connection to it broke."""

    def __init__(self, server: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{server} cannot be reached: {reason}", hint=hint)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class Unacknowledged(ConnectionLost):
    """The connection broke during a write; the fate of its last messages is unknown."""

    def __init__(
        self, server: str, reason: str, *, acknowledged: int, in_doubt: int, hint: str | None = None
    ) -> None:
        super().__init__(
            server,
            f"{reason}; of this call {acknowledged:,} messages are appended, and of {in_doubt:,} "
            "it is not known",
            hint=hint,
        )
        #: Messages of the call that were certainly appended: its first ones.
        self.acknowledged = acknowledged
        #: Messages after those of which none, some or all were appended.
        self.in_doubt = in_doubt


class ServerBusy(PenstockError):
    """The server is at its limit of clients."""

    def __init__(self, limit: int, *, hint: str | None = None) -> None:
        super().__init__(f"the server has {limit:,} clients, and takes no more", hint=hint)
        self.limit = limit


class StorageError(PenstockError, OSError):
    """The operating system refused: no space, no permission, a device error."""

    def __init__(self, doing: str, path: str, cause: OSError, *, hint: str | None = None) -> None:
        super().__init__(f"{doing} {path}: {cause.strerror or cause}", hint=hint)
        self.doing = doing
        self.path = path
        self.errno = cause.errno

    def __str__(self) -> str:
        return str(self.args[0])
