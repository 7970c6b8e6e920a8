"""How does the server of queues put messages, and failures, into a reply?"""

from __future__ import annotations

from typing import Final

from penstock.core.errors import (
    AlreadyExists,
    DamagedQueue,
    InvalidOption,
    InvalidURL,
    MessageTooLarge,
    NotFound,
    Unsupported,
)
from penstock.protocols.lrose.ds_message import DsMessage, ErrorCode, error_reply, int_part
from penstock.protocols.lrose.fmq_messages import Messages, encode_message, encode_messages
from penstock.protocols.lrose.fmq_wire import OURS, SOCKET_ID, Failure, Op

__all__ = ["NOTHING_THERE", "failure_reply", "marked_reply", "reply_header", "reply_with"]

_REPLY_TO_READ: Final = DsMessage(Op.REPLY, Op.READ)
NOTHING_THERE: Final = _REPLY_TO_READ.to_bytes()
#: Where the number of parts, and serialNum, are in it.
_N_PARTS: Final = 36
_SERIAL: Final = 24

#: Requests that are answered with their own number, also when they fail.
_KNOWN: Final = frozenset(Op) - {Op.REPLY}


def failure_reply(
    request: DsMessage, error: Exception, text: str, written: int, *, is_ours: bool
) -> tuple[int, DsMessage]:
    """Return the id of the frame, and the reply, that tell a client of an error."""
    hint = getattr(error, "hint", None)
    if hint:
        text = f"{text} ({hint})"
    if request.type not in _KNOWN:
        return 0, error_reply(Op.REPLY, SOCKET_ID, ErrorCode.FAILED, text)
    reply = error_reply(Op.REPLY, request.type, ErrorCode.FAILED, text)
    if not is_ours:
        return SOCKET_ID, reply
    parts = reply.parts
    if isinstance(error, MessageTooLarge):
        parts += tuple(int_part(min(n, 2**31 - 1)) for n in (error.size, error.limit))
    return SOCKET_ID, reply._replace(mode=_kind(error), flags=OURS, serial_num=written, parts=parts)


def reply_header(n_parts: int) -> bytes:
    """Return what the reply to a READ begins with."""
    return b"".join((NOTHING_THERE[:_N_PARTS], n_parts.to_bytes(4), NOTHING_THERE[_N_PARTS + 4 :]))


def marked_reply(reply: bytes | bytearray, restarts: int) -> bytes:
    """Return a reply to a READ that says in serialNum how often the queue was created anew."""
    return b"".join((reply[:_SERIAL], restarts.to_bytes(4), reply[_SERIAL + 4 :]))


def reply_with(messages: Messages) -> bytes:
    """Return the reply to a READ."""
    if not messages.ids:
        return NOTHING_THERE
    if len(messages.ids) == 1:
        return encode_message(
            _REPLY_TO_READ,
            messages.payloads[0],
            messages.types[0],
            messages.subtypes[0],
            pre_compressed=messages.pre_compressed[0],
            uncompressed_len=messages.uncompressed_lens[0],
            id=messages.ids[0],
            time=messages.times[0],
        )
    return encode_messages(
        _REPLY_TO_READ,
        messages.payloads,
        types=messages.types,
        subtypes=messages.subtypes,
        pre_compressed=messages.pre_compressed,
        uncompressed_lens=messages.uncompressed_lens,
        ids=messages.ids,
        times=messages.times,
    )


def _kind(error: Exception) -> Failure:
    if isinstance(error, NotFound):
        return Failure.NOT_FOUND
    if isinstance(error, MessageTooLarge):
        return Failure.TOO_LARGE
    if isinstance(error, DamagedQueue):
        return Failure.DAMAGED
    refused = (AlreadyExists, InvalidURL, InvalidOption, Unsupported)
    return Failure.REFUSED if isinstance(error, refused) else Failure.OTHER
