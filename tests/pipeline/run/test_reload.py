"""A file that changes while it runs: what is good is taken, what is bad is said once."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import typer
from pyspark.sql import SparkSession

from penstock.cli import run as command
from penstock.pipeline import load_pipelines
from penstock.pipeline.run import Outcome, Progress
from penstock.pipeline.run.reload import Changes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.pipeline import Pipeline

TEXT = """
pipeline: p
sources: {a: {url: "log:/in"}}
stages: {x: {from: a, use: "reloaded_stage:f"}}
sinks: {out: {from: x, url: "log:/out"}}
"""


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the session of other tests: beginning anew would stop it."""
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)


def wait_for(changes: Changes, said: list[str], count: int) -> bool:
    until = time.monotonic() + 20
    while len(said) < count:
        assert time.monotonic() < until, said
        changes.are_good()
        time.sleep(0.05)
    return changes.are_good()


def test_what_is_good_is_taken_and_what_is_bad_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file, module = tmp_path / "p.yaml", tmp_path / "reloaded_stage.py"
    module.write_text("def f(x): return x\n")
    file.write_text(TEXT)
    said: list[str] = []
    changes = Changes(file, said.append)
    assert not changes.are_good()
    file.write_text(TEXT.replace("from: x", "from: y"))
    assert not wait_for(changes, said, 1)
    assert said[0].startswith(f"p.yaml changed, and is not taken: {file}:5: sinks.out.from: there")
    assert said[0].endswith("; what ran before goes on")
    file.unlink()
    assert not wait_for(changes, said, 2)
    module.write_text("def f(x: return x\n")
    file.write_text(TEXT)
    assert not wait_for(changes, said, 3)
    assert "p.yaml, reloaded_stage.py changed, and is not taken: " in said[2]
    module.write_text("def f(x): return x.limit(1)\n")
    assert wait_for(changes, said, 4)
    assert said[3].startswith("reloaded_stage.py changed; the batches under way are finished")
    assert changes.is_changed
    assert changes.are_good()
    assert len(said) == 4
    changes.begin_anew()
    assert not changes.are_good()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "reloaded_stage.py").write_text("def f(x): return x\n")
    file = tmp_path / "p.yaml"
    file.write_text(TEXT)
    yield file
    for name in ("reloaded_stage", "reloaded_other", "reloaded_package"):
        sys.modules.pop(name, None)


def test_a_save_before_the_new_version_runs_is_noticed(file: Path) -> None:
    said: list[str] = []
    changes = Changes(file, said.append)
    file.write_text(TEXT.replace("{out:", "{one:"))
    assert wait_for(changes, said, 1)
    file.write_text(TEXT.replace("{out:", "{other:"))  # while batches are finished
    changes.begin_anew()
    assert wait_for(changes, said, 2)
    assert list(changes.plan.pipelines[0].sinks) == ["other"]


def test_a_save_after_the_file_was_read_is_noticed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_before_it_is_saved(path: Path) -> list[Pipeline]:
        found = load_pipelines(path)
        file.write_text(TEXT.replace("{out:", "{other:"))
        return found

    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr("penstock.pipeline.run.reload.load_pipelines", read_before_it_is_saved)
        changes = Changes(file, said.append)
    assert wait_for(changes, said, 1)
    assert list(changes.plan.pipelines[0].sinks) == ["other"]


def test_modules_that_a_rejected_version_names_are_watched(file: Path) -> None:
    said: list[str] = []
    changes = Changes(file, said.append)
    file.write_text(TEXT.replace("reloaded_stage", "reloaded_other"))
    assert not wait_for(changes, said, 1)
    assert "there is no module reloaded_other" in said[0]
    (file.parent / "reloaded_other.py").write_text("def f(x): return x\n")
    assert wait_for(changes, said, 2)


def test_a_function_that_is_renamed_is_not_taken(file: Path) -> None:
    said: list[str] = []
    changes = Changes(file, said.append)
    import_module("reloaded_stage")  # as the run has done
    module = file.parent / "reloaded_stage.py"
    module.write_text("def g(x): return x\n")
    assert not wait_for(changes, said, 1)
    assert "reloaded_stage has no function f" in said[0]
    module.unlink()
    assert not wait_for(changes, said, 2)
    assert said[1].startswith("reloaded_stage.py changed, and is not taken: ")
    module.write_text("def f(x): return x\n")
    assert wait_for(changes, said, 3)


def test_a_file_of_a_package_that_is_removed_is_named(file: Path) -> None:
    package = file.parent / "reloaded_package"
    package.mkdir()
    (package / "__init__.py").write_text("def f(x): return x\n")
    (package / "unused.py").write_text("")
    file.write_text(TEXT.replace("reloaded_stage", "reloaded_package"))
    said: list[str] = []
    changes = Changes(file, said.append)
    (package / "unused.py").unlink()
    assert wait_for(changes, said, 1)
    assert said[0].startswith("unused.py changed; ")


def test_files_that_are_included_are_watched(file: Path) -> None:
    part = file.parent / "part.yaml"
    part.write_text('sources: {a: {url: "log:/in"}}\n')
    file.write_text("include: part.yaml\n" + TEXT.replace('sources: {a: {url: "log:/in"}}\n', ""))
    said: list[str] = []
    changes = Changes(file, said.append)
    part.write_text('sources: {a: {url: "log:/other"}}\n')
    assert wait_for(changes, said, 1)
    assert said[0].startswith("part.yaml changed; ")
    assert changes.plan.pipelines[0].sources["a"].urls == ("log:/other",)


def test_a_loss_before_a_change_counts_for_the_exit_code(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = [{"log:/in": 3}, {}]

    def run_until(*given: Any) -> Outcome:
        """Stand for a run that ends by a change, and then for one that ends by itself."""
        changes: Changes = given[4]
        if len(lost) == 2:
            file.write_text(TEXT.replace("{out:", "{other:"))
            while not changes.are_good():
                time.sleep(0.05)
        return Outcome((Progress("p-out", "done", lost=lost.pop(0)),), was_stopped=bool(lost))

    monkeypatch.setattr(command, "_run_until", run_until)
    with pytest.raises(typer.Exit) as caught:
        command.run(file, progress="none", reload=True)
    assert caught.value.exit_code == 3
    assert not lost
    assert "3 messages lost" in capfd.readouterr().err
