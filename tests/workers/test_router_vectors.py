"""What the original router was seen to do, and where this one does better."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidStreamId, MessageTooLarge, NotFound
from penstock.core.overflow import DropReason, OverflowPolicy, QueueFull
from penstock.core.stream_id import StreamId
from penstock.queue import AlreadyOwned, InputStream, OutputStream
from penstock.workers.router import RegisteredApp, Router

VECTORS = Path(__file__).parents[1] / "vectors" / "jrtc"
SEEN: dict[str, Any] = {
    each["case"]: each
    for each in json.loads((VECTORS / "router_behaviour.json").read_text())["observations"]
}
#: The original, with the fault corrected that loses bursts.
CORRECTED: dict[str, Any] = {
    each["case"]: each
    for each in json.loads((VECTORS / "router_behaviour.json").read_text())["control_experiment"][
        "observations"
    ]
}
MATCHING = json.loads((VECTORS / "matching.json").read_text())["vectors"]

STREAM = StreamId.generate(2, 1, "a path of tests", "a name of tests")


@pytest.fixture
def router(directory: str) -> Router:
    return Router(directory)


def values(app: RegisteredApp) -> list[int]:
    taken = []
    while (message := app.read(0)) is not None:
        taken.append(struct.unpack("<I", message.payload)[0])
    return taken


def number(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.mark.parametrize("row", MATCHING, ids=lambda row: row["sid"][:10] + "-" + row["req"][:10])
def test_a_request_gets_what_the_original_delivers(router: Router, row: dict[str, Any]) -> None:
    stream, request = StreamId.parse(row["sid"]), StreamId.parse(row["req"])
    if not stream.is_concrete:
        pytest.skip("it is no stream")
    with router.register("subscriber") as app, router.register("creator") as creator:
        app.add(request)
        creator.create_output(stream, slots=4, size=4096).write(number(7))
        assert values(app) == ([7] if row["router_delivers"] else [])


def test_channels_are_made_once_a_direction(router: Router) -> None:
    with router.register("app") as app:
        app.create_output(STREAM)
        assert not SEEN["create"]["duplicate_same_direction"]
        with pytest.raises(AlreadyOwned):
            app.create_output(STREAM)
        assert SEEN["create"]["same_id_other_direction"]
        app.create_input(STREAM)


def test_two_requests_for_one_stream_deliver_once(router: Router) -> None:
    expected = SEEN["paced_10_two_matching_requests"]["values"]
    with router.register("app") as app, router.register("creator") as creator:
        output = creator.create_output(STREAM)
        app.add(STREAM, STREAM)
        app.add(StreamId.generate(None, None, "a path of tests", None))
        for value in expected:
            output.write(number(value))
        assert values(app) == expected


def test_bursts_are_delivered_whole(router: Router) -> None:
    """The original lost 180 of 200."""
    assert SEEN["burst_20x10"] == {"case": "burst_20x10", "sent": 200, "received": 20}
    with router.register("app") as app, router.register("creator") as creator:
        output = creator.create_output(STREAM)
        app.add(STREAM)
        taken = []
        for burst in range(20):
            for value in range(10):
                output.write(number(burst * 10 + value))
            taken += values(app)
        assert taken == list(range(200))
        for value in range(8):
            output.write(number(value))
        assert values(app) == CORRECTED["burst_8"]["values"]


def test_two_destinations_in_one_number_match_neither(router: Router) -> None:
    assert SEEN["ored_destination_subscription"]["received"] == 0
    with router.register("app") as app, router.register("creator") as creator:
        app.add(StreamId.generate(3, 1, "a path of tests", "a name of tests"))
        creator.create_output(STREAM).write(number(1))
        assert values(app) == []


def test_names_with_one_filter_are_one_stream(router: Router) -> None:
    one = StreamId.generate(1, 1, "a path of tests", "one")
    assert SEEN["collision_subscribe_nne_gets_one"]["received"] == 1
    assert SEEN["collision_create_second_channel"]["created"] == 0
    with router.register("app") as app, router.register("creator") as creator:
        app.add(StreamId.generate(1, 1, "a path of tests", "nne"))
        creator.create_output(one).write(number(1))
        assert values(app) == [1]
        with pytest.raises(AlreadyOwned):
            creator.create_output(StreamId.generate(1, 1, "a path of tests", "nne"))


def test_an_input_stream_takes_what_fits_from_who_knows_its_id(router: Router) -> None:
    open_device = StreamId.generate(2, None, "a path of tests", "a name of tests")
    missing = StreamId.generate(2, 1, "a path of tests", "another name")
    with router.register("app") as app, router.register("owner") as owner:
        owner.create_input(STREAM, slots=8, size=4096)
        app.send(STREAM, number(1))
        app.send(STREAM, bytes(number(2)))
        assert values(owner) == [1, 2]  # without a subscription
        with pytest.raises(MessageTooLarge):
            app.send(STREAM, bytes(10_000))
        with pytest.raises(NotFound):
            app.send(missing, number(1))
        with pytest.raises(InvalidStreamId):
            app.send(open_device, number(1))
        assert app.has_input(STREAM)
        assert not app.has_input(missing)
        assert not app.has_input(open_device)


def test_a_full_input_stream_refuses_and_keeps_what_it_has_in_order(router: Router) -> None:
    with router.register("app") as app, router.register("owner") as owner:
        owner.create_input(STREAM, slots=16, size=4096)
        for value in range(16):
            app.send(STREAM, number(value))
        with pytest.raises(QueueFull):
            app.send(STREAM, number(16))
        assert values(owner) == list(range(16))
        app.send(STREAM, number(99))
        assert values(owner) == [99]


@pytest.mark.parametrize(
    ("policy", "expected", "reason"),
    [
        (OverflowPolicy.DROP_NEWEST, list(range(7)), DropReason.OVERFLOW_NEWEST),
        (OverflowPolicy.DROP_OLDEST, list(range(23, 30)), DropReason.OVERFLOW_OLDEST),
    ],
)
def test_a_queue_of_seven_keeps_seven_and_counts_the_others(
    router: Router, policy: OverflowPolicy, expected: list[int], reason: DropReason
) -> None:
    """The original drops the newest, and does not count them."""
    seen = SEEN["app_queue_7_receiver_idle_30_paced"]["values"]
    with (
        router.register("app", queue_size=7, policy=policy) as app,
        router.register("creator") as creator,
    ):
        app.add(STREAM)
        output = creator.create_output(STREAM)
        for value in range(30):
            output.write(number(value))
        assert values(app) == expected
        assert (expected == seen) is (policy is OverflowPolicy.DROP_NEWEST)
        books = app.statistics()
        assert (books.messages, books.lost, books.backlog) == (7, 23, 0)
        assert {loss.reason for loss in books.streams[STREAM].losses} == {reason}
        output.write(number(30))
        assert values(app) == [30]


def test_subscriptions_die_with_their_app(router: Router) -> None:
    assert SEEN["new_app_reusing_slot_inherits_old_subscription"]["received"] == 1  # there
    with router.register("creator") as creator:
        output = creator.create_output(STREAM)
        with router.register("app") as app:
            app.add(STREAM)
        with router.register("app") as app:
            output.write(number(1))
            assert values(app) == []


def test_a_channel_that_was_destroyed_can_be_made_again(router: Router) -> None:
    assert SEEN["create_destroy_create_same_id"]["second_create_succeeded"] == 0  # there
    with router.register("app") as app:
        app.add(STREAM)
        for value in range(20):
            with OutputStream.create(STREAM, owner="creator", directory=router.directory) as output:
                output.write(number(value))
                assert values(app) == [value]
                output.remove()
        assert app.streams == ()


def test_more_apps_than_the_original_has_room_for(router: Router) -> None:
    streams = [StreamId.generate(1, 1, "a path of tests", f"stream {n}") for n in range(3)]
    outputs = [OutputStream.create(each, owner="x", directory=router.directory) for each in streams]
    apps = [router.register(f"app-{n}") for n in range(140)]
    for app in apps:
        app.add(streams[0])
    outputs[0].write(number(5))
    outputs[1].write(number(6))
    assert all(values(app) == [5] for app in apps)
    assert len(router.apps()) == 140
    for each in (*apps, *outputs):
        each.close()


def test_an_input_stream_is_removed_under_its_senders(router: Router) -> None:
    with router.register("app") as app:
        for value in range(3):
            with InputStream.create(STREAM, owner="owner", directory=router.directory) as stream:
                app.send(STREAM, number(value))
                message = stream.read(1)
                assert message is not None
                assert message.payload == number(value)
                stream.remove()
            with pytest.raises(NotFound):
                app.send(STREAM, number(9))
