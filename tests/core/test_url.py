from __future__ import annotations

import os
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidURL
from penstock.core.url import URL


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port", "path"),
    [
        ("fmq:/data/beams", "fmq", None, None, "/data/beams"),
        ("fmq:beams", "fmq", None, None, "beams"),
        ("FMQ:/data/Beams", "fmq", None, None, "/data/Beams"),
        ("  fmq:/data/beams\n", "fmq", None, None, "/data/beams"),
        ("fmqp://rig:5443//data/beams", "fmqp", "rig", 5443, "//data/beams"),
        ("fmqp:://rig:5443:/data", "fmqp", None, None, "://rig:5443:/data"),
        ("psi://rig:11411/Stream%20Name", "psi", "rig", 11411, "/Stream Name"),
        ("psi://[::1]:11411/Floats", "psi", "::1", 11411, "/Floats"),
        ("lhhttt+unix:/run/queue", "lhhttt+unix", None, None, "/run/queue"),
        ("jrtc+udp://127.0.0.1:20788", "jrtc+udp", "127.0.0.1", 20788, ""),
        ("latest:/data/a;b#1+2", "latest", None, None, "/data/a;b#1+2"),
    ],
)
def test_a_url_is_taken_apart(
    text: str, scheme: str, host: str | None, port: int | None, path: str
) -> None:
    url = URL.parse(text)
    assert (url.scheme, url.host, url.port, url.path) == (scheme, host, port, path)
    assert url.options == {}
    assert str(url) == text.strip()


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("slots=20&size=10M", {"slots": "20", "size": "10M"}),
        ("blocking", {"blocking": ""}),
        ("topic=up://vehicle1/100D/2/8001", {"topic": "up://vehicle1/100D/2/8001"}),
        ("topic=site/+/beams#1", {"topic": "site/+/beams#1"}),
        ("start=2026-05-01T12:00:00+02:00", {"start": "2026-05-01T12:00:00+02:00"}),
        ("name=a%20b%26c%2B", {"name": "a b&c+"}),
    ],
)
def test_options_mean_what_they_say(query: str, options: dict[str, str]) -> None:
    assert URL.parse(f"up+mqtt://broker:1883/?{query}").options == options


def test_keyword_options_win_and_none_leaves_the_text_alone() -> None:
    url = URL.parse(
        "fmq:/q?slots=1&size=2&blocking=false",
        {"slots": 5, "size": None, "blocking": True, "wait": 0.5},
    )
    assert url.options == {"slots": "5", "size": "2", "blocking": "true", "wait": "0.5"}


def test_bytes_of_a_file_name_that_are_not_utf_8_survive() -> None:
    assert os.fsencode(URL.parse("fmq:/data/%ff%C3%A9").path) == b"/data/\xff\xc3\xa9"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no scheme"),
        ("/data/beams", "no scheme"),
        ("beams", "no scheme"),
        ("./a:b", "no scheme"),
        (":/data", "no scheme"),
        ("1x:/data", "no scheme"),
        ("a_b:/data", "no scheme"),
        ("fmq:/data\nbeams", "control character"),
        ("fmq:/data\0beams", "control character"),
        ("fmq:/data%00beams", "NUL"),
        ("fmq:/data?name=%00", "NUL"),
        ("fmq:/q?slots=1&slots=2", "slots is given twice"),
        ("psi://rig:99999/x", "Port out of range"),
        ("psi://rig:port/x", "Port"),
        ("psi://[::1/x", "IPv6"),
        ("fmq:/" + "x" * 10_000, "longer than 8192"),
    ],
)
def test_what_is_no_url_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidURL, match=reason) as caught:
        URL.parse(text)
    assert len(str(caught.value)) < 300
    assert caught.value.url[:10] == text[:10]


def test_a_bare_path_gets_the_hint_that_helps() -> None:
    with pytest.raises(InvalidURL) as caught:
        URL.parse("/data/beams")
    assert caught.value.hint == "for a queue, write fmq:/data/beams, for a log log:/data/beams"


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    try:
        url = URL.parse(text)
    except InvalidURL:
        return
    assert url.scheme
    assert "\0" not in url.path


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=30))
def test_every_name_can_be_written(name: str) -> None:
    written = quote(name, safe="")
    url = URL.parse(f"fmq:/{written}?x={written}")
    assert url.path == f"/{name}"
    assert url.options == {"x": name}
