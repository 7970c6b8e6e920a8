"""How does a client reach a server, ask it something, and understand its errors?"""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import pyarrow as pa
from pyarrow import flight
from pydantic import ValidationError

from penstock.core.errors import (
    ConnectionLost,
    InvalidURL,
    Malformed,
    NotFound,
    PenstockError,
    Unacknowledged,
    Unsupported,
)
from penstock.core.info import StreamInfo
from penstock.core.options import parse_options
from penstock.core.retry import Backoff, RetryPolicy
from penstock.core.url import URL
from penstock.protocols.flight.access import check_token, load_token
from penstock.protocols.flight.errors import AccessRefused, ServerBusy
from penstock.protocols.flight.failures import error_from
from penstock.protocols.flight.options import DEFAULT_PORT, ClientOptions, is_loopback
from penstock.protocols.flight.wire import (
    ActionKind,
    Create,
    Described,
    Failure,
    Forget,
    Identified,
    Record,
    Stream,
    encode_name,
)
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FAREWELL",
    "TOKEN_VARIABLE",
    "Connection",
    "Listed",
    "Target",
    "create_stream",
    "describe_stream",
    "identify_stream",
    "list_streams",
]

log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "PENSTOCK_FLIGHT_TOKEN"  # noqa: S105 - its name

#: Who leaves says so, and waits no longer than this (seconds) for an answer.
FAREWELL: Final = 2.0

_BACKOFF: Final = Backoff(initial=0.05, maximum=2.0)

#: gRPC's own reconnecting, made quick, and no connection shared with another reader or writer. A
#: server that has fallen silent is noticed by pings; gRPC's servers allow one in five minutes.
_CHANNEL: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class Target(NamedTuple):
    """A `flight:` URL, taken apart."""

    url: str
    #: As people write it: `host:port`.
    server: str
    #: As Flight writes it.
    location: str
    #: The stream's name, percent-encoded; empty for the server itself.
    stream: str
    options: ClientOptions
    #: Options for the stream's own endpoint there.
    passed_on: Mapping[str, str]

    @classmethod
    def of(cls, url: URL, *, has_stream: bool = True) -> Target:
        """Take a URL apart.

        :raises InvalidURL: it names no host, or no stream.
        :raises InvalidOption: an option does not fit.
        """
        example = "write flight://host:8815/name"
        if not url.host:
            raise InvalidURL(url.text, "it names no host", hint=example)
        path = url.path.removeprefix("/")
        if has_stream and not path:
            raise InvalidURL(url.text, "it names no stream", hint=example)
        own = {k: v for k, v in url.options.items() if k in ClientOptions.model_fields}
        options = parse_options(
            URL(url.text, url.scheme, url.host, url.port, url.path, own), ClientOptions
        )
        passed_on = {k: v for k, v in url.options.items() if k not in own}
        name = encode_name(path)
        try:
            Stream(stream=name or "/", options=passed_on)
        except ValidationError:
            raise InvalidURL(
                url.text[:60], "the name or an option is too long, or is no text"
            ) from None
        is_tls = options.tls or url.scheme == "flight+tls"
        host = f"[{url.host}]" if ":" in url.host else url.host
        server = f"{host}:{url.port or DEFAULT_PORT}"
        return cls(
            url.text,
            server,
            f"{'grpc+tls' if is_tls else 'grpc+tcp'}://{server}",
            name,
            options,
            passed_on,
        )

    @property
    def is_encrypted(self) -> bool:
        return self.location.startswith("grpc+tls")

    @property
    def host(self) -> str:
        return self.server.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.server.rpartition(":")[2])

    def names(self, **more: Any) -> dict[str, Any]:
        """Return the fields of a record that name the stream."""
        return {"stream": self.stream, "kind": self.options.kind, **more}


class Connection:
    """A connection to a server. It mends itself: a call after one that failed connects again."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._headers = _headers(target)
        self._root_certificates = _root_certificates(target)
        self._client: Any = None

    def __repr__(self) -> str:
        return f"<Connection {self.target.server}>"

    @property
    def client(self) -> Any:
        _check_fork()
        if self._client is None:
            self._client = flight.FlightClient(
                self.target.location,
                tls_root_certs=self._root_certificates,
                generic_options=list(_CHANNEL),
            )
        return self._client

    def check_process(self) -> None:
        """Make sure that this is not a child of the process that connected.

        :raises Unsupported: it is.
        """
        _check_fork()

    def options(self, timeout: float | None = None) -> Any:
        """Return what goes with every call: the token, and how long it may take."""
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def ask(self, kind: ActionKind, question: Record, patience: float | None = None) -> bytes:
        """Ask the server something, and return its answer within so many seconds.

        :raises ConnectionLost: it cannot be reached.
        :raises PenstockError: what the server has to say against it.
        """
        action = flight.Action(kind.value, question.to_bytes())
        try:
            patience = patience or self.target.options.call_timeout
            answers = self.client.do_action(action, self.options(patience))
            body: bytes = next(iter(answers)).body.to_pybytes()
        except StopIteration:
            raise Malformed("flight answer", "count", 1, 0) from None
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise self.understood(error) from None
        return body

    def check(self) -> None:
        """Make sure that the server is there: ask for something that changes nothing.

        :raises ConnectionLost: it is not.
        """
        self.ask(ActionKind.FORGET, Forget(reader=secrets.token_hex(16)))

    def understood(self, error: BaseException) -> PenstockError:
        """Return what an error of Flight means."""
        said = getattr(error, "extra_info", b"")
        if said:
            with suppress(Malformed):
                return error_from(Failure.from_bytes(said))
        reason = _reason(error)
        if isinstance(error, flight.FlightUnauthenticatedError):
            return AccessRefused(
                f"{self.target.server} refuses: {reason}",
                hint=f"give token_file=FILE in the URL, or set {TOKEN_VARIABLE}",
            )
        hint = None
        if not self.target.is_encrypted:
            hint = "is the server running, and does it want flight+tls://?"
        return ConnectionLost(self.target.server, reason, hint=hint)

    def retry_policy(self) -> RetryPolicy:
        """Return how a broken connection is tried again."""
        return RetryPolicy(
            retry_on=_may_pass,
            backoff=_BACKOFF,
            max_attempts=None,
            max_elapsed=self.target.options.retry,
        )

    def drop(self) -> None:
        """Let go of the connection; the next call makes a new one."""
        client, self._client = self._client, None
        if client is None:
            return
        if _Process.first != os.getpid():
            _Process.left_to_parent.append(client)  # to let go of it would wait for ever
            return
        with suppress(Exception):
            client.close()


class _Process:
    """Which process uses gRPC. Its threads are not in a child that is forked then."""

    first: int | None = None
    left_to_parent: ClassVar[list[Any]] = []


def _check_fork() -> None:
    if _Process.first is None:
        _Process.first = os.getpid()
    elif _Process.first != os.getpid():
        raise Unsupported(
            "flight: was in use in the process that this one was forked from, and gRPC cannot "
            "be used in both",
            hint='start the process anew: multiprocessing.get_context("spawn")',
        )


def _may_pass(error: Exception) -> bool:
    """Tell whether an error may be gone at the next attempt."""
    if isinstance(error, Unacknowledged):
        return False
    return isinstance(error, (ConnectionLost, ServerBusy))


def _reason(error: BaseException) -> str:
    """Return the part of an error of gRPC that a person can use."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    for noise in (". Detail:", " Detail:", ". gRPC client debug context", ". Client context"):
        text = text.partition(noise)[0]
    text = text.removeprefix("Flight returned unavailable error, with message: ")
    text = text.removeprefix("Flight returned unauthenticated error, with message: ")
    return text or type(error).__name__


def _headers(target: Target) -> list[tuple[bytes, bytes]]:
    file, said = target.options.token_file, os.environ.get(TOKEN_VARIABLE)
    if file is not None:
        token = load_token(file)
    elif said:
        token = check_token(os.fsencode(said.strip()), TOKEN_VARIABLE, "(not shown)")
    else:
        return []
    if not target.is_encrypted and not is_loopback(target.server.rpartition(":")[0]):
        log.warning(
            "the token for %s passes the network for all to read; use flight+tls://", target.server
        )
    return [(b"authorization", b"Bearer " + token)]


def _root_certificates(target: Target) -> bytes | None:
    file = target.options.ca
    if file is None:
        return None
    with storage_errors("reading", str(file)):
        return file.read_bytes()


# --- streams themselves ---------------------------------------------------------------------------


def create_stream(url: URL, *, replace: bool) -> None:
    """Make a stream on a server."""
    target = Target.of(url)
    connection = Connection(target)
    try:
        options = dict(target.passed_on)
        connection.ask(ActionKind.CREATE, Create(**target.names(options=options), replace=replace))
    finally:
        connection.drop()


def describe_stream(url: URL) -> StreamInfo:
    """Tell what a stream on a server holds."""
    target = Target.of(url)
    connection = Connection(target)
    try:
        answer = Described.from_bytes(
            connection.ask(ActionKind.DESCRIBE, Stream(stream=target.stream))
        )
    finally:
        connection.drop()
    try:
        return StreamInfo(**{**json.loads(answer.info), "url": url.text})
    except (TypeError, ValueError) as error:
        raise Malformed("flight Described", "info", "the fields of a stream", error) from None


def identify_stream(url: URL) -> str | None:
    """Return a token of where a stream is stored, which is that of its own URL over there."""
    target = Target.of(url)
    connection = Connection(target)
    try:
        question = Stream(stream=target.stream)
        answer = connection.ask(ActionKind.IDENTIFY, question)
        return Identified.from_bytes(answer).storage
    except NotFound:
        return None
    except Malformed:  # an older server, which does not know the question
        return f"flight://{target.server}/{target.stream}"
    finally:
        connection.drop()


class Listed(NamedTuple):
    """A stream in a list."""

    url: str
    #: -1: not known.
    messages: int
    bytes: int


def list_streams(url: str, **options: object) -> list[Listed]:
    """Return the streams of a server: `flight://host:port`.

    :raises ConnectionLost: it cannot be reached.
    """
    parsed = URL.parse(url, options)
    target = Target.of(parsed, has_stream=False)
    connection = Connection(target)
    try:
        found = list(connection.client.list_flights(b"", connection.options(None)))
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise connection.understood(error) from None
    finally:
        connection.drop()
    base = f"{parsed.scheme}://{target.server}/"
    return [
        Listed(
            base + b"/".join(info.descriptor.path).decode(errors="replace"),
            info.total_records,
            info.total_bytes,
        )
        for info in found
    ]
