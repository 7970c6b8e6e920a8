"""Java keeps the classes of Spark, and takes them from nobody else."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pyspark
import pytest

from cli.command import run
from penstock.pipeline.run import java

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "with a space"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def archive() -> Path:
    found = java.archive()
    assert found is not None
    return found


def test_nothing_is_said_to_java_before_it_was_prepared(cache: Path) -> None:
    assert archive().is_relative_to(cache)
    assert java.options() == ""


@pytest.mark.usefixtures("cache")
def test_an_archive_that_others_may_write_to_is_not_used() -> None:
    archive().parent.mkdir(parents=True)
    archive().touch(mode=0o600)
    assert str(archive()) in java.options()
    archive().chmod(0o622)
    assert java.options() == ""


@pytest.mark.usefixtures("cache")
def test_a_home_that_others_may_write_to_is_not_used() -> None:
    assert java.home() is None
    folder = archive().with_suffix(".home")
    folder.mkdir(mode=0o700, parents=True)
    assert java.home() == folder
    folder.chmod(0o770)
    assert java.home() is None


def test_a_folder_that_is_not_absolute_is_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert archive().is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert archive().is_absolute()


def test_without_java_nothing_is_prepared_and_it_is_said(cache: Path) -> None:
    done = run("prepare", XDG_CACHE_HOME=str(cache), JAVA_HOME=str(cache / "java"))
    assert done.returncode == 1
    assert b"Spark needs Java 17 or newer; there is none (hint: install it" in done.stderr


def test_what_is_kept_is_removed(cache: Path) -> None:
    done = run("prepare", "--remove", XDG_CACHE_HOME=str(cache))
    assert (done.returncode, done.stdout) == (0, b"there is nothing to remove\n")
    archive().parent.mkdir(parents=True)
    archive().touch()
    archive().with_suffix(".home").mkdir(mode=0o700)
    assert run("prepare", "--remove", XDG_CACHE_HOME=str(cache)).returncode == 0
    assert list((cache / "penstock").iterdir()) == []


@pytest.mark.full
def test_spark_starts_with_the_classes_that_were_kept(cache: Path) -> None:
    assert java.prepare() == archive()
    home = archive().with_suffix(".home")
    assert set((cache / "penstock").iterdir()) == {archive(), home}
    look = (
        "from pathlib import Path\n"
        "from penstock.pipeline.run.spark import spark_session\n"
        "spark = spark_session(master='local[1]')\n"
        "java = spark._jvm.java.lang.ProcessHandle.current().pid()\n"
        "print(Path(f'/proc/{java}/maps').read_text())\n"
        "def modules(_):\n"
        "    import pyspark\n"
        "    yield pyspark.__file__\n"
        "[found] = spark.sparkContext.parallelize([0], 1).mapPartitions(modules).collect()\n"
        "print('Python has', found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=300, check=True
    )
    assert str(archive()) in done.stdout
    assert f"Python has {pyspark.__file__}\n" in done.stdout  # and its compiled modules
