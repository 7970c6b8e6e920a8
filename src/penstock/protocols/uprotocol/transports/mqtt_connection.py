"""Is a broker connected now, by which connection, and if it is not, why?"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from penstock.protocols.uprotocol.codes import UCode, UStatus

if TYPE_CHECKING:
    from paho.mqtt.client import Client

__all__ = ["SILENT", "Connection"]

SILENT: Final = UStatus(UCode.UNAVAILABLE, "the broker does not acknowledge")


class Connection:
    """What the parts of a link share, and change with its lock only."""

    def __init__(self, client: Client) -> None:
        #: The lock, and a way to wait for changes. It is never held while the library is called:
        #: that has locks of its own, and calls back while it holds them.
        self.changed = threading.Condition()
        #: The library's. There is another one for each connection.
        self.client = client
        #: Which one this is, counted from 1.
        self.number = 0
        self.is_up = False
        #: Whether the broker went on with the session of the one before.
        self.is_resumed = False
        self.why_down = UStatus(UCode.UNAVAILABLE, "the broker is not connected yet")

    def begin(self, *, is_resumed: bool) -> None:
        self.number += 1
        self.is_resumed = is_resumed
        self.is_up = True
        self.changed.notify_all()

    def end(self, why: UStatus, *, is_news: bool) -> None:
        """Say why there is none; `is_news`: it is not the end of a refusal."""
        # That the broker refused us tells more than that it then closed the connection.
        was_refused = not self.is_up and self.why_down.code != UCode.UNAVAILABLE
        if is_news or not was_refused or why.code != UCode.UNAVAILABLE:
            self.why_down = why
        self.is_up = False
        self.changed.notify_all()
