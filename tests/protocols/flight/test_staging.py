"""Tasks stage with the server, and what is committed is appended once, whatever dies in between."""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock import create, describe, open_reader, open_writer
from penstock.core.batch import batch_from_messages
from penstock.core.capabilities import Stages, StagingFull
from penstock.core.endpoints import endpoint_of
from penstock.core.errors import InvalidURL, Malformed, MessageTooLarge, NotFound, Unsupported
from penstock.core.message import Message
from penstock.core.provenance import AnotherBatch, Commit, Origin, Span, Staged
from penstock.core.url import URL
from penstock.protocols.flight.access import Place, Root
from penstock.protocols.flight.errors import AccessRefused
from penstock.protocols.flight.server import ServerOptions
from penstock.protocols.flight.staging import StagingArea
from penstock.protocols.flight.wire import EMPTY, ActionKind, CommitStaged, Kind, Piece, Stage
from penstock.queue.append_once import NotedAppends, Stranger
from penstock.queue.notes import NoteFile
from protocols.flight.serving import TOKEN, served, server_process, wire_to
from support.mosquitto import free_port
from support.until import until
from support.waiting import SOON, background, waits

WRITER = "the-query"
PLACE = Place("out", Kind.LOG, Path("out"), exists=False)


def endpoint(url: str) -> Stages:
    found = endpoint_of(url)
    assert isinstance(found, Stages)
    return found


def stage(url: str, numbers: list[int], batch: int = 0, partition: int = 0) -> Staged:
    part = endpoint(url).stage(URL.parse(url), WRITER, batch, partition)
    messages = [Message(0, 0, 0, n % 5, 0, None, None, b"row %d" % n) for n in numbers]
    for start in range(0, len(messages), 1000):
        part.add(batch_from_messages(messages[start : start + 1000]))
    return part.finish()


def stage_all(url: str, rows: int, batch: int = 0, seed: int = 0, tasks: int = 3) -> list[Staged]:
    """Stage a batch as some tasks do; rows come in another order each time."""
    numbers = list(range(rows))
    random.Random(seed).shuffle(numbers)
    return [stage(url, numbers[task::tasks], batch, task) for task in range(tasks)]


def commit(
    url: str,
    files: list[Staged],
    batch: int = 0,
    origin: Origin = Origin(),  # noqa: B008
) -> int:
    return endpoint(url).append_once(URL.parse(url), Commit(WRITER, batch, files, origin))


def origin(first: int, end: int) -> Origin:
    return Origin({"0 log:/in": Span(7, first, end)}, None, "run")


def rows_of(url: str) -> list[int]:
    with open_reader(url.partition("?")[0]) as reader:
        return sorted(int(message.payload.split()[1]) for message in reader.available())


def files_in(root: Path) -> list[str]:
    """Return what is staged below a folder; unlike `rglob`, `os.walk` bears folders that go."""
    return sorted(
        name
        for folder, _, names in os.walk(root)
        for name in names
        if ".penstock-staging" in Path(folder).parts and ".arrow" in name
    )


def wait_until_there_are(count: int, root: Path) -> None:
    """Wait until so many files are staged: the server removes them when it has time."""
    until = time.monotonic() + 20
    while len(files_in(root)) != count:
        assert time.monotonic() < until, files_in(root)
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_what_tasks_have_staged_is_appended_once_in_the_order_of_their_partitions(
    tmp_path: Path, kind: str
) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}deep/out?kind={kind}"
        files = [stage(url, [3, 4], partition=1), stage(url, [0, 1, 2], partition=0)]
        assert all(file.is_there for file in files)
        assert not (tmp_path / "deep").exists()
        assert commit(url, files) == 5
        assert commit(url, files) == 0
        with open_reader(f"{kind}:{tmp_path}/deep/out") as reader:
            assert [m.payload for m in reader.available()] == [b"row %d" % n for n in range(5)]
        assert server.statistics().messages_in == 5
        assert server.statistics().writers == 0
        endpoint(url).unstage(URL.parse(url), Commit(WRITER, 0), is_done=True)
        wait_until_there_are(0, tmp_path)
        assert commit(url, stage_all(url, 9, 1), 1) == 9


def test_an_attempt_that_is_not_committed_leaves_nothing_in_the_stream(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}out?kind=log"
        failed, good = stage(url, [0, 1]), stage(url, [0, 1])
        endpoint(url).unstage(URL.parse(url), Commit(WRITER, 0, [failed]), is_done=False)
        assert len(files_in(tmp_path)) == 1
        with pytest.raises(NotFound, match="not here any more"):
            commit(url, [failed])
        part = endpoint(url).stage(URL.parse(url), WRITER, 0, 0)
        part.add(batch_from_messages([Message(0, 0, 0, 0, 0, None, None, b"row 9")]))
        part.discard()
        assert commit(url, [good]) == 2
        stage(url, [2])  # of a task that Spark has given up, and which came late
        commit(url, [stage(url, [2], 1)], 1)
        assert rows_of(url) == [0, 1, 2]
        endpoint(url).unstage(URL.parse(url), Commit(WRITER, 1), is_done=True)
        wait_until_there_are(0, tmp_path)


def test_a_batch_that_was_begun_goes_on_with_the_files_of_the_first_attempt(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}out?kind=log"
        create(f"log:{tmp_path}/out")
        first = stage_all(url, 30)
        died_half_way(url, tmp_path, first, 12)
        # Spark gives up what it knows of; the server keeps what was begun.
        endpoint(url).unstage(URL.parse(url), Commit(WRITER, 0, first), is_done=False)
        assert len(files_in(tmp_path)) == 3
        assert commit(url, stage_all(url, 30, seed=1)) == 18
        assert rows_of(url) == list(range(30))
        # The replay of a batch that was begun may have no rows at all for a stream.
        died_half_way(url, tmp_path, stage_all(url, 30, 1), 12, batch=1)
        assert commit(url, [], 1) == 18
        assert rows_of(url) == sorted([*range(30), *range(30)])


def died_half_way(url: str, root: Path, files: list[Staged], done: int, batch: int = 0) -> None:
    """Leave what a server leaves that is killed while it appends."""
    log = f"log:{root}/out"
    with open_reader(log) as reader:
        start, epoch = reader.bounds().end, reader.bounds().epoch
    kept = endpoint_of(url)
    assert isinstance(kept, NotedAppends)
    names = [f"{batch}/{file.partition:05d}-{file.path}.arrow" for file in files]
    noted = [[n, f.partition, f.messages] for n, f in zip(names, files, strict=True)]
    note = {
        "batch": batch, "count": 30, "start": start, "epoch": epoch, "is_done": False,
        "files": noted,
    }  # fmt: skip
    notes = kept._notes_for(URL.parse(url), Commit(WRITER, batch))
    kept.notes(URL.parse(url)).write(f"{WRITER}{notes._suffix}", note, sync=True)
    staged = next(root.rglob(f".penstock-staging/**/{names[0].partition('/')[2]}"))
    (staged.parent / "begun").write_text(json.dumps({"stream": "out", "kind": "log"}))
    there = [
        file._replace(path=str(staged.parent / name.partition("/")[2]))
        for file, name in zip(files, names, strict=True)
    ]
    with open_writer(log) as writer:
        for one in Commit("", 0, there).batches():
            writer.write_batch(one.slice(0, done))
            done -= min(done, one.num_rows)


def test_refusals_are_those_of_a_stream_of_this_machine(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}out?kind=log"
        assert commit(url, [stage(url, list(range(10)))], 0, origin(0, 10)) == 10
        assert commit(url, [stage(url, list(range(10)))], 0, origin(0, 10)) == 0
        assert commit(url, [stage(url, list(range(15)))], 0, origin(0, 15)) == 5
        with pytest.raises(AnotherBatch, match=r"log:/in 5 to 19, but delivered was") as caught:
            commit(url, [stage(url, list(range(5, 20)))], 0, origin(5, 20))
        assert caught.value.batch == 0
        assert str(tmp_path) not in str(caught.value)
        files = stage_all(url, 30, 1)
        died_half_way(url, tmp_path, files, 0, batch=1)
        with open_writer(f"log:{tmp_path}/out") as writer:
            writer.write(b"a stranger's")
        with pytest.raises(Stranger, match="messages from 15 on"):
            commit(url, files, 1)


def test_a_note_of_a_client_leads_to_no_other_file(tmp_path: Path) -> None:
    """Whoever may write notes may not have the server read what is outside of its root."""
    secret = tmp_path / "secret"
    secret.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    with served(secret) as other:
        outside = stage(f"{other.url}x?kind=log", [1, 2, 3])
    path = next(secret.rglob(f"*{outside.path}*"))
    with served(root) as server:
        url = f"{server.url}out?kind=log"
        create(f"log:{root}/out")
        kept = endpoint_of(url)
        assert isinstance(kept, NotedAppends)
        notes = kept.notes(URL.parse(url))
        suffix = kept._notes_for(URL.parse(url), Commit(WRITER, 0))._suffix
        with open_reader(f"log:{root}/out") as reader:
            epoch = reader.bounds().epoch
        for name in (str(path), os.path.relpath(path, root / ".penstock-staging/flight/x")):
            note = {
                "batch": 0, "count": 3, "start": 0, "epoch": epoch, "is_done": False,
                "files": [[name, 0, 3]],
            }  # fmt: skip
            notes.write(f"{WRITER}{suffix}", note, sync=True)
            assert commit(url, [stage(url, [7], 1)], 1) == 1
        assert set(rows_of(url)) == {7}


def test_notes_do_not_tell_where_the_files_are(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}out?kind=log"
        commit(url, stage_all(url, 9))
        died_half_way(url, tmp_path, stage_all(url, 30, 1), 3, batch=1)
        commit(url, stage_all(url, 30, 1), 1)
        assert str(tmp_path) not in json.dumps(NoteFile(tmp_path / "out.commits.json").read())


def test_more_than_the_server_has_room_for_is_refused_in_words(tmp_path: Path) -> None:
    with served(tmp_path, max_staged="200k") as server:
        url = f"{server.url}out?kind=log"
        kept = stage(url, list(range(1500)))
        with pytest.raises(StagingFull, match="more than 204,800 bytes") as caught:
            stage(url, list(range(3000)))
        assert "maxOffsetsPerTrigger" in (caught.value.hint or "")
        assert caught.value.limit == 204_800
        assert len(files_in(tmp_path)) == 1
        assert commit(url, [kept]) == 1500
        endpoint(url).unstage(URL.parse(url), Commit(WRITER, 0), is_done=True)
        wait_until_there_are(0, tmp_path)
        assert commit(url, [stage(url, list(range(1500)), 1)], 1) == 1500
    with served(tmp_path, max_message="1k") as server, pytest.raises(MessageTooLarge):
        stage(f"{server.url}out", list(range(500)))


def test_what_nobody_commits_is_removed_in_time_but_not_what_was_begun(tmp_path: Path) -> None:
    with served(tmp_path, keep_staged="1s") as server:
        url = f"{server.url}out?kind=log"
        create(f"log:{tmp_path}/out")
        stage(f"{server.url}other", [1])
        died_half_way(url, tmp_path, stage_all(url, 30), 12)
        wait_until_there_are(3, tmp_path)
        time.sleep(1.5)
        assert commit(url, stage_all(url, 30, seed=1)) == 18


def test_what_was_committed_is_removed_in_time_if_its_query_never_comes_back(
    tmp_path: Path,
) -> None:
    with served(tmp_path, keep_staged="1s") as server:
        url = f"{server.url}out?kind=log"
        assert commit(url, [stage(url, [0, 1])], 0, origin(0, 2)) == 2
        wait_until_there_are(0, tmp_path)
        with pytest.raises(AnotherBatch):
            commit(url, [stage(url, [1, 2])], 0, origin(1, 3))
        wait_until_there_are(0, tmp_path)
        # A writer under a new name has other folders, and takes the note with it.
        died_half_way(url, tmp_path, stage_all(url, 30, 1), 12, batch=1)
        endpoint(url).forget(URL.parse(url), WRITER)
        wait_until_there_are(0, tmp_path)
        assert not list(tmp_path.rglob("begun"))


def test_of_a_batch_that_was_begun_only_what_its_note_names_stays(tmp_path: Path) -> None:
    with served(tmp_path, keep_staged="1s") as server:
        url = f"{server.url}out?kind=log"
        create(f"log:{tmp_path}/out")
        first = stage_all(url, 30)
        stage_all(url, 30, seed=1)
        died_half_way(url, tmp_path, first, 12)
        wait_until_there_are(3, tmp_path)
        assert all(any(file.path in name for file in first) for name in files_in(tmp_path))
        assert commit(url, [], 0) == 18
        wait_until_there_are(0, tmp_path)


def test_files_stay_while_their_commit_waits_for_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocols.flight.staging._OUTCOMES_KEPT", 1)
    with served(tmp_path, keep_staged="1s") as server:
        url = f"{server.url}out?kind=log"
        create(f"log:{tmp_path}/out")
        new = []
        with open_writer(f"log:{tmp_path}/out"):
            files = [stage(url, [0, 1, 2])]
            waiting = threading.Thread(target=lambda: new.append(commit(url, files)))
            waiting.start()
            other = f"{server.url}other?kind=log"
            for batch in range(3):  # whose outcomes do not displace the commit under way
                commit(other, [stage(other, [batch], batch)], batch)
            time.sleep(2.5)
        waiting.join()
        assert new == [3]
        assert rows_of(url) == [0, 1, 2]
        until(lambda: not requests_in_memory())  # the threads of the commits may still be ending


def requests_in_memory() -> list[CommitStaged]:
    gc.collect()  # an error that was handled may keep its frame, and that one the request
    return [one for one in gc.get_objects() if type(one) is CommitStaged]


def test_a_commit_that_waits_goes_on_after_an_orderly_restart(tmp_path: Path) -> None:
    local, port = f"fmq:{tmp_path}/out", free_port()
    create(f"{local}?slots=8&size=64k")
    with open_reader(f"{local}?hold=r") as reader, ExitStack() as calls:
        with served(tmp_path, port=port) as server:
            url = f"{server.url}out?hold=r"
            files = [stage(url, list(range(20)))]
            call = calls.enter_context(background(commit, url, files))
            until(lambda: describe(local).count == 8)
            assert waits(call)
            assert server.stop()
            assert server.statistics().messages_in == 8  # although the rest was not appended
        with served(tmp_path, port=port):
            seen: list[bytes] = []
            while len(seen) < 20:
                seen += [message.payload for message in reader.read_many(100, SOON)]
            call.result(SOON)
    assert seen == [b"row %d" % n for n in range(20)]


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}out?kind=log"
        file = stage(url, [0, 1])
        with pytest.raises(Malformed, match="each file once"):
            commit(url, [file, file])
        assert commit(url, [file]) == 2


def received(
    area: StagingArea, calls: ExitStack, pieces: list[list[int]], *, finish: bool = False
) -> bool:
    """Have an area receive pieces of a new task, whose call lasts as long as `calls`."""
    asked = Stage(stream="out", writer=WRITER, batch=0, id=secrets.token_hex(16), partition=0)
    add = calls.enter_context(area.staging(PLACE, asked))
    outcomes = []
    for number, rows in enumerate(pieces, start=1):
        messages = [Message(0, 0, 0, 0, 0, None, None, b"row %d" % n) for n in rows]
        outcomes.append(add(batch_from_messages(messages), Piece(number=number)))
    if finish:
        outcomes.append(add(EMPTY, Piece(number=len(pieces) + 1, flush=True)))
    return all(outcome.failure is None for outcome in outcomes)


def only_folder(root: Path) -> Path:
    """Return the folder of the only writer."""
    return next(path for path in (root / ".penstock-staging/flight").glob("?" * 32))


def test_room_is_counted_once_and_as_it_is_on_the_disk(tmp_path: Path) -> None:
    area = StagingArea(Root(tmp_path), ServerOptions(root=tmp_path, max_staged=200 << 10))
    with ExitStack() as calls:
        for _ in range(3):  # each 64k, all at the same time
            assert received(area, calls, [list(range(1000))])
        assert not received(area, calls, [list(range(1000))])
    with ExitStack() as calls:
        assert received(area, calls, [[0]] * 150, finish=True)
        assert not received(area, calls, [[0]] * 200)
        size = sum(path.stat().st_size for path in tmp_path.rglob("*.arrow*"))
        assert 190_000 < size <= 204_800


def test_a_batch_that_is_staged_again_is_not_removed_with_the_one_before(tmp_path: Path) -> None:
    area = StagingArea(Root(tmp_path), ServerOptions(root=tmp_path, max_staged=200 << 10))
    for _ in range(5):  # what is done does not count
        with ExitStack() as calls:
            assert received(area, calls, [list(range(2000))], finish=True)
        area.give_up(only_folder(tmp_path), 0)
    with ExitStack() as calls:
        assert received(area, calls, [[1, 2, 3]], finish=True)
    area.clean()
    assert len(files_in(tmp_path)) == 1
    area.give_up(only_folder(tmp_path), 0)
    area.clean()
    assert not list((tmp_path / ".penstock-staging").rglob("*/*"))


def test_a_part_is_sent_again_when_the_connection_breaks(tmp_path: Path) -> None:
    with served(tmp_path) as server, wire_to(server.port) as wire:
        url = f"{wire.url('out')}?kind=log&chunk=1k"
        is_over = threading.Event()

        def cut() -> None:
            while not is_over.wait(0.1):
                wire.cut()
                if wire.connections > 4:
                    return

        cutting = threading.Thread(target=cut)
        part = endpoint(url).stage(URL.parse(url), WRITER, 0, 0)
        messages = [Message(0, 0, 0, 0, 0, None, None, b"row %d" % n) for n in range(20_000)]
        part.add(batch_from_messages(messages))
        cutting.start()
        try:
            staged = part.finish()
        finally:
            is_over.set()
            cutting.join()
        assert commit(url, [staged]) == 20_000
        assert rows_of(f"log:{tmp_path}/out") == list(range(20_000))


def test_a_server_is_killed_at_any_moment_and_every_batch_is_there_once(tmp_path: Path) -> None:
    chance, per_batch = random.Random(5), 3000
    with server_process(tmp_path, "--quiet") as server:
        url = f"{server.url}out?kind=log&segment=64k&segment_slots=512"
        for batch in range(4):
            life = threading.Thread(target=kill_and_start, args=(server, chance.uniform(0, 0.4)))
            life.start()
            numbers = list(range(batch * per_batch, (batch + 1) * per_batch))
            files = [stage(url, numbers[task::2], batch, task) for task in range(2)]
            commit(url, files, batch, origin(numbers[0], numbers[-1] + 1))
            life.join()
            endpoint(url).unstage(URL.parse(url), Commit(WRITER, batch), is_done=True)
        assert rows_of(f"log:{tmp_path}/out") == list(range(4 * per_batch))
        wait_until_there_are(0, tmp_path)


def kill_and_start(server: object, after: float) -> None:
    time.sleep(after)
    server.kill()  # type: ignore[attr-defined]
    server.start()  # type: ignore[attr-defined]


def test_token_and_encryption_hold_for_it_too(
    tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    root = tmp_path / "root"
    root.mkdir()
    with served(root, token_file=token_file, tls_cert=cert, tls_key=key) as server:
        assert server.url.startswith("flight+tls://")
        url = f"flight+tls://localhost:{server.port}/out?kind=log&ca={cert}"
        with pytest.raises(AccessRefused):
            stage(url, [1])
        assert TOKEN in token_file.read_text()
        assert (
            commit(f"{url}&token_file={token_file}", [stage(f"{url}&token_file={token_file}", [1])])
            == 1
        )
    with served(root, read_only=True) as server, pytest.raises(AccessRefused):
        stage(f"{server.url}out", [1])


def test_no_stream_can_be_where_tasks_stage(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        stage(f"{server.url}out", [1])
        with pytest.raises(InvalidURL):
            open_writer(f"{server.url}.penstock-staging/flight/x")
        with pytest.raises(InvalidURL):
            stage(f"{server.url}.penstock-staging/x", [1])


def test_an_older_server_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path) as server:
        known = [kind for kind in ActionKind if kind is not ActionKind.COMMIT]
        said = [(kind.value, "") for kind in known]
        monkeypatch.setattr(server._service, "list_actions", lambda _: said)
        with pytest.raises(Unsupported, match="does not stage"):
            stage(f"{server.url}out", [1])
