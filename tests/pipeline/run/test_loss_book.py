"""What was lost is told once, by whichever run can."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from penstock.pipeline.graph.model import Source
from penstock.pipeline.run.loss_book import LossBook, Losses
from penstock.pipeline.source.checkpoint import Offset, offsets_to_json
from penstock.pipeline.source.loss_reports import Attempt, LostRange, note_delivered, reports_of

if TYPE_CHECKING:
    from pathlib import Path

URL = "fmq:/q"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "p-out"
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text('{"id": "one"}')
    return folder


def book_of(checkpoint: Path) -> LossBook:
    book = LossBook.of(str(checkpoint), [Source(url=(URL,), failOnDataLoss=False)])
    assert book is not None
    return book


def planned(checkpoint: Path, batch: int, offset: Offset) -> None:
    text = json.dumps(offsets_to_json({URL: offset}))
    (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{text}")


def lose(book: LossBook, first: int, last: int, batch: int, run: str) -> None:
    reports = reports_of(None, str(book.folder), "r")
    reports.report(LostRange(URL, 7, first, last, "overwritten"), Attempt(batch, run))


def test_what_is_counted_and_what_is_not_yet_are_told_together(checkpoint: Path) -> None:
    book = book_of(checkpoint)
    assert book.begin([]) == Losses({})
    planned(checkpoint, 3, Offset(7, 200, 100, lost=5, reader="r"))
    lose(book, 90, 99, 2, "a")  # counted in the five
    lose(book, 110, 119, 3, "a")
    lose(book, 105, 114, 3, "a")
    assert book.total() == Losses({URL: 5 + 15})
    # It was killed. The next one begins where nothing was told.
    assert book_of(checkpoint).begin([]) == Losses({})
    book.tell(book.total())
    book.clean()
    assert book_of(checkpoint).begin([]) == Losses({URL: 20})
    assert book.total() == Losses({URL: 20})  # it is kept until the query has counted it


def test_what_a_later_attempt_does_not_find_of_a_batch_that_was_delivered_is_no_loss(
    checkpoint: Path,
) -> None:
    book = book_of(checkpoint)
    planned(checkpoint, 0, Offset(7, 200, 100, reader="r"))
    lose(book, 110, 119, 0, "first")
    lose(book, 100, 149, 0, "second")
    assert book.total() == Losses({URL: 50})
    note_delivered(book.folder, Attempt(0, "first"))
    assert book.total() == Losses({URL: 10})


def test_losses_of_before_there_was_a_book_are_not_told_again(checkpoint: Path) -> None:
    planned(checkpoint, 0, Offset(7, 200, 100, lost=9, lost_unknown=1))
    assert book_of(checkpoint).begin([]) == Losses({URL: 9}, 1)


def test_a_query_that_begins_anew_has_a_book_of_its_own(checkpoint: Path) -> None:
    book = book_of(checkpoint)
    planned(checkpoint, 0, Offset(7, 200, 100, lost=9))
    book.tell(book.total())
    (checkpoint / "metadata").write_text('{"id": "another"}')
    planned(checkpoint, 0, Offset(7, 200, 100, lost=2))
    assert book_of(checkpoint).begin([]) == Losses({URL: 2})
