"""How does a YAML file describe a forwarder: which streams go where?"""

from __future__ import annotations

import contextlib
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, InstanceOf

from penstock.core.config import ConfigModel
from penstock.core.endpoints import open_writer
from penstock.core.interfaces import Closable
from penstock.core.overflow import OverflowPolicy
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.control import ControlServer
from penstock.protocols.jrtc.decoder import DecoderServer
from penstock.protocols.jrtc.destinations import destination_for
from penstock.protocols.jrtc.forwarder import Forwarder
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.jrtc.wire import DATA_PORT

if TYPE_CHECKING:
    from penstock.protocols.jrtc.struct_codec import StructLike

__all__ = ["ControlConfig", "ForwarderConfig", "ForwarderService", "SchemaConfig"]


def _stream(value: Any) -> Any:
    return StreamId.parse(value) if isinstance(value, str) else value


_Stream = Annotated[InstanceOf[StreamId], BeforeValidator(_stream)]
_Port = Annotated[int, Field(ge=0, le=65535)]


class SchemaConfig(ConfigModel):
    """A descriptor set, and the streams that carry its messages."""

    #: As `protoc --include_imports --descriptor_set_out` writes it.
    file: Path
    #: The message of each stream, by its full name.
    streams: dict[_Stream, str] = Field(default_factory=dict)
    #: What payloads are in the queues: protobuf already, or structs as nanopb has them.
    payloads: Literal["protobuf", "nanopb"] = "protobuf"
    #: nanopb's options, where the .proto itself does not have them.
    options: Path | None = None

    def load(self, schemas: Schemas) -> None:
        """Load the descriptor set.

        :raises PenstockError: the descriptor set is invalid.
        """
        struct: StructLike | None = None
        if self.payloads == "nanopb":
            struct = Nanopb() if self.options is None else Nanopb.from_options(self.options)
        schemas.load(self.file, self.streams, struct, replace=False)


class ControlConfig(ConfigModel):
    """Where commands arrive, and which input streams they may reach."""

    host: str = "127.0.0.1"
    tcp_port: _Port | None = None
    udp_port: _Port | None = None
    #: Requests that match the streams; a field of all ones matches any.
    allow: tuple[_Stream, ...]


class ForwarderConfig(ConfigModel):
    """The streams to forward, and their destinations."""

    #: A URL for each `fwd_dst`.
    destinations: dict[Annotated[int, Field(ge=1, le=126)], str] = Field(
        default_factory=lambda: {2: f"jrtc+udp://127.0.0.1:{DATA_PORT}"}
    )
    schemas: tuple[SchemaConfig, ...] = ()
    #: Where schemas come by gRPC, on loopback; those streams carry what `payloads` says.
    grpc_port: _Port | None = None
    payloads: Literal["protobuf", "nanopb"] = "protobuf"
    #: The stream of dead letters.
    dead: str | None = None
    #: Where streams are; by default that of this user.
    directory: Path | None = None
    #: `block`: creators of streams that name us (`hold=forwarder-DST`) wait for us.
    policy: Literal[OverflowPolicy.DROP_OLDEST, OverflowPolicy.BLOCK] = OverflowPolicy.DROP_OLDEST
    control: ControlConfig | None = None

    def load_schemas(self) -> Schemas:
        """Load the descriptor sets.

        :raises PenstockError: one is invalid.
        """
        schemas = Schemas()
        for each in self.schemas:
            each.load(schemas)
        return schemas


class ForwarderService(Closable):
    """A forwarder with its control and schema servers, as a file describes them."""

    def __init__(self, config: ForwarderConfig, schemas: Schemas | None = None) -> None:
        """Open everything and start.

        :param schemas: used instead of those of `config`
        :raises PenstockError: a destination, port or schema is unusable.
        """
        self.schemas = config.load_schemas() if schemas is None else schemas
        self.control: ControlServer | None = None
        self.grpc_port: int | None = None
        with contextlib.ExitStack() as undo:
            if config.grpc_port is not None:
                struct = Nanopb() if config.payloads == "nanopb" else None
                decoder = DecoderServer(self.schemas, "127.0.0.1", config.grpc_port, struct=struct)
                undo.callback(decoder.close)
                self.grpc_port = decoder.port
            if config.control is not None:
                self.control = ControlServer(
                    config.control.allow,
                    self.schemas,
                    host=config.control.host,
                    tcp_port=config.control.tcp_port,
                    udp_port=config.control.udp_port,
                    directory=config.directory,
                )
                undo.callback(self.control.close)
            self.forwarder = undo.enter_context(_forwarder(config, self.schemas))
            self._undo = undo.pop_all()
        self.forwarder.start()

    def close(self) -> None:
        """Send what is left, for a moment, and stop. Idempotent."""
        self._undo.close()


def _forwarder(config: ForwarderConfig, schemas: Schemas) -> Forwarder:
    with contextlib.ExitStack() as undo:
        dead = None
        if config.dead is not None:
            dead = undo.enter_context(open_writer(config.dead))
        forwarder = Forwarder(
            {
                number: undo.enter_context(destination_for(url, schemas))
                for number, url in config.destinations.items()
            },
            schemas,
            directory=config.directory,
            policy=config.policy,
            dead=dead,
        )
        undo.pop_all()  # they are the forwarder's now
    return forwarder
