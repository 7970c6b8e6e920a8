"""What does a Spark user see of an error of ours?"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["explained"]


@contextmanager
def explained() -> Iterator[None]:
    """Put an error's hint below its message.

    Spark passes a Python error on as the text of its traceback, which has the message and the
    notes, and nothing of the fields. It serves as a decorator too, but not for generators.
    """
    try:
        yield
    except PenstockError as error:
        note = f"hint: {error.hint}"
        if error.hint and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
