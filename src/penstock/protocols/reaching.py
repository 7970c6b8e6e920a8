"""Why can a host not be reached, in plain words?"""

from __future__ import annotations

import socket
import ssl

from penstock.core.errors import ConnectionLost, PenstockError

__all__ = ["why_unreachable"]


def why_unreachable(error: BaseException, host: str, port: int) -> str:
    """Say what an attempt to connect ended with, without numbers of the operating system."""
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
    # Only what the library itself raises has these.
    return str(getattr(error, name, None) or error.strerror or error)
