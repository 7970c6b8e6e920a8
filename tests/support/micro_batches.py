"""What Spark does with a checkpoint, batch by batch: the real source and the real sink, no JVM."""

from __future__ import annotations

import json
import secrets
import uuid
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock.core.batch import batch_from_messages
from penstock.core.message import Message
from penstock.pipeline.source.checkpoint import origin_of
from penstock.queue.append_once import Staging, append_once
from support.planner import Planner

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Refused", "deliver"]


class Refused(Exception):
    """Spark does not go on with such a checkpoint."""


class _Checkpoint:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("offsets", "commits"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        metadata = folder / "metadata"
        if not metadata.exists():
            metadata.write_text(json.dumps({"id": str(uuid.uuid4())}))
        try:
            self.query: str = json.loads(metadata.read_text())["id"]
        except (ValueError, KeyError, TypeError):
            raise Refused("metadata") from None

    def latest(self, name: str) -> int | None:
        found = [int(f.name) for f in (self.folder / name).iterdir() if f.name.isdigit()]
        return max(found, default=None)

    def read(self, batch: int) -> dict[str, Any]:
        try:
            version, _, offsets = (self.folder / "offsets" / str(batch)).read_text().splitlines()
            found: dict[str, Any] = json.loads(offsets)
        except (OSError, ValueError):
            raise Refused(f"offsets/{batch}") from None
        if version != "v1":
            raise Refused(f"offsets/{batch}")
        return found

    def add(self, name: str, batch: int, *lines: str) -> None:
        path = self.folder / name / str(batch)
        if path.exists():
            raise Refused(f"concurrent {name}/{batch}")
        path.write_text("\n".join(("v1", "{}", *lines)))


def deliver(source: str, target: str, folder: Path, staging: Path, per_batch: int) -> None:
    """Deliver all that is there, from where the checkpoint says.

    :raises Refused: Spark would end the query.
    """
    checkpoint = _Checkpoint(folder)
    planner = Planner(source, minPartitions=2)
    try:
        _run(planner, checkpoint, target, staging, ReadMaxRows(per_batch))
    finally:
        planner.reader.stop()


def _run(
    planner: Planner, checkpoint: _Checkpoint, target: str, staging: Path, limit: ReadMaxRows
) -> None:
    planned, committed = checkpoint.latest("offsets"), checkpoint.latest("commits")
    if committed is not None:
        lines = (checkpoint.folder / "commits" / str(committed)).read_text().splitlines()
        if lines[:2] != ["v1", "{}"]:
            raise Refused(f"commits/{committed}")
    batch = 0
    if planned is None:
        planner.begin()
    else:
        end = checkpoint.read(planned)
        if planned == committed:
            planner.at, batch = end, planned + 1
        else:
            before = checkpoint.read(planned - 1) if planned else planner.begin()
            planner.at = end
            planner.parts = planner._parts(before)
            _deliver(planner, checkpoint, target, staging, planned)
            batch = planned + 1
    while planner.plan(limit):
        checkpoint.add("offsets", batch, json.dumps(planner.at))
        _deliver(planner, checkpoint, target, staging, batch)
        batch += 1


def _deliver(
    planner: Planner, checkpoint: _Checkpoint, target: str, staging: Path, batch: int
) -> None:
    task = Staging(staging / checkpoint.query / str(batch), 0)
    numbers = planner.read()
    if numbers:
        messages = [Message(0, 0, 0, 0, 0, None, None, b"%d" % n) for n in numbers]
        task.add([target], batch_from_messages(messages))
    parts = task.finish()
    if parts:
        origin = origin_of(str(checkpoint.folder), batch, secrets.token_hex(4))
        append_once(target, parts, checkpoint.query, batch, staging, origin)
    checkpoint.add("commits", batch)
