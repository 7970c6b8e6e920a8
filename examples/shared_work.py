"""Three processes share the jobs of a log; one of them is killed, and nothing is left undone.

python examples/shared_work.py
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time

import penstock

COUNT = 300


def work(url: str) -> None:
    """Take jobs, ten at a time, until none is left."""
    with penstock.open_reader(url, group="workers", lease="10s") as reader:
        assert isinstance(reader, penstock.Grouped)
        done = 0
        while reader.group().lag:
            messages = reader.read_many(10, timeout=0.5)
            time.sleep(0.02)  # the work
            reader.ack(messages)
            done += len(messages)
        print(f"process {os.getpid()} did {done} jobs")


def main() -> None:
    """Write jobs, let processes work on them, and kill one of those."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"log:{folder}/jobs"
        with penstock.open_writer(url) as writer:
            writer.write_many(b"job %d" % number for number in range(COUNT))
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=work, args=(url,)) for _ in range(3)]
        for worker in workers:
            worker.start()
        with penstock.open_reader(url, group="workers") as reader:
            assert isinstance(reader, penstock.Grouped)
            while not reader.group().leased:
                time.sleep(0.01)
            workers[0].kill()
            print(f"process {workers[0].pid} was killed")
            for worker in workers:
                worker.join()
            books = reader.group()
        print(f"{books.acked} jobs done, {books.redelivered} were given out again")
        assert (books.acked, books.lag, books.lost) == (COUNT, 0, 0)


if __name__ == "__main__":
    main()
