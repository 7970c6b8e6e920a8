"""Triggers: work for every new file, its place, its retries, its dead letters and its commands."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import open_writer
from penstock.core.dead_letter import Code
from penstock.core.errors import CursorInUse, InvalidOption, NotFound, Unsupported
from penstock.core.retry import Backoff, RetryPolicy
from penstock.protocols.lrose.ldata_format import LatestInfo
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_files import LatestSettings
from penstock.registry.trigger_commands import Command, CommandFailed, CommandTimeout
from penstock.registry.triggers import Happening, NewData, Trigger, on_new_data

AT_ONCE = RetryPolicy(retry_on=(Exception,), backoff=Backoff(table=(0.001,)), max_attempts=3)


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data")


def write(directory: str, *names: str, slots: int = 2500) -> None:
    settings = LatestSettings(fmq_slots=slots)
    with LatestDataInfo(directory, settings=settings, register=None) as latest:
        for number, name in enumerate(names):
            (Path(directory) / name).touch()
            latest.write(name, time=1705320000 + number)


class Recorder:
    """Work that notes what it was done for, and fails when it is told to."""

    def __init__(self, *failing: str) -> None:
        self.names: list[str] = []
        self.failing = set(failing)
        self.told: list[Happening] = []

    def __call__(self, new: NewData) -> None:
        self.names.append(new.info.rel_data_path)
        if new.info.rel_data_path in self.failing:
            raise ValueError(f"no {new.info.rel_data_path} today")

    def trigger(self, directory: str, **options: Any) -> Trigger:
        options = {"start": "start", "policy": AT_ONCE, "tell": self.told.append, **options}
        return Trigger(directory, self, **options)

    def whats(self) -> list[str]:
        return [happening.what for happening in self.told]


def run(trigger: Trigger) -> None:
    trigger.run(idle=0.05)


# --- order and place --------------------------------------------------------------------------


def test_work_is_done_once_for_each_file_in_order(data: str) -> None:
    write(data, "a", "b", "c")
    recorder = Recorder()
    trigger = recorder.trigger(data)
    run(trigger)
    assert recorder.names == ["a", "b", "c"]
    assert trigger.statistics() == (3, 0, 0, 0, 0, 0)
    assert recorder.whats() == ["done"] * 3


def test_the_next_process_goes_on_where_the_last_one_ended(data: str) -> None:
    write(data, "a", "b")
    run(Recorder().trigger(data))
    write(data, "c", "d")
    recorder = Recorder()
    run(recorder.trigger(data))
    assert recorder.names == ["c", "d"]
    other = Recorder()
    run(other.trigger(data, name="another"))
    assert other.names == ["a", "b", "c", "d"]


def test_what_was_under_way_comes_again(data: str) -> None:
    write(data, "a", "b", "c")

    def break_off(new: NewData) -> None:
        if new.info.rel_data_path == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Trigger(data, break_off, start="start"))
    recorder = Recorder()
    run(recorder.trigger(data))
    assert recorder.names == ["b", "c"]


@pytest.mark.parametrize(("start", "names"), [("start", "abc"), ("last", "c"), ("end", "")])
def test_a_new_name_begins_where_it_is_told(data: str, start: str, names: str) -> None:
    write(data, "a", "b", "c")
    recorder = Recorder()
    run(recorder.trigger(data, start=start))
    assert recorder.names == list(names)
    write(data, "d")
    run(recorder.trigger(data, start=start))
    assert recorder.names == [*names, "d"]


def test_a_trigger_that_was_there_before_the_files_gets_all_of_them(data: str) -> None:
    recorder = Recorder()
    trigger = recorder.trigger(data, start="last")
    thread = threading.Thread(target=lambda: trigger.run(lambda: len(recorder.names) == 3))
    thread.start()
    time.sleep(0.1)
    write(data, "a", "b", "c")
    thread.join(20)
    assert not thread.is_alive()
    assert recorder.names == ["a", "b", "c"]


def test_a_waiting_trigger_is_woken_soon(data: str) -> None:
    write(data, "a")
    recorder = Recorder()
    trigger = recorder.trigger(data, start="end")
    thread = threading.Thread(target=lambda: trigger.run(lambda: bool(recorder.names)))
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    write(data, "b")
    while not recorder.names:
        assert time.monotonic() - began < 2
        time.sleep(0.001)
    thread.join(20)


def test_two_processes_cannot_have_one_name(data: str) -> None:
    write(data, "a")
    inner = Recorder().trigger(data)

    def work(_: NewData) -> None:
        with pytest.raises(CursorInUse):
            run(inner)
        run(Recorder().trigger(data, name="mine"))

    trigger = Trigger(data, work, start="start", policy=AT_ONCE)
    run(trigger)
    assert trigger.statistics().done == 1


def test_entries_that_are_gone_are_told_of(data: str) -> None:
    write(data, "0", slots=10)
    recorder = Recorder()
    run(recorder.trigger(data))
    write(data, *map(str, range(1, 26)))
    trigger = recorder.trigger(data)
    run(trigger)
    assert recorder.names == ["0", *map(str, range(16, 26))]
    assert trigger.statistics() == (10, 0, 0, 15, 0, 0)
    lost = [happening for happening in recorder.told if happening.what == "lost"]
    assert [happening.count for happening in lost] == [15]


@pytest.mark.parametrize("fresh", [("x",), ("x", "y", "z", "zz")])
def test_a_queue_that_was_made_anew_is_read_from_its_start(data: str, fresh: tuple[str]) -> None:
    write(data, "a", "b", "c")
    run(Recorder().trigger(data))
    for end in ("stat", "buf"):
        (Path(data) / f"_latest_data_info.{end}").unlink()
    write(data, *fresh)
    recorder = Recorder()
    trigger = recorder.trigger(data)
    run(trigger)
    assert recorder.names == list(fresh)
    assert trigger.statistics().restarts == 1
    assert recorder.whats()[0] == "restarted"


@pytest.mark.parametrize("start", ["end", "last"])
def test_a_queue_that_is_made_anew_before_the_first_work_is_read_from_its_start(
    data: str, start: str
) -> None:
    write(data, "a", "b", "c")
    Recorder().trigger(data, start=start).run(stop=lambda: True)
    for end in ("stat", "buf"):
        (Path(data) / f"_latest_data_info.{end}").unlink()
    write(data, *"ABCDE")
    recorder = Recorder()
    trigger = recorder.trigger(data, start=start)
    run(trigger)
    assert recorder.names == [*"ABCDE"]
    assert trigger.statistics().restarts == 1


def test_an_entry_that_is_none_is_told_of_and_passed(data: str) -> None:
    write(data, "a")
    with open_writer(f"fmq:{data}/_latest_data_info") as writer:
        writer.write(b"nothing of the kind")
    write(data, "b")
    recorder = Recorder()
    trigger = recorder.trigger(data)
    run(trigger)
    assert recorder.names == ["a", "b"]
    assert recorder.whats() == ["done", "unreadable", "done"]
    assert trigger.statistics() == (2, 0, 0, 0, 1, 0)


@pytest.mark.parametrize("other", ["LDATA_AS_XML", "LDATA_AS_ASCII"])
def test_files_without_a_queue_are_not_enough(
    data: str, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setenv(other, "false")
    monkeypatch.setenv("LDATA_FMQ_ACTIVE", "false")
    write(data, "a")
    with pytest.raises(Unsupported):
        Recorder().trigger(data).run(idle=20)


def test_the_place_can_be_kept_elsewhere(data: str, tmp_path: Path) -> None:
    write(data, "a")
    before = set(Path(data).iterdir())
    recorder = Recorder("a")
    run(recorder.trigger(data, state=tmp_path / "state"))
    assert set(Path(data).iterdir()) == before
    assert (tmp_path / "state" / "_penstock_on.cursors").exists()
    assert len(list(recorder.trigger(data, state=tmp_path / "state").dead_letters)) == 1


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 100, "a b"])
def test_a_name_that_no_file_can_have_is_refused(data: str, name: str) -> None:
    with pytest.raises(InvalidOption):
        Trigger(data, lambda _: None, name=name)


def test_the_decorator_takes_the_name_of_its_function(data: str) -> None:
    write(data, "a")
    seen: list[str] = []

    @on_new_data(data, start="start")
    def convert(new: NewData) -> None:
        seen.append(new.path)

    assert isinstance(convert, Trigger)
    assert convert.name == "convert"
    run(convert)
    assert seen == [f"{data}/a"]
    convert(NewData(LatestInfo(latest_time=1, rel_data_path="a"), data, 7))
    assert len(seen) == 2


# --- what fails -------------------------------------------------------------------------------


def test_work_that_fails_is_tried_again_before_the_next_file(data: str) -> None:
    write(data, "a", "b", "c")
    recorder = Recorder("b")
    trigger = recorder.trigger(data)
    run(trigger)
    assert recorder.names == ["a", "b", "b", "b", "c"]
    assert recorder.whats() == ["done", "failed", "failed", "dead", "done"]
    assert trigger.statistics() == (2, 1, 3, 0, 0, 0)


def test_what_is_given_up_is_kept_and_can_be_tried_again(data: str) -> None:
    write(data, "a", "b", "c")
    recorder = Recorder("a", "c")
    trigger = recorder.trigger(data)
    run(trigger)
    letters = list(trigger.dead_letters)
    assert [trigger.told_by(letter).info.rel_data_path for letter in letters] == ["a", "c"]
    assert [letter.attempts for letter in letters] == [3, 3]
    assert letters[0].code is Code.UNKNOWN
    assert letters[0].reason == "no a today"

    recorder.failing = {"c"}
    recorder.names.clear()
    assert trigger.retry_dead() == (1, 1)
    assert recorder.names == ["a", "c", "c", "c"]
    (still,) = trigger.dead_letters
    assert still.attempts == 6
    assert still.first_attempt_ns == letters[1].first_attempt_ns

    recorder.failing = set()
    assert trigger.retry_dead() == (1, 0)
    assert list(trigger.dead_letters) == []
    assert trigger.retry_dead() == (0, 0)


def test_letters_in_a_folder_that_was_removed_and_made_again_are_all_there(data: str) -> None:
    write(data, "a", "b")
    recorder = Recorder("a", "b", "c", "d")
    trigger = recorder.trigger(data)
    run(trigger)
    recorder.failing = {"c", "d"}
    assert trigger.retry_dead() == (2, 0)
    shutil.rmtree(trigger.dead_letters.folder)  # they are done, and the position of that stays
    write(data, "c", "d")
    run(trigger)
    names = [trigger.told_by(letter).info.rel_data_path for letter in trigger.dead_letters]
    assert names == ["c", "d"]
    recorder.failing = {"d"}
    assert trigger.retry_dead() == (1, 1)
    recorder.failing = set()
    assert trigger.retry_dead() == (1, 0)
    assert list(trigger.dead_letters) == []


def test_a_stop_ends_the_wait_for_the_next_attempt(data: str) -> None:
    write(data, "a", "b")
    recorder = Recorder("a")
    patient = RetryPolicy(retry_on=(Exception,), backoff=Backoff(table=(60.0,)), max_attempts=9)
    began = time.monotonic()
    trigger = recorder.trigger(data, policy=patient)
    trigger.run(lambda: bool(recorder.names))
    assert time.monotonic() - began < 10
    assert recorder.names == ["a"]
    again = Recorder()
    run(again.trigger(data))
    assert again.names == ["a", "b"]


def test_a_dead_letter_that_cannot_be_kept_stops_the_trigger(data: str) -> None:
    write(data, "a", "b")
    (Path(data) / "_penstock_on.on.dead").write_text("in the way")
    recorder = Recorder("a")
    with pytest.raises(Exception, match="dead"):
        run(recorder.trigger(data))
    (Path(data) / "_penstock_on.on.dead").unlink()
    recorder.failing = set()
    recorder.names.clear()
    run(recorder.trigger(data))
    assert recorder.names == ["a", "b"]


# --- commands ---------------------------------------------------------------------------------


def new_data(directory: str, name: str = "sub/a b.nc", **fields: Any) -> NewData:
    path = Path(directory) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    ext = path.suffix.removeprefix(".") or "none"
    fields = {"latest_time": 1705320000, "rel_data_path": name, "file_ext": ext, **fields}
    return NewData(LatestInfo(**fields), directory, 5)


def test_words_are_filled_in_and_no_shell_looks_at_them(data: str) -> None:
    words = ["{path}", "{rel}|{ext}|{seq}", "{time}", "{unix}{{x}}", "$HOME;rm", "{lead}", "{dir}"]
    new = new_data(data, is_forecast=True, forecast_lead_secs=3600)
    assert Command(words).arguments(new) == [
        f"{data}/sub/a b.nc",
        "sub/a b.nc|nc|5",
        "2024-01-15T12:00:00Z",
        "1705320000{x}",
        "$HOME;rm",
        "3600",
        data,
    ]
    assert Command(["{valid}"]).arguments(new) == ["2024-01-15T13:00:00Z"]


@pytest.mark.parametrize("words", [[], ["{what}"], ["a", "{"], ["}"], ["{PATH}"]])
def test_words_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(InvalidOption):
        Command(words)


def test_a_command_succeeds_or_fails_by_its_status(data: str) -> None:
    new = new_data(data)
    Command(["test", "-f", "{path}"])(new)
    with pytest.raises(CommandFailed, match="ended with status 3"):
        Command(["sh", "-c", "exit 3"])(new)
    with pytest.raises(CommandFailed, match="SIGKILL"):
        Command(["sh", "-c", "kill -9 $$"])(new)
    with pytest.raises(CommandFailed, match="cannot be started"):
        Command(["/no/such/program"])(new)


def test_a_file_that_is_gone_is_told_of(data: str) -> None:
    new = new_data(data)
    Path(new.path).unlink()
    with pytest.raises(NotFound):
        Command(["cat", "{path}"])(new)
    Command(["true", "{rel}"])(new)  # which does not need it


def test_a_command_that_takes_too_long_is_ended_with_all_it_started(
    data: str, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; wait"
    began = time.monotonic()
    with pytest.raises(CommandTimeout):
        Command(["sh", "-c", script], timeout=0.5)(new_data(data))
    assert time.monotonic() - began < 10
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 40
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_that_does_not_hear_is_ended_for_good(data: str) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(CommandTimeout):
        Command([sys.executable, "-c", code], timeout=1, grace=0.2)(new_data(data))
    assert time.monotonic() - began < 20


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_a_stop_lets_a_run_come_to_its_end(data: str, tmp_path: Path) -> None:
    write(data, "a", "b")
    done = tmp_path / "done"
    words = ["sh", "-c", f"sleep 0.3; echo x >> {done}"]
    trigger = Trigger(data, Command(words, stop=lambda: True), start="start")
    stops = iter([False])
    trigger.run(lambda: next(stops, True))
    assert done.read_text() == "x\n"
    assert trigger.statistics().done == 1


def test_a_run_that_does_not_end_is_broken_off_and_comes_again(data: str) -> None:
    write(data, "a", "b")
    command = Command(["sleep", "60"], stop=lambda: True, grace=0.2)
    stops = iter([False])
    books = Trigger(data, command, start="start").run(lambda: next(stops, True))
    assert books == (0, 0, 0, 0, 0, 0)
    recorder = Recorder()
    run(recorder.trigger(data))
    assert recorder.names == ["a", "b"]


def test_a_place_that_somebody_removed_is_kept_again(data: str) -> None:
    write(data, "a")
    recorder = Recorder()
    trigger = recorder.trigger(data)
    thread = threading.Thread(target=lambda: trigger.run(lambda: len(recorder.names) == 2))
    thread.start()
    while "done" not in recorder.whats():
        time.sleep(0.01)
    (Path(data) / "_penstock_on.cursors").unlink()
    write(data, "b")
    thread.join(20)
    write(data, "c", "d")
    after = Recorder()
    run(after.trigger(data, start="last"))
    assert after.names == ["c", "d"]


def test_a_data_directory_that_is_removed_and_made_again_is_followed(data: str) -> None:
    write(data, "a")
    recorder = Recorder()
    state = f"{data}-state"
    trigger = recorder.trigger(data, state=state)
    thread = threading.Thread(target=lambda: trigger.run(lambda: len(recorder.names) == 2))
    thread.start()
    while not recorder.names:
        time.sleep(0.01)
    shutil.rmtree(data)
    Path(data).mkdir()
    write(data, "b")
    thread.join(20)
    assert not thread.is_alive()
    assert recorder.names == ["a", "b"]


def test_a_directory_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        run(Recorder().trigger(str(tmp_path / "nothing")))
    assert not (tmp_path / "nothing").exists()


def test_a_queue_that_is_being_made_is_waited_for(data: str) -> None:
    for end in (".stat", ".buf"):
        (Path(data) / f"_latest_data_info{end}").touch()
    recorder = Recorder()
    trigger = recorder.trigger(data, start="last")
    thread = threading.Thread(target=lambda: trigger.run(idle=2))
    thread.start()
    time.sleep(0.5)
    write(data, "a", "b")
    thread.join(20)
    assert recorder.names == ["a", "b"]
