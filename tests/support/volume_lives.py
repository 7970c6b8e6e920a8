"""Beams become volumes in processes that are killed at any line of the code that does it.

`python -m support.volume_lives FOLDER VOLUMES KILLS` commits the beams of volumes to
`cfradial:FOLDER/out`, batch after batch, as a pipeline does. As often as KILLS says, the process
that is at it dies before a random line, and another one goes on with the batch that was not done.
It prints a JSON line: the kills, and in which file each ray is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.core import whole_files
from penstock.core.capabilities import AppendOnce
from penstock.core.endpoints import endpoint_of
from penstock.core.provenance import Commit
from penstock.core.url import URL
from penstock.queue import append_once, notes
from penstock.radar import file_endpoints, volumes
from penstock.radar.beams import batch_from_beams
from penstock.registry import latest_files
from support.radar_volumes import volume

if TYPE_CHECKING:
    from types import FrameType

_WATCHED = {
    module.__file__
    for module in (whole_files, append_once, notes, volumes, file_endpoints, latest_files)
}
_RAYS = 8


def beams_of(count: int) -> pa.Table:
    """Return volumes one behind the other; every third one does not say where it ends."""
    return pa.concat_tables(
        [
            volume(number, sweeps=2, rays=_RAYS // 2, gates=4, ends=number % 3 != 0)
            for number in range(1, count + 1)
        ]
    )


def commit_all(folder: Path, count: int) -> None:
    """Commit what is not done yet, in batches that know nothing of volumes."""
    url = f"cfradial:{folder / 'out'}?datamapper=false"
    endpoint, done = endpoint_of(url), folder / "done"
    assert isinstance(endpoint, AppendOnce)
    beams = beams_of(count)
    size = 11
    batches = [beams.slice(at, size) for at in range(0, beams.num_rows, size)]
    begin = int(done.read_text()) if done.exists() else 0
    for number in range(begin, len(batches)):
        task = append_once.Staging(folder / "staging" / str(number), 0)
        task.add([url], batch_from_beams(batches[number]))
        endpoint.append_once(URL.parse(url), Commit("query", number, task.finish()))
        whole_files.write_whole(done, str(number + 1).encode(), sync=False)
    file_endpoints.CfRadialEndpoint().open_writer(URL.parse(url)).close()


def die_at_line(number: int) -> None:
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in _WATCHED:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def live(folder: Path, count: int, lines: int | None) -> bool:
    """Fork a process for it; tell whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            if lines is not None:
                die_at_line(lines)
            commit_all(folder, count)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is told
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def main() -> None:
    folder, count, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(kills)
    killed = 0
    while killed < kills and not live(folder, count, rng.randrange(100, 1_500)):
        killed += 1
    while not live(folder, count, None):
        pass
    sys.stdout.write(json.dumps({"kills": killed}) + "\n")


if __name__ == "__main__":
    main()
