"""How does a blocking writer hear how far its reader is? Spec lrose 1.9, 1.10."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from penstock.queue.classic.layout import ID_COUNT

if TYPE_CHECKING:
    from penstock.queue.classic.device import Device
    from penstock.queue.classic.layout import Status

__all__ = ["Progress"]

log = logging.getLogger(__name__)

#: Reports remembered, to notice that a writer put back an older one.
_REMEMBERED = 8


class Progress:
    """Reports the last message read, in the status of the queue."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._reports: deque[int] = deque(maxlen=_REMEMBERED)
        self._may_report = True

    def forget(self) -> None:
        """Start anew, with another queue."""
        self._reports.clear()

    def report(self, device: Device, status: Status, seq: int) -> None:
        """Say that everything up to a message was read; once is enough."""
        id = seq % ID_COUNT
        if seq >= 0 and not (self._reports and self._reports[-1] == id):
            self._write(device, status, id)

    def insist(self, device: Device, status: Status) -> None:
        """Report again if a writer, in the middle of writing the status, put back the past."""
        reports = list(self._reports)
        if reports and status.last_id_read in reports[:-1]:
            self._write(device, status, reports[-1])

    def _write(self, device: Device, status: Status, id: int) -> None:
        if not self._may_report:
            return
        if not self._reports:
            self._reports.append(status.last_id_read)  # what a writer may put back
        try:
            device.report_last_id_read(id)
        except OSError as error:
            self._may_report = False
            log.warning(
                "%s: its writer waits for a reader, and this one may not tell it: %s",
                self._url,
                error.strerror,
            )
            return
        if self._reports[-1] != id:
            self._reports.append(id)
