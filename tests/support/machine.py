"""A machine whose disk is told what it gets, and which loses power."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from penstock import open_writer
from penstock.queue.log.segments import path_of
from penstock.queue.wide.layout import HEADER
from support.log_files import after_power_failure
from support.power_cuts import forget_boot

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Machine"]


class Machine:
    """A stream on a disk that gets what is written when it is told to."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.url = f"{kind}:{folder}/stream"
        self._place = folder / ("stream" if kind == "log" else "stream.fmq")
        self._disk = folder / "disk"
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, *numbers: int) -> None:
        options = {"sync": "none"} if self.kind == "log" else {}
        with open_writer(self.url, **options) as writer:
            writer.write_many([b"%d" % number for number in numbers])

    def sync(self) -> None:
        if self.kind == "log":
            shutil.rmtree(self._disk, ignore_errors=True)
            shutil.copytree(self._place, self._disk)
        else:
            shutil.copy(self._place, self._disk)

    def lose_power(self) -> None:
        """Bring the disk as it was synced last, as another run of the machine finds it."""
        if self.kind == "log":
            shutil.rmtree(self._place)
            shutil.copytree(self._disk, self._place)
            after_power_failure(self._place)
        else:
            self._place.unlink()
            self._place.write_bytes(forget_boot(self._disk.read_bytes()))

    def forget_all_but(self, count: int) -> None:
        """Lose power while it is written, with so many messages on the disk."""
        self.sync()
        disk = path_of(self._disk, 0) if self.kind == "log" else self._disk
        with disk.open("r+b") as file:
            head = count.to_bytes(8, "little")
            for name, value in (("head", head), ("head_check", head), ("boot_id", b"x" * 16)):
                file.seek(HEADER.fields[name].offset)
                file.write(value)
        self.lose_power()
