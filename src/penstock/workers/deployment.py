"""What belongs to a deployment: apps, devices, codelet sets with their channels, and collectors?

The files are those of jrt-controller's control program. Reading them assigns every channel its
stream id, and refuses what would fail later or name another stream than was meant.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from penstock.core.config import ConfigModel, line_of, load_config, parse_config, read_text
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads them
from penstock.core.stream_id import (
    ANY_DEVICE,
    CONTROLLER_DEVICE,
    ForwardDestination,
    StreamId,
    codelet_path,
    hash54,
)
from penstock.core.stream_names import StreamNames, advice
from penstock.queue.stream_directory import StreamKind
from penstock.workers.router import check_app_name

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

__all__ = [
    "AppSpec",
    "Channel",
    "ChannelSpec",
    "CodeletSet",
    "CodeletSpec",
    "DecoderSpec",
    "Deployment",
    "DeviceSpec",
    "PlacedCodeletSet",
    "SerdeSpec",
    "load_deployment",
    "variable_of",
]

#: Where jrt-controller's forwarder sends what has the destination UDP.
_COLLECTOR: Final = "jrtc+udp://127.0.0.1:20788"
_PORT: Final = Field(ge=1, le=65535)
#: What an app is told of a channel's queue, by a parameter of this name and the channel's label.
_QUEUE: Final = "queue:"


def _check_device(number: int) -> int:
    if number == CONTROLLER_DEVICE:
        raise ValueError("0 is the controller itself; devices are 1 to 126")
    if number == ANY_DEVICE:
        raise ValueError("127 means any device in a request; devices are 1 to 126")
    if not 0 < number < ANY_DEVICE:
        raise ValueError("should be from 1 to 126: a stream id has 7 bits for it")
    return number


def _parse_destination(value: object) -> object:
    names = {
        "DestinationNone": ForwardDestination.NONE,
        "DestinationUDP": ForwardDestination.UDP,
        "JRTC_ROUTER_DEST_NONE": ForwardDestination.NONE,
        "JRTC_ROUTER_DEST_UDP": ForwardDestination.UDP,
    }
    if value in {"DestinationAny", "JRTC_ROUTER_DEST_ANY"}:
        raise ValueError("DestinationAny is for requests: a channel goes to one destination")
    return names.get(value, value) if isinstance(value, str) else value


Device: TypeAlias = Annotated[int, AfterValidator(_check_device)]
#: DestinationNone, DestinationUDP, or the number of another that `forward` names.
Destination: TypeAlias = Annotated[
    int, BeforeValidator(_parse_destination), Field(ge=1, lt=ForwardDestination.ANY)
]


# --- a codelet set's file -----------------------------------------------------------------------


class ProtobufSpec(ConfigModel):
    """Which message of which descriptor set a channel carries."""

    #: The descriptor set.
    package_path: Path
    #: The message's full name.
    msg_name: str
    #: nanopb's options, if payloads are the structs that it generates; else they are protobuf.
    options_path: Path | None = None


class SerdeSpec(ConfigModel):
    """How a channel's elements are serialised."""

    #: The library that jbpf serialises by. It is never loaded here.
    file_path: str = ""
    protobuf: ProtobufSpec | None = None


class ChannelSpec(ConfigModel):
    """An input or output channel of a codelet."""

    name: Annotated[str, Field(min_length=1)]
    forward_destination: Destination = ForwardDestination.NONE
    serde: SerdeSpec | None = None
    #: Of the queue that is made here.
    slots: Annotated[int, Field(ge=2)] = 4096
    size: Size = 4 << 20


class LinkedMap(ConfigModel):
    """A map that a codelet shares with an earlier one."""

    map_name: str
    linked_codelet_name: str
    linked_map_name: str


class CodeletSpec(ConfigModel):
    """One codelet."""

    codelet_name: Annotated[str, Field(min_length=1)]
    codelet_path: str
    hook_name: str
    priority: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    runtime_threshold: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    in_io_channel: tuple[ChannelSpec, ...] = ()
    out_io_channel: tuple[ChannelSpec, ...] = ()
    linked_maps: tuple[LinkedMap, ...] = ()

    @field_validator("in_io_channel")
    @classmethod
    def _check_inputs(cls, channels: tuple[ChannelSpec, ...]) -> tuple[ChannelSpec, ...]:
        for channel in channels:
            if channel.forward_destination != ForwardDestination.NONE:
                raise ValueError(f"{channel.name} is an input: it is not forwarded anywhere")
        return _distinct(channels)

    @field_validator("out_io_channel")
    @classmethod
    def _check_outputs(cls, channels: tuple[ChannelSpec, ...]) -> tuple[ChannelSpec, ...]:
        for channel in channels:
            has_schema = channel.serde is not None and channel.serde.protobuf is not None
            if channel.forward_destination != ForwardDestination.NONE and not has_schema:
                raise ValueError(f"{channel.name} is forwarded, which needs serde.protobuf")
        return _distinct(channels)

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        _refuse_collisions({each.name for each in (*self.in_io_channel, *self.out_io_channel)})
        return self


def _distinct(channels: tuple[ChannelSpec, ...]) -> tuple[ChannelSpec, ...]:
    _refuse_duplicates((channel.name for channel in channels), "channel")
    _refuse_collisions({channel.name for channel in channels})
    return channels


def _refuse_duplicates(names: Iterable[object], what: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name} is there {count} times")


def _refuse_collisions(names: set[str]) -> None:
    """Refuse names whose stream ids collide."""
    seen: dict[int, str] = {}
    for name in sorted(names):
        other = seen.setdefault(hash54(name), name)
        if other != name:
            why = advice(name) or "choose another name"
            raise ValueError(f"{name!r} and {other!r} have the same id in a stream id; {why}")


class CodeletSet(ConfigModel):
    """Codelets that are loaded together."""

    codeletset_id: Annotated[str, Field(min_length=1)]
    codelet_descriptor: Annotated[tuple[CodeletSpec, ...], Field(min_length=1)]

    @field_validator("codelet_descriptor")
    @classmethod
    def _check_order(cls, codelets: tuple[CodeletSpec, ...]) -> tuple[CodeletSpec, ...]:
        _refuse_duplicates((codelet.codelet_name for codelet in codelets), "codelet")
        earlier: set[str] = set()
        for codelet in codelets:
            for linked in codelet.linked_maps:
                if linked.linked_codelet_name not in earlier:
                    raise ValueError(
                        f"{codelet.codelet_name} links a map of {linked.linked_codelet_name}, "
                        "which is not loaded before it"
                    )
            earlier.add(codelet.codelet_name)
        return codelets

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read the file. Paths on the device stay as written.

        :raises ConfigError: the file is invalid; the error names the line.
        """
        return parse_config(_OF_THE_DEVICE.sub(_escape, read_text(file)), cls, str(file))


# The reverse proxy puts its own environment into these.
_OF_THE_DEVICE: Final = re.compile(r"^[\s-]*(?:codelet_path|file_path)\s*:.*$", re.MULTILINE)


def _escape(line: re.Match[str]) -> str:
    return line[0].replace("${", "$${")


# --- a deployment's file ------------------------------------------------------------------------


class DecoderSpec(ConfigModel):
    """A collector that the schemas are loaded into."""

    type: Literal["decodergrpc", "decoderhttp"] = "decodergrpc"
    ip: str = "127.0.0.1"
    port: Annotated[int, _PORT]
    http_relative_path: str = ""


class AppSpec(ConfigModel):
    """An app of the controller."""

    name: Annotated[str, AfterValidator(check_app_name)]
    path: Path
    type: Literal["c", "python"]
    #: Where its controller is, for `penstock jrtc load`.
    ip: str = "127.0.0.1"
    port: Annotated[int, _PORT] = 3001
    #: Messages that may wait for it; without it, as many as the queues of its streams hold.
    ioq_size: Annotated[int, Field(ge=1)] | None = None
    #: For the scheduler of the original; here the system's own schedules.
    deadline: Duration = 0.0
    period: Duration = 0.0
    runtime: Duration = 0.0
    params: dict[str, str | int | float | bool] = Field(default_factory=dict)
    modules: tuple[Path, ...] = ()


class DeviceSpec(ConfigModel):
    """A network function."""

    id: Device
    ip: str = "127.0.0.1"
    #: Of its reverse proxy, which loads codelets; without it, nobody is asked to.
    port: Annotated[int, _PORT] | None = None


class _CodeletSetOnDevice(ConfigModel):
    config: Path
    device: Device


class _Jbpf(ConfigModel):
    device: tuple[DeviceSpec, ...] = ()
    codelet_set: tuple[_CodeletSetOnDevice, ...] = ()

    @field_validator("device")
    @classmethod
    def _check_devices(cls, devices: tuple[DeviceSpec, ...]) -> tuple[DeviceSpec, ...]:
        _refuse_duplicates((device.id for device in devices), "device")
        return devices

    @field_validator("codelet_set")
    @classmethod
    def _check_sets(cls, sets: tuple[_CodeletSetOnDevice, ...]) -> tuple[_CodeletSetOnDevice, ...]:
        _refuse_duplicates((f"{each.config} on device {each.device}" for each in sets), "set")
        return sets


class _File(ConfigModel):
    name: Annotated[str, Field(min_length=1)]
    decoder: tuple[DecoderSpec, ...] = ()
    app: tuple[AppSpec, ...] = ()
    jbpf: _Jbpf = _Jbpf()
    #: Where streams go, by their destinations: URLs.
    forward: dict[int, str] = Field(default_factory=dict)

    @field_validator("app")
    @classmethod
    def _check_apps(cls, apps: tuple[AppSpec, ...]) -> tuple[AppSpec, ...]:
        _refuse_duplicates((app.name for app in apps), "app")
        return apps

    @field_validator("forward", mode="before")
    @classmethod
    def _check_forward(cls, urls: Any) -> Any:
        for number in urls if isinstance(urls, dict) else ():
            if not (str(number).isdigit() and 1 < int(number) < ForwardDestination.ANY):
                raise ValueError(f"{number} is no destination: those are 2 (UDP) to 126")
        return urls


# --- what follows from them ---------------------------------------------------------------------


def variable_of(param: str) -> str:
    """Return the environment variable in which a program finds a parameter.

    It has upper-case letters, digits and '_' only, so several parameters may have the same.
    """
    prefix = "PENSTOCK_" if param.startswith(_QUEUE) else "PENSTOCK_PARAM_"
    return prefix + re.sub(r"[^A-Za-z0-9]", "_", param).upper()


class PlacedCodeletSet(NamedTuple):
    """A codelet set on a device."""

    device: DeviceSpec
    codelets: CodeletSet


class Channel(NamedTuple):
    """A channel of a codelet, with its stream id."""

    stream: StreamId
    kind: StreamKind
    device: int
    codeletset: str
    codelet: str
    spec: ChannelSpec

    @property
    def label(self) -> str:
        """A name that is unique in the deployment."""
        return f"{self.device}/{self.codeletset}/{self.codelet}/{self.spec.name}/{self.kind}"

    @property
    def param(self) -> str:
        """The parameter that tells a program the file of its queue."""
        return _QUEUE + self.label

    @property
    def schema(self) -> ProtobufSpec | None:
        return None if self.spec.serde is None else self.spec.serde.protobuf


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Everything that is deployed together."""

    name: str
    decoders: tuple[DecoderSpec, ...]
    apps: tuple[AppSpec, ...]
    devices: tuple[DeviceSpec, ...]
    codelet_sets: tuple[PlacedCodeletSet, ...]
    #: Where streams go, by their destinations.
    forward: dict[int, str]
    channels: tuple[Channel, ...]

    @property
    def device_addresses(self) -> dict[int, str]:
        return {device.id: f"{device.ip}:{device.port or 0}" for device in self.devices}


def load_deployment(*files: str | os.PathLike[str]) -> Deployment:
    """Read a deployment from its files.

    Paths in a file are relative to it.

    :raises ConfigError: a file is invalid; the error names file, line and field.
    """
    if not files:
        raise ConfigError("deployment", None, None, "no file is given")
    parts = [(Path(file), load_config(file, _File)) for file in files]
    name = parts[0][1].name
    devices: dict[int, DeviceSpec] = {}
    apps: dict[str, AppSpec] = {}
    forward = {ForwardDestination.UDP.value: _COLLECTOR}
    for file, part in parts:
        if part.name != name:
            raise _fault(file, ("name",), f"should be {name}, as in {files[0]}")
        for index, device in enumerate(part.jbpf.device):
            if devices.setdefault(device.id, device) is not device:
                reason = f"device {device.id} is in another file already"
                raise _fault(file, ("jbpf", "device", index), reason)
        for index, app in enumerate(part.app):
            if app.name in apps:
                raise _fault(file, ("app", index), f"app {app.name} is in another file already")
            apps[app.name] = _located_app(file.parent, app)
        forward |= part.forward
    found = list(_placed(parts, devices))
    placed = tuple(each for each, _ in found)
    _refuse_unused(parts, {each.device.id for each in placed})
    has_programs = any(app.type == "c" for app in apps.values())
    return Deployment(
        name=name,
        decoders=tuple(decoder for _, part in parts for decoder in part.decoder),
        apps=tuple(apps.values()),
        devices=tuple(devices.values()),
        codelet_sets=placed,
        forward=forward,
        channels=tuple(_channels(name, found, forward, has_programs=has_programs)),
    )


#: The file and the field that something comes from.
_Origin: TypeAlias = tuple[Path, tuple[str | int, ...]]


def _fault(file: Path, path: tuple[str | int, ...], reason: str) -> ConfigError:
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return ConfigError(str(file), line_of(file, path), dotted.removeprefix("."), reason)


def _refuse_unused(parts: Sequence[tuple[Path, _File]], used: set[int]) -> None:
    for file, part in parts:
        for index, device in enumerate(part.jbpf.device):
            if device.id not in used:
                reason = f"no codelet set is on device {device.id}"
                raise _fault(file, ("jbpf", "device", index), reason)


def _located_app(folder: Path, app: AppSpec) -> AppSpec:
    modules = tuple(folder / module for module in app.modules)
    return app.model_copy(update={"path": folder / app.path, "modules": modules})


def _placed(
    parts: Sequence[tuple[Path, _File]], devices: dict[int, DeviceSpec]
) -> Iterable[tuple[PlacedCodeletSet, _Origin]]:
    seen: set[tuple[int, str]] = set()
    for file, part in parts:
        for index, each in enumerate(part.jbpf.codelet_set):
            path = ("jbpf", "codelet_set", index)
            if each.device not in devices:
                known = ", ".join(map(str, sorted(devices))) or "none"
                reason = f"there is no device {each.device}; there are: {known}"
                raise _fault(file, (*path, "device"), reason)
            config = file.parent / each.config
            if not config.is_file():
                raise _fault(file, (*path, "config"), f"there is no file {config}")
            codelets = _located_set(config.parent, CodeletSet.load(config))
            if (each.device, codelets.codeletset_id) in seen:
                reason = f"{codelets.codeletset_id} is on device {each.device} already"
                raise _fault(file, path, reason)
            seen.add((each.device, codelets.codeletset_id))
            yield PlacedCodeletSet(devices[each.device], codelets), (file, path)


def _located_set(folder: Path, codelets: CodeletSet) -> CodeletSet:
    """Resolve the paths of descriptor sets on this machine."""

    def located(channel: ChannelSpec) -> ChannelSpec:
        if channel.serde is None or channel.serde.protobuf is None:
            return channel
        protobuf = channel.serde.protobuf
        options = None if protobuf.options_path is None else folder / protobuf.options_path
        there = {"package_path": folder / protobuf.package_path, "options_path": options}
        serde = channel.serde.model_copy(update={"protobuf": protobuf.model_copy(update=there)})
        return channel.model_copy(update={"serde": serde})

    descriptors = tuple(
        codelet.model_copy(
            update={
                "in_io_channel": tuple(map(located, codelet.in_io_channel)),
                "out_io_channel": tuple(map(located, codelet.out_io_channel)),
            }
        )
        for codelet in codelets.codelet_descriptor
    )
    return codelets.model_copy(update={"codelet_descriptor": descriptors})


def _channels(
    name: str,
    placed: Iterable[tuple[PlacedCodeletSet, _Origin]],
    forward: dict[int, str],
    *,
    has_programs: bool,
) -> Iterable[Channel]:
    """Assign each channel its stream id; refuse paths whose ids collide.

    :param has_programs: channels whose environment variables collide are refused, too
    """
    names = StreamNames()
    labels: dict[str, str] = {}
    for (device, codelets), origin in placed:
        for codelet in codelets.codelet_descriptor:
            path = codelet_path(name, codelets.codeletset_id, codelet.codelet_name)
            both = (
                (StreamKind.INPUT, codelet.in_io_channel),
                (StreamKind.OUTPUT, codelet.out_io_channel),
            )
            for kind, spec in ((kind, spec) for kind, specs in both for spec in specs):
                destination = spec.forward_destination
                if destination != ForwardDestination.NONE and destination not in forward:
                    reason = f"{path} {spec.name} goes to {destination}: forward has no URL for it"
                    raise _fault(*origin, reason)
                try:
                    stream = names.register(destination, device.id, path, spec.name)
                except PenstockError as error:
                    raise _fault(*origin, str(error)) from None
                channel = Channel(
                    stream, kind, device.id, codelets.codeletset_id, codelet.codelet_name, spec
                )
                variable = variable_of(channel.param)
                other = labels.setdefault(variable, channel.label)
                if has_programs and other != channel.label:
                    reason = f"{other} and {channel.label} would be one variable for programs"
                    raise _fault(*origin, f"{reason}: {variable}")
                yield channel
