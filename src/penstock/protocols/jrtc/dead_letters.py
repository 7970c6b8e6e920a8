"""What happens to messages that cannot be forwarded or collected?"""

from __future__ import annotations

import logging
import time
from threading import Lock
from typing import TYPE_CHECKING

from penstock.core.batch import messages_from_batch
from penstock.core.dead_letter import DeadLetter
from penstock.core.errors import PenstockError
from penstock.core.interfaces import Closable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.protocols.jrtc.destinations import Rejected

__all__ = ["DeadLetters"]

log = logging.getLogger(__name__)


class DeadLetters(Closable):
    """The dead letters of a forwarder or collector. Thread-safe."""

    def __init__(self, writer: Writer | None) -> None:
        self._writer = writer
        self._lock = Lock()
        self.written = self.unwritten = 0

    def write(self, batch: Batch, rejected: Sequence[Rejected], receiver: str) -> None:
        """Store messages of a batch as dead letters; count those that cannot be stored."""
        if not rejected:
            return
        now = time.time_ns()
        fate = "are gone" if self._writer is None else "are dead letters"
        log.warning("%d messages for %s %s: %s", len(rejected), receiver, fate, rejected[0].reason)
        with self._lock:
            if self._writer is None:
                self.unwritten += len(rejected)
                return
            for row, code, reason in rejected:
                original = next(messages_from_batch(batch.slice(row, 1)))
                letter = DeadLetter(original, code, reason, receiver, 1, now, now, now)
                self._keep(self._writer, letter)

    def note(self, count: int, what: str) -> None:
        """Count a refusal that has no message to store."""
        with self._lock:
            self.unwritten += count
        log.warning("%d %s", count, what)

    def _keep(self, writer: Writer, letter: DeadLetter) -> None:
        m = letter.to_message()
        try:
            writer.write(m.payload, m.type, m.subtype, m.time_ns, None, m.stream, m.attributes)
            self.written += 1
        except (OSError, PenstockError) as error:
            self.unwritten += 1
            log.error("a dead letter of %s cannot be kept: %s", letter.receiver, error)  # noqa: TRY400

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
