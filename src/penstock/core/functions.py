"""Which function of which module is meant by `module:function`?"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import PenstockError
from penstock.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from importlib.machinery import ModuleSpec

__all__ = ["FunctionNotFound", "find_function", "function_name", "load_function"]


class FunctionNotFound(PenstockError):
    """The module or function does not exist, or the module cannot be imported."""


def function_name(use: str | Callable[..., Any]) -> str:
    """Return `module:function` for a function or for its name."""
    if isinstance(use, str):
        return use
    name = getattr(use, "__qualname__", type(use).__qualname__)
    return f"{getattr(use, '__module__', '?')}:{name}"


def find_function(name: str, *, is_changed: bool = False) -> None:
    """Check that `module:function` exists, as far as is possible without importing it.

    :param is_changed: its file may have changed since it was imported, and is what counts
    :raises FunctionNotFound: the module does not exist, or its source has no such function.
    """
    module_name, _, path = name.partition(":")
    if module_name in sys.modules and not is_changed:
        return
    if is_changed:
        importlib.invalidate_caches()
    spec = _spec(module_name, is_changed=is_changed)
    if spec is None:
        raise _no_module(module_name)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        source = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise FunctionNotFound(f"{module_name} cannot be imported: {error}") from error
    known = set(_names(source))
    if known.isdisjoint({path.partition(".")[0], "*", "__getattr__"}):
        raise _no_function(module_name, path, (one for one in known if one[0] != "_"))


def _spec(module_name: str, *, is_changed: bool) -> ModuleSpec | None:
    """Find a module. `importlib.util.find_spec` would import its parent packages."""
    first, *rest = module_name.split(".")
    try:
        spec = PathFinder.find_spec(first) if is_changed else None
        spec = spec or importlib.util.find_spec(first)
    except ValueError:  # it is loaded, and has no spec
        return None
    for end in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join((first, *rest[: end + 1]))
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _names(source: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines; `*` for a star import."""
    waiting: list[ast.AST] = [source]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield name
                case ast.ClassDef(name=name):
                    yield name
                case ast.alias(name=name, asname=asname):
                    yield asname or name
                case ast.Name(id=name, ctx=ast.Store()):
                    yield name
                case _:
                    waiting.append(node)


def load_function(name: str) -> Callable[..., Any]:
    """Import the module of `module:function`, and return the function.

    :raises FunctionNotFound: it does not exist, or the import of its module fails.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise FunctionNotFound(f"{module_name} cannot be imported: {error}") from error
        raise _no_module(module_name) from None
    except Exception as error:
        raise FunctionNotFound(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            known = (n for n, v in vars(found).items() if callable(v) and n[0] != "_")
            raise _no_function(module_name, path, known)
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _no_module(name: str) -> FunctionNotFound:
    return FunctionNotFound(
        f"there is no module {name}",
        hint="it should be installed, beside the file that names it, or on PYTHONPATH",
    )


def _no_function(module: str, name: str, known: Iterable[str]) -> FunctionNotFound:
    return FunctionNotFound(f"{module} has no function {name}", hint=nearest(name, known, "it has"))
