"""Whatever stands in a file, it gives pipelines or a ConfigError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.drawing import to_mermaid
from penstock.core.drawing.picture import compose
from penstock.core.errors import ConfigError
from penstock.pipeline import parse_pipelines, plan
from penstock.pipeline.graph.plan_diagram import diagram_of, to_text
from pipeline.graph.test_mistakes import GOOD, SECOND

TEXT = f"{GOOD}---\n{SECOND}"
PIECES = [
    *(line.strip() for line in TEXT.splitlines()), "null", "[]", "{}", "- ", "---", "...", "&a",
    "*a", "!!int", "\t", "\x85", "5", "true", "''", "moments", "beams", "{from: x}", "#", "%", ":",
]  # fmt: skip


@st.composite
def changed_files(draw: st.DrawFn) -> str:
    text = TEXT
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 40))
        piece = draw(st.sampled_from(PIECES) | st.text(max_size=5))
        text = text[:start] + piece + text[end:]
    return text


def read_or_refuse(text: str) -> None:
    with contextlib.suppress(ConfigError):
        made = plan(parse_pipelines(text))
        to_text(made)
        to_mermaid(diagram_of(made))
        compose(diagram_of(made))


@settings(max_examples=150)
@given(changed_files())
def test_fuzz_a_file_with_changes_is_read_or_refused(text: str) -> None:
    read_or_refuse(text)


@pytest.mark.full
@settings(max_examples=10_000)
@given(changed_files())
def test_fuzz_ten_thousand_files_with_changes_are_read_or_refused(text: str) -> None:
    read_or_refuse(text)
