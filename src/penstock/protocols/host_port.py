"""Which host and port are meant, and why can they not be reached, in plain words?"""

from __future__ import annotations

import errno
import socket
import ssl
from typing import TYPE_CHECKING, Final

from penstock.core.errors import ConnectionLost, InvalidURL, PenstockError, StorageError

if TYPE_CHECKING:
    from penstock.core.url import URL

__all__ = ["check_port", "host_alone", "why_unreachable"]

_LARGEST_PORT: Final = 65_535


def check_port(host: str, port: int) -> None:
    """Check the number of a port to listen at: the resolver would take its low bits.

    :raises StorageError: there is no such port.
    """
    if not 0 <= port <= _LARGEST_PORT:
        cause = OSError(errno.EINVAL, "there is no such port")
        hint = f"ports are numbers up to {_LARGEST_PORT:,}; 0 takes any that is free"
        raise StorageError("listening on", f"{host}:{port}", cause, hint=hint)


def host_alone(url: URL, default_port: int) -> tuple[str, int]:
    """Return host and port of a URL without a path.

    :raises InvalidURL: the URL has no host, or has a path.
    """
    if not url.host or url.path.strip("/"):
        hint = f"write {url.scheme}://host:{default_port}"
        raise InvalidURL(url.text, "it names no host alone", hint=hint)
    # Port 0 is valid: a server picks a free port.
    return url.host, default_port if url.port is None else url.port


def why_unreachable(error: BaseException, host: str, port: int) -> str:
    """Describe why an attempt to connect failed, without error numbers."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(error, ConnectionLost):
        return error.reason
    if isinstance(error, PenstockError):
        return str(error)
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {place}"
    if isinstance(error, socket.gaierror):
        return f"there is no host {host!r}"
    if isinstance(error, TimeoutError):
        return f"{place} does not answer"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {place} is not accepted: {_of(error, 'verify_message')}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with {place}: {_of(error, 'reason').replace('_', ' ').lower()}"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{place}: {reason or str(error) or type(error).__name__}"


def _of(error: OSError, name: str) -> str:
    # Only errors raised by the ssl library have these.
    return str(getattr(error, name, None) or error.strerror or error)
