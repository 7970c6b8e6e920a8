"""The blocks of Python, of YAML and of shell in the documentation, page by page."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PAGES", "ROOT", "python_blocks", "shell_lines", "yaml_blocks"]

ROOT = Path(__file__).parents[2]
#: All pages, by their names.
PAGES = {page.stem: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python_blocks(page: str) -> list[str]:
    """Return the blocks of a page, each behind as many empty lines as are before it there."""
    text = PAGES[page].read_text()
    return [
        "\n" * text.count("\n", 0, found.start(1)) + found[1] for found in _BLOCK.finditer(text)
    ]


def yaml_blocks(page: str) -> list[str]:
    """Return the YAML of a page."""
    found = re.finditer(r"^```yaml\n(.*?)^```", PAGES[page].read_text(), re.DOTALL | re.MULTILINE)
    return [match[1] for match in found]


def shell_lines(page: str) -> list[str]:
    """Return the lines of a page that call penstock, without their comments."""
    text = re.sub(
        r"^```(\w*)\n(.*?)^```$", _indented, PAGES[page].read_text(), flags=re.DOTALL | re.MULTILINE
    )
    lines = re.findall(r"^    ((?:.*(?:\| |&& ))?penstock [^:].*)$", text, re.MULTILINE)
    return [re.sub(r"\s+# .*$", "", line) for line in lines]


def _indented(block: re.Match[str]) -> str:
    """Show a fenced block as an indented one, unless it is of another language."""
    return "" if block[1] else "".join(f"    {line}\n" for line in block[2].splitlines())
