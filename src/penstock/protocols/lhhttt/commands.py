"""What do a queue and its clients say to each other, behind the framing?

The prototype's verbs `PUT`, `GET` and `SIZE`, and reliable ones that it leaves unanswered: who asks
for `CAPS` and hears nothing knows with whom it speaks. No part but the last has a colon in it.

| asked | answered |
|---|---|
| `CAPS` | `CAPS:1:lease,dedup,batch` |
| `RPUT:<client>:<seq>:<message>` | `OK:<seq>` |
| `RPUTS:<client>:<seq>:<frames>` | `OK:<seq>` |
| `RGET:<client>:<seq>[:<wait_ms>]` | `MSG:<seq>:<tag>:<message>` or `NONE:<seq>` |
| `RGETS:<client>:<seq>:<count>[:<wait_ms>]` | `MSGS:<seq>:<tags>:<frames>` or `NONE:<seq>` |
| `ACK:<client>:<tags>` | `OK:<first tag>` |
| `NACK:<client>:<tags>[:<delay_ms>]` | `OK:<first tag>` |

A tag is `<epoch>.<number>`, the same whenever a message comes again. Commas separate tags, and
`<epoch>.<number>-<last>` are those of consecutive messages. `ERR:<seq or first tag>:<code>:<text>`
says what is wrong with a request.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.errors import Malformed
from penstock.protocols.lhhttt.frames import Frames, encode_bytes, join_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "CAPS",
    "LARGEST_HEAD",
    "LONGEST_WAIT_MS",
    "MOST_MESSAGES",
    "RELIABLE",
    "STORING",
    "Ack",
    "BadRequest",
    "Code",
    "Lease",
    "Nack",
    "Reply",
    "Request",
    "Store",
    "Tags",
    "ack_request",
    "error_reply",
    "format_limits",
    "format_tags",
    "is_text",
    "lease_request",
    "message_reply",
    "messages_head",
    "nack_request",
    "none_reply",
    "ok_reply",
    "parse_limits",
    "parse_reply",
    "parse_tags",
    "seq_of_store",
    "store_request",
]

#: The answer to `CAPS`: the version, and what there is beyond the prototype's verbs
#: (docs/specs/streampy.md 2).
CAPS: Final = encode_bytes(b"CAPS:1:lease,dedup,batch")
#: Messages that one request may name.
MOST_MESSAGES: Final = 10_000
LONGEST_WAIT_MS: Final = 60_000
_LONGEST_DELAY_MS: Final = 24 * 3_600_000
#: Of a client's name, in bytes: it is kept.
_LONGEST_NAME: Final = 64
_LARGEST_SEQ: Final = 2**63 - 1
_MOST_DIGITS: Final = 19
#: Bytes of a request to store, before its messages: verb, client, number, colons, frame header.
LARGEST_HEAD: Final = len(b"RPUTS:::") + _LONGEST_NAME + _MOST_DIGITS + 16
_LIMITS: Final = re.compile(r"at most (\d{1,19}) messages, (\d{1,19}) bytes")
_WHAT: Final = "LHHTTT command"


class Code(StrEnum):
    """What is wrong with a reliable request."""

    #: It is not as the protocol says.
    MALFORMED = "malformed"
    #: The queue is full, and its policy refuses. Later there may be room.
    FULL = "full"
    #: A message is larger than the queue takes, or than this way can carry.
    TOO_LARGE = "too-large"
    #: The number is too far below the client's latest to tell whether it was heard before.
    STALE = "stale"
    #: Too many messages are leased already.
    BUSY = "busy"
    #: Messages are not leased to this client any more; those named are, or will be, another's.
    NO_LEASE = "no-lease"
    #: The server failed at it. Asked again, it may succeed.
    FAILED = "failed"


#: Numbers of messages, as (epoch, first, last) of each run of them.
Tags: TypeAlias = "Sequence[tuple[int, int, int]]"


class Store(NamedTuple):
    """Append messages, once however often the request is repeated."""

    client: bytes
    seq: int
    messages: Frames


class Lease(NamedTuple):
    """Lease messages; a repeated number leases the same ones."""

    client: bytes
    seq: int
    #: How many messages, at most.
    most: int
    #: Seconds to wait for the first.
    wait: float
    #: It is answered by one message, and not by frames of them.
    is_single: bool


class Ack(NamedTuple):
    """Messages are done."""

    client: bytes
    tags: Tags
    #: What the answer names.
    first: bytes


class Nack(NamedTuple):
    """Messages are to be redelivered after `delay` seconds."""

    client: bytes
    tags: Tags
    first: bytes
    delay: float


Request: TypeAlias = Store | Lease | Ack | Nack


class BadRequest(Malformed):
    """A reliable request is malformed; `about` is what the reply names."""

    def __init__(self, about: bytes, where: str, expected: object, found: object) -> None:
        super().__init__(_WHAT, where, expected, found)
        self.about = about


def is_text(data: bytes) -> bool:
    """Tell whether bytes are UTF-8: the prototype leaves any other command unanswered."""
    if data.isascii():
        return True
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


# --- requests -----------------------------------------------------------------------------------


def store_request(client: bytes, seq: int, messages: Sequence[bytes]) -> bytes:
    """Return the frame that asks to append messages."""
    if len(messages) == 1:
        return encode_bytes(b"RPUT:%b:%d:%b" % (client, seq, messages[0]))
    return join_frames(messages, b"RPUTS:%b:%d:" % (client, seq))


def lease_request(client: bytes, seq: int, count: int, wait: float) -> bytes:
    """Return the frame that asks for up to `count` messages, and waits up to `wait` seconds."""
    return encode_bytes(b"RGETS:%b:%d:%d:%d" % (client, seq, count, wait * 1000))


def ack_request(client: bytes, tags: bytes) -> bytes:
    """Return the frame that acknowledges messages."""
    return encode_bytes(b"ACK:%b:%b" % (client, tags))


def nack_request(client: bytes, tags: bytes, delay: float) -> bytes:
    """Return the frame that asks for redelivery after `delay` seconds."""
    return encode_bytes(b"NACK:%b:%b:%d" % (client, tags, delay * 1000))


def _parse_rput(rest: bytes) -> Store:
    client, seq, message = _parts(rest, 3)
    return Store(client, _seq(seq), Frames.of_one(message))


def _parse_rputs(rest: bytes) -> Store:
    client, seq, frames = _parts(rest, 3)
    try:
        messages = Frames.located(frames)
    except Malformed as error:
        raise BadRequest(seq, error.where, error.expected, error.found) from None
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise BadRequest(seq, "frames", f"1 to {MOST_MESSAGES}", len(messages))
    return Store(client, _seq(seq), messages)


def _parse_rget(rest: bytes) -> Lease:
    client, seq, wait = _parts(rest, 2, optional=1)
    seconds = _number(seq, "wait_ms", wait or b"0", LONGEST_WAIT_MS) / 1000
    return Lease(client, _seq(seq), 1, seconds, is_single=True)


def _parse_rgets(rest: bytes) -> Lease:
    client, seq, count, wait = _parts(rest, 3, optional=1)
    most = _number(seq, "count", count, MOST_MESSAGES)
    seconds = _number(seq, "wait_ms", wait or b"0", LONGEST_WAIT_MS) / 1000
    return Lease(client, _seq(seq), max(1, most), seconds, is_single=False)


def _parse_ack(rest: bytes) -> Ack:
    client, tags = _parts(rest, 2)
    return Ack(client, parse_tags(tags), _first(tags))


def seq_of_store(head: bytes) -> bytes | None:
    """Return the number of a request to store, by its first bytes; None if it is another."""
    verb, *parts = head.split(b":", 3)
    if verb not in {b"RPUT", b"RPUTS"} or len(parts) < 3 or not parts[1].isdigit():  # noqa: PLR2004
        return None
    return parts[1]


def _parse_nack(rest: bytes) -> Nack:
    client, tags, delay = _parts(rest, 2, optional=1)
    first = _first(tags)
    seconds = _number(first, "delay_ms", delay or b"0", _LONGEST_DELAY_MS) / 1000
    return Nack(client, parse_tags(tags), first, seconds)


#: The reliable verbs, and what parses what comes after their colon; it raises `BadRequest`.
RELIABLE: Final[Mapping[bytes, Callable[[bytes], Request]]] = {
    b"RPUT": _parse_rput,
    b"RPUTS": _parse_rputs,
    b"RGET": _parse_rget,
    b"RGETS": _parse_rgets,
    b"ACK": _parse_ack,
    b"NACK": _parse_nack,
}


#: Those that append messages.
STORING: Final = frozenset({b"RPUT", b"RPUTS"})


def _parts(rest: bytes, count: int, *, optional: int = 0) -> list[bytes]:
    """Split at colons into `count` parts and up to `optional` more; missing ones are empty."""
    parts = rest.split(b":", count + optional - 1)
    if len(parts) < count:
        about = _first(parts[1]) if len(parts) > 1 else b""
        raise BadRequest(about, "parts", f"at least {count}", len(parts))
    if not 0 < len(parts[0]) <= _LONGEST_NAME:
        raise BadRequest(_first(parts[1]), "client", f"1 to {_LONGEST_NAME} bytes", len(parts[0]))
    return parts + [b""] * (count + optional - len(parts))


def _seq(text: bytes) -> int:
    return _number(text, "seq", text, _LARGEST_SEQ)


def _number(about: bytes, where: str, text: bytes, most: int, base: int = 10) -> int:
    # Python's own parser takes signs, spaces and underscores, too.
    is_number = text.isdigit() if base == 10 else text.isalnum()  # noqa: PLR2004
    try:
        number = int(text, base) if is_number and len(text) <= _MOST_DIGITS else most + 1
    except ValueError:
        number = most + 1
    if number > most:
        raise BadRequest(_first(about), where, f"a number up to {most}", repr(text[:20])[1:])
    return number


def _first(tags: bytes) -> bytes:
    """Return what the reply names: the first tag, without the rest of its run."""
    return tags[:_LONGEST_NAME].partition(b",")[0].partition(b"-")[0]


def parse_tags(text: bytes) -> Tags:
    """Return the numbers that tags name.

    :raises BadRequest: they are no tags, or too many.
    """
    first = _first(text)
    tags: list[tuple[int, int, int]] = []
    count = 0
    for part in text.split(b",", MOST_MESSAGES):
        epoch, _, numbers = part.partition(b".")
        start, dash, end = numbers.partition(b"-")
        low = _number(first, "tag", start, _LARGEST_SEQ)
        high = _number(first, "tag", end, _LARGEST_SEQ) if dash else low
        count += high - low + 1
        if low > high or count > MOST_MESSAGES:
            raise BadRequest(first, "tags", f"of 1 to {MOST_MESSAGES} messages", count)
        tags.append((_number(first, "tag", epoch, 2**64 - 1, 16), low, high))
    return tags


def format_tags(runs: Tags) -> bytes:
    """Return the tags of messages, whose numbers are in these runs."""
    return b",".join(
        [
            b"%x.%d" % (epoch, first) if first == last else b"%x.%d-%d" % (epoch, first, last)
            for epoch, first, last in runs
        ]
    )


# --- replies ------------------------------------------------------------------------------------


def ok_reply(about: bytes) -> bytes:
    """Return the reply for success."""
    return encode_bytes(b"OK:" + about)


def none_reply(seq: int) -> bytes:
    """Return the reply for an empty queue."""
    return encode_bytes(b"NONE:%d" % seq)


def message_reply(seq: int, tag: bytes, message: bytes) -> bytes:
    """Return the reply that leases one message."""
    return encode_bytes(b"MSG:%d:%b:%b" % (seq, tag, message))


def messages_head(seq: int, tags: bytes) -> bytes:
    """Return what the reply that leases messages has before their frames."""
    return b"MSGS:%d:%b:" % (seq, tags)


def error_reply(about: bytes, code: Code, text: str) -> bytes:
    """Return the reply that reports an error."""
    return encode_bytes(b"ERR:%b:%b:%b" % (about, code.encode(), text.encode()))


def format_limits(messages: int, size: int) -> str:
    """Return the words of `too-large` for a request that has more than a queue ever holds."""
    return f"at most {messages} messages, {size} bytes"


def parse_limits(text: str) -> tuple[int, int] | None:
    """Return the limits that `format_limits` tells: no message of the request is stored."""
    found = _LIMITS.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]))


class Reply(NamedTuple):
    """A parsed reply to a reliable request."""

    #: The sequence number, or the first tag, of the request.
    about: bytes
    #: What is wrong; None: nothing is.
    code: str | None = None
    #: What is wrong, in words.
    text: str = ""
    #: Messages, with the run of numbers of their tags.
    tags: Tags = ()
    messages: Sequence[bytes] = ()


def parse_reply(answer: bytes) -> Reply:
    """Parse a reply.

    :raises Malformed: this is no reply to a reliable request.
    """
    verb, *parts = answer.split(b":", 3)  # no part but the last has a colon in it
    if verb in {b"OK", b"NONE"}:
        return Reply(b":".join(parts))
    if len(parts) == 3 and verb == b"ERR":  # noqa: PLR2004
        return Reply(
            parts[0], parts[1].decode("ascii", "replace"), parts[2].decode("utf-8", "replace")
        )
    if len(parts) == 3 and verb in {b"MSG", b"MSGS"}:  # noqa: PLR2004
        seq, tags, body = parts
        messages = Frames.of_one(body) if verb == b"MSG" else Frames.located(body)
        numbers = parse_tags(tags)
        if sum(last - first + 1 for _, first, last in numbers) != len(messages):
            raise Malformed(_WHAT, "tags", f"those of {len(messages)} messages", tags[:80])
        return Reply(seq, tags=numbers, messages=messages)
    raise Malformed(_WHAT, "verb", "an answer", repr(answer[:40])[1:])
