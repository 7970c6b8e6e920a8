"""Where can files be that only this user's processes on this machine need?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from penstock.core.errors import Unsupported
from penstock.queue.storage import storage_errors

__all__ = ["private_folder"]


def private_folder(name: str) -> Path:
    """Return a folder in the temporary directory, which anybody may write to, that is ours alone.

    :raises Unsupported: somebody else has put something in its place.
    """
    folder = Path(tempfile.gettempdir()) / f"penstock-{name}-{os.getuid()}"
    with storage_errors("making", str(folder)):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise Unsupported(
                f"{folder} belongs to somebody else", hint="set TMPDIR to a directory of your own"
            )
    return folder
