from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core.errors import InvalidURL
from penstock.core.url import URL
from penstock.protocols.lrose.addresses import (
    Address,
    QueueRoot,
    default_port,
    parse_address,
    path_of,
)


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("fmqp://radar1:5000/fmq/dsr", "radar1", 5000, "fmq/dsr"),
        ("fmqp://radar1/fmq/dsr?type=3", "radar1", 5443, "fmq/dsr"),
        ("fmqp://radar1:5000//data/fmq/dsr", "radar1", 5000, "/data/fmq/dsr"),
        ("fmqp://[::1]:5000/a%20b", "::1", 5000, "a b"),
        ("fmqp:://radar1:5000:fmq/dsr", "radar1", 5000, "fmq/dsr"),
        ("fmqp:://radar1::fmq/dsr", "radar1", 5443, "fmq/dsr"),
        ("fmqp:://radar1:5000:/data/fmq/dsr?type=3", "radar1", 5000, "/data/fmq/dsr"),
        ("fmqp:trans:params//radar1:5000:x", "radar1", 5000, "x"),
        ("fmqp::/etc/params//radar1:5000:x", "radar1", 5000, "x"),
        ("fmqp:://[::1]:5000:x", "::1", 5000, "x"),
        ("fmqp:://::x", "localhost", 5443, "x"),
        ("fmqp:://radar1:default:x", "radar1", 5443, "x"),
    ],
)
def test_both_spellings_say_where_a_queue_is(text: str, host: str, port: int, path: str) -> None:
    address = parse_address(URL.parse(text))
    assert address == Address("fmqp", host, port, path)
    assert parse_address(URL.parse(str(address))) == address
    assert path_of(str(address)) == path


@pytest.mark.parametrize(
    "text", ["fmqp:", "fmqp:/a/b", "fmqp://host", "fmqp://host/", "fmqp://host/a/", "fmqp:://h:1:",
             "fmqp:://h:99999:x", "fmqp:://h:x:x", "fmqp://h/a%3Fb", "fmqp:://h:1:a%3Fb"]
)  # fmt: skip
def test_what_names_no_queue_is_refused(text: str) -> None:
    with pytest.raises(InvalidURL):
        parse_address(URL.parse(text))


def test_a_directory_may_end_in_a_slash() -> None:
    assert parse_address(URL.parse("ldatap://host/mdv/radar/")).path == "mdv/radar/"
    assert parse_address(URL.parse("ldatap:://host::mdv/radar/")).path == "mdv/radar/"
    with pytest.raises(InvalidURL, match="ldatap") as refused:
        parse_address(URL.parse("ldatap://host/"))
    assert "ldatap://" in str(refused.value.hint)


def test_the_environment_shifts_all_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BASE_PORT", "6430")
    assert default_port("fmqp") == 6443
    for said in ("rubbish", "80", "1023", "-6430", ""):  # passed over, as by LROSE
        monkeypatch.setenv("DS_BASE_PORT", said)
        assert default_port("fmqp") == 5443
    for said in (" 6430", "+6430", "6430 # ours"):  # as C's scanf reads it
        monkeypatch.setenv("DS_BASE_PORT", said)
        assert default_port("fmqp") == 6443


@pytest.mark.parametrize(
    "said",
    ["a/b", "./a/b", "a//b", "fmqp:://host:5443:a/b", "fmqp:://host::./a/b", "fmqp:x:y//h:1:a/b",
     "fmqp:://host:default:a/b", "fmqp:://host:-1:a/b"],
)  # fmt: skip
def test_a_path_is_below_the_root(tmp_path: Path, said: str) -> None:
    assert QueueRoot(tmp_path).path(said) == str(tmp_path / "a" / "b")


@pytest.mark.parametrize("said", ["a/b?x=1", "fmqp:://host:1:a/b?", "fmqp:://h::a/b?x=http://p:8/"])
def test_arguments_in_the_url_of_a_client_are_no_part_of_the_path(
    tmp_path: Path, said: str
) -> None:
    assert QueueRoot(tmp_path).path(said) == str(tmp_path / "a" / "b")


def test_an_absolute_path_below_the_root_is_fine(tmp_path: Path) -> None:
    root = QueueRoot(tmp_path)
    assert root.path(f"fmqp:://h:1:{tmp_path}/q") == str(tmp_path / "q")
    assert root.path(f"{tmp_path}/a/../q") == str(tmp_path / "q")


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd", "a/../../b", "/etc/passwd", "{root}/../x", "{root}", ".", "", "..",
        "fmqp:://h:1:../x", "a\nb", "a\0b", "x" * 300, "x/" * 40 + "x", "shmem_12345", "link/x",
        "{root}2/x", "out",
    ],
)  # fmt: skip
def test_a_path_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "root2").mkdir()
    (root / "link").symlink_to(tmp_path / "root2")
    for ending in (".stat", ".buf"):
        (root / f"out{ending}").symlink_to(tmp_path / f"other{ending}")
    with pytest.raises(InvalidURL):
        QueueRoot(root).path(name.format(root=root))


def test_shared_memory_is_served_when_that_is_asked_for(tmp_path: Path) -> None:
    root = QueueRoot(tmp_path, shared_memory=True)
    assert root.path("shmem_12345") == os.path.join(tmp_path, "shmem_12345")  # noqa: PTH118
