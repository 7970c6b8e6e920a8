"""What does `cat --decode` print: the columns of payloads, a row a line?"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final

import typer
import yaml

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages
from penstock.core.decoding import Rows, decoder_for, parse_decoding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.message import Message

__all__ = ["DecodedLines"]

#: What of a message is printed, unless `keep` says it.
_KEPT: Final = ["seq", "time_ns", "created_ns", "type", "subtype"]
_HINT: Final = "as in '{format: json, schema: \"id BIGINT, name STRING\"}'"


class DecodedLines:
    """Turns messages into lines of JSON, one for each row that a payload has."""

    def __init__(self, text: str) -> None:
        """Read the options of decoding, as YAML or JSON.

        :raises typer.BadParameter: they are no mapping.
        :raises InvalidOption: one is unknown or missing, or its value does not fit.
        """
        try:
            given = yaml.safe_load(text)
        except yaml.YAMLError:
            given = None
        if not isinstance(given, dict):
            raise typer.BadParameter(f"--decode takes a mapping, {_HINT}")
        if "on_error" in given:
            raise typer.BadParameter(
                "--decode has no on_error: a line says why one does not decode"
            )
        options = parse_decoding({"keep": _KEPT, **given, "on_error": "skip"})
        self._rows = Rows(decoder_for(options), options, BATCH_SCHEMA.names)
        self.failed = 0

    def of(self, messages: Sequence[Message]) -> Iterator[bytes]:
        """Yield the lines; one with `decode_error` for each payload that does not decode."""
        rows, failures = self._rows.of(batch_from_messages(messages))
        self.failed += len(failures)
        for row in rows.to_pylist():
            if row["decode_error"] is None:
                del row["decode_error"]
            yield json.dumps(row, default=_plain).encode() + b"\n"


def _plain(value: Any) -> str:
    """Write what JSON has no type for: bytes in hex, exact numbers and times as text."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if isinstance(value, dt.date) else str(value)
