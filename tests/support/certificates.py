"""How does a test get certificates that are good for just this test?"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

__all__ = ["Authority", "Identity"]


class Identity(NamedTuple):
    """The files of one side."""

    certificate: str
    key: str


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._key = directory / f"{name}.key"
        self._file = directory / f"{name}.pem"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(self._key), "-out", str(self._file), "-days", "2"),
            *("-subj", f"/CN=Penstock test {name}"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    @property
    def certificate(self) -> str:
        return str(self._file)

    def issue(self, name: str, *, address: str = "127.0.0.1") -> Identity:
        """Make a certificate for a server at this address, or for a client of this name."""
        base = self._directory / name
        request, extensions = base.with_suffix(".csr"), base.with_suffix(".ext")
        key, certificate = base.with_suffix(".key"), base.with_suffix(".pem")
        extensions.write_text(f"subjectAltName=IP:{address},DNS:{name}\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}"),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self._file)),
            *("-CAkey", str(self._key), "-CAcreateserial", "-days", "2"),
            *("-extfile", str(extensions), "-out", str(certificate)),
        )
        key.chmod(0o644)
        return Identity(str(certificate), str(key))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
