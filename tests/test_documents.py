"""Every block of the README and of docs/ is right: its commands exist, its Python runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from penstock.cli.main import app
from penstock.core import capabilities

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What all wrong usage is, in whichever library typer has for it.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
#: What a person puts something else for.
PLACEHOLDER = re.compile(r"\[|…|\.\.\.|\bURL\b|\bFILE\b|\bDIR\b|\bNAME\b|\bSTREAM\b|<\w+>")
#: Python that needs no other program, machine or hour: it is run, in the order of the document.
RUN = ["README.md", "logs.md", "streams.md", "wide-queues.md"]


class Block(NamedTuple):
    """A block of a document."""

    line: int
    kind: str
    text: str


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document, and the indented ones as `sh`."""
    text = document.read_text(encoding="utf-8")
    found = [
        Block(text[: match.start()].count("\n") + 1, match[1], match[2])
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    outside = re.sub(
        r"^```.*?^```$",
        lambda match: "\n" * match[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    for match in re.finditer(r"(?:^    \S.*\n)+", outside, re.MULTILINE):
        line = outside[: match.start()].count("\n") + 1
        found.append(Block(line, "sh", re.sub(r"^    ", "", match[0], flags=re.MULTILINE)))
    return found


def commands(block: Block) -> list[tuple[int, list[str]]]:
    """Return the calls of penstock in a block of shell, without what a person has to fill in."""
    found = []
    joined = block.text.replace("\\\n", "  ")
    for number, line in enumerate(joined.splitlines()):
        if PLACEHOLDER.search(line) or "penstock" not in line:
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # of a shell's own, such as a here-document
        call: list[str] | None = None
        for word in words:
            if word in {"|", "&", "&&", ";", "||"}:
                call = None
            elif call is None and word == "penstock":
                call = []
                found.append((block.line + number, call))
            elif call is not None:
                call.append(word.removesuffix(";"))
                if word.endswith(";"):
                    call = None
    return [
        (line, [w for w in words if not w.startswith(("<", ">", "2>"))]) for line, words in found
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_one_that_there_is(document: Path) -> None:
    group = typer.main.get_command(app)
    wrong = []
    for block in blocks(document):
        for line, words in commands(block) if block.kind == "sh" else ():
            try:
                parse(group, words)
            except typer.Exit:
                pass  # --version, --help
            except USAGE_ERROR as error:
                if "does not exist" not in str(error):  # a file of the reader's own
                    wrong.append(f"{document.name}:{line}: {' '.join(words)}: {error}")
    assert wrong == []


def parse(command: Any, words: list[str]) -> None:
    """Parse a call down to its last subcommand, and run nothing."""
    context = command.make_context("penstock", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("call", ["put x --nonsense", "nonsense", "log nonsense", "cat --from"])
def test_a_call_that_is_wrong_is_found(call: str) -> None:
    with pytest.raises(USAGE_ERROR):
        parse(typer.main.get_command(app), call.split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_of_python_and_yaml_can_be_read(document: Path) -> None:
    for block in blocks(document):
        if block.kind == "python":
            code = "\n" * block.line + block.text
            compile(code, str(document), "exec")
        elif block.kind == "yaml":
            assert all(isinstance(part, dict) for part in yaml.safe_load_all(block.text)), (
                block.line
            )


@pytest.mark.parametrize("name", RUN)
def test_blocks_of_python_run_in_their_order(tmp_path: Path, name: str) -> None:
    document = next(path for path in DOCUMENTS if path.name == name)
    code = ""
    for block in blocks(document):
        if block.kind == "python":
            code += "\n" * (block.line - code.count("\n")) + block.text
    # What a reader has at the root of the machine is in the folder of the test.
    code = re.sub(r"(?<=[\":])/(tmp|data|run|var)/", rf"{tmp_path}/\1/", code)
    for folder in ("tmp", "data", "run"):
        (tmp_path / folder).mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=False,
        env={**os.environ, "PENSTOCK_STREAMS": str(tmp_path / "streams")},
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_page_on_endpoints_names_every_capability() -> None:
    page = (ROOT / "docs" / "endpoints.md").read_text(encoding="utf-8")
    base = capabilities.Capability
    named = [
        name
        for name, each in vars(capabilities).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base
    ]
    assert len(named) > 10
    assert [name for name in named if f"`{name}`" not in page] == []
