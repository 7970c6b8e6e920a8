"""Things that are closed: at the end of a `with`, also of one that failed."""

from __future__ import annotations

import pytest

from penstock.core.closing import Closable, Concluding


class _Tap(Closable):
    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_with_hands_out_the_thing_itself_and_closes_it_at_its_end() -> None:
    tap = _Tap()
    with tap as entered:
        assert entered is tap
        assert tap.closed == 0
    assert tap.closed == 1


def test_a_failure_inside_a_with_closes_it_and_is_not_hidden() -> None:
    tap = _Tap()
    with pytest.raises(ValueError, match="inside"), tap:
        raise ValueError("inside")
    assert tap.closed == 1


def test_what_cannot_be_closed_cannot_be_made() -> None:
    class Leak(Closable):
        pass

    with pytest.raises(TypeError, match="close"):
        Leak()  # type: ignore[abstract]


def test_a_thing_with_slots_stays_without_a_dictionary() -> None:
    assert not hasattr(_Tap(), "__dict__")


class _Worker(Concluding):
    def __init__(self) -> None:
        self.said: list[bool] = []

    def _close(self, *, finished: bool) -> None:
        self.said.append(finished)


def test_work_is_done_when_it_is_closed_or_a_with_ends_well() -> None:
    worker = _Worker()
    with worker as entered:
        assert entered is worker
    worker.close()
    assert worker.said == [True, True]


def test_work_is_not_done_when_a_with_fails() -> None:
    worker = _Worker()
    with pytest.raises(KeyboardInterrupt), worker:
        raise KeyboardInterrupt
    assert worker.said == [False]
