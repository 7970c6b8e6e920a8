from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.overflow import DropReason
from penstock.core.statistics import LoggedLosses, Loss, LossLedger, ReaderStatistics


def test_a_loss_counts_both_its_ends() -> None:
    assert Loss(5, 5, DropReason.OVERRUN).count == 1
    assert Loss(5, 9, DropReason.OVERRUN).count == 5


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (Loss(5, 5, DropReason.DAMAGED), "1 message lost (seq 5): damaged"),
        (Loss(0, 1999, DropReason.OVERRUN), "2,000 messages lost (seq 0 to 1999): overrun"),
    ],
)
def test_a_loss_reads_as_a_sentence(loss: Loss, text: str) -> None:
    assert str(loss) == text


def test_a_new_ledger_is_empty() -> None:
    ledger = LossLedger()
    assert ledger.total == 0
    assert ledger.ranges() == ()


def test_losses_that_touch_become_one_range() -> None:
    ledger = LossLedger()
    for first, last in ((0, 4), (5, 5), (6, 9)):
        ledger.add(Loss(first, last, DropReason.OVERRUN))
    assert ledger.ranges() == (Loss(0, 9, DropReason.OVERRUN),)
    assert ledger.total == 10


def test_losses_apart_or_for_another_reason_stay_apart() -> None:
    ledger = LossLedger()
    losses = (
        Loss(0, 4, DropReason.OVERRUN),
        Loss(6, 9, DropReason.OVERRUN),
        Loss(10, 10, DropReason.DAMAGED),
    )
    for loss in losses:
        ledger.add(loss)
    assert ledger.ranges() == losses


def test_the_last_losses_are_logged_with_an_interval_or_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    ledger = LoggedLosses("x:y", logging.getLogger("tests"))
    for seq in (0, 2, 4):
        ledger.add(Loss(seq, seq, DropReason.OVERRUN))
    ledger.tell()
    now += 1.5
    for _ in range(2):
        ledger.tell()
    ledger.add(Loss(6, 6, DropReason.OVERRUN))
    for _ in range(2):
        ledger.tell(at_once=True)
    assert [record.getMessage() for record in caplog.records] == [
        "x:y: 1 message lost (seq 0): overrun; 1 in all",
        "x:y: 1 message lost (seq 4): overrun; 3 in all",
        "x:y: 1 message lost (seq 6): overrun; 4 in all",
    ]


def test_ranges_given_out_do_not_change_later() -> None:
    ledger = LossLedger()
    ledger.add(Loss(0, 0, DropReason.OVERRUN))
    before = ledger.ranges()
    ledger.add(Loss(1, 1, DropReason.OVERRUN))
    assert before == (Loss(0, 0, DropReason.OVERRUN),)


def test_the_total_stays_exact_beyond_the_ranges_remembered() -> None:
    ledger = LossLedger()
    for number in range(5000):
        ledger.add(Loss(number * 2, number * 2, DropReason.OVERRUN))
    assert ledger.total == 5000
    assert len(ledger.ranges()) == 1000
    assert ledger.ranges()[-1].last == 9998


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from(DropReason)), max_size=50
    )
)
def test_ranges_and_total_agree_and_stay_in_order(
    steps: list[tuple[int, int, DropReason]],
) -> None:
    ledger = LossLedger()
    lost: list[tuple[int, DropReason]] = []
    seq = 0
    for gap, count, reason in steps:
        seq += gap
        ledger.add(Loss(seq, seq + count - 1, reason))
        lost += [(number, reason) for number in range(seq, seq + count)]
        seq += count
    ranges = ledger.ranges()
    assert [(seq, loss.reason) for loss in ranges for seq in range(loss.first, loss.last + 1)] == (
        lost
    )
    assert ledger.total == len(lost) == sum(loss.count for loss in ranges)


def test_losses_outside_of_a_range_are_none_of_its_reader() -> None:
    losses = tuple(Loss(first, first + 9, DropReason.OVERRUN) for first in (0, 20, 40))
    books = ReaderStatistics(5, 50, 1030, 0, 0, 50, 0, losses)  # 1000 are remembered no more
    assert books.before(50) == books
    cut = books.before(25)
    assert cut.lost == 1015
    assert cut.losses == (losses[0], Loss(20, 24, DropReason.OVERRUN))
    assert books.before(0).losses == ()
