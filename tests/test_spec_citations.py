"""Does every citation of `docs/specs` in the code lead to a heading, a rule or an item there?"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "specs"
KINDS = {".py", ".pyi", ".c", ".h", ".proto"}

#: What may stand between two words of a comment that goes on in the next line.
GAP = r"(?:\s|\n[ \t]*(?:#:?|//|\*)?)+"
SECTION = r"\d+(?:\.\d+)*"
CITATION = re.compile(
    rf"docs/specs/(?P<page>\w+)\.md{GAP}"
    rf"(?P<sections>{SECTION}(?:(?:,| to| and){GAP}{SECTION})*)"
    rf"(?:{GAP}item{GAP}(?P<item>\d+))?"
)
HEADING = re.compile(rf"^#{{2,}} ({SECTION}) ", re.MULTILINE)
#: A rule or a case of uProtocol's dispatchers, in a comment or in the name of a test.
RULE = re.compile(r"(?<![0-9A-Za-z])(?:[RE]\d{1,2}|(?<=test_)[re]\d{1,2}(?=_))(?![0-9A-Za-z])")


class Citation(NamedTuple):
    """A place in the code that cites a page."""

    where: str
    page: str
    section: str
    item: str | None


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    """The text of all files of code, by their path."""
    files = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*")]
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for path in files
        if path.suffix in KINDS and path != Path(__file__)
    }


def citations_in(where: str, text: str) -> list[Citation]:
    return [
        Citation(where, found["page"], section, found["item"])
        for found in CITATION.finditer(text)
        for section in re.findall(SECTION, found["sections"])
    ]


@cache
def sections_of(page: str) -> dict[str, str]:
    """Return the text of each section of a page, by its number; nothing for no page."""
    path = PAGES / f"{page}.md"
    if not path.is_file():
        return {}
    _, *parts = HEADING.split(path.read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


def leads_nowhere(citation: Citation) -> bool:
    text = sections_of(citation.page).get(citation.section)
    if text is None:
        return True
    return citation.item is not None and f"\n{citation.item}. " not in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(docs/specs/lrose.md 1.8, step F)", ["1.8"]),
        ("(docs/specs/lrose.md\n    # 1.4, 1.6 and 2).", ["1.4", "1.6", "2"]),
        ("docs/specs/psi.md 1.2 to\n * 1.7", ["1.2", "1.7"]),
        ("(docs/specs/uprotocol.md 10.4, E1, E2)", ["10.4"]),
        ("see docs/specs/psi.md", []),
    ],
)
def test_citations_are_found_also_across_lines(text: str, found: list[str]) -> None:
    assert [citation.section for citation in citations_in("", text)] == found


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("docs/specs/lrose.md 6.1 item 3", False),
        ("docs/specs/lrose.md 6.1 item 99", True),
        ("docs/specs/lrose.md 1.99", True),
        ("docs/specs/nobody.md 1", True),
    ],
)
def test_a_citation_of_what_there_is_not_is_noticed(text: str, is_wrong: bool) -> None:
    [citation] = citations_in("", text)
    assert leads_nowhere(citation) is is_wrong


def test_every_citation_names_a_page_and_a_heading(code: dict[str, str]) -> None:
    found = [citation for where, text in code.items() for citation in citations_in(where, text)]
    assert [citation for citation in found if leads_nowhere(citation)] == []


def test_every_page_that_is_named_is_there(code: dict[str, str]) -> None:
    named = {page for text in code.values() for page in re.findall(r"docs/specs/(\w+)\.md", text)}
    assert sorted(page for page in named if not (PAGES / f"{page}.md").is_file()) == []


def test_every_rule_of_dispatchers_that_is_named_is_on_the_page(code: dict[str, str]) -> None:
    page = "".join(sections_of("uprotocol").values())
    rules = set(re.findall(r"^\| ([RE]\d+) \|", page, re.MULTILINE))
    named = {
        (where, rule.upper())
        for where, text in code.items()
        if "dispatch" in where or "uprotocol" in where
        for rule in RULE.findall(text)
    }
    assert named, "no rule is named any more: remove this test"
    assert sorted((where, rule) for where, rule in named if rule not in rules) == []


def test_no_citation_of_the_old_form_is_left(code: dict[str, str]) -> None:
    old = re.compile(
        r"(?i:\bspec,?\s+(?:(?:lrose|psi|uprotocol)\b|\d))"  # without the page
        r"|\((?:iwrf|jrtc|lrose|psi|streampy|uprotocol) \d"  # likewise
        r"|docs/specs/\w+\.md,\s+[A-Z]"  # a title, which may change, for a number
    )
    assert [(where, found[0]) for where, text in code.items() for found in old.finditer(text)] == []
