"""How does a dispatcher look to people and programs that ask for its state?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dispatch.dispatcher import Dispatcher
    from penstock.dispatch.letters import Letter
    from penstock.dispatch.outlets import ReceiverInfo
    from penstock.dispatch.quarantine import Stray

__all__ = ["described", "described_letter", "described_stray"]


def described(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the receivers, the books and what is stopped, ready for JSON."""
    books = dispatcher.books()
    copies = books.copies._asdict()
    return {
        "receivers": [_receiver(info) for info in dispatcher.receivers()],
        "stopped": [
            {"topic": str(stop.topic), "receiver": str(stop.receiver), "queue": stop.queue}
            for stop in dispatcher.switches
        ],
        "books": {
            "messages": asdict(books.counts),
            "copies": copies,
            "refused": books.refused,
            "dead": books.dead,
            "problems": books.problems(),
        },
        "dead_letters": str(dispatcher.topic),
    }


def _receiver(info: ReceiverInfo) -> dict[str, Any]:
    books = info.books
    return {
        "leg": info.receiver.leg,
        "address": str(info.receiver.address),
        "queued": books.queued,
        "bytes": info.bytes,
        "acked": books.acked,
        "dead": books.expired + books.queue_full + books.permanent,
        "books": books._asdict(),
        "order": info.order,
        "attempts": info.attempts,
        "trouble": info.trouble,
        "due_in": info.due_in,
        "findings": [str(finding) for finding in info.findings],
    }


def described_letter(letter: Letter, *, payload: bool = False) -> dict[str, Any]:
    """Return a dead letter, ready for JSON.

    :param payload: also what the message itself says, as hexadecimal digits
    """
    header = letter.header
    found = {
        "number": letter.number,
        "id": str(letter.id),
        "dead_ms": letter.dead_ms,
        "first_failure_ms": letter.first_failure_ms,
        "code": letter.code.name,
        "reason": letter.reason.name,
        "message": letter.message,
        "receiver": None if letter.receiver is None else str(letter.receiver),
        "leg": letter.leg,
        "attempts": letter.attempts,
        "dispatcher": str(letter.dispatcher),
        "is_whole": letter.original is not None,
        "original": {
            "id": None if header.id is None else str(header.id),
            "type": header.type.name,
            "source": None if header.source is None else str(header.source),
            "sink": None if header.sink is None else str(header.sink),
            "priority": header.effective_priority.name,
            "ttl": header.ttl,
            "payload_format": header.payload_format.name,
        },
    }
    if letter.original is not None:
        content = letter.original.payload or b""
        found["payload_bytes"] = len(content)
        if payload:
            found["payload"] = content.hex()
    return found


def described_stray(stray: Stray, *, data: bool = False) -> dict[str, Any]:
    """Return bytes that could not be decoded, ready for JSON.

    :param data: also what is kept of them, as hexadecimal digits
    """
    found = {
        "number": stray.number,
        "came_ms": stray.came_ms,
        "leg": stray.leg,
        "bytes": stray.size,
        "is_whole": stray.size == len(stray.data),
    }
    return {**found, "data": stray.data.hex()} if data else found
