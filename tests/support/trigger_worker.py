"""A process that works on new files until it is killed."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from penstock.core.retry import Backoff, RetryPolicy
from penstock.registry.triggers import NewData, on_new_data


def main() -> None:
    directory, record, seed = sys.argv[1:4]
    rng = random.Random(int(seed))
    file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    policy = RetryPolicy(retry_on=(ValueError,), backoff=Backoff(table=(0.001,)), max_attempts=50)

    @on_new_data(directory, start="start", policy=policy)
    def worker(new: NewData) -> None:
        if rng.random() < 0.02:
            raise ValueError("not this time")
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        number = Path(new.path).stem
        os.write(file, f"{number}\n".encode())

    os.write(1, b"ready\n")
    worker.run()


if __name__ == "__main__":
    main()
