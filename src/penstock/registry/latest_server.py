"""How is the latest_data_info of this machine served to others?

As LROSE's DsLdataServer does (docs/specs/lrose.md 3.6), below one directory. Unlike LROSE's it
applies the age, the force and the form that a client requests.
"""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from penstock.core.errors import InvalidOption, NotFound, PenstockError, Unsupported
from penstock.protocols.lrose.addresses import QueueRoot, default_port
from penstock.protocols.lrose.ds_server import DsServer, ServingOptions
from penstock.protocols.lrose.ldata_wire import Arguments, LdataMessage, Mode
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_files import LatestSettings
from penstock.registry.registration import MapRegistrar

if TYPE_CHECKING:
    from penstock.protocols.lrose.ds_message import DsMessage
    from penstock.protocols.lrose.ldata_format import LatestInfo
    from penstock.registry.registration import Register

__all__ = ["LdataServer", "LdataServerOptions"]

log = logging.getLogger(__name__)

#: Most seconds that a client waits for another writer.
_LOCK_TIMEOUT: Final = 10.0
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Folder of the clients' saved positions, below the root.
_PLACES: Final = "_latest_read_info"


class LdataServerOptions(ServingOptions):
    """Options of a server of latest_data_info."""

    #: The directory that is served, with all below it.
    root: Path
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default_factory=lambda: default_port("ldatap")
    )
    #: Refuse writes.
    read_only: bool = False
    #: Most slots of a queue that a client creates.
    max_slots: Annotated[int, Field(ge=1, le=1_000_000)] = 100_000
    #: Register written entries with the DataMapper of this machine.
    datamapper: bool = True
    #: An entry is small.
    max_message: Annotated[int, Field(ge=1024, le=1 << 24)] = 1 << 20


class LdataServer(DsServer):
    """A DsLdataServer. Serves from construction until `close`."""

    def __init__(self, options: LdataServerOptions) -> None:
        """Serve the directories below the root.

        :raises NotFound: the root is not a directory.
        :raises StorageError: the address is in use.
        """
        if not options.root.is_dir():
            raise NotFound(f"there is no directory {options.root}")
        self._map = MapRegistrar() if options.datamapper else None
        self._registering = threading.Lock()
        super().__init__(
            options,
            lambda _: _LdataSession(options, self._register),
            grants=f"{'read' if options.read_only else 'read and write'} its latest_data_info",
        )

    def _register(self, info: LatestInfo, directory: str) -> None:
        if self._map is not None:
            # Each client is served by a thread of its own.
            with self._registering:
                self._map(info, directory)

    def close(self) -> None:
        super().close()
        if self._map is not None:
            with self._registering:
                self._map.close()


class _LdataSession:
    """The open directory of one client."""

    socket_id: int = Mode.REPLY

    def __init__(self, options: LdataServerOptions, register: Register) -> None:
        self.is_over = False
        self._register = register
        self._options = options
        self._root = QueueRoot(options.root)
        self._latest: LatestDataInfo | None = None
        self._directory: str | None = None
        self._arguments = Arguments()

    def handle(self, request: DsMessage) -> DsMessage:
        if self._latest is not None:
            # A client that asks again has the reply before. One whose connection broke may not have
            # it: its label stays before that entry.
            self._latest.save_place()
        return self._reply_to(LdataMessage.from_message(request)).to_message()

    def failure(self, request: DsMessage, error: Exception) -> tuple[int, DsMessage]:
        del request
        text = str(error) if isinstance(error, PenstockError) else "the server failed"
        reply = LdataMessage(mode=Mode.REPLY, error=self._root.hide(text))
        return self.socket_id, reply.to_message()

    def close(self) -> None:
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.close()

    def _reply_to(self, asked: LdataMessage) -> LdataMessage:
        match asked.mode:
            case Mode.OPEN:
                self._open(asked)
            case Mode.READ:
                return self._read(asked.arguments)
            case Mode.WRITE:
                self._write(asked)
            case Mode.CLOSE:
                self.close()
                self.is_over = True
            case Mode.REPLY:
                raise Unsupported("a reply was sent to the server")
            case _:
                self._change(asked.mode, asked.arguments)
        return LdataMessage(mode=Mode.REPLY)

    def _open(self, asked: LdataMessage) -> None:
        self.close()
        self._directory = self._root.path(asked.url or "")
        self._use(asked.arguments)

    def _change(self, mode: Mode, arguments: Arguments) -> None:
        """Change only the arguments that the request sets."""
        names = {
            Mode.SET_DISPLACED_DIR_PATH: ("displacedDirPath",),
            Mode.SET_LDATA_FILE_NAME: ("ldataFileName",),
            Mode.SET_USE_XML: ("useXml",),
            Mode.SET_USE_ASCII: ("useAscii",),
            Mode.SET_SAVE_LATEST_READ_INFO: ("saveLatestReadInfo", "latestReadInfoLabel"),
            Mode.SET_USE_FMQ: ("useFmq",),
            Mode.SET_FMQ_NSLOTS: ("fmqNSlots",),
            Mode.SET_READ_FMQ_FROM_START: ("readFmqFromStart",),
        }[mode]
        said = {name: getattr(self._arguments, name) for name in Arguments.__slots__}
        said |= {name: getattr(arguments, name) for name in names}
        self._use(Arguments(**said))

    def _use(self, arguments: Arguments) -> None:
        """Open the directory with the client's arguments."""
        if self._directory is None:
            raise Unsupported("no directory is open", hint="a client opens one first")
        if arguments.fmqNSlots > self._options.max_slots:
            raise InvalidOption(
                "fmqNSlots", arguments.fmqNSlots, f"is above {self._options.max_slots:,}"
            )
        label = arguments.latestReadInfoLabel if arguments.saveLatestReadInfo else None
        if label is not None and not _LABEL.fullmatch(label):
            raise InvalidOption("latestReadInfoLabel", label, "is letters, digits, dots and dashes")
        settings = LatestSettings(
            name=arguments.ldataFileName,
            use_ascii=arguments.useAscii,
            use_xml=arguments.useXml,
            use_fmq=arguments.useFmq,
            fmq_slots=arguments.fmqNSlots,
            lock_timeout=_LOCK_TIMEOUT,
        )
        # No symbolic link in place of a file may lead out of the root.
        self._root.below(f"{self._directory}/_{settings.name}")
        before, self._arguments = self._arguments, arguments
        if self._latest is not None and _is_same_place(before, arguments):
            self._latest.use(settings)
            return
        self.close()
        self._latest = LatestDataInfo(
            self._directory,
            settings=settings,
            label=label,
            label_place=self._root.folder / _PLACES,
            saves_at_once=False,
            register=self._register,
        )

    def _opened(self) -> LatestDataInfo:
        if self._latest is None:
            raise Unsupported("no directory is open", hint="a client opens one first")
        return self._latest

    def _read(self, arguments: Arguments) -> LdataMessage:
        age = arguments.maxValidAge if arguments.maxValidAge >= 0 else None
        forced = arguments.readForced
        info = self._opened().read(age, from_start=self._arguments.readFmqFromStart, forced=forced)
        if info is None and forced:
            raise NotFound("there is no latest_data_info (of that age)")
        return LdataMessage(mode=Mode.REPLY, info=info)

    def _write(self, asked: LdataMessage) -> None:
        if self._options.read_only:
            raise Unsupported("this server takes no entries: it is read-only")
        if asked.info is None:
            raise InvalidOption("INFO_XML", None, "a write has an entry")
        if asked.info.displaced_dir_path:
            # Readers of the entry would take a file of that directory for the client's.
            self._root.below(asked.info.displaced_dir_path)
        self._opened().write(info=asked.info, fmq_only=asked.arguments.writeFmqOnly)


def _is_same_place(one: Arguments, other: Arguments) -> bool:
    """Tell whether a reader with the other arguments continues at the same position."""
    names = ("ldataFileName", "saveLatestReadInfo", "latestReadInfoLabel")
    return all(getattr(one, name) == getattr(other, name) for name in names)
