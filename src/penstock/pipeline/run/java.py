"""Which Java does Spark use, and how does it start in about half the time?

Java loads and verifies some fifteen thousand classes before Spark does anything. It can store them
ready for use in a class data sharing (CDS) archive, which it maps at the next start.

Spark lets its Python processes import PySpark from a zip file without compiled modules: each of
them compiles it again. Seven start with the first query and one with every other. In a home
without that file, they import the PySpark that is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import open_writer
from penstock.core.errors import PenstockError
from penstock.core.whole_files import open_new
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "MissingJava",
    "NotPrepared",
    "archive",
    "find_java",
    "home",
    "java_version",
    "options",
    "prepare",
    "remove",
]

_OLDEST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')


#: Java ignores an archive that does not match; no warning about it.
_QUIET: Final = "-Xlog:cds*=off"

#: Time limit of `prepare` in seconds. It takes about thirty.
_PATIENCE: Final = 600.0

#: Uses the features of most pipelines, so that their classes are archived.
_PIPELINE: Final = """
pipeline: prepare
sources:
  messages: {{url: "log:{folder}/in"}}
stages:
  numbers: {{from: messages, decode: {{format: struct, layout: "<i", names: [x]}}}}
  found: {{from: numbers, sql: "select seq, time, x, x * 2 as y from numbers where x > 0"}}
  counted:
    from: found
    sql: "select window(time, '1 minute') as w, count(*) as n from found group by 1"
sinks:
  stream: {{from: messages, url: "log:{folder}/out"}}
  files: {{from: found, parquet: "{folder}/files"}}
  counts: {{from: counted, console: true, mode: update}}
"""


class MissingJava(PenstockError):
    """The Java that Spark needs is not installed."""


def find_java() -> str:
    """Return the path of the Java that Spark will use.

    :raises MissingJava: Java is not installed, or too old.
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
    """Return the version line of a Java."""
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    # Lines about options from the environment may come first.
    return next(filter(_VERSION.search, said.splitlines()), said.partition("\n")[0])


class NotPrepared(PenstockError):
    """Spark did not run, or Java did not write the archive."""


def archive() -> Path | None:
    """Return the archive file for the installed Spark and Java; None: no PySpark."""
    try:
        spark = version("pyspark")
    except PackageNotFoundError:
        return None
    place = find_spec("pyspark")
    assert place is not None
    java = find_java()
    key = "\n".join((java, java_version(java), str(place.origin)))
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the standard says so: others are not meant
        cache = Path.home() / ".cache"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache / "penstock" / f"spark-{spark}-{digest}.jsa"


def options() -> str:
    """Return Java's options to use the archive; empty if this user has none."""
    try:
        file = archive()
        if file is None or set(str(file)) & set('"\\'):  # which Spark would take for its own
            return ""
    except MissingJava:
        return ""
    return f'"-XX:SharedArchiveFile={file}" {_QUIET}' if _is_ours(file) else ""


def home() -> Path | None:
    """Return the `SPARK_HOME` for a master on this machine; None: this user has none."""
    try:
        file = archive()
    except MissingJava:
        return None
    folder = None if file is None else _home_of(file)
    return folder if folder is not None and _is_ours(folder) else None


def _home_of(archive: Path) -> Path:
    return archive.with_suffix(".home")


def _is_ours(path: Path) -> bool:
    """Tell whether it exists and no other user could have written it: it is code."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make_home(folder: Path) -> None:
    """Link to the programs and the classes of the installed Spark."""
    place = find_spec("pyspark")
    assert place is not None
    assert place.origin is not None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("bin", "jars"):
        with suppress(FileExistsError):  # of an earlier time: its name says to which Spark
            (folder / name).symlink_to(Path(place.origin).with_name(name))


def remove() -> Path | None:
    """Remove what `prepare` has made; return the archive, None if there was none."""
    file = archive()
    if file is None:
        return None
    shutil.rmtree(_home_of(file), ignore_errors=True)
    was_there = file.exists()
    file.unlink(missing_ok=True)
    return file if was_there else None


def prepare() -> Path:
    """Run Spark once, and archive the classes that Java has loaded. Return the file.

    :raises MissingJava: the Java that Spark needs is not installed.
    :raises NotPrepared: no archive was written.
    :raises StorageError: the file cannot be written.
    """
    file = archive()
    if file is None:
        raise NotPrepared("PySpark is not installed", hint="pip install 'penstock[spark]'")
    with storage_errors("writing", str(file)):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_home(_home_of(file))  # Java keeps the classes of one path: it starts there
    with tempfile.TemporaryDirectory(prefix="penstock-prepare-") as name:
        folder = Path(name)
        with open_writer(f"log:{folder}/in") as writer:
            writer.write_many([number.to_bytes(4, "little") for number in range(100)])
        (folder / "pipeline.yaml").write_text(_PIPELINE.format(folder=folder), encoding="utf-8")
        # Java inherits the pipes: they close when it has written the archive.
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", __name__, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
            env={k: v for k, v in os.environ.items() if k != "SPARK_SUBMIT_OPTS"},
        )
        made = folder / file.name
        if done.returncode != 0 or not made.exists():
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise NotPrepared(
                f"Spark cannot be prepared: {said[-1] if said else 'Java kept nothing'}",
                hint="it works without, and starts more slowly",
            )
        with storage_errors("writing", str(file)):
            new = file.with_suffix(f".{os.getpid()}")
            with made.open("rb") as source, os.fdopen(open_new(new, 0o600), "wb") as copy:
                shutil.copyfileobj(source, copy)
            new.replace(file)
    return file


def _live(folder: Path) -> None:
    """Run the pipeline of a folder, in a Java that archives its classes at exit."""
    from penstock.pipeline.graph.description import load_pipelines  # noqa: PLC0415
    from penstock.pipeline.graph.plan import plan  # noqa: PLC0415 - only in this process
    from penstock.pipeline.run import run  # noqa: PLC0415
    from penstock.pipeline.run.spark import spark_session  # noqa: PLC0415

    file = archive()
    assert file is not None
    keeping = f'"-XX:ArchiveClassesAtExit={folder / file.name}" {_QUIET}'
    spark = spark_session("penstock", settings={"spark.driver.extraJavaOptions": keeping})
    run(
        plan(load_pipelines(folder / "pipeline.yaml")),
        spark=spark,
        checkpoint=str(folder / "checkpoints"),
        once=True,
        show=_collect,
    )
    spark.stop()


def _collect(_name: str, frame: DataFrame) -> None:
    frame.collect()


if __name__ == "__main__":
    _live(Path(sys.argv[1]))
