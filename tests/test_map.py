"""Is the map in CONTRIBUTING true: its picture of the rooms, and where questions are answered?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (.+\?.*) \| `([a-z_/0-9]+\.py)` \|$", re.MULTILINE)
ROOM = re.compile(r'^  (\w+)\["\1: ', re.MULTILINE)


def test_the_picture_shows_every_room_and_no_other() -> None:
    [picture] = re.findall(
        r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    folders = [path.parent.name for path in (ROOT / "src/penstock").glob("*/__init__.py")]
    assert sorted(ROOM.findall(picture)) == sorted(folders)


def test_each_question_is_the_first_line_of_the_module_that_answers_it() -> None:
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(rows) >= 30
    for question, module in rows:
        text = ast.get_docstring(ast.parse((ROOT / "src/penstock" / module).read_text()))
        assert text is not None
        assert text.split("\n")[0] == question, module
