"""What does a command import before it does anything, and does the table tell the truth?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.commands import FAMILIES
from penstock.cli.main import commands_of

#: Each takes longer to import than most commands take to run.
HEAVY = {"numpy", "pyarrow", "pydantic", "asyncio", "yaml", "importlib.metadata", "pyspark"}
SHOWN = """
import sys
sys.argv[:] = ["penstock", *sys.argv[1:]]
from penstock.cli.main import main
try:
    main()
except SystemExit:
    print("imported:", *sys.modules, file=sys.stderr)
"""


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a command has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stderr.partition("imported:")[2].split())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_the_table_says_what_a_module_has(family: object) -> None:
    assert isinstance(family, tuple)
    module, heading, said = family
    commands = commands_of(module)
    assert set(commands) == set(said)
    for name, command in commands.items():
        first = " ".join(command.help.split("\n\n")[0].split())
        assert first == said[name]
        assert command.rich_help_panel == heading


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    imported = imported_by(*arguments)
    assert "typer" in imported
    assert not HEAVY & imported


@pytest.mark.parametrize("url", ["fmq:{}/queue?slots=64&size=1M", "log:{}/log?segment=1M"])
def test_one_message_needs_neither_arrays_nor_models(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    for arguments in (["put", "--text", "a"], ["put", "--text", "b"], ["info"], ["cat", "-n", "1"]):
        name, *options = arguments
        imported = imported_by(name, url, *options)
        assert "penstock.queue.wide.file" in imported
        assert not HEAVY & imported, name
        assert not imported & {"penstock.core.options", "penstock.queue.wide.arrow"}, name


@pytest.mark.parametrize("target", ["fmq:{}/copy?slots=64&size=1M", "log:{}/copy?segment=1M"])
def test_a_copy_does_not_import_pandas(target: str, tmp_path: Path) -> None:
    """Arrow would, for a column made an array of numpy, and that takes a quarter of a second."""
    source = f"fmq:{tmp_path}/queue?slots=64&size=1M"
    imported_by("put", source, "--text", "a")
    imported = imported_by("cp", source, target.format(tmp_path))
    assert "pyarrow" in imported
    assert not imported & {"pandas", "pyarrow.compute", "rich"}


@pytest.mark.parametrize("service", ["flight", "fmqp", "ldata"])
def test_a_server_imports_no_other_and_no_pandas(service: str, tmp_path: Path) -> None:
    imported = imported_by("serve", service, "--root", f"{tmp_path}/none")  # which is refused
    others = {
        "flight": "penstock.protocols.flight.server",
        "fmqp": "penstock.protocols.lrose.fmq_server",
        "ldata": "penstock.registry.latest_server",
        "lhhttt": "penstock.protocols.lhhttt.server",
        "psi": "penstock.protocols.psi.exporter",
    }
    assert others.pop(service) in imported
    assert not imported & {"pandas", *others.values()}


def test_a_client_of_flight_imports_neither_its_server_nor_pandas() -> None:
    script = "import sys, penstock.protocols.flight.endpoint; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "pyarrow.flight" in imported
    assert not imported & {"pandas", "penstock.protocols.flight.server"}


def test_a_task_that_writes_rows_does_not_import_pandas() -> None:
    script = (
        "import sys, pyarrow as pa\n"
        "from penstock.pipeline.sink.stream_sink import Targets\n"
        "rows = pa.RecordBatch.from_arrays([pa.nulls(0, pa.binary())], ['payload'])\n"
        "[(_, messages)] = Targets(['log:/none'], {}, ['payload']).messages(rows)\n"
        "print(messages.num_columns, *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("8 ")
    assert "pandas" not in done.stdout.split()
