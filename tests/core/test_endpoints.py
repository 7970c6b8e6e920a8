from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from penstock.core import endpoints
from penstock.core.endpoints import create, describe, open_reader, open_writer, schemes
from penstock.core.errors import InvalidOption, InvalidURL, UnknownScheme, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLUGIN = '''
from penstock.core.endpoints import Endpoint
from penstock.core.errors import NotFound

class Parrot(Endpoint):
    """Tells what it was asked for."""

    def open_reader(self, url, start):
        raise NotFound(f"{url.path} {sorted(url.options.items())} {start}")
'''


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package that adds a scheme, as pip would, and remove it afterwards."""
    (tmp_path / "penstock_parrot.py").write_text(PLUGIN)
    info = tmp_path / "penstock_parrot-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-parrot\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{endpoints.ENTRY_POINT_GROUP}]\nparrot = penstock_parrot:Parrot\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    endpoints._load.cache_clear()
    sys.modules.pop("penstock_parrot", None)


def asked_for(*args: object, **options: object) -> str:
    with pytest.raises(FileNotFoundError) as caught:
        open_reader(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_the_schemes_installed_are_listed_once_and_in_order() -> None:
    found = schemes()
    assert "fmq" in found
    assert found == sorted(set(found))


@pytest.mark.parametrize("call", [open_reader, open_writer, create, describe])
def test_an_unknown_scheme_gets_the_one_that_was_meant(call: object) -> None:
    assert callable(call)
    with pytest.raises(UnknownScheme, match="no endpoint answers to fmqq:") as caught:
        call("fmqq:/data/beams")
    assert caught.value.url == "fmqq:/data/beams"
    assert caught.value.hint == "did you mean fmq:?"


def test_an_unknown_scheme_like_no_other_gets_all_there_are() -> None:
    with pytest.raises(UnknownScheme) as caught:
        open_reader("zzzzzz:/data")
    assert caught.value.hint == f"known schemes: {', '.join(schemes())}"


def test_a_path_without_a_scheme_is_refused_as_such() -> None:
    with pytest.raises(InvalidURL, match="no scheme") as caught:
        open_reader("/data/beams")
    assert not isinstance(caught.value, UnknownScheme)


def test_keyword_options_win_over_those_in_the_url(queue_url: str) -> None:
    with open_writer(queue_url + "&compress=off", slots=7) as writer:
        writer.write_many([b"%d" % number for number in range(10)])
    info = describe(queue_url)
    assert info.slots == 7
    assert info.buffer_size == 8192


def test_keyword_options_are_checked_as_those_in_the_url(queue_url: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        open_writer(queue_url, slots="many")
    assert caught.value.option == "slots"
    with pytest.raises(InvalidOption) as caught:
        open_reader(queue_url, slotz=3)
    assert caught.value.hint == "did you mean slots?"


@pytest.mark.usefixtures("parrot")
def test_a_package_adds_a_scheme_by_an_entry_point() -> None:
    assert "parrot" in schemes()
    assert asked_for("parrot:/cage") == "/cage [] start"
    assert asked_for("PARROT:/cage?a=1&b=2", 17, b=3, c=True) == (
        "/cage [('a', '1'), ('b', '3'), ('c', 'true')] seq 17"
    )


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (open_writer, "parrot: cannot be written to"),
        (create, "parrot: has nothing to create"),
        (describe, "parrot: has nothing to show"),
    ],
)
def test_what_a_scheme_cannot_do_is_said_clearly(call: object, says: str) -> None:
    assert callable(call)
    with pytest.raises(Unsupported, match=says):
        call("parrot:/cage")


def test_a_scheme_goes_with_its_package() -> None:
    assert "parrot" not in schemes()
    with pytest.raises(UnknownScheme):
        open_reader("parrot:/cage")
    endpoints._load.cache_clear()
