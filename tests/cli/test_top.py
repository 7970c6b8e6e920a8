"""The screen of `top`: what it shows, and how it changes."""

from __future__ import annotations

import asyncio
import html
import os
import shutil
import time
from pathlib import Path

import pytest
from textual.widgets import DataTable

from cli.command import fill, run
from penstock import open_reader, open_writer
from penstock.cli.top_screen import MessagesScreen, StreamsApp, last_lines, sparkline
from penstock.core.errors import WriteTimeout
from penstock.radar.beams import batch_from_beams
from support.radar_volumes import volume


def screen(folder: Path, decode: str | None = None) -> StreamsApp:
    return StreamsApp([str(folder)], recursive=True, every=3600, decode=decode)


def text_of(app: StreamsApp) -> str:
    """Return what is on the screen."""
    return html.unescape(app.export_screenshot()).replace("\xa0", " ")


def test_bars_grow_with_values() -> None:
    assert sparkline([0, 1, 4, 8], 6) == "   ▁▄█"
    assert sparkline([], 3) == "   "


def test_rates_lag_and_messages_are_on_the_screen(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/readings"
    fill(f"fmq:{tmp_path}/beams", 5)
    fill(url, 7)

    async def look() -> None:
        app = screen(tmp_path)
        async with app.run_test(size=(150, 20)) as pilot:
            with open_writer(url) as writer, open_reader(url, cursor="slow"):
                writer.write_many([b'{"v": %d}' % n for n in range(300)])
                await asyncio.sleep(0.05)
                app.look()
                await pilot.pause()
                shown = text_of(app)
                assert "beams" in shown
                assert "readings" in shown
                assert "307" in shown
                assert "█" in shown
                assert str(os.getpid()) in shown
            await pilot.press("s")  # by rate: the one that is written comes first
            await pilot.pause()
            assert app.sub_title == "2 streams, by rate"
            await pilot.press("enter")
            await pilot.pause()
            assert isinstance(app.screen, MessagesScreen)
            assert '{"v": 299}' in text_of(app)
            app.save_screenshot("messages.svg", str(tmp_path))
            await pilot.press("escape")
            await pilot.pause()
            app.save_screenshot("top.svg", str(tmp_path))

    asyncio.run(look())
    for name in ("messages.svg", "top.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")


def test_the_order_follows_the_streams_and_the_cursor_stays_on_its_own(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/{name}?slots=16&size=64k" for name in "ab"]
    for url in urls:
        fill(url, 1)

    async def look() -> None:
        app = screen(tmp_path)
        async with app.run_test(size=(150, 20)) as pilot:
            await pilot.press("s", "s")  # by lag
            with open_writer(urls[1]) as writer, open_reader(urls[1]):
                writer.write_many([b"x"] * 10)
                app.look()
                await pilot.pause()
                rows = [str(row.value) for row in app.query_one(DataTable).rows]
                assert rows == [f"fmq:{tmp_path}/b", f"fmq:{tmp_path}/a"]
                assert app.query_one(DataTable).cursor_row == 1
                assert "Last messages" in text_of(app)  # how to see them

    asyncio.run(look())


def test_a_column_grows_with_what_is_in_it(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a?slots=2048&size=1M"
    fill(url, 1)

    async def look() -> None:
        app = screen(tmp_path)
        async with app.run_test(size=(150, 20)) as pilot:
            table = app.query_one(DataTable)
            before = [column.content_width for column in table.columns.values()]
            with open_writer(url) as writer:
                writer.write_many([b"x" * 100] * 2000)
                app.look()
                await pilot.pause()
            cells = table.get_row_at(0)
            now = [column.content_width for column in table.columns.values()]
            assert all(len(cell) <= width for cell, width in zip(cells, now, strict=True))
            assert now != before

    asyncio.run(look())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], b"top needs a terminal (hint: penstock ls prints the same, once)"),
        (["none"], b"there is no folder and no stream none"),
        (["--decode", "x"], b"--decode takes a format"),
        (["--every", "x"], b"expected a duration"),
    ],
)
def test_what_cannot_be_shown_is_an_error_and_no_screen(
    arguments: list[str], reason: bytes
) -> None:
    done = run("top", *arguments)
    assert done.returncode in {1, 2}
    assert done.stdout == b""  # and not the codes that a terminal gets
    assert reason in done.stderr


def test_a_folder_that_goes_away_is_said_and_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    fill(f"fmq:{folder}/a", 1)

    async def look() -> None:
        app = screen(folder)
        async with app.run_test(size=(150, 20)) as pilot:
            shutil.rmtree(folder)
            for _ in range(10):
                app.look()
            await pilot.pause()
            assert "there is no folder" in app.sub_title
            fill(f"fmq:{folder}/a", 1)
            for _ in range(10):
                app.look()
            assert app.sub_title == "1 stream, by name"

    asyncio.run(look())


def test_messages_are_decoded(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/log"
    with open_writer(url) as writer:
        writer.write(b'{"v": 5}')
    line = last_lines(url, "json:v BIGINT")[-1]
    assert '"v": 5' in line
    assert "there is no log" in last_lines(f"{url}x", None)[0]


def test_the_messages_that_are_shown_stay_for_the_reader_that_their_writer_waits_for(
    tmp_path: Path,
) -> None:
    url = f"fmq:{tmp_path}/queue"
    with open_writer(f"{url}?layout=classic&slots=10&blocking=true&timeout=0.1") as writer:
        writer.write_many([b"%d" % i for i in range(5)])
        assert len(last_lines(url, None)) == 5
        with pytest.raises(WriteTimeout):
            writer.write_many([b"x"] * 10)
    with open_reader(url) as reader:
        assert [message.payload for message in reader.read_many(5)] == [b"%d" % i for i in range(5)]
        assert reader.statistics().lost == 0


def test_the_messages_that_are_shown_stay_for_the_group_that_shares_them(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/log"
    fill(url, 5)
    assert len(last_lines(f"{url}?group=g", None)) == 5
    with open_reader(f"{url}?group=g") as reader:
        assert len(reader.read_many(10)) == 5


def test_of_radar_files_the_log_behind_them_is_not_shown(tmp_path: Path) -> None:
    url = f"cfradial:{tmp_path}"
    with open_writer(url, datamapper=False) as writer:
        writer.write_batch(batch_from_beams(volume(1, rays=4, gates=2)))
    said = f"{url} cannot be read again"  # one cannot count from their end
    assert last_lines(url, None) == [said]
    shutil.rmtree(tmp_path / ".penstock")  # as where another program writes
    assert last_lines(url, None) == [said]


def test_a_thousand_streams_are_there_in_less_than_a_second_of_work(tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/0?slots=64&size=64k", 5)
    whole = (tmp_path / "0.fmq").read_bytes()
    for number in range(1, 1000):
        (tmp_path / f"{number}.fmq").write_bytes(whole)

    async def look() -> tuple[float, float]:
        app = screen(tmp_path)
        began = time.process_time()
        async with app.run_test(size=(150, 40)) as pilot:
            await pilot.pause()
            first = time.process_time() - began
            began = time.process_time()
            app.look()
            again = time.process_time() - began
            assert app.sub_title == "1,000 streams, by name"
        return first, again

    first, again = asyncio.run(look())
    assert first < 1.5  # with the start of the screen itself
    assert again < 1.0
