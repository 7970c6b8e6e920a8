"""Which modules go along with a pipeline: those of its stages, and what they import beside them."""

from __future__ import annotations

import os
import tempfile
import zipfile
from typing import TYPE_CHECKING, Any

from penstock.pipeline import load_pipelines
from penstock.pipeline.run.modules import modules_of, ship

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TEXT = """
pipeline: p
sources: {a: {url: "log:/in"}}
stages:
  one: {from: a, use: "ship_one:f"}
  two: {from: a, use: "ship_package.deep:f"}
  installed: {from: a, use: "json:loads"}
sinks: {out: {from: one, url: "log:/out"}}
"""


class Context:
    def __init__(self) -> None:
        self.added: list[str] = []

    def addPyFile(self, path: str) -> None:  # noqa: N802 - Spark's
        self.added.append(path)


class Session:
    """As much of a session as is needed to take an archive."""

    def __init__(self) -> None:
        self.sparkContext = Context()
        self._jsparkSession = None


def write(folder: Path, helper: str) -> Any:
    (folder / "ship_one.py").write_text("import os, ship_helper\nfrom ship_package import deep\n")
    (folder / "ship_helper.py").write_text(helper)
    (folder / "ship_unused.py").write_text("")
    (folder / "ship_package").mkdir(exist_ok=True)
    (folder / "ship_package" / "__init__.py").write_text("from . import deep\n")
    (folder / "ship_package" / "deep.py").write_text("import ship_last\n\ndef f(x): ...\n")
    (folder / "ship_package" / "table.txt").write_text("1")
    (folder / "ship_last.py").write_text("not python at all")
    (folder / "p.yaml").write_text(TEXT)
    return load_pipelines(folder / "p.yaml")


def test_modules_are_found_through_what_others_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")  # so that it is put back
    pipelines = write(tmp_path, "")
    names = ["ship_helper", "ship_last", "ship_one", "ship_package"]
    assert list(modules_of(pipelines)) == names
    session: Any = Session()
    first = ship(session, pipelines)
    assert first is not None
    assert session.sparkContext.added == [str(first)]
    with zipfile.ZipFile(first) as archive:
        assert sorted(archive.namelist()) == [
            *("ship_helper.py", "ship_last.py", "ship_one.py"),
            *("ship_package/__init__.py", "ship_package/deep.py", "ship_package/table.txt"),
        ]
    assert ship(session, pipelines) == first
    assert ship(session, write(tmp_path, "x = 1")) != first


def test_archives_are_compressed_and_removed_when_no_process_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session: Any = Session()
    first = ship(session, write(tmp_path, "x = 1\n" * 1000))
    assert first is not None
    with zipfile.ZipFile(first) as archive:
        assert archive.getinfo("ship_helper.py").compress_size < 500
    unused = [first.with_name(f"stages-{name}.zip") for name in ("old", "new")]
    for path in unused:
        path.write_bytes(b"")
    for path in (first, unused[0]):
        os.utime(path, (1, 1))
    second = ship(session, write(tmp_path, "x = 2\n"))
    assert second is not None
    assert sorted(first.parent.glob("*.zip")) == sorted([first, second, unused[1]])
