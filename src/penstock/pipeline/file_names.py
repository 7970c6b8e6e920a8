"""What is a file called that is about a stream which has no place on this disk?"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["file_name"]

_LONGEST: Final = 80


def file_name(url: str) -> str:
    """Return a name that people recognise, and that no other URL has."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:_LONGEST]
    # `radar_1` and `radar-1`, or two topics of one broker, must not have the same.
    return f"{plain}-{hashlib.sha256(url.encode(errors='surrogateescape')).hexdigest()[:12]}"
