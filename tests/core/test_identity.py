"""A stream is one and the same, whatever its URL says of how it is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.endpoints import Endpoint, are_same_stream, identity, is_named_by, is_pattern
from penstock.core.url import URL


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fmq:/a/b?slots=10", "fmq:/a//c/../b.fmq"),
        ("log:a", f"log:{Path.cwd()}/a/?sync=none"),
        ("flight://host/a?token_file=/x", "flight+tls://host:8815/a?retry=5s"),
        ("fmqp://host/a/b?timeout=5", "fmqp:://host:5443:a/b"),
        ("psi://host/Floats?wait=5", "psi://host:11411/Floats"),
        (
            "up+mqtt://host/?topic=up://v/1/1/8001",
            "up+mqtt://host:1883/?qos=0&topic=up://v/1/1/8001",
        ),
        ("latest:/d?wait=5", "latest:/d/?name=latest_data_info"),
    ],
)
def test_options_of_how_it_is_reached_make_no_difference(one: str, other: str) -> None:
    assert identity(one) == identity(other)
    assert are_same_stream(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fmq:/a", "log:/a"),
        ("fmq:/a", "fmq:/b"),
        ("flight://host:1/a", "flight://host:2/a"),
        ("flight://host/a?kind=log", "flight://host/a?kind=fmq"),
        ("up+mqtt://host/?topic=up://v/1/1/8001", "up+mqtt://host/?topic=up://v/1/1/8002"),
        ("latest:/d", "latest:/d?name=other"),
    ],
)
def test_what_says_which_stream_it_is_makes_one(one: str, other: str) -> None:
    assert identity(one) != identity(other)


def test_it_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "here.fmq").symlink_to(tmp_path / "disk" / "there.fmq")
    assert identity(f"log:{tmp_path}/data/x") == identity(f"log:{tmp_path}/disk/x")
    assert identity(f"fmq:{tmp_path}/data/here") == identity(f"fmq:{tmp_path}/disk/there")


def test_it_says_where_it_is_on_this_machine_and_reads_like_a_url(tmp_path: Path) -> None:
    here, there = identity(f"log:{tmp_path}/a?sync=none"), identity("flight://host/a")
    assert here.path == tmp_path / "a"
    assert str(here) == f"log:{tmp_path}/a"
    assert there.path is None
    assert str(there) == "flight://host:8815/a"
    assert str(identity("flight://[::1]/a")) == "flight://[::1]:8815/a"
    odd = identity(f"log:{tmp_path}/a%3Fb%2525")
    assert odd.path == tmp_path / "a?b%25"
    assert identity(str(odd)) == odd


def test_what_an_endpoint_does_not_know_makes_a_difference_but_no_secret_does() -> None:
    one = Endpoint().identity(URL.parse("any://host/a?table=x&password=1"))
    assert one == Endpoint().identity(URL.parse("any://host/a?password=2&table=x"))
    assert str(one) == "any://host/a?table=x"
    assert one != Endpoint().identity(URL.parse("any://host/a?table=y"))


@pytest.mark.parametrize(
    ("url", "pattern", "is_named"),
    [
        ("fmq:/d/out", "fmq:/d/o*", True),
        ("fmq:/d/out.fmq?hold=me", "fmq:/d/[mno]ut?damaged=skip", True),
        ("fmq:/d/e/out", "fmq:/d/*", False),
        ("fmq:/d/out", "log:/d/*", False),
        ("flight://host/d/out", "flight://host:8815/d/*", True),
        ("psi://host/x", "psi://host/*", False),
    ],
)
def test_a_pattern_stands_for_names_and_not_for_directories(
    url: str, pattern: str, is_named: bool
) -> None:
    assert is_named_by(url, pattern) is is_named
    assert not is_pattern(url)


def test_the_brackets_of_an_address_are_no_pattern() -> None:
    assert not is_pattern("flight://[::1]:8815/a")
    assert is_pattern("flight://[::1]:8815/[a]")
