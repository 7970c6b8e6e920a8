"""What does the disk have of a file when the power fails?

A sync that returned brought every page there. Of those that changed since, any may have followed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    import pytest

__all__ = ["Disk", "PowerCut", "forget_boot"]

PAGE = 4096
BOOT_ID_AT = 400


class PowerCut(BaseException):
    """The machine is gone, in the middle of a sync."""


class Disk:
    """Takes the place of the disk under one file: it knows what a power failure leaves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        self._path = Path(path)
        self._synced = b""
        #: Syncs that return, before one that does not; None: all do.
        self.syncs_left: int | None = None
        #: What the last sync that returned was called for: `head` then.
        self.head = 0
        #: How often it was synced.
        self.syncs = 0

        def fdatasync(_: int) -> None:
            if self.syncs_left == 0:
                raise PowerCut
            if self.syncs_left is not None:
                self.syncs_left -= 1
            self.syncs += 1
            self.sync()

        # The disk of the machine need not be waited for.
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(os, "fsync", lambda _: None)

    def sync(self) -> None:
        """Have all of the file, as it is now."""
        self._synced = self._path.read_bytes()
        self.head = int.from_bytes(self._synced[128:136], "little")

    def image(self, chance: random.Random, share: float = 0.5) -> bytes:
        """Return what is on the disk when the power fails now: such a share of the new pages."""
        now = self._path.read_bytes()
        pages = []
        for at in range(0, len(now), PAGE):
            is_new = chance.random() < share
            pages.append((now if is_new else self._synced)[at : at + PAGE])
        return b"".join(pages)


def forget_boot(image: bytes) -> bytes:
    """Let an image look as if it was written before the machine went down."""
    if not any(image[BOOT_ID_AT : BOOT_ID_AT + 16]):
        return image  # it was closed cleanly
    return image[:BOOT_ID_AT] + b"an earlier boot." + image[BOOT_ID_AT + 16 :]
