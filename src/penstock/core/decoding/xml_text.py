"""How do payloads that are XML documents become rows?

An XPath selects the elements that are rows, and each column is an XPath from there. The parser
loads no external data and expands no entities; a document that declares any is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from penstock.core.decoding.decoder import Decoder, Parsed, Part, Refused, parse_all
from penstock.core.decoding.schema import Wrong
from penstock.core.decoding.values import ValueChanged, cast_unchanged, check_times
from penstock.core.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["XmlDecoder", "check_xml_schema"]

_DOCUMENT: Final = "an XML document"
_SCALARS: Final = ("boolean", "integer", "floating", "decimal", "date", "timestamp", "string")


def check_xml_schema(schema: pa.Schema) -> None:
    """Refuse types that an element's text cannot have.

    :raises Wrong: a column has such a type.
    """
    for field in schema:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        if not any(getattr(pa.types, f"is_{name}")(kind) for name in _SCALARS):
            raise Wrong(
                f"column {field.name}: XML cannot be read as {field.type}",
                hint="a column is a number, text, a time, or an ARRAY of those",
            )


class XmlDecoder(Decoder):
    """Reads one document per payload; each element that `rows` finds is a row."""

    format: ClassVar[str] = "xml"

    def __init__(
        self,
        schema: pa.Schema,
        prefix: str,
        *,
        rows: str,
        paths: Mapping[str, str],
        namespaces: Mapping[str, str],
        max_size: int,
        max_rows: int,
    ) -> None:
        super().__init__(schema, prefix)
        unknown = sorted(paths.keys() - set(schema.names))
        if unknown:
            raise InvalidOption("paths", unknown[0], "there is no such column in the schema")
        self._rows = rows
        # A plain name finds the attribute or the element of that name.
        self._paths = {name: paths.get(name, f"@{name} | {name}") for name in schema.names}
        self._namespaces = dict(namespaces)
        self._max_size = max_size
        self._max_rows = max_rows
        self._compiled()  # to report a mistake now

    def _compiled(self) -> tuple[Any, dict[str, Any]]:
        """Compile the paths; the result does not pickle."""
        etree = _lxml()
        try:
            option, text = "rows", self._rows
            rows = etree.XPath(text, namespaces=self._namespaces)
            columns = {}
            for name, text in self._paths.items():
                option = "paths"
                columns[name] = etree.XPath(text, namespaces=self._namespaces)
        except etree.XPathError as error:
            raise InvalidOption(option, text, f"is no XPath: {error}") from None
        return rows, columns

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        compiled = self._compiled()

        def parse(start: int, end: int) -> Parsed:
            tables = [self._read(payloads[i].as_py(), *compiled) for i in range(start, end)]
            counts = np.array([table.num_rows for table in tables], np.int64)
            return Parsed(pa.concat_tables(tables), counts)

        lengths = np.ones(len(payloads), np.int64)
        columns, origin, failures = parse_all(lengths, parse, self._plain, at_once=1)
        return Part(columns, origin, failures)

    def _read(self, payload: bytes, rows: Any, columns: Mapping[str, Any]) -> pa.Table:
        if len(payload) > self._max_size:
            raise Refused(f"{_DOCUMENT} of at most {self._max_size:,} bytes", f"{len(payload):,}")
        etree = _lxml()
        try:
            found = rows(_parse(payload, etree))
            for each in found if isinstance(found, list) else [found]:
                if not etree.iselement(each):
                    raise Refused("elements as rows", f"{each!r}, which the path finds")
            if len(found) > self._max_rows:
                raise Refused(f"{_DOCUMENT} of at most {self._max_rows:,} rows", f"{len(found):,}")
            texts = {name: [path(row) for row in found] for name, path in columns.items()}
        except etree.XPathError as error:
            raise Refused("a document that the paths fit", str(error)) from None
        arrays = [_column(field, texts[field.name]) for field in self._plain]
        return pa.table(arrays, schema=self._plain)


def _parse(payload: bytes, etree: Any) -> Any:
    parser = etree.XMLParser(
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        dtd_validation=False,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
    )
    try:
        root = etree.fromstring(payload, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise Refused(_DOCUMENT, str(error)) from None
    if root.getroottree().docinfo.internalDTD is not None:
        raise Refused(f"{_DOCUMENT} without a DOCTYPE", "one that declares its own")
    return root


def _column(field: pa.Field, found: list[Any]) -> pa.Array:
    """Build a column from the results of a path in each row."""
    is_list = pa.types.is_list(field.type)
    kind = field.type.value_type if is_list else field.type
    texts = [_texts(each) for each in found]
    if not is_list and any(len(each) > 1 for each in texts):
        raise Refused(f"one value of {field.name} a row", "several")
    flat = pa.array([text for each in texts for text in each], pa.string())
    try:
        values = cast_unchanged(flat, kind)
        check_times(values)
    except (pa.ArrowInvalid, ValueChanged) as error:
        raise Refused(f"{field.name} as {kind}", str(error)) from None
    if is_list:
        offsets = np.concatenate(([0], np.cumsum([len(each) for each in texts])))
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=field.type)
    places = np.cumsum([len(each) for each in texts]) - 1
    is_missing = np.array([not each for each in texts], np.bool_)
    return values.take(pa.array(places, pa.int64(), mask=is_missing))


def _texts(found: Any) -> list[str]:
    """Return the texts that an XPath found: of elements, attributes, or what it computed."""
    if isinstance(found, bool):
        return ["true" if found else "false"]
    if isinstance(found, float):
        return [repr(int(found)) if found.is_integer() else repr(found)]
    if isinstance(found, str):
        return [str(found)] if found else []
    return [
        text.strip()
        for each in found
        for text in (str(each) if isinstance(each, str) else "".join(each.itertext()),)
    ]


def _lxml() -> Any:
    try:
        from lxml import etree  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise Unsupported(
            "decoding XML needs the lxml library", hint="pip install 'penstock[xml]'"
        ) from error
    return etree
