"""What does this machine have, and what does it lack?"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

import penstock
from penstock.cli.console import console
from penstock.cli.output import standard_output
from penstock.core.endpoints import schemes
from penstock.core.units import format_size
from penstock.pipeline.run import java
from penstock.pipeline.run.java import MissingJava, find_java, java_version

__all__ = ["add_to"]

_LIBRARIES = ("numpy", "pyarrow", "pydantic", "PyYAML", "typer", "rich")
#: Libraries of extras: library, extra, and what it is for.
_EXTRAS = """
textual        top       penstock top
matplotlib     pictures  bench --plot, plan --svg, radar plot
mcap           mcap      mcap: files
protobuf       protobuf  --decode protobuf:…
lxml           xml       decoding of XML
paho-mqtt      mqtt      up+mqtt:
eclipse-zenoh  zenoh     up+zenoh:
grpcio         jrtc      penstock jrtc, serve collector
netCDF4        radar     cfradial:, cfgrid:
"""
#: Linux reports a larger number if there is no limit.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    #: None: not needed by the installed extras.
    is_fine: bool | None
    #: What to do if it fails.
    advice: str = ""


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command(rich_help_panel="This machine")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what this machine has for Penstock. Exit code 1 if something needed is missing."""
    findings = [
        Finding("penstock", penstock.__version__, is_fine=True),
        _python(),
        *map(_library, _LIBRARIES),
        Finding("endpoints", ", ".join(f"{s}:" for s in schemes()) or "none", bool(schemes()),
                "install the package again: pip install penstock"),
        _locks(),
        _shared_memory_limit(),
        _space("/dev/shm"),  # noqa: S108 - this is the thing looked at
        _space("/tmp"),  # noqa: S108
        _java(),
        _spark(),
        *(_extra(*line.split(maxsplit=2)) for line in _EXTRAS.strip().splitlines()),
        _program("cc", "apt-get install gcc", "to build the native core from source"),
    ]  # fmt: skip
    with standard_output():
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings]))
        else:
            console.print(_table(findings))
    if any(finding.is_fine is False for finding in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    marks = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "[yellow]-[/yellow]"}
    table = Table(box=None, show_header=False)
    for finding in findings:
        advice = "" if finding.is_fine else finding.advice
        # As text: brackets are not markup.
        row = Text(finding.what), Text(finding.found), Text(advice, style="dim")
        table.add_row(marks[finding.is_fine], *row)
    return table


def _python() -> Finding:
    found = (
        f"{platform.python_version()} ({sys.executable}), {platform.system()} {os.uname().release}"
    )
    is_fine = sys.version_info >= (3, 11) and sys.platform == "linux"
    return Finding("python", found, is_fine, "Penstock needs Python 3.11 on Linux")


def _library(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name), is_fine=True)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", is_fine=False, advice=f"pip install {name}")


def _extra(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name), is_fine=True)
    except importlib.metadata.PackageNotFoundError:
        advice = f"for {purpose}: pip install 'penstock[{extra}]'"
        return Finding(name, "missing", is_fine=None, advice=advice)


def _locks() -> Finding:
    has = hasattr(fcntl, "F_OFD_SETLK")
    return Finding("file locks", "open file description" if has else "missing", has,
                   "queues beside LROSE need Linux 3.15 or later")  # fmt: skip


def _shared_memory_limit() -> Finding:
    try:
        limit = int(Path("/proc/sys/kernel/shmmax").read_text())
    except (OSError, ValueError):
        return Finding("shared memory", "none", is_fine=None, advice="shmem_N queues will not work")
    found = f"segments up to {format_size(limit)}" if limit < _UNLIMITED else "no limit"
    return Finding("shared memory", found, is_fine=True)


def _space(path: str) -> Finding:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return Finding(path, "missing", is_fine=None)
    found = f"{format_size(usage.free)} free of {format_size(usage.total)}"
    return Finding(path, found, usage.free > 64 << 20, "free some space")


def _java() -> Finding:
    try:
        return Finding("java", java_version(find_java()), is_fine=True)
    except MissingJava as error:
        return Finding("java", "missing", is_fine=None, advice=f"for Spark: {error.hint}")


def _spark() -> Finding:
    try:
        file = java.archive()
    except MissingJava:
        file = None
    if file is None:
        return Finding("spark", "missing", is_fine=None, advice="pip install 'penstock[spark]'")
    found = importlib.metadata.version("pyspark")
    if java.options():
        return Finding("spark", f"{found}, prepared to start quickly", is_fine=True)
    return Finding("spark", found, is_fine=None, advice="penstock prepare: it starts more quickly")


def _program(name: str, install: str, purpose: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path or "missing", True if path else None, f"{purpose}: {install}")
