"""How does Spark start in about half the time?

Java loads and checks some fifteen thousand classes before Spark has done anything. It can keep them
as it needs them, in an archive of classes that it maps when it starts the next time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import open_writer
from penstock.core.errors import PenstockError
from penstock.core.whole_files import open_new
from penstock.pipeline.java import MissingJava, find_java, java_version
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["NotPrepared", "archive", "options", "prepare"]

#: An archive that does not fit is not used. There is nothing to say about it then.
_QUIET: Final = "-Xlog:cds*=off"

#: Seconds for all that `prepare` does. It takes about thirty.
_PATIENCE: Final = 600.0

#: What most pipelines do, so that its classes are in the archive.
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


class NotPrepared(PenstockError):
    """Spark did not run, or Java did not keep its classes."""


def archive() -> Path | None:
    """Return the file for the Spark and the Java that are here; None: there is no Spark."""
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
    """Return what to tell Java, so that it uses the archive. Nothing, if there is none of ours."""
    try:
        file = archive()
        if file is None or set(str(file)) & set('"\\'):  # which Spark would take for its own
            return ""
        found = file.stat()
    except (MissingJava, OSError):
        return ""
    # It is code: not to be taken from somebody else.
    is_ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f'"-XX:SharedArchiveFile={file}" {_QUIET}' if is_ours else ""


def prepare() -> Path:
    """Run Spark once, and keep what Java has loaded. Return the file.

    :raises MissingJava: Spark needs a Java that is not there.
    :raises NotPrepared: it does not work; why is said.
    :raises StorageError: the file cannot be written.
    """
    file = archive()
    if file is None:
        raise NotPrepared("PySpark is not installed", hint="pip install 'penstock[spark]'")
    with tempfile.TemporaryDirectory(prefix="penstock-prepare-") as name:
        folder = Path(name)
        with open_writer(f"log:{folder}/in") as writer:
            writer.write_many([number.to_bytes(4, "little") for number in range(100)])
        (folder / "pipeline.yaml").write_text(_PIPELINE.format(folder=folder), encoding="utf-8")
        # Java inherits the ends of the pipes: they close when it has written the archive.
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
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = file.with_suffix(f".{os.getpid()}")
            with made.open("rb") as source, os.fdopen(open_new(new, 0o600), "wb") as copy:
                shutil.copyfileobj(source, copy)
            new.replace(file)
    return file


def _live(folder: Path) -> None:
    """Run the pipeline of a folder, in a Java that keeps its classes when it ends."""
    from penstock.pipeline.plan import plan  # noqa: PLC0415 - only in this process
    from penstock.pipeline.reading import load_pipelines  # noqa: PLC0415
    from penstock.pipeline.running import run  # noqa: PLC0415
    from penstock.pipeline.session import spark_session  # noqa: PLC0415

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
