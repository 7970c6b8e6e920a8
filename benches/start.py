"""How much processor time does a command take that does next to nothing?

    python benches/start.py [--rounds N]

`--help`, and `put`, `info` and `cat -n 1` of one message in a ring and in a log, beside a program
of typer's with one command. All run in turn, round after round, with their bytecode cached as that
of an installed package is. Processor time is that of the process, user and system.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

#: A command against the one of typer's, at most.
HELP, COMMAND = 1.5, 2.0

TYPER: Final = """
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "you") -> None:
    typer.echo(name)


app()
"""
PENSTOCK: Final = "from penstock.cli.main import main; main()"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        (Path(folder) / "hello.py").write_text(TYPER)
        commands = _commands(folder)
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(-1, rounds):  # the first round writes the bytecode
            for name, command in commands.items():
                seconds = _processor_time(command, environment)
                if number >= 0:
                    taken[name].append(seconds)
    times = {name: median(seconds) for name, seconds in taken.items()}
    yardstick = {"penstock --help": "typer --help"}
    missed = 0
    for name, seconds in times.items():
        against = yardstick.get(name, "typer")
        ratio, most = seconds / times[against], HELP if name in yardstick else COMMAND
        missed += ratio > most
        print(f"{name:24} {seconds * 1000:6.0f} ms   {ratio:.2f}x of {against}, at most {most:g}x")
    return int(missed > 0)


def _commands(folder: str) -> dict[str, list[str]]:
    python = [sys.executable]
    commands = {
        "typer": [*python, f"{folder}/hello.py"],
        "typer --help": [*python, f"{folder}/hello.py", "--help"],
        "penstock --help": [*python, "-c", PENSTOCK, "--help"],
    }
    for url in (f"fmq:{folder}/ring", f"log:{folder}/log"):
        kind = url.partition(":")[0]
        for name, *options in (["put", "--text", "hello"], ["info"], ["cat", "-n", "1"]):
            commands[f"{name} {kind}"] = [*python, "-c", PENSTOCK, name, url, *options]
    return commands


def _processor_time(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, check=True, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
