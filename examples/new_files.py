"""Work for every new file of a directory, as a chain of radar programs does it.

One process writes files and tells of them by latest_data_info, as LROSE's programs do. A trigger
does the work for each, in order. One file fails, is tried again, and ends as a dead letter.

    python examples/new_files.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.core.retry import Backoff, RetryPolicy
from penstock.registry import LatestDataInfo, NewData, on_new_data

VOLUMES = 5


def main() -> None:
    """Write the files, then do the work."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "volumes"
        directory.mkdir()

        with LatestDataInfo(directory) as latest:
            for number in range(VOLUMES):
                path = directory / f"volume_{number}.txt"
                path.write_text("broken" if number == 2 else "reflectivity " * (number + 1))
                latest.write(path, time=1705320000 + 300 * number, writer="example")

        twice = RetryPolicy(retry_on=(Exception,), backoff=Backoff(table=(0.1,)), max_attempts=2)

        @on_new_data(directory, start="start", policy=twice)
        def count_words(new: NewData) -> None:
            text = Path(new.path).read_text()
            if text == "broken":
                raise ValueError("this volume is broken")
            print(f"{new.info.rel_data_path}: {len(text.split())} words")

        books = count_words.run(idle=0.2)
        print(books)
        for letter in count_words.dead_letters:
            name = count_words.told_by(letter).info.rel_data_path
            print(f"given up: {name}, {letter.attempts} attempts: {letter.reason}")


if __name__ == "__main__":
    main()
