"""How does a client connect to a server, send requests, and interpret its errors?"""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

import pyarrow as pa
from pyarrow import flight
from pydantic import Field, ValidationError

from penstock.core.errors import (
    ConnectionLost,
    InvalidURL,
    Malformed,
    NotFound,
    PenstockError,
    Unacknowledged,
    Unsupported,
)
from penstock.core.interfaces import StreamInfo
from penstock.core.options import Duration, Options, Patience, Size, parse_options
from penstock.core.retry import Backoff, RetryPolicy
from penstock.core.url import URL, is_loopback
from penstock.protocols.flight.access import DEFAULT_PORT, check_token, load_token
from penstock.protocols.flight.errors import AccessRefused, ServerBusy, error_from
from penstock.protocols.flight.wire import (
    ActionKind,
    Create,
    Described,
    Failure,
    Forget,
    Identified,
    Kind,
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
    "ClientOptions",
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

#: Timeout (seconds) of the request by which a client says that it leaves.
FAREWELL: Final = 2.0

_BACKOFF: Final = Backoff(initial=0.05, maximum=2.0)

#: Quick reconnects by gRPC, and no connection shared with another reader or writer. Pings detect
#: a silent server; gRPC's servers allow one in five minutes.
_CHANNEL: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class ClientOptions(Options):
    """Options of `flight://host:port/stream`; all others go to the stream's own endpoint there."""

    #: Kind of the stream, also if it is created; default: that of the existing stream, or a queue.
    kind: Kind | None = None
    #: Encrypt. `flight+tls://` says the same.
    tls: bool = False
    #: A file with the certificates to trust, PEM; without it, those that the system trusts.
    ca: Path | None = None
    #: A file with the token. Without it, the environment's PENSTOCK_FLIGHT_TOKEN, if it is set.
    token_file: Path | None = None
    #: How long to retry a broken connection before it is an error.
    retry: Duration = 30.0
    #: Timeout of one request.
    call_timeout: Annotated[Duration, Field(gt=0)] = 20.0
    #: Most bytes of one record batch.
    chunk: Annotated[Size, Field(ge=1024, le=1 << 30)] = 1 << 20
    #: Send over a bulk connection, past gRPC, where the server has a port for it.
    bulk: bool = True
    #: Wait for the server and the stream to appear: `true`, or for how long.
    wait: Patience = 0.0
    #: Reader: hold this name; the writer waits for its reader. `cursor` is the same.
    hold: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cursor: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @property
    def name(self) -> str | None:
        """The name under which a reader's position is stored."""
        return self.hold or self.cursor


class Target(NamedTuple):
    """A parsed `flight:` URL."""

    url: str
    #: `host:port`, for messages.
    server: str
    #: The location in Flight's spelling.
    location: str
    #: The stream's name, percent-encoded; empty for the server itself.
    stream: str
    options: ClientOptions
    #: Options for the stream's own endpoint there.
    passed_on: Mapping[str, str]

    @classmethod
    def of(cls, url: URL, *, has_stream: bool = True) -> Target:
        """Parse a URL.

        :raises InvalidURL: it names no host, or no stream.
        :raises InvalidOption: an option is not valid.
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
    """A connection to a server. A call after one that failed reconnects."""

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
        """Check that this is not a forked child of the process that connected.

        :raises Unsupported: it is a forked child.
        """
        _check_fork()

    def options(self, timeout: float | None = None) -> Any:
        """Return the options of every call: the token, and the timeout."""
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def ask(self, kind: ActionKind, question: Record, patience: float | None = None) -> bytes:
        """Send a request, and return its answer within `patience` seconds.

        :raises ConnectionLost: the server cannot be reached.
        :raises PenstockError: the server's error.
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

    def can(self, kind: ActionKind) -> bool:
        """Tell whether the server supports an action; one of an earlier release may not.

        :raises ConnectionLost: the server cannot be reached.
        """
        options = self.options(self.target.options.call_timeout)
        try:
            return any(action.type == kind.value for action in self.client.list_actions(options))
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise self.understood(error) from None

    def check(self) -> None:
        """Check that the server answers, by a request that changes nothing.

        :raises ConnectionLost: it does not.
        """
        self.ask(ActionKind.FORGET, Forget(reader=secrets.token_hex(16)))

    def understood(self, error: BaseException) -> PenstockError:
        """Return the Penstock error for an error of Flight."""
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
        """Return the policy for retries of a broken connection."""
        return RetryPolicy(
            retry_on=_may_pass,
            backoff=_BACKOFF,
            max_attempts=None,
            max_elapsed=self.target.options.retry,
        )

    def drop(self) -> None:
        """Close the connection; the next call opens a new one."""
        client, self._client = self._client, None
        if client is None:
            return
        if _Process.first != os.getpid():
            _Process.left_to_parent.append(client)  # to let go of it would wait for ever
            return
        with suppress(Exception):
            client.close()


class _Process:
    """The process that uses gRPC. A forked child does not have gRPC's threads."""

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
    """Tell whether an error is transient."""
    if isinstance(error, Unacknowledged):
        return False
    return isinstance(error, (ConnectionLost, ServerBusy))


def _reason(error: BaseException) -> str:
    """Return the readable part of an error of gRPC."""
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
    """Create a stream on a server."""
    target = Target.of(url)
    connection = Connection(target)
    try:
        options = dict(target.passed_on)
        connection.ask(ActionKind.CREATE, Create(**target.names(options=options), replace=replace))
    finally:
        connection.drop()


def describe_stream(url: URL) -> StreamInfo:
    """Describe a stream on a server."""
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
    """Return the token of a stream's storage, as its own URL has it on the server."""
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
    #: -1: unknown.
    messages: int
    bytes: int


def list_streams(url: str, **options: object) -> list[Listed]:
    """Return the streams of a server: `flight://host:port`.

    :raises ConnectionLost: the server cannot be reached.
    """
    parsed = URL.parse(url, options)
    target = Target.of(parsed, has_stream=False)
    connection = Connection(target)
    try:
        options_of_call = connection.options(target.options.call_timeout)
        found = list(connection.client.list_flights(b"", options_of_call))
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
