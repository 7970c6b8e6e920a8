"""A folder that stands for the machine of somebody who tries what a page says.

Paths such as `/data` are below it, hosts such as `rig` are this machine, and ports are free ones.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cli.command import PENSTOCK
from penstock.core.interfaces import Closable
from support.mosquitto import free_port
from support.until import until

if TYPE_CHECKING:
    pass

__all__ = ["Machine"]

_FOLDERS = ("tmp", "data", "archive", "path", "dev/shm")
_PATH = re.compile(rf"(?<![\w.])/(?:{'|'.join(_FOLDERS)})(?=/|\b)")
_HOST = re.compile(r"""(?:(?<=//)|(?<="))(?:rig|desk|radar1|broker|collector|localhost)\b""")
_PORT = re.compile(
    r"""((?:127\.0\.0\.1|0\.0\.0\.0):|[Pp]ort[=:]\s?|-?port |--metrics |"127\.0\.0\.1", )"""
    r"(\d{4,5})\b"
)
#: The ports of servers for whose lines a page says none.
_USUAL = {"flight": 8815, "psi": 11411, "ldata": 5447, "collector": 20788}
#: Ends by itself, or is told to after some seconds.
ENDLESS = re.compile(
    r"--follow|--loop|\bwatch\b|\bmon\b|\bon /|iwrf\+tcp|\brelay \w|\brun\b(?!.*--to)"
)
_SECONDS = 3
#: Where nothing is to be found, or something is lacking: an exit code that says so is right.
MAY_FAIL = re.compile(
    r"--from 2026-05-01|yesterday|\bdoctor\b|--before 1000000|\bdead (show|retry)"
)
_SERVER = re.compile(r"penstock (?:serve|chaos|graph run|jrtc (?:run|forward)|dispatch run)\b")


class Machine(Closable):
    """Runs lines of a page, one after the other; what serves goes on until it is closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports: dict[str, int] = {}
        self._servers: list[tuple[str, subprocess.Popen[str], IO[str]]] = []
        for name in (*_FOLDERS, "bin"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "bin/penstock").symlink_to(PENSTOCK)
        self.environment = {
            **os.environ,
            "NO_COLOR": "1",
            "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "PENSTOCK_STREAMS": str(folder / "streams"),
            "UBUS": str(folder / "tmp/penstock-ubus"),
            "DS_BASE_PORT": str(free_port()),  # of LROSE's servers that are told none
            "TMP_DIR": str(folder / "tmp"),
        }

    def here(self, text: str) -> str:
        """Return text of a page as it is for this machine."""
        text = _HOST.sub("127.0.0.1", text).replace("fmqp://127.0.0.1/", "fmqp://127.0.0.1:5443/")
        text = _PORT.sub(lambda found: f"{found[1]}{self._port(found[0])}", text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        return _PATH.sub(lambda found: f"{self.folder}{found[0]}", text)

    def _port(self, where: str) -> int:
        """Return the port that stands for another, the same each time; of all hosts another one."""
        key = ("all " if "0.0.0.0" in where else "") + where[-5:].strip(":= ")
        return self._ports.setdefault(key, free_port())

    def do(self, line: str) -> None:
        """Run a line of shell, as a person would type it."""
        if _SERVER.search(line) and "--check" not in line:
            self._serve(line)
            return
        call = self.here(line)
        fine = {0}
        if ENDLESS.search(line):
            before, _, last = call.rpartition("| ")
            call = f"{before and before + '| '}timeout -s INT {_SECONDS} {last}"
            fine = {0, 124, 130}
        elif MAY_FAIL.search(line):
            fine = {0, 1}
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", call],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
            cwd=self.folder,
            env=self.environment,
        )
        assert done.returncode in fine, f"{line}\n{done.stdout[-500:]}{done.stderr}"
        assert "Traceback" not in done.stderr

    def python(self, script: str, until_it_says: str | None = None) -> str:
        """Run a program and return what it prints; one that goes on gets Ctrl-C behind a text."""
        with (
            tempfile.TemporaryFile("w+", dir=self.folder) as said,
            subprocess.Popen(
                [sys.executable, "-u", "-W", "error::DeprecationWarning", "-c", self.here(script)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env=self.environment,
            ) as program,
        ):
            try:
                if until_it_says is not None:
                    until(lambda: program.poll() is not None or until_it_says in self._said(said))
                    program.send_signal(signal.SIGINT)
                code = program.wait(60)
            finally:
                program.kill()
            printed = self._said(said)
        if until_it_says is None:
            assert code == 0, printed
        else:
            assert until_it_says in printed, printed
        return printed

    def _serve(self, line: str) -> None:
        """Start a line that serves, and wait until it says something."""
        call = line.rstrip("& ")
        service = re.search(r"serve (\w+)", call)
        if service and service[1] in _USUAL and "--port" not in call:
            call += f" --port {_USUAL[service[1]]}"
        ports = set(re.findall(r"\b\d{5}\b", self.here(call)))
        for number, (earlier, *_) in enumerate(self._servers):
            if ports & set(re.findall(r"\b\d{5}\b", self.here(earlier))):
                self._end(self._servers.pop(number))  # a person would, to try the next
                break
        said = tempfile.TemporaryFile("w+", dir=self.folder)  # noqa: SIM115 - closed with it
        server = subprocess.Popen(
            shlex.split(self.here(call)),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )
        self._servers.append((call, server, said))
        until(lambda: server.poll() is not None or os.fstat(said.fileno()).st_size > 0)
        assert server.poll() is None, f"{line}\n{self._said(said)}"

    @staticmethod
    def _said(file: IO[str]) -> str:
        file.seek(0)
        return file.read()

    def close(self) -> None:
        """End what serves, as Ctrl-C does."""
        while self._servers:
            self._end(self._servers.pop())

    def _end(self, started: tuple[str, subprocess.Popen[str], IO[str]]) -> None:
        line, server, said = started
        server.send_signal(signal.SIGINT)
        try:
            code = server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait(30)
        with said:
            text = self._said(said)
        assert code in {0, 3, 130}, f"{line}\n{text}"
        assert "Traceback" not in text, f"{line}\n{text}"
