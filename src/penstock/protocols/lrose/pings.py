"""What does every one of LROSE's servers answer to a ping? Spec lrose 2.4."""

from __future__ import annotations

import os
from typing import Final

from penstock.protocols.lrose.ds_message import (
    Category,
    CommonPart,
    DsMessage,
    ErrorCode,
    Part,
    StatusRequest,
    error_reply,
    int_part,
    text_part,
)

__all__ = ["status_reply"]

#: What LROSE's servers answer to a ping beside their process id; clients do not look at it.
_PING_TEXT: Final = "Executable Name should go here."


def status_reply(request: DsMessage, client_count: int) -> DsMessage:
    """Return the reply to a request of the category of pings."""
    parts: tuple[Part, ...] = ()
    match request.type:
        case StatusRequest.IS_ALIVE:
            parts = (int_part(os.getpid()), text_part(CommonPart.STRING, _PING_TEXT))
        case StatusRequest.CLIENT_COUNT:
            parts = (int_part(client_count),)
        case StatusRequest.SHUTDOWN:
            pass
        case _:
            text = f"there is no command {request.type}"
            reply = error_reply(request.type, -1, ErrorCode.UNKNOWN_COMMAND, text)
            return reply._replace(category=Category.SERVER_STATUS)
    return request._replace(parts=parts)
