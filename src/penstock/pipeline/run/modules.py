"""Which Python files beside a pipeline do its tasks need, and how do they get there?

Tasks may run on machines without the folder of the file. An archive carries the modules that
stages name, and those that they import from the same folders; installed packages have to be
installed there as well.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import io
import os
import sys
import time
import zipfile
from contextlib import suppress
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.functions import function_name
from penstock.core.whole_files import write_whole
from penstock.pipeline.graph.check import python_folders
from penstock.pipeline.spark_process import private_folder
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from penstock.pipeline.graph.model import Pipeline

__all__ = ["Carried", "forget_modules", "is_remote", "modules_of", "ship", "wanted_modules"]

#: A fixed date, so that the same files give the same archive.
_THEN: Final = (1980, 1, 1, 0, 0, 0)
#: Seconds after which an archive that no process uses is removed.
_KEPT: Final = 86400.0
#: The archives of this process, open and locked until it ends: executors that start later ask for
#: them.
_in_use: dict[Path, int] = {}


def modules_of(pipelines: Sequence[Pipeline]) -> dict[str, Path]:
    """Return the modules and packages beside the files that stages need, by name.

    Imports are found in the source; no module is imported.
    """
    folders = [Path(folder) for folder in python_folders(pipelines)]
    found: dict[str, Path] = {}
    waiting = _used(pipelines)
    while waiting:
        name = waiting.pop()
        place = None if name in found else _place(name, folders)
        if place is not None:
            found[name] = place
            waiting += {one for file in _files(place) if file.suffix == ".py" for one in _of(file)}
    return dict(sorted(found.items()))


def wanted_modules(pipelines: Sequence[Pipeline]) -> list[Path]:
    """Return where the modules that stages name would be, of those that are not beside the files.

    They are installed, or still missing.
    """
    folders = [Path(folder) for folder in python_folders(pipelines)]
    names = [name for name in _used(pipelines) if _place(name, folders) is None]
    return [folder / path for name in names for folder in folders for path in (f"{name}.py", name)]


def _used(pipelines: Iterable[Pipeline]) -> list[str]:
    """Return the top-level names of the modules that stages name."""
    return [
        function_name(stage.use).partition(":")[0].partition(".")[0]
        for pipeline in pipelines
        for stage in pipeline.stages.values()
        if stage.use is not None
    ]


def _place(name: str, folders: Iterable[Path]) -> Path | None:
    for folder in folders:
        if (folder / name / "__init__.py").is_file():
            return folder / name
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
    return None


def _files(place: Path) -> list[Path]:
    """Return the files of a module or a package."""
    if place.is_file():
        return [place]
    return [
        file
        for file in sorted(place.rglob("*"))
        if file.is_file() and file.parent.name != "__pycache__"
    ]


def _of(file: Path) -> Iterator[str]:
    """Yield the top-level names that a source file imports."""
    try:
        source = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # importing it will raise the error
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def ship(spark: SparkSession, pipelines: Sequence[Pipeline]) -> Path | None:
    """Send the modules of stages to the tasks of a session; return the archive, or None.

    :raises StorageError: the archive cannot be written.
    """
    carried = Carried.of(pipelines)
    if carried is None:
        return None
    archive = carried.keep()
    if is_remote(spark):
        spark.addArtifacts(str(archive), pyfile=True)
        # Not all processes of the server have the archive on their path.
        _pickle_by_value(carried.modules)
    else:
        spark.sparkContext.addPyFile(str(archive))
    return archive


def is_remote(spark: SparkSession) -> bool:
    """Tell whether a session is one of Spark Connect."""
    return not hasattr(spark, "_jsparkSession")


class Carried(NamedTuple):
    """Modules in an archive, to send to another process."""

    modules: tuple[str, ...]
    archive: bytes

    @classmethod
    def of(cls, pipelines: Sequence[Pipeline]) -> Carried | None:
        """Archive the modules that stages need; None: they need none."""
        modules = modules_of(pipelines)
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for place in modules.values():
                for file in _files(place):
                    entry = zipfile.ZipInfo(str(file.relative_to(place.parent)), _THEN)
                    entry.compress_type = zipfile.ZIP_DEFLATED  # an entry does not inherit it
                    with storage_errors("reading", str(file)):
                        archive.writestr(entry, file.read_bytes())
        return cls(tuple(modules), made.getvalue()) if modules else None

    def keep(self) -> Path:
        """Write the archive to a file named by its content: Spark never replaces a file."""
        name = f"stages-{hashlib.sha256(self.archive).hexdigest()[:16]}.zip"
        path = private_folder("modules") / name
        with storage_errors("writing", str(path)):
            while path not in _in_use:
                if not path.exists():
                    write_whole(path, self.archive, sync=False, is_shared=True)
                with suppress(FileNotFoundError):  # removed at this moment
                    _in_use[path] = _lock(path, fcntl.LOCK_SH)
            _remove_unused(path.parent)
        return path

    def unpack(self) -> None:
        """Add the archive to this process's `sys.path`."""
        path = str(self.keep())
        if path not in sys.path:
            sys.path.insert(0, path)
            _pickle_by_value(self.modules)


def _lock(path: Path, how: int) -> int:
    """Lock an archive; return the open file.

    :raises FileNotFoundError: it is removed.
    :raises BlockingIOError: with `LOCK_NB`, another process has locked it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, how)
    except BaseException:
        os.close(file)
        raise
    if os.fstat(file).st_nlink:
        return file
    os.close(file)
    raise FileNotFoundError(path)


def _remove_unused(folder: Path) -> None:
    """Remove old archives that no process uses."""
    for path in folder.glob("stages-*.zip"):
        with suppress(OSError):
            if path not in _in_use and path.stat().st_mtime < time.time() - _KEPT:
                file = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    path.unlink()
                finally:
                    os.close(file)


def _pickle_by_value(modules: Iterable[str]) -> None:
    """Have functions of these modules pickled by value, and not by name."""
    from pyspark import cloudpickle  # noqa: PLC0415 - an extra

    for name in modules:
        with suppress(Exception):  # using the module will raise the error
            cloudpickle.register_pickle_by_value(import_module(name))  # type: ignore[no-untyped-call]


def forget_modules(modules: Mapping[str, Path]) -> None:
    """Remove modules from `sys.modules`, so that the changed files are imported again."""
    for name in [one for one in sys.modules if one.partition(".")[0] in modules]:
        del sys.modules[name]
    invalidate_caches()  # of the names in folders: a file may be new
