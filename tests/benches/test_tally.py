"""Does a comparison notice everything that a transport can do wrong?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from peers.tally import Delivery, Stopwatch, Taker, Tally, end_marker, payloads_of, stamped
from penstock.core.batch import batch_from_messages

SIZE = 64
FORMS = ["one", "many", "batch", "each"]


def stream(count: int) -> list[bytes]:
    """What a writer sends: `count` messages, then the one that says so."""
    payloads = payloads_of(SIZE)
    return [payloads[number % len(payloads)] for number in range(count)] + [end_marker(SIZE, count)]


def take(taker: Taker, form: str, messages: list[bytes], group: int = 100) -> Delivery:
    groups = [messages[at : at + group] for at in range(0, len(messages), group)]
    match form:
        case "one":
            any(map(taker.one, messages))
        case "many":
            any(map(taker.many, groups))
        case "batch":
            any(map(taker.batch, map(batch_of, groups)))
        case _:
            taker.each(messages)
    return taker.delivery()


def batch_of(payloads: list[bytes]) -> penstock.Batch:
    return batch_from_messages(
        [penstock.Message(0, 0, 0, 0, 0, None, None, payload) for payload in payloads]
    )


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("form", FORMS)
@given(count=st.integers(0, 600), group=st.integers(1, 300))
def test_a_complete_delivery_has_no_problem(
    form: str, thorough: bool, count: int, group: int
) -> None:
    delivery = take(Tally(SIZE, thorough=thorough), form, stream(count), group)

    assert delivery.problem is None
    assert delivery.received == delivery.sent == count


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), count=st.integers(1, 600))
def test_lost_messages_are_counted(form: str, data: st.DataObject, count: int) -> None:
    lost = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    messages = [each for number, each in enumerate(stream(count)) if number not in lost]

    delivery = take(Tally(SIZE), form, messages)

    assert delivery.problem == f"lossy: {len(lost)} of {count} lost"


@pytest.mark.parametrize("form", FORMS)
def test_a_lost_end_is_noticed(form: str) -> None:
    delivery = take(Tally(SIZE), form, stream(500)[:-1])

    assert delivery.problem == "lossy: the last message never came"


@pytest.mark.parametrize("form", FORMS)
def test_two_messages_in_the_wrong_order_are_noticed(form: str) -> None:
    messages = stream(500)
    messages[300], messages[301] = messages[301], messages[300]

    assert take(Tally(SIZE), form, messages).problem == "2 of 500 out of order or changed"


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_byte_is_noticed_when_every_byte_is_compared(form: str) -> None:
    messages = stream(500)
    messages[300] = messages[300][:-1] + b"!"

    delivery = take(Tally(SIZE, thorough=True), form, messages)

    assert delivery.problem == "1 of 500 out of order or changed"


@pytest.mark.parametrize("size", [64, 1 << 10, 64 << 10, 1 << 20])
def test_prepared_messages_fit_a_cache_and_tell_their_number(size: int) -> None:
    payloads = payloads_of(size)

    assert sum(map(len, payloads)) <= 4 << 20
    assert [payload[0] for payload in payloads] == list(range(len(payloads)))


def test_a_stopwatch_notes_how_long_each_message_took() -> None:
    watch = Stopwatch()

    delivery = take(watch, "many", [stamped(bytearray(SIZE)) for _ in range(3)])
    assert delivery.problem == "lossy: the last message never came"
    delivery = take(watch, "one", [end_marker(SIZE, 3)])

    assert delivery.problem is None
    assert len(delivery.delays) == 3
    assert all(0 <= delay < 10**9 for delay in delivery.delays)
