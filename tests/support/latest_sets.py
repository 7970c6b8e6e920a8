"""Writing and reading latest_data_info in tests, without a DataMapper."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.protocols.lrose.ldata_format import LatestInfo
from penstock.registry.latest import LatestDataInfo

__all__ = ["drained", "latest", "paths", "write"]


def latest(directory: str | Path, **options: Any) -> LatestDataInfo:
    options.setdefault("register", None)
    return LatestDataInfo(directory, **options)


def write(directory: str, *names: str, **fields: Any) -> None:
    with latest(directory) as there:
        for number, name in enumerate(names):
            there.write(name, time=1705320000 + number, **fields)


def paths(found: Iterable[LatestInfo]) -> list[str]:
    return [info.rel_data_path for info in found]


def drained(there: LatestDataInfo, **options: Any) -> list[LatestInfo]:
    found = []
    while (info := there.read(**options)) is not None:
        found.append(info)
    return found
