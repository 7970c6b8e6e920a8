"""How is the latest_data_info of another machine read and written?

Through its DsLdataServer, LROSE's or ours (docs/specs/lrose.md 3.6).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import Closed, ConnectionLost, Malformed
from penstock.core.interfaces import Closable
from penstock.core.url import URL
from penstock.protocols.lrose.addresses import parse_address
from penstock.protocols.lrose.ds_client import Connection, RequestRefused, ping
from penstock.protocols.lrose.ds_message import ErrorCode
from penstock.protocols.lrose.ldata_format import UNKNOWN, LatestInfo, guess_data_type
from penstock.protocols.lrose.ldata_wire import MESSAGE_TYPE, Arguments, LdataMessage, Mode

if TYPE_CHECKING:
    from penstock.protocols.lrose.addresses import Address
    from penstock.protocols.lrose.ds_message import DsMessage

__all__ = ["LdataClient"]

log = logging.getLogger(__name__)

#: A reply is an entry, which is small.
_MAX_REPLY: Final = 1 << 20
#: No limit of age.
_ANY_AGE: Final = -1
#: Most entries searched, after a reconnect, for the last one delivered.
_MOST_MISSED: Final = 100_000
#: Entries may be alike: the last one delivered is known by those before it, this many at most.
_REMEMBERED: Final = 100


class LdataClient(Closable):
    """One directory behind a server, to be read or written. For one thread at a time.

    After a broken connection, the next read reconnects and resumes after the last entry that was
    delivered.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 10.0,
        timeout: float = 30.0,
        **arguments: Any,
    ) -> None:
        """Name the directory: `ldatap://host:port/dir`, or LROSE's `ldatap:://host:port:dir`.

        Arguments are those of `Arguments`, as `readFmqFromStart=True`.

        :raises InvalidURL: it names no directory.
        """
        self.url = url
        self.address: Address = parse_address(URL.parse(url))
        self._arguments = Arguments(**arguments)
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self._connection: Connection | None = None
        self._is_closed = False
        #: The last entries delivered, the oldest first.
        self._delivered: deque[LatestInfo] = deque(maxlen=_REMEMBERED)
        #: There was no entry at the first read: all later ones are new.
        self._saw_nothing = False
        self._missed: deque[LatestInfo] = deque()
        #: How often the last entry delivered was not found after a reconnect: then entries may be
        #: missing, and all existing ones are delivered.
        self.gaps = 0

    # --- what can be asked ------------------------------------------------------------------

    def read(
        self, max_valid_age: float | None = None, *, forced: bool = False
    ) -> LatestInfo | None:
        """Return what is new since the last read, or None; see `LatestDataInfo.read`.

        LROSE's own server treats every read as not forced, with a maximum age of an hour.

        :raises ConnectionLost: the server cannot be reached.
        :raises RequestRefused: the server reports an error.
        :raises Malformed: the entry is not valid; the next read returns the next one.
        """
        age = _ANY_AGE if max_valid_age is None else int(max_valid_age)
        # With a label, the server keeps the position.
        is_labelled = self._arguments.saveLatestReadInfo
        if self._connection is None and not is_labelled:
            if self._delivered:
                self._catch_up(age)
            elif self._saw_nothing:
                self._open(replace(self._arguments, readFmqFromStart=True))
        if forced:
            return self._read(age, forced=True)
        info = self._missed.popleft() if self._missed else self._read(age)
        if info is not None:
            self._delivered.append(info)
        elif age == _ANY_AGE:
            self._saw_nothing = True
        return info

    def write(self, info: LatestInfo, *, fmq_only: bool = False) -> None:
        """Write an entry.

        :raises ConnectionLost: the server cannot be reached, or did not answer.
        :raises RequestRefused: the server reports an error.
        """
        if info.data_type == UNKNOWN:
            guess = guess_data_type(self.address.path)
            info = LatestInfo.as_read(**{**info.to_fields(), "data_type": guess})
        self._ask(Mode.WRITE, replace(self._arguments, writeFmqOnly=fmq_only), info=info)

    def change(self, mode: Mode, **arguments: Any) -> None:
        """Change an argument, as `change(Mode.SET_USE_XML, useXml=False)`."""
        self._arguments = replace(self._arguments, **arguments)
        self._ask(mode, self._arguments)

    # --- the connection ---------------------------------------------------------------------

    def _read(self, age: int, *, forced: bool = False) -> LatestInfo | None:
        asked = replace(self._arguments, maxValidAge=age, readForced=forced)
        return self._ask(Mode.READ, asked).info

    def _read_or_skip(self, age: int) -> LatestInfo | None:
        """Read the next entry; skip malformed ones."""
        while True:
            try:
                return self._read(age)
            except Malformed as fault:
                if self._connection is None:
                    raise
                log.warning("%s: an entry is passed over: %s", self.url, fault)

    def _catch_up(self, age: int) -> None:
        """Find the entries after the last one delivered, on a new connection."""
        self._open(replace(self._arguments, readFmqFromStart=True))
        found: deque[LatestInfo] = deque(maxlen=_MOST_MISSED)
        try:
            while (info := self._read_or_skip(age)) is not None:
                found.append(info)
        except BaseException:
            self._drop()  # what was found so far is found again
            raise
        place = _place_behind(list(found), list(self._delivered))
        if place is None and found:
            self.gaps += 1
            log.warning("%s: what was read last is gone there; entries may be missing", self.url)
        self._missed = deque(islice(found, place or 0, None))

    def _ask(
        self, mode: Mode, arguments: Arguments, info: LatestInfo | None = None
    ) -> LdataMessage:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")
        if self._connection is None:
            self._open(self._arguments)
        return self._exchange(LdataMessage(mode=mode, arguments=arguments, info=info))

    def _open(self, arguments: Arguments) -> None:
        self._connection = Connection(
            self.address.host,
            self.address.port,
            connect_timeout=self._connect_timeout,
            timeout=self._timeout,
            max_bytes=_MAX_REPLY,
        )
        try:
            self._exchange(LdataMessage(mode=Mode.OPEN, arguments=arguments, url=str(self.address)))
        except BaseException:
            self._drop()
            raise

    def _exchange(self, request: LdataMessage) -> LdataMessage:
        connection = self._connection
        assert connection is not None
        try:
            answer = connection.ask(MESSAGE_TYPE, request.to_message())
        except BaseException:
            # A late reply on it could be taken for the next one.
            self._drop()
            raise
        # A malformed entry is still a complete reply: the next read is not affected.
        reply = _reply(answer)
        if reply.error is not None:
            raise RequestRefused(connection.server, ErrorCode.FAILED, reply.error)
        return reply

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def ping(self) -> None:
        """Check that the server answers.

        :raises ConnectionLost: it does not.
        """
        ping(self.address.host, self.address.port, self._timeout)

    def close(self) -> None:
        """Close the directory at the server, and disconnect. Idempotent."""
        if self._connection is not None:
            try:
                self._exchange(LdataMessage(mode=Mode.CLOSE))
            except (ConnectionLost, RequestRefused, Malformed) as error:
                log.debug("%s: closing: %s", self.url, error)
            self._drop()
        self._is_closed = True


def _place_behind(found: list[LatestInfo], delivered: list[LatestInfo]) -> int | None:
    """Return where the entries after those delivered begin; None: the last one is not there.

    Of several places that fit as well it is the first: an entry twice is better than none.
    """

    def alike(end: int) -> int:
        before = zip(
            reversed(found[max(0, end - _REMEMBERED) : end]), reversed(delivered), strict=False
        )
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], before))

    ends = [end for end, info in enumerate(found, 1) if info == delivered[-1]]
    return max(ends, key=alike, default=None)


def _reply(answer: DsMessage) -> LdataMessage:
    reply = LdataMessage.from_message(answer)
    if reply.mode is not Mode.REPLY:
        raise Malformed("DsLdata reply", "mode", Mode.REPLY.value, reply.mode.value)
    return reply
