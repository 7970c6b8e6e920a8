"""The processes around a streamer: `python -m support.streamer_roles ROLE ARGUMENTS` (JSON).

Each says a line when it is ready. Those that send note down how far they are, those that receive
what came; the dispatcher answers questions.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.core.retry import Backoff
from penstock.dispatch import Dispatcher, Letter, Retry, Routes
from penstock.protocols.uprotocol import UCode, UMessage, UStatus, UUri
from penstock.protocols.uprotocol.transports import NOT_TRIED, UTransport
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg, MqttTransport
from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink, ZenohTransport
from support.dispatching import Table
from support.peer import say
from support.streamer_traffic import BUS, DEAD_LETTERS, LISTENER, Side, access, made, number_of

#: Messages that are sent in one go, so that the rate is right on the whole.
_AT_ONCE = 16


# --- those that send --------------------------------------------------------------------------


def send(
    side: Side, count: int, rate: float, progress: str, deliver: Callable[[list[UMessage]], int]
) -> None:
    """Send all messages in order, each until it is taken, and note down how many were."""
    noted = os.open(progress, os.O_WRONLY | os.O_CREAT)
    say(is_ready=True)
    sys.stdin.readline()
    began = time.monotonic()
    done = 0
    while done < count:
        time.sleep(max(began + done / rate - time.monotonic(), 0))
        rest = [made(number, side) for number in range(done, min(done + _AT_ONCE, count))]
        while rest:
            taken = deliver(rest)
            rest = rest[taken:]
            done += taken
            os.pwrite(noted, b"%12d" % done, 0)
            if rest:
                time.sleep(0.02)
                began += 0.02
    say(sent=done)
    sys.stdin.readline()


def send_by_zenoh(side: Side, count: int, rate: float, progress: str, place: str) -> None:
    # Nothing is put while nobody subscribes; what is put as the dispatcher dies may be lost.
    link = ZenohLink(side, listen=[place])

    def deliver(messages: list[UMessage]) -> int:
        for at, message in enumerate(messages):
            if link.put(message, must_be_heard=True) is not None:
                return at
        return len(messages)

    send(side, count, rate, progress, deliver)
    link.close()


def send_by_mqtt(side: Side, count: int, rate: float, progress: str, broker: str) -> None:
    # Taken is what the broker has acknowledged: it keeps it for the dispatcher's session.
    leg = MqttLeg("out", side, MqttBroker.parse(broker, client_id=f"{side}-sender"))
    leg.start(lambda _: None, ["nobody"])

    def deliver(messages: list[UMessage]) -> int:
        answers = leg.deliver(UUri(), messages)
        return next((at for at, it in enumerate(answers) if it is not None), len(answers))

    send(side, count, rate, progress, deliver)
    leg.close()


# --- those that receive -----------------------------------------------------------------------


def receive(side: Side, notes: str, transport: UTransport) -> None:
    """Note down what comes: a line for each message, and for each dead letter."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hear(message: UMessage) -> None:
        assert message.attributes.source is not None
        source = message.attributes.source.ue_id
        os.write(file, b"message %d %x\n" % (number_of(message), source))

    def hear_letter(message: UMessage) -> None:
        letter = Letter.from_bytes(message.payload or b"")
        assert letter.header.sink is not None
        number = number_of(letter.original)
        to = letter.header.sink.authority_name
        line = f"letter {number} {letter.id} {letter.code.name} {to}\n"
        os.write(file, line.encode())

    transport.register_listener(UUri.ANY, hear, UUri.ANY.with_authority(side))
    transport.register_listener(DEAD_LETTERS, hear_letter)
    say(is_ready=True)
    sys.stdin.readline()
    transport.close()


def receive_by_zenoh(side: Side, notes: str, place: str) -> None:
    receive(side, notes, ZenohTransport(ZenohLink(side, listen=[place])))


def receive_by_mqtt(side: Side, notes: str, broker: str) -> None:
    session = MqttBroker.parse(broker, client_id=f"{side}-receiver")
    receive(side, notes, MqttTransport(side, session))


# --- the dispatcher ---------------------------------------------------------------------------


class Faults:
    """Makes deliveries fail: half of the time the message is lost, half of the time the answer."""

    def __init__(self, share: float, seed: str) -> None:
        self._share = share
        self._chance = random.Random(seed)

    def deliver(
        self,
        deliver: Callable[[UUri, Sequence[UMessage]], list[UStatus | None]],
        address: UUri,
        messages: Sequence[UMessage],
    ) -> list[UStatus | None]:
        chance, share = self._chance, self._share
        at = next((at for at in range(len(messages)) if chance.random() < share), None)
        if at is None:
            return deliver(address, messages)
        sent = at + chance.randrange(2)
        found = deliver(address, messages[:sent]) if sent else []
        if found.count(None) == sent:
            found[at:] = [UStatus(UCode.UNAVAILABLE, "as told")]
        return found + [NOT_TRIED] * (len(messages) - len(found))


class FailingZenohLeg(ZenohLeg):
    faults: Faults

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        return self.faults.deliver(super().deliver, address, messages)


class FailingMqttLeg(MqttLeg):
    faults: Faults

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        return self.faults.deliver(super().deliver, address, messages)


def dispatch(state: str, places: list[str], broker: str, failing: float, seed: int) -> None:
    # As quick as it gets, so that all is delivered anew many times, and never given up.
    retry = Retry(backoff=Backoff(initial=0.001, maximum=0.25), max_attempts=1 << 30)
    device = FailingZenohLeg("device", ZenohLink(BUS, connect=places))
    cloud = FailingMqttLeg("cloud", BUS, MqttBroker.parse(broker, client_id=BUS))
    device.faults = Faults(failing, f"device {seed}")
    cloud.faults = Faults(failing, f"cloud {seed}")
    table = Table()
    table.add(DEAD_LETTERS, LISTENER)
    routes = Routes(authorities={"device": ["device"], "cloud": ["cloud"]})
    dispatcher = Dispatcher(
        BUS,
        state,
        [device, cloud],
        routes=routes,
        access=access(),
        retry=retry,
        subscriptions=table,
    )
    dispatcher.start()
    say(is_ready=True)
    answer(dispatcher)


def answer(dispatcher: Dispatcher) -> None:
    """Tell the books to whoever asks; end when the questions do."""
    while sys.stdin.readline():
        say(**told(dispatcher))
    dispatcher.stop(grace=20)
    dispatcher.close()
    say(**told(dispatcher))


def told(dispatcher: Dispatcher) -> dict[str, Any]:
    books = dispatcher.books()
    return {
        "copies": books.copies._asdict(),
        "receivers": {it.receiver.leg: it.books._asdict() for it in dispatcher.receivers()},
        "problems": books.problems(),
    }


ROLES: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (send_by_zenoh, send_by_mqtt, receive_by_zenoh, receive_by_mqtt, dispatch)
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
