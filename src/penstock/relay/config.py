"""Which options does a relay have?"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, ValidationError

from penstock.core.config import ConfigModel, line_of, load_config
from penstock.core.delivery_policy import DeliveryPolicy
from penstock.core.errors import ConfigError, InvalidOption, PenstockError
from penstock.core.options import Duration, reason_of
from penstock.core.position import Position
from penstock.core.quota import parse_quota
from penstock.core.units import parse_duration
from penstock.core.url import URL
from penstock.relay.pacing import parse_speed

__all__ = ["RelayFile", "RelayOptions", "load_relays", "parse_offset", "relay_options"]

#: The default longest outage (seconds) without `follow`.
_SHORT_OUTAGE: Final = 30.0


def parse_offset(value: str | float) -> float:
    """Return the seconds meant by a duration that may have a sign: `-1.5s`, `+20ms`.

    :raises InvalidOption: it is not a duration.
    """
    if isinstance(value, str):
        text = value.strip()
        size = parse_duration(text[1:] if text[:1] in {"-", "+"} else text)
        return -size if text.startswith("-") else size
    return -parse_duration(-value) if value < 0 else parse_duration(value)


def _policy(value: object) -> object:
    return DeliveryPolicy.parse(value) if isinstance(value, str) else value


def _place(value: object) -> object:
    return Position.of(value) if isinstance(value, str | int) else value


def _checked_url(text: str) -> str:
    URL.parse(text)
    return text


def _checked_quota(text: str) -> str:
    parse_quota(text)
    return text


_Url = Annotated[str, AfterValidator(_checked_url)]
_Place = Annotated[InstanceOf[Position], BeforeValidator(_place)]


class RelayOptions(ConfigModel):
    """Options of one relay: source, target, range, speed and overflow policy."""

    source: _Url
    target: _Url
    #: Where to start, the first time.
    start: _Place = Position.START
    #: The last message, inclusive: its number, or the time when it was appended.
    end: _Place | None = None
    #: The time that `start` and `end` refer to: of appending; of appending to the first stream
    #: (`origin_ns`); or the originating time. With the latter two, all messages in that range are
    #: copied, wherever they are in the stream.
    by: Literal["append", "origin", "source"] = "append"
    #: Wait for more messages; otherwise end after the existing ones.
    follow: bool = True
    #: The file with the relay's progress, to resume from.
    state: Path | None = None
    #: The delivery policy while the target is slower; without it, the source is read more slowly.
    policy: Annotated[InstanceOf[DeliveryPolicy] | None, BeforeValidator(_policy)] = None
    #: Payload bytes per second, as `1MB/s`.
    quota: Annotated[str, AfterValidator(_checked_quota)] | None = None
    #: Playback speed of a recording, relative to its originating times; None: no pacing.
    speed: Annotated[float | None, BeforeValidator(parse_speed)] = None
    #: The most messages per batch; fewer if they are large.
    batch: Annotated[int, Field(ge=1, le=100_000)] = 8192
    #: Seconds added to the time of every message: the target's clock minus the source's.
    clock_offset: Annotated[float, BeforeValidator(parse_offset)] = 0.0
    #: The longest outage of either side. By default unlimited with `follow`, else 30 seconds.
    give_up: Duration | None = None
    #: What to do with a message that the target will never accept: stop, or drop and count it.
    refused: Literal["stop", "drop"] = "stop"
    #: Refuse a target that cannot carry every field.
    strict: bool = False

    @property
    def longest_outage(self) -> float | None:
        """`give_up`, or its default; None: unlimited."""
        return self.give_up if self.follow or self.give_up is not None else _SHORT_OUTAGE


def relay_options(**given: object) -> RelayOptions:
    """Return the options of one relay; None means the default.

    :raises InvalidOption: a value does not fit.
    :raises InvalidURL: source or target is not a URL.
    """
    try:
        return RelayOptions.model_validate({k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "options"
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidOption):  # by a unit's parser, without the option's name
            raise InvalidOption(name, first["input"], cause.reason, hint=cause.hint) from None
        if isinstance(cause, PenstockError):
            raise cause from None
        raise InvalidOption(
            name, first["input"], reason_of(first["type"], str(first["msg"]))
        ) from None


class RelayFile(ConfigModel):
    """A file of relays."""

    #: The folder of the state files, one per relay by its name, unless it sets its own.
    state: Path | None = None
    relays: Annotated[dict[str, RelayOptions], Field(min_length=1, max_length=1000)]


def load_relays(path: Path) -> dict[str, RelayOptions]:
    """Read a YAML file of relays; paths of state are relative to it.

    :raises ConfigError: a fault in the file, with its line.
    """
    file = load_config(path, RelayFile)
    found: dict[str, RelayOptions] = {}
    users: dict[Path, str] = {}
    for name, options in file.relays.items():
        state = options.state
        if state is None and file.state is not None:
            # A name may be any text, and must not lead out of the folder.
            plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".")
            state = file.state / f"{plain or 'relay'}.relay"
        if state is not None:
            state = path.parent / state
            user = users.setdefault(state.resolve(), name)
            if user != name:
                raise ConfigError(
                    str(path),
                    line_of(path, ("relays", name)),
                    f"relays.{name}",
                    f"has the state of {user}: {state}",
                    hint="give it a state of its own: state: FILE",
                )
        found[name] = options.model_copy(update={"state": state})
    return found
