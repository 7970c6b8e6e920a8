"""How are the payloads of messages decoded into rows of columns, one or more each?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import typer

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages
from penstock.core.decoding import Rows, decoder_for, decoding_from_text, parse_decoding
from penstock.core.errors import InvalidOption
from penstock.core.json_lines import json_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.core.message import Message

__all__ = ["DecodedPayloads"]

#: Fields of a message that are shown as well, unless `keep` is given.
_KEPT: Final = ["seq", "time_ns", "created_ns", "type", "subtype"]
#: The column with the reason why a payload does not decode.
_ERROR: Final = "decode_error"


class DecodedPayloads:
    """Decodes the payloads of messages into rows."""

    def __init__(self, text: str) -> None:
        """Parse how to decode: the short form, or options as YAML or JSON.

        :raises typer.BadParameter: it is neither.
        :raises InvalidOption: an option is unknown or missing, or its value does not fit.
        """
        try:
            given = decoding_from_text(text)
        except InvalidOption as error:
            if error.reason == "names no message":
                raise
            raise typer.BadParameter(f"--decode {error.reason}: {error.hint}") from None
        if "on_error" in given:
            raise typer.BadParameter(
                "--decode has no on_error: a line says why one does not decode"
            )
        options = parse_decoding({"keep": _KEPT, **given, "on_error": "skip"})
        self._rows = Rows(decoder_for(options), options, BATCH_SCHEMA.names)
        self.failed = 0

    def of(self, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
        """Yield the rows; one with `decode_error` for each payload that does not decode."""
        rows, failures = self._rows.of(batch_from_messages(messages))
        self.failed += len(failures)
        for row in rows.to_pylist():
            if row[_ERROR] is None:
                del row[_ERROR]
            yield row

    @staticmethod
    def line(row: Mapping[str, Any]) -> bytes:
        """Return a row as a line of JSON."""
        return json_text(row).encode() + b"\n"
