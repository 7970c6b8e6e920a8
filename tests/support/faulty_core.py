"""How does another build of the native core get into a process in place of the installed one?

`python -m support.faulty_core LIBRARY` serves the processes of `support.wide_faults` with it.
Nothing of the library may be imported before, hence a module of its own.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_CORE = "penstock.queue.wide._ring"


class _Finder:
    """Finds the core in a library that was built for a test."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - as importlib calls it
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _CORE:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self._library)
        return importlib.util.spec_from_loader(name, loader)


if __name__ == "__main__":
    sys.meta_path.insert(0, _Finder(sys.argv[1]))
    faults = importlib.import_module("support.wide_faults")
    assert importlib.import_module(_CORE).__file__ == sys.argv[1]
    faults.serve_operations()
