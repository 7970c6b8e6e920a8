"""Apps that receive and send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.core.errors import InvalidOption, NotFound, Overrun, StorageError
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import ForwardDestination, StreamId
from penstock.queue import AlreadyOwned, InputStream, OutputStream
from penstock.queue.subscription import StreamMessage, Subscription, requests_for
from penstock.workers.apps import App, AppContext, AppStream, Input, Output, Receive, Target
from penstock.workers.router import Router
from support.until import until
from support.waiting import background

PATH = "deployment://intraapp"

pytestmark = pytest.mark.usefixtures("directory")


class Adder(App):
    """Adds up the numbers of all devices; says the sum to who asks, and to the codelet."""

    numbers = Receive(path=PATH, name="numbers")
    questions = Input(path=PATH, name="questions")
    sums = Output(path=PATH, name="sums of numbers", destination=ForwardDestination.UDP)
    streams = (numbers, questions, sums)
    inactivity = 0.05

    def __init__(self, context: AppContext | None = None) -> None:
        super().__init__(context)
        self.sum = self.timeouts = 0
        self.heard: list[tuple[int, str, int]] = []
        self.is_started = self.is_stopped = False

    def on_start(self) -> None:
        self.is_started = True

    def on_message(self, stream: AppStream, message: StreamMessage) -> None:
        if stream is self.numbers:
            assert message.stream is not None
            self.heard.append((message.stream.device_id, message.sender, message.seq))
            self.sum += struct.unpack("<I", message.payload)[0]
        else:
            self.send(self.sums, struct.pack("<I", self.sum))

    def on_timeout(self) -> None:
        self.timeouts += 1

    def on_stop(self) -> None:
        self.is_stopped = True


@contextlib.contextmanager
def run(app: App) -> Iterator[None]:
    with background(app.run) as running:
        try:
            until(lambda: app._queue is not None or running.done())
            yield
        finally:
            app.stop()
            running.result(5)


def device(number: int) -> OutputStream:
    stream = StreamId.generate(1, number, PATH, "numbers")
    return OutputStream.create(stream, owner=f"device {number}")


def test_an_app_receives_sends_and_hears_of_silence() -> None:
    app = Adder()
    with device(1) as first, device(2) as second, run(app):
        for value in range(10):
            (first, second)[value % 2].write(struct.pack("<I", value))
        until(lambda: app.sum == 45)
        with Router().register("somebody") as somebody:
            somebody.add(Adder.sums.stream)
            somebody.send(Adder.questions.stream, b"?")
            answer = somebody.read(5)
            assert answer is not None
            assert (answer.payload, answer.sender) == (struct.pack("<I", 45), "Adder")
        until(lambda: app.timeouts >= 2)  # it comes again and again, and not at every loop
        began, before = time.monotonic(), app.timeouts
        time.sleep(0.2)
        assert app.timeouts - before <= (time.monotonic() - began) / 0.05 + 1
        assert app.statistics().messages == 11
    assert app.is_started
    assert app.is_stopped
    # By the time of each message.
    assert app.heard == [(1 + n % 2, f"device {1 + n % 2}", n // 2) for n in range(10)]


def test_a_message_belongs_to_the_stream_that_the_router_matched() -> None:
    """By the original's rule of masks, device 1 would belong to the request for device 3."""

    class Two(App):
        three = Receive(device=3, path=PATH)
        one = Receive(device=1, path=PATH)
        streams = (three, one)
        got: list[AppStream]

        def on_message(self, stream: AppStream, message: StreamMessage) -> None:
            del message
            self.got.append(stream)

    app = Two()
    app.got = []
    with run(app), device(1) as first, device(3) as third:
        first.write(bytes(4))
        until(lambda: app.got == [Two.one])
        third.write(bytes(4))
        until(lambda: app.got == [Two.one, Two.three])


def test_a_second_app_of_that_name_is_refused() -> None:
    with run(Adder()), pytest.raises(AlreadyOwned, match="Adder"):
        Adder().run()


def test_an_app_waits_for_the_stream_that_it_sends_to_or_gives_up() -> None:
    class Commander(App):
        codelet = Target(path=PATH, name="commands", device=7)
        streams = (codelet,)
        patience: float | None = 0.1

        def on_start(self) -> None:
            self.send(self.codelet, b"go")

    with pytest.raises(NotFound, match="did not appear"):
        Commander().run()
    app = Commander()
    app.patience = None
    with background(app.run) as running:
        time.sleep(0.1)
        with InputStream.create(Commander.codelet.stream, owner="codelet") as stream:
            message = stream.read(5)
            assert message is not None
            assert (message.payload, message.attributes) == (b"go", b"Commander")
        app.stop()
        running.result(5)


def test_a_target_is_one_stream() -> None:
    class Vague(App):
        streams = (Target(path=PATH, name="commands", device=127),)

    with pytest.raises(InvalidOption, match="one stream"):
        Vague().run()


def test_what_a_handler_raises_ends_the_app_and_its_registration() -> None:
    class Broken(Adder):
        def on_message(self, *_: object) -> None:
            raise ValueError("broken")

    with device(1) as output, background(Broken().run) as running:
        until(lambda: any(each.requests for each in Router().apps()))
        output.write(bytes(4))
        with pytest.raises(ValueError, match="broken"):
            running.result(5)
    assert Router().apps() == []


def test_async_for_gives_messages_until_the_app_is_stopped() -> None:
    async def collect() -> list[bytes]:
        app = Adder()
        taken = []
        async for stream, message in app:
            assert stream is Adder.numbers
            taken.append(bytes(message.payload))
            if len(taken) == 20:
                app.stop()
        return taken

    with device(1) as output, background(asyncio.run, collect()) as running:
        until(lambda: any(each.requests for each in Router().apps()))
        for value in range(20):
            output.write(struct.pack("<I", value))
            if value % 5 == 0:
                time.sleep(0.01)
        assert running.result(5) == [struct.pack("<I", value) for value in range(20)]


def test_an_async_wait_can_be_cancelled_and_goes_on_later() -> None:
    async def collect(output: OutputStream) -> bytes:
        messages = Adder().messages()
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await messages.aclose()  # type: ignore[attr-defined]
        assert Router().apps() == []
        messages = Adder().messages()
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.05)
        output.write(b"abcd")
        _, message = await waiting
        payload = bytes(message.payload)
        await messages.aclose()  # type: ignore[attr-defined]
        return payload

    with device(1) as output:
        assert asyncio.run(collect(output)) == b"abcd"
    assert not [t for t in threading.enumerate() if t.name == "penstock-app"]


def test_what_fails_while_an_async_app_waits_is_raised_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> bool:
        raise StorageError("reading", "streams", OSError(24, "Too many open files"))

    async def collect() -> None:
        messages = Adder().messages()
        with pytest.raises(StorageError, match="Too many open files"):
            await asyncio.wait_for(anext(messages), 10)

    monkeypatch.setattr(Subscription, "wait", fail)
    asyncio.run(collect())
    assert Router().apps() == []


def test_a_payload_is_lent_and_cannot_be_written_to() -> None:
    with device(1) as output, Router().register("app") as app:
        app.add(*requests_for(device=1))
        output.write(b"abcd", type=3)
        with app.receive(1) as message:
            assert message is not None
            assert (message.size, message.type, message.seq) == (4, 3, 0)
            assert abs(message.time_ns - time.time_ns()) < 10e9
            payload: object = message.payload
            assert isinstance(payload, memoryview)
            assert payload.readonly
            assert message.cast("<u4")[0] == int.from_bytes(b"abcd", "little")
            kept = message.copy()
        assert kept.payload == b"abcd"
        assert (kept.sender, kept.stream) == ("device 1", output.stream)
        with pytest.raises(ValueError, match="released"):
            bytes(payload)


def test_what_is_overwritten_while_it_is_lent_is_counted_and_told() -> None:
    stream = StreamId.generate(1, 1, PATH, "numbers")
    with (
        OutputStream.create(stream, owner="fast", slots=4, size=4096) as output,
        Router().register("app") as app,
    ):
        app.add(stream)
        output.write(b"0")
        with pytest.raises(Overrun), app.receive(1):
            output.write_many([b"1"] * 8)
        assert app.statistics().lost == 1
        while app.read(0) is not None:
            pass
        books = app.statistics()
        assert books.messages + books.lost == 9


def test_streams_that_are_there_are_read_from_their_end_and_new_ones_from_their_start() -> None:
    with device(1) as old, Router().register("app") as app:
        old.write(b"old")
        app.add(*requests_for(path=PATH))
        old.write(b"new")
        with device(2) as new:
            new.write(b"first")
            messages = [app.read(1), app.read(1), app.read(0)]
            assert [m and m.payload for m in messages] == [b"new", b"first", None]
            new.remove()
        assert list(app.streams) == [old.stream]
        app.discard(*requests_for(path=PATH))
        old.write(b"unheard")
        assert app.read(0) is None
        assert not app.streams


def test_who_blocks_goes_on_where_it_was() -> None:
    stream = StreamId.generate(1, 1, PATH, "numbers")
    router = Router()
    with OutputStream.create(stream, owner="x", hold="app") as output:
        with router.register("app", policy=OverflowPolicy.BLOCK) as app:
            app.add(stream)
            output.write_many([b"0", b"1"])
            first = app.read(1)
            assert first is not None
            assert first.payload == b"0"
        output.write(b"2")
        with router.register("app", policy=OverflowPolicy.BLOCK) as app:
            app.add(stream)
            taken = [app.read(1), app.read(1)]
            assert [m and m.payload for m in taken] == [b"1", b"2"]


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65, "ä"])
def test_names_of_apps_are_plain(name: str) -> None:
    with pytest.raises(InvalidOption):
        Router().register(name)


def test_a_stream_that_cannot_be_read_costs_the_others_nothing(directory: str) -> None:
    with device(1) as broken, device(2) as whole, Router().register("app") as app:
        app.add(*requests_for(path=PATH))
        for value in range(3):
            broken.write(b"broken")
            whole.write(b"%d" % value)
        os.truncate(f"{directory}/{broken.stream.hex()}.output.fmq", 4096)
        with device(3) as another:  # which makes it look for streams again
            another.write(b"3")
            taken = [app.read(1) for _ in range(4)]
            assert [m and m.payload for m in taken] == [b"0", b"1", b"2", b"3"]
            assert app.read(0) is None
            assert set(app.streams) == {whole.stream, another.stream}
