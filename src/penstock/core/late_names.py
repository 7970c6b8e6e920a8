"""How does a package export names without importing their modules?"""

from __future__ import annotations

import ast
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["late_names"]


def late_names(package: str, moved: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """Return the `__getattr__` of a package: a name is imported on first access.

    The names are those that the package imports under `if TYPE_CHECKING`, so they are listed only
    once. A name must not also be that of a module in the package: which of the two is found would
    depend on earlier imports.

    :param moved: modules, and their names that the package had before: access to these warns
    """
    where: dict[str, str] = {}
    former = {name: module for module, names in (moved or {}).items() for name in names.split()}

    def get(name: str) -> object:
        if not where:
            where.update(_imports(package))
        if name in former:
            said = f"{package}.{name} will be gone: use {former[name]}.{name}"
            warnings.warn(said, DeprecationWarning, stacklevel=2)
            return getattr(import_module(former[name]), name)
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object
        if where[name] == package:
            found = import_module(f"{package}.{name}")
        else:
            found = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return get


def _imports(package: str) -> dict[str, str]:
    """Return the modules of the names that a package imports for type checkers."""
    source = Path(sys.modules[package].__file__ or "")
    return {
        alias.name: statement.module
        for block in ast.parse(source.read_bytes()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
