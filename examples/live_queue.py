"""One writer process and two reader processes on one queue, with a live view of all three.

The second reader is slow on purpose: it is overrun, and says exactly how much it lost.

    python examples/live_queue.py [--seconds 10] [--queue fmq:/path/name]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing as mp
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

import penstock

if TYPE_CHECKING:
    from multiprocessing.managers import SyncManager
    from multiprocessing.synchronize import Event

PAYLOAD = 1024
AT_ONCE = 100
CONSOLE = Console()


@dataclass(frozen=True)
class Books:
    """What a process has done so far."""

    messages: int = 0
    lost: int = 0
    behind: int = 0


def write(url: str, books: dict[str, Books], stop: Event) -> None:
    """Write beams at about 100,000 messages a second until told to stop."""
    with penstock.open_writer(url) as writer:
        payloads = [bytes(PAYLOAD)] * AT_ONCE
        began = time.monotonic()
        while not stop.is_set():
            writer.write_many(payloads, type=1)
            written = writer.statistics().messages
            books["writer"] = Books(written)
            time.sleep(max(0, written / 100_000 - (time.monotonic() - began)))


def read(url: str, name: str, pause: float, books: dict[str, Books], stop: Event) -> None:
    """Read everything until the writer has stopped and nothing is left."""
    with penstock.open_reader(url) as reader:
        while True:
            messages = reader.read_many(AT_ONCE, timeout=0.05)
            now = reader.statistics()
            books[name] = Books(now.messages, now.lost, now.backlog)
            if not messages and stop.is_set():
                return
            time.sleep(pause)


def show(books: dict[str, Books], before: dict[str, Books], seconds: float) -> Table:
    """Draw the table: rates since the last look, totals, losses."""
    table = Table(title="one queue, three processes", title_justify="left")
    for column in ("process", "messages/s", "", "messages", "lost", "behind"):
        table.add_column(column, justify="left" if column in ("process", "") else "right")
    for name, now in books.items():
        rate = (now.messages - before.get(name, Books()).messages) / seconds
        lost = f"[red]{now.lost:,}[/red]" if now.lost else "0"
        table.add_row(
            name,
            f"{rate:,.0f}",
            "█" * round(rate / 10_000),
            f"{now.messages:,}",
            lost,
            f"{now.behind:,}",
        )
    return table


def run(url: str, seconds: float, manager: SyncManager) -> dict[str, Books]:
    """Run the three processes for some seconds and return their books."""
    names = ("writer", "reader", "slow reader")
    books = manager.dict({name: Books() for name in names})
    stopped = mp.Event()
    drained = mp.Event()
    processes = [
        mp.Process(target=read, args=(url, "reader", 0, books, drained)),
        mp.Process(target=read, args=(url, "slow reader", 0.005, books, drained)),
        mp.Process(target=write, args=(url, books, stopped)),
    ]
    for process in processes:
        process.start()
    before, looked = dict(books), time.monotonic()
    with Live(console=CONSOLE, auto_refresh=False) as live:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.25)
            now, moment = dict(books), time.monotonic()
            live.update(show(now, before, moment - looked), refresh=True)
            before, looked = now, moment
    stopped.set()
    processes[-1].join()
    drained.set()
    for process in processes:
        process.join()
    return dict(books)


def main() -> None:
    """Run it and check the books."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--queue", help="an fmq: URL; by default one in a temporary folder")
    given = parser.parse_args()
    # The table shows what is lost; the readers' own warnings would only disturb it.
    logging.getLogger("penstock").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        url = given.queue or f"fmq:{folder}/beams?slots=10000&size=16M"
        penstock.create(url, replace=True)
        books = run(url, given.seconds, manager)
    written = books.pop("writer").messages
    CONSOLE.print(f"\nwritten {written:,} messages of {PAYLOAD} bytes")
    for name, done in books.items():
        adds_up = done.messages + done.lost == written
        verdict = "adds up" if adds_up else "DOES NOT ADD UP"
        CONSOLE.print(f"{name}: {done.messages:,} read + {done.lost:,} lost: {verdict}")
        assert adds_up


if __name__ == "__main__":
    main()
