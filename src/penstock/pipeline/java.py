"""Which Java does Spark use?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

from penstock.core.errors import PenstockError

__all__ = ["MissingJava", "find_java", "java_version"]

_OLDEST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')


class MissingJava(PenstockError):
    """Spark needs a Java that is not there."""


def find_java() -> str:
    """Return the Java that Spark will use.

    :raises MissingJava: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    hint = f"install it (apt-get install openjdk-{_OLDEST}-jre-headless), or set JAVA_HOME"
    if java is None or not Path(java).exists():
        raise MissingJava(f"Spark needs Java {_OLDEST} or newer; there is none", hint=hint)
    said = java_version(java)
    version = _VERSION.search(said)
    if version is None or int(version[1]) < _OLDEST:
        found = said or "nothing that it says"
        raise MissingJava(f"Spark needs Java {_OLDEST} or newer; {java} is {found}", hint=hint)
    return java


@cache
def java_version(java: str) -> str:
    """Return what a Java says of itself, in one line."""
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    # Before it, it may tell of options from its environment.
    return next(filter(_VERSION.search, said.splitlines()), said.partition("\n")[0])
