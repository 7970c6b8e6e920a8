"""What does a service do for one of its clients, and what is counted?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Protocol, TypeAlias

from pydantic import Field

from penstock.core.options import Duration, Options, Size
from penstock.protocols.lrose.datamapper_messages import DATAMAPPER_TYPE, MapReply
from penstock.protocols.lrose.ds_message import DsMessage

__all__ = [
    "Answer",
    "Counts",
    "Encoded",
    "ServerStatistics",
    "Service",
    "ServingOptions",
    "is_refusal",
]

#: What a session gives back: a message, one that is encoded already, or nothing.
Encoded: TypeAlias = bytes | bytearray
Answer: TypeAlias = DsMessage | Encoded | None


class ServingOptions(Options):
    """Limits that every server has."""

    host: str = "127.0.0.1"
    #: 0: any that is free.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Clients at the same time.
    max_clients: Annotated[int, Field(ge=1, le=100_000)] = 256
    #: Bytes of one request.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 31)] = 64 << 20
    #: Bytes of requests that have not come to their end, of all clients together.
    max_held: Annotated[Size, Field(ge=1024)] = 512 << 20
    #: Bytes of replies that clients have not taken yet, of all clients together; the largest reply
    #: has to fit. Beyond it those who have most of them are cut off.
    max_unsent: Annotated[Size, Field(ge=1024)] = 512 << 20
    #: The first request has to be there by then, and each later one so long after its first byte;
    #: a large one may take longer, as long as it comes on.
    first_message: Annotated[Duration, Field(gt=0)] = 30.0
    #: A client that says nothing for so long is cut off.
    idle: Annotated[Duration, Field(gt=0)] = 3600.0
    #: Let anybody who can reach the port stop the server, as LROSE's does.
    allow_shutdown: bool = False


@dataclass(slots=True)
class Counts:
    """What became of the requests of one client, or of all that have left."""

    requests: int = 0
    replies: int = 0
    errors: int = 0
    unanswered: int = 0
    pings: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(slots=True)
class ServerStatistics:
    """Books of a server. Every request is answered, is one that has no answer, or its end is."""

    #: Clients connected now.
    clients: int = 0
    #: Clients since the start.
    clients_seen: int = 0
    #: Clients turned away because there were too many.
    clients_denied: int = 0
    #: Clients cut off because they said nothing, or took no reply, for too long.
    clients_timed_out: int = 0
    #: Clients cut off because of what they sent.
    clients_malformed: int = 0
    #: Clients cut off because replies that nobody took were too many.
    clients_behind: int = 0
    #: Requests that came, pings included.
    requests: int = 0
    #: Of those: answered, and answered with an error.
    replies: int = 0
    errors: int = 0
    #: Of those: not answered, because the client left, or because there is no answer to them.
    unanswered: int = 0
    #: Of those: pings, and the like.
    pings: int = 0
    #: Payload bytes of requests and replies.
    bytes_in: int = 0
    bytes_out: int = 0


def is_refusal(reply: DsMessage) -> bool:
    """Tell whether a reply says no, in the way of any of LROSE's services."""
    if reply.error:
        return True
    if reply.type == DATAMAPPER_TYPE:
        # What it says besides may be thousands of entries, which are not looked at.
        return MapReply.from_message(reply._replace(parts=())).error is not None
    return reply.error_text is not None


class Service(Protocol):
    """What a service does for one client.

    One that also has `handle_payload(payload: bytes)` is asked first, with the bytes of each
    request but the first; it returns `...` for those that `handle` is to get. Before that, one
    that has `handle_frame(buffer: bytearray, size: int, seq: int)` is shown what came, all of it,
    if nothing else is under way; it returns the whole frame of the reply, which has that number, or
    None: then it has done nothing.
    """

    #: The id of the frames of replies.
    socket_id: int
    #: True once the conversation is over; then the connection is closed.
    is_over: bool

    def handle(self, request: DsMessage) -> Answer:
        """Carry out a request; it may take its time, for as long as the client is there.

        An error of the tree, or of the operating system, becomes what `failure` makes of it.

        :raises ConnectionAbortedError: the client left meanwhile.
        """
        ...

    def failure(self, request: DsMessage, error: Exception) -> tuple[int, DsMessage]:
        """Return the id of the frame, and the reply, that tell the client of an error."""
        ...

    def close(self) -> None:
        """Give everything back: the client has left."""
        ...
