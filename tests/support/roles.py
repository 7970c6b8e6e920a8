"""How does a test start a process that plays a role, and end it again?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from support.processes import _PATH, Peer

__all__ = ["Cast", "Role", "cast"]


class Role(Peer):
    """A process that runs one function of a module of `support`, and is ready."""

    def __init__(self, module: str, name: str, /, **arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"support.{module}", name, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _PATH, "PYTHONWARNINGS": "error"},
        )

    def ask(self) -> dict[str, Any]:
        self.say()
        return self.hear()

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.end()
        assert self.process.returncode == -signal.SIGKILL

    def leave(self) -> str:
        """Let it end by itself, and return what it said since."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        said = self.process.stdout.read()
        assert self.process.wait(60) == 0
        return said


class Cast:
    """All processes of one test; none outlives it."""

    def __init__(self) -> None:
        self._roles: list[Role] = []

    def begin(self, module: str, name: str, /, **arguments: object) -> Role:
        """Start one; who has to know that it is ready hears what it says."""
        role = Role(module, name, **arguments)
        self._roles.append(role)
        return role

    def start(self, module: str, name: str, /, **arguments: object) -> Role:
        """Start one, and return when it is ready."""
        role = self.begin(module, name, **arguments)
        role.hear()
        return role

    def end(self) -> None:
        for role in self._roles:
            role.end()


@contextlib.contextmanager
def cast() -> Iterator[Cast]:
    roles = Cast()
    try:
        yield roles
    finally:
        roles.end()
