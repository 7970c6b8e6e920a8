from __future__ import annotations

import math
import threading
import time

import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import InvalidOption
from penstock.core.quota import PsiQuota, TokenBucket, parse_quota

MS = 1_000_000


def test_the_rate_holds_from_the_first_byte_on() -> None:
    clock = ManualClock()
    quota = TokenBucket(1000, clock=clock)
    sent = 0
    while clock.monotonic() < 10:
        clock.sleep(quota.delay(28))
        sent += 28
    assert sent == pytest.approx(10_000, rel=0.01)


def test_a_message_larger_than_the_rate_waits_its_time_and_so_does_the_next() -> None:
    clock = ManualClock()
    quota = TokenBucket(1000, clock=clock)
    clock.sleep(quota.delay(5000))
    assert clock.monotonic() == pytest.approx(5)
    assert quota.delay(1000) == pytest.approx(1)


def test_what_a_window_saved_up_may_go_at_once_and_no_more() -> None:
    clock = ManualClock()
    quota = TokenBucket(1000, window=2, clock=clock)
    clock.advance(100)
    assert quota.delay(2000) == 0
    assert quota.delay(500) == pytest.approx(0.5)


def test_many_that_share_a_quota_keep_to_it_together() -> None:
    quota = TokenBucket(200_000)
    sent = [0] * 4
    began = time.monotonic()

    def send(index: int) -> None:
        while (now := time.monotonic()) - began < 1.0:
            delay = quota.delay(1000)
            if now + delay - began > 1.0:
                return
            time.sleep(delay)
            sent[index] += 1000

    threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.9 * 200_000 <= sum(sent) <= 1.05 * 200_000


def test_the_formula_of_psi_sleeps_as_the_real_exporter_was_seen_to() -> None:
    # One float (24 + 4 bytes) every 20 ms, 1000 B/s, window 5 s: docs/specs/psi.md 4.
    quota = PsiQuota(1000)
    delays = [round(quota.delay(28, i * 20 * MS) * 1000) for i in range(51)]
    assert delays[:5] == [0, 0, 0, 0, 2]
    assert (delays[5], delays[10], delays[26]) == (7, 35, 118)
    assert delays[50] == pytest.approx(234, abs=3)


def test_the_formula_of_psi_is_off_for_good_after_two_messages_of_one_time() -> None:
    quota = PsiQuota(10)
    for i in range(50):
        quota.delay(1000, i * MS)
    assert quota.delay(1000, 50 * MS) > 0
    assert quota.delay(1000, 50 * MS) == 0
    assert math.isnan(quota._average)
    assert quota.delay(1000, 51 * MS) == 0


def test_time_that_goes_back_does_not_make_the_formula_of_psi_sleep() -> None:
    quota = PsiQuota(10)
    quota.delay(1000, 5 * MS)
    assert quota.delay(1000, 4 * MS) == 0


def test_a_quota_is_read_from_text() -> None:
    plain = parse_quota("1MB/s")
    assert isinstance(plain, TokenBucket)
    assert (plain.rate, plain.window) == (1_000_000, 1.0)
    assert parse_quota("64k:5s").window == 5
    psi = parse_quota("psi:2MiB/s:3s")
    assert isinstance(psi, PsiQuota)
    assert (psi.rate, psi.window) == (2 << 20, 3)


@pytest.mark.parametrize("text", ["", "fast", "0", "1MB/h", "1MB/s:", "1MB/s:0", "psi:", "-1k/s"])
def test_what_is_no_quota_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_quota(text)
    assert caught.value.option == "quota"
    assert "1MB/s" in (caught.value.hint or "")
