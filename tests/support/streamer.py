"""How does a test run a streamer between zenoh and a broker, both real, and break it?"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.mosquitto import Mosquitto, free_port
from support.roles import Cast, Role
from support.streamer_traffic import SOURCES, Fate, Side, fate
from support.until import until

__all__ = ["Heard", "Letters", "Streamer"]

_ROLES = "streamer_roles"
#: Seconds without any change after which nobody will go on.
_STUCK = 30.0


@dataclass
class Letters:
    """The dead letters that came, about messages to one side."""

    #: The codes of the letters about each message, and those of their ids.
    codes: dict[int, set[str]] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)


class Heard:
    """What a receiver has noted down, in order."""

    def __init__(self, notes: Path) -> None:
        self.numbers: list[int] = []
        self.letters: dict[str, Letters] = {"device": Letters(), "cloud": Letters()}
        self.letter_count = 0
        text = notes.read_text(encoding="ascii") if notes.exists() else ""
        for line in text.splitlines():
            kind, number, *rest = line.split(" ")
            if kind == "message":
                self.numbers.append(int(number))
                continue
            id, code, to = rest
            letters = self.letters[to]
            letters.codes.setdefault(int(number), set()).add(code)
            letters.ids.add(id)
            self.letter_count += 1

    @property
    def distinct(self) -> set[int]:
        return set(self.numbers)

    @property
    def repeated(self) -> int:
        return len(self.numbers) - len(self.distinct)

    def disorder(self) -> list[int]:
        """Return the messages that came after later ones of their source."""
        last = [-1] * SOURCES
        wrong = []
        for number in dict.fromkeys(self.numbers):
            if number < last[number % SOURCES]:
                wrong.append(number)
            last[number % SOURCES] = number
        return wrong


class Streamer:
    """A dispatcher with a leg to zenoh and one to the broker; each side sends and receives."""

    def __init__(
        self, cast: Cast, broker: Mosquitto, path: Path, *, count: int, rate: float, seed: int
    ) -> None:
        self._cast = cast
        self._broker = broker
        self._path = path
        self.state = path / "state"
        self._count = count
        self._rate = rate
        self._seed = seed
        self._lives = 0
        places = [f"tcp/127.0.0.1:{free_port()}" for _ in range(2)]
        self._places = places
        begin = cast.begin
        self._senders: dict[Side, Role] = {
            "device": begin(_ROLES, "send_by_zenoh", **self._sender("device"), place=places[0]),
            "cloud": begin(_ROLES, "send_by_mqtt", **self._sender("cloud"), broker=broker.url),
        }
        notes: dict[Side, str] = {"device": self._notes("device"), "cloud": self._notes("cloud")}
        self._receivers: dict[Side, Role] = {
            "device": begin(
                _ROLES, "receive_by_zenoh", side="device", place=places[1], notes=notes["device"]
            ),
            "cloud": begin(
                _ROLES, "receive_by_mqtt", side="cloud", broker=broker.url, notes=notes["cloud"]
            ),
        }
        for role in (*self._senders.values(), *self._receivers.values()):
            role.hear()
        self.dispatcher = self._dispatcher()

    def _sender(self, side: Side) -> dict[str, object]:
        progress = str(self._path / f"{side}-sent")
        return {"side": side, "count": self._count, "rate": self._rate, "progress": progress}

    def _notes(self, side: Side) -> str:
        return str(self._path / f"{side}-heard")

    def _dispatcher(self) -> Role:
        self._lives += 1
        return self._cast.start(
            *(_ROLES, "dispatch"),
            state=str(self.state),
            places=self._places,
            broker=self._broker.url,
            failing=0.1,
            seed=self._seed * 1000 + self._lives,
        )

    def begin(self) -> None:
        for role in self._senders.values():
            role.say()

    def sent(self, side: Side) -> int:
        """Return how many messages a side has sent so far."""
        try:
            return int((self._path / f"{side}-sent").read_text(encoding="ascii") or "0")
        except FileNotFoundError:
            return 0

    def heard(self, side: Side) -> Heard:
        return Heard(Path(self._notes(side)))

    def kill_dispatcher(self) -> None:
        self.dispatcher.kill()
        self.dispatcher = self._dispatcher()

    def restart_broker(self, pause: float) -> None:
        # Ended, not killed: then it keeps what it acknowledged. What a kill -9 of a broker
        # loses after its PUBACK nobody else can know, whatever a dispatcher does.
        self._broker.end()
        time.sleep(pause)
        self._broker.start()

    def torture(self, kills: int, restarts: int) -> None:
        """Kill and restart at random moments, while messages are sent."""
        chance = random.Random(self._seed)
        begin, end = self._count // 20, self._count * 19 // 20
        what = ["kill"] * kills + ["restart"] * restarts
        chance.shuffle(what)
        moments = sorted(chance.randrange(begin, end) for _ in what)
        for moment, event in zip(moments, what, strict=True):
            until(lambda moment=moment: self.sent("device") >= moment, 120)  # type: ignore[misc]
            time.sleep(chance.uniform(0, 0.05))
            if event == "kill":
                self.kill_dispatcher()
            else:
                self.restart_broker(chance.uniform(0, 0.5))

    def drain(self, patience: float) -> dict[str, Any]:
        """Wait until all is delivered; return the books."""
        for role in self._senders.values():
            role.hear()
        deadline = time.monotonic() + patience
        last: object = None
        changed = time.monotonic()
        wanted = {n for n in range(self._count) if fate(n) is Fate.ARRIVES}
        # When it takes too long, what is missing says more than that something is.
        while (now := time.monotonic()) < min(deadline, changed + _STUCK):
            copies = self.dispatcher.ask()["copies"]
            if copies != last:
                last, changed = copies, now
            is_quiet = copies["queued"] == 0 and now - changed > 1
            if is_quiet and wanted <= self.heard("device").distinct:
                break
            time.sleep(0.2)
        said: dict[str, Any] = json.loads(self.dispatcher.leave().splitlines()[-1])
        return said

    def settle(self, enough: int) -> None:
        """Let the broker bring the rest to the receivers, and end them."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            heard = self.heard("cloud")
            letters = sum(len(letters.ids) for letters in heard.letters.values())
            if len(heard.distinct) + letters >= enough:
                break
            time.sleep(0.1)
        for role in (*self._receivers.values(), *self._senders.values()):
            role.leave()
