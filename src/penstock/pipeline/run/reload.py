"""Has the file of a pipeline changed while it runs, and is the new version valid?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PenstockError
from penstock.pipeline.graph.check import check_functions, raise_all
from penstock.pipeline.graph.description import load_pipelines
from penstock.pipeline.graph.plan import plan
from penstock.pipeline.run.modules import forget_modules, modules_of, wanted_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.pipeline.graph.model import Pipeline
    from penstock.pipeline.graph.plan import Plan

__all__ = ["Changes"]

#: Seconds between two checks. A change counts only when two checks find the same.
_LOOK_EVERY: Final = 0.5

#: Modification time and size of files, by path; None: the file does not exist.
_Stamps = dict[Path, tuple[int, int] | None]


class Changes:
    """Watches a file, those that it includes, and the modules of its stages while they run."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        """Load a file, and watch it from before it is read.

        :raises PenstockError: it is not valid.
        """
        self._file = file
        self._say = say
        #: Files and packages to watch.
        self._places = {file}
        self._stamps = self._look()
        self._seen = self._stamps
        self._looked = 0.0
        #: The plan to run: of the file, or of its latest valid version.
        self.plan = plan(self._load())
        self._modules = modules_of(self.plan.pipelines)
        #: Whether `plan` is a new version.
        self.is_changed = False
        #: Files that have changed since a version was valid.
        self._changed: set[Path] = set()

    def are_good(self) -> bool:
        """Tell whether a valid change was found. An invalid one is reported once."""
        if not self.is_changed and time.monotonic() >= self._looked + _LOOK_EVERY:
            self._looked = time.monotonic()
            seen, self._seen = self._seen, self._look()
            if self._seen != self._stamps and self._seen == seen:  # not still being written
                paths = {*self._seen, *self._stamps}
                changed = {one for one in paths if self._stamps.get(one) != self._seen.get(one)}
                self._stamps = self._seen
                self._take(changed)
        return self.is_changed

    def _look(self) -> _Stamps:
        return {one: _stamp(one) for place in self._places for one in _files(place)}

    def _take(self, changed: set[Path]) -> None:
        names = ", ".join(sorted(path.name for path in changed))
        self._changed |= changed
        try:
            made = self._checked()
        except (PenstockError, SyntaxError, ValueError, OSError) as error:
            said = " ".join(str(error).split())
            self._say(f"{names} changed, and is not taken: {said}; what ran before goes on")
            return
        self._say(f"{names} changed; the batches under way are finished, and it begins anew")
        self.plan = made
        self.is_changed = True
        self._changed.clear()

    def _checked(self) -> Plan:
        """Return the plan of the new version.

        :raises PenstockError: it is not valid.
        :raises SyntaxError: a module is not valid Python; or a `ValueError`.
        """
        for path in self._changed:
            if path.suffix == ".py" and self._stamps.get(path) is not None:
                compile(path.read_bytes(), str(path), "exec")
        pipelines = self._load()
        check_functions(pipelines, are_changed=True)
        made = plan(pipelines)
        if not any(path.suffix == ".py" for path in self._changed):
            # Changed modules are not imported while the old version runs.
            self._analyze(made)
        return made

    def _load(self) -> list[Pipeline]:
        """Load the file. What it names is watched from before it is read, valid or not."""
        while True:
            pipelines = load_pipelines(self._file)
            named = {self._file, *_named(pipelines)}
            if named <= self._places:
                return pipelines
            for place in named - self._places:
                found = {one: _stamp(one) for one in _files(place)}
                self._stamps = {**found, **self._stamps}
                self._seen = {**found, **self._seen}
            self._places |= named

    @staticmethod
    def _analyze(made: Plan) -> None:
        """Check a plan with the running Spark session, if there is one."""
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

        from penstock.pipeline.run.analysis import analyze  # noqa: PLC0415 - loads Spark

        spark = SparkSession.getActiveSession()
        if spark is not None:
            raise_all(analyze(made, spark, 0).faults)

    def begin_anew(self) -> None:
        """Stop the Spark session, so that task processes restart, and unload the modules.

        Changes since the new version was read are found by the next check.
        """
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

        spark = SparkSession.getActiveSession()
        if spark is not None:
            spark.stop()
        new = modules_of(self.plan.pipelines)
        forget_modules({**self._modules, **new})
        self._modules = new
        self._places = {self._file, *_named(self.plan.pipelines)}
        self._stamps = {
            one: at
            for one, at in self._stamps.items()
            if not self._places.isdisjoint((one, *one.parents))
        }
        self._seen = self._stamps
        self.is_changed = False


def _named(pipelines: Iterable[Pipeline]) -> set[Path]:
    """Return the files that pipelines are read from, and the modules that their stages need."""
    pipelines = list(pipelines)
    files = {Path(one) for p in pipelines if p.lines is not None for one in p.lines.files}
    return {*files, *modules_of(pipelines).values(), *wanted_modules(pipelines)}


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
