"""Which streams do the tests create, and what came through?"""

from __future__ import annotations

import pytest

from penstock.core.interfaces import Reader
from penstock.core.stream_id import id_for_app
from penstock.queue.streams import InputStream, OutputStream

__all__ = ["CREATORS", "OTHER", "STREAM", "payloads"]

STREAM = id_for_app("an_app_of_tests", "a_stream")
OTHER = id_for_app("an_app_of_tests", "another_stream")
#: Each side that can be created.
CREATORS = pytest.mark.parametrize("creator", [OutputStream, InputStream])


def payloads(reader: Reader) -> list[bytes]:
    return [bytes(message.payload) for message in reader.available()]
