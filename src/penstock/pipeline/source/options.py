"""Which options do the Spark source and sink have?"""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.core.config import listed
from penstock.core.endpoints import endpoint_of
from penstock.core.errors import InvalidOption
from penstock.core.options import Size  # noqa: TC001 - pydantic reads it at run time
from penstock.core.units import parse_duration, parse_time
from penstock.core.url import URL
from penstock.pipeline.graph.fields import PLACES, Url
from penstock.pipeline.source.ranges import ROW_SCHEMA, Slice, slices_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SinkOptions", "SourceOptions", "check_target", "parse_spark_options"]

#: A comma before another URL; other commas are part of a URL.
_BETWEEN_URLS: Final = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*:)")

_NUMBER: Final = re.compile(r"-?[0-9]+")
#: Values of an option that is off.
_OFF: Final = frozenset({"false", "0", "no", "off", "n", "f"})

#: Options that set the start of a source, and its end.
_STARTS: Final = (
    *("startingOffsets", "startingTime", "startingSeq", "startingTimestamp"),
    "startingOffsetsByTimestamp",
)
_ENDS: Final = ("endingOffsets", "endingTime", "endingTimestamp", "endingOffsetsByTimestamp")

#: Options for streaming reads only.
STREAM_ONLY: Final = (
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger"),
    *("maxTriggerDelay", "hold", "stage"),
)

#: Reader options that would hide messages from the source, or set another position.
_NOT_IN_A_URL: Final = {
    "type": 'use .option("type", …)',
    "resume": 'use .option("failOnDataLoss", "false")',
    "hold": 'use .option("hold", …)',
    "cursor": 'use .option("hold", …)',
}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"is not JSON; expected {what}") from None


def _urls(value: object) -> object:
    """Accept one URL, a JSON list of URLs, or several separated by commas."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        urls = _json(text, '["fmq:/path/one", "fmq:/path/two"]')
    else:
        urls = [part.strip() for part in _BETWEEN_URLS.split(text) if part.strip()]
    for url in urls:
        _check_source(str(url))
    return urls


def _check_source(url: str) -> None:
    for option in URL.parse(url).options:
        if option in _NOT_IN_A_URL:
            raise InvalidOption(
                "url", url, f"{option}= has no place in a source's URL", hint=_NOT_IN_A_URL[option]
            )


def check_target(url: str) -> None:
    """Check that batches can be appended to the stream of a URL one by one.

    :raises InvalidURL: the URL is not valid.
    :raises InvalidOption: each batch would replace the one before.
    """
    options = URL.parse(url).options
    if options.get("create") == "always":
        raise InvalidOption(
            "url", url, "create=always would empty it with every batch", hint="leave it out"
        )
    if options.get("replace", "false").lower() not in _OFF:
        raise InvalidOption(
            "url",
            url,
            "replace= would write over it with every batch",
            hint="leave it out; what gets many batches is a log:, or a directory of files",
        )


def _target(value: object) -> object:
    if isinstance(value, str):
        check_target(value)
    return value


def _offsets(value: object) -> object:
    text = str(value).strip()
    if not text.startswith("{"):
        return _place(text)
    given = _json(text, '{"fmq:/path/name": 120}')
    return {url: PLACES.get(str(at := _place(each)), at) for url, each in given.items()}


def _place(value: object) -> str | int:
    text = str(value).strip().lower()
    if text in PLACES:
        return text
    if not _NUMBER.fullmatch(text):
        raise ValueError("expected earliest, latest, a number, or JSON with one for each URL")
    return int(text)


def _moment(value: object) -> object:
    if value is None:
        return None
    text = str(value)
    return int(text) if _NUMBER.fullmatch(text) else parse_time(text)


def _milliseconds(value: object) -> object:
    """Accept a time as in Kafka's source: milliseconds since 1970."""
    if value is None:
        return None
    text = str(value).strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError("expected milliseconds since 1970; startingTime takes ISO 8601")
    return int(text) * 1_000_000


def _times(value: object) -> object:
    """Accept a time in milliseconds for each URL."""
    if value is None or isinstance(value, dict):
        return value
    given = _json(str(value), '{"fmq:/path/name": 1700000000000}')
    if not isinstance(given, dict):
        raise ValueError('expected {"fmq:/path/name": 1700000000000}')  # noqa: TRY004 - pydantic's
    return {url: _milliseconds(at) for url, at in given.items()}


def _delay(value: object) -> object:
    return parse_duration(str(value))


def _slices(value: object) -> object:
    return value if value is None else slices_from_json(str(value))


def _decoding(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.strip()
    return (
        _json(text, '{"format": "struct", "layout": "<if"}')
        if text[:1] == "{"
        else {"format": text}
    )


def _columns(value: object) -> object:
    """Accept names separated by commas."""
    if not isinstance(value, str):
        return value
    names = [name.strip().lower() for name in value.split(",")]
    for name in names:
        if name not in ROW_SCHEMA.names:
            raise ValueError(f"{name!r} is no column; there are {', '.join(ROW_SCHEMA.names)}")
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice")
    return names


#: `earliest`, `latest`, a sequence number for all URLs, or JSON with one for each URL.
Place = Annotated[Literal["earliest", "latest"] | int | dict[str, int], BeforeValidator(_offsets)]
#: ISO 8601, or nanoseconds.
Moment = Annotated[int | None, BeforeValidator(_moment)]
#: As in Kafka's source, in milliseconds; for all URLs, or JSON with one for each.
Timestamp = Annotated[int | None, BeforeValidator(_milliseconds)]
Timestamps = Annotated[dict[str, int] | None, BeforeValidator(_times)]
#: The target URL of a sink.
Target = Annotated[str, BeforeValidator(_target)]


class SparkOptions(BaseModel):
    """Base of options given by `.option(…)`, whose names are case-insensitive in Spark."""

    # Built on first use: a process that reads does not need the options of a sink.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def refuse(self, names: set[str], reason: str) -> None:
        """Check that none of these options is given.

        :raises InvalidOption: one of them is given.
        """
        for name in sorted(names & self.model_fields_set):
            raise InvalidOption(name, getattr(self, name), reason)


class SourceOptions(SparkOptions):
    """Options of `format("penstock")` as a source. Those of Kafka's source mean the same."""

    url: Annotated[list[str], BeforeValidator(_urls), Field(min_length=1)]
    startingOffsets: Place = "earliest"  # noqa: N815 - the words of Spark's users
    #: Batch only.
    endingOffsets: Place = "latest"  # noqa: N815
    #: Read from this append time on.
    startingTime: Moment = None  # noqa: N815
    #: Batch only: read up to this append time, exclusive.
    endingTime: Moment = None  # noqa: N815
    #: The same under Kafka's names.
    startingTimestamp: Timestamp = None  # noqa: N815
    startingOffsetsByTimestamp: Timestamps = None  # noqa: N815
    endingTimestamp: Timestamp = None  # noqa: N815
    endingOffsetsByTimestamp: Timestamps = None  # noqa: N815
    #: The same as a number in `startingOffsets`.
    startingSeq: Annotated[int | None, Field(ge=0)] = None  # noqa: N815
    maxOffsetsPerTrigger: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    maxBytesPerTrigger: Annotated[Size, Field(ge=1)] | None = None  # noqa: N815
    #: A batch waits for this many messages, but at most `maxTriggerDelay` seconds.
    minOffsetsPerTrigger: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    maxTriggerDelay: Annotated[float, BeforeValidator(_delay), Field(ge=0)] = 900.0  # noqa: N815
    failOnDataLoss: bool = True  # noqa: N815
    minPartitions: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    #: Deliver messages of this type only.
    type: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    #: Name of a reader for which the writer waits, until the query has finished messages.
    hold: Annotated[str | None, Field(min_length=1)] = None
    #: A log for the copy of a stream that cannot be re-read, such as a UDP port.
    stage: Annotated[str | None, Field(pattern="^log:")] = None
    #: The columns to read: Spark does not push down the selection of a query.
    columns: Annotated[list[str] | None, BeforeValidator(_columns)] = None
    #: How payloads become columns: a format, or JSON with the options of `decode`. The option
    #: `schema` is its schema.
    decode: Annotated[dict[str, Any] | None, BeforeValidator(_decoding)] = None
    #: The part of each stream to read, from `slices_to_json`.
    slices: Annotated[dict[str, Slice] | None, BeforeValidator(_slices)] = None
    #: With failOnDataLoss=false: a stream that gets a message for every lost range.
    lossUrl: Url | None = None  # noqa: N815
    #: The folder for loss reports of tasks; by default in the temporary directory.
    lossFolder: Annotated[str | None, Field(min_length=1)] = None  # noqa: N815

    def check_stream(self) -> None:
        """Check that the options fit a streaming read.

        :raises InvalidOption: one does not.
        """
        self.check_together()
        self.refuse(set(_ENDS), "is for spark.read only")

    def check_table(self) -> None:
        """Check that the options fit a batch read.

        :raises InvalidOption: one does not.
        """
        self.check_together()
        self.refuse(set(STREAM_ONLY), "is for readStream only")

    def check_together(self) -> None:
        """Check that no options conflict.

        :raises InvalidOption: two options set the start, or the end.
        """
        for names in (_STARTS, _ENDS):
            given = [name for name in names if name in self.model_fields_set]
            for name in given[1:]:
                raise InvalidOption(name, getattr(self, name), f"{given[0]} is given as well")
        self._check_order()
        if "maxTriggerDelay" in self.model_fields_set and self.minOffsetsPerTrigger is None:
            raise InvalidOption(
                "maxTriggerDelay",
                self.maxTriggerDelay,
                "nothing waits without minOffsetsPerTrigger",
            )
        if self.columns is not None and self.decode is not None:
            raise InvalidOption(
                "columns", ", ".join(self.columns), "decode says it", hint='give it "keep": […]'
            )
        if self.lossUrl is not None and self.failOnDataLoss:
            raise InvalidOption(
                "lossUrl",
                self.lossUrl,
                "nothing is written to it while a loss ends the query",
                hint='.option("failOnDataLoss", "false")',
            )
        if self.lossUrl is not None and not endpoint_of(self.lossUrl).can_be_reread:
            raise InvalidOption(
                "lossUrl",
                self.lossUrl,
                "cannot be read again, and what tasks tell there is counted from it",
                hint="use a log: or a queue, and copy that: penstock cp",
            )

    def start_time(self, url: str | None = None) -> int | None:
        """Return the append time at which reading a stream starts, or None."""
        return self._time(self.startingTime, self.startingTimestamp, url, _STARTS[-1])

    def end_time(self, url: str | None = None) -> int | None:
        """Return the append time before which reading a stream ends, or None."""
        return self._time(self.endingTime, self.endingTimestamp, url, _ENDS[-1])

    def _time(
        self, moment: int | None, timestamp: int | None, url: str | None, option: str
    ) -> int | None:
        if url is not None and (each := getattr(self, option)) is not None:
            found: int | None = each.get(url)
            return found
        return timestamp if moment is None else moment

    def _check_order(self) -> None:
        numbers = self.startingOffsets if self.startingSeq is None else self.startingSeq
        for name, start, end in (
            ("endingTime", self.start_time(), self.end_time()),
            ("endingOffsets", numbers, self.endingOffsets),
        ):
            if isinstance(start, int) and isinstance(end, int) and 0 <= end < start:
                raise InvalidOption(name, end, f"is before the start, which is {start}")


def _outputs(value: object) -> object:
    if not isinstance(value, str):
        return value
    return _json(value, '{"name": "log:/path/name"}')


def _all_targets(value: object) -> object:
    """Accept one URL, or a JSON list of URLs."""
    if isinstance(value, str) and value.strip().startswith("["):
        value = _json(value, '["log:/path/one", "log:/path/two"]')
    return (value,) if isinstance(value, str) else listed(value)


class SinkOptions(SparkOptions):
    """Options of `format("penstock")` as a sink."""

    #: The target of all rows, or a JSON list: each gets all of them. Without it the column `url`
    #: has the target of each row.
    url: Annotated[tuple[Target, ...], BeforeValidator(_all_targets)] = ()
    #: JSON, names to URLs: the targets of rows by their column `output`. A name may have several
    #: URLs, each of which gets the row.
    outputs: Annotated[
        dict[str, Annotated[tuple[Target, ...], BeforeValidator(listed)]], BeforeValidator(_outputs)
    ] = {}
    #: A folder shared by driver and executors; by default beside the stream.
    staging: Annotated[str | None, Field(min_length=1)] = None
    #: Batch only: the query and the number of the batch, to append it only once.
    query: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    batch: Annotated[int | None, Field(ge=0)] = None
    #: Set by Spark.
    checkpointLocation: str | None = None  # noqa: N815
    queryName: str | None = None  # noqa: N815

    def check_part(self) -> None:
        """Check that `query` and `batch` are given together.

        :raises InvalidOption: one of the two is missing.
        """
        if (self.query is None) != (self.batch is None):
            missing = "query" if self.query is None else "batch"
            raise InvalidOption(missing, None, "query and batch go together")


_AnyOptions = TypeVar("_AnyOptions", bound=SparkOptions)


def parse_spark_options(given: Mapping[str, Any], model: type[_AnyOptions]) -> _AnyOptions:
    """Parse and check options given by `.option(…)`.

    :raises InvalidOption: one is unknown or missing, or its value does not fit.
    """
    if "owner" in given:  # which Spark adds for a table, whose options it then keeps to itself
        raise InvalidOption(
            "url",
            given.get("url"),
            "Spark does not give the options of a table to a source in Python",
            hint="CREATE TEMPORARY VIEW … USING penstock OPTIONS (url '…')",
        )
    names = {name.lower(): name for name in model.model_fields}
    named = {names.get(key.lower(), key): value for key, value in given.items()}
    _take_path(named)
    _take_schema(named)
    try:
        return model.model_validate(named)
    except ValidationError as error:
        raise _in_words(error, names) from None


def _in_words(error: ValidationError, names: Mapping[str, str]) -> InvalidOption:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "options"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name.lower(), names, n=1)
        known = f"known: {', '.join(sorted(names.values()))}"
        hint = f"did you mean {names[near[0]]}?" if near else known
        return InvalidOption(name, first["input"], "there is no such option", hint=hint)
    if first["type"] == "missing":
        example = f'.option("{name}", "fmq:/path/name")' if name == "url" else None
        return InvalidOption(name, None, "is missing", hint=example)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidOption):  # by a parser that knows its own field only
        return InvalidOption(name, first["input"], cause.reason, hint=cause.hint)
    reason = str(first["msg"]).removeprefix("Value error, ").replace("Input should", "should", 1)
    return InvalidOption(name, first["input"], reason, hint=getattr(cause, "hint", None))


def _take_path(named: dict[str, Any]) -> None:
    """Take the URL from `path` or `paths`, as `.load("fmq:/path")` and `.start(…)` set them."""
    path = named.pop("path", None) or named.pop("paths", None)
    if path is None:
        return
    if named.setdefault("url", path) != path:
        raise InvalidOption("path", path, f"url={named['url']} is given as well")


def _take_schema(named: dict[str, Any]) -> None:
    """Move the option `schema` into `decode`."""
    schema = named.pop("schema", None)
    if schema is None:
        return
    decoding = _decoding(named.get("decode"))
    if not isinstance(decoding, dict):
        raise InvalidOption(
            "schema", schema, "says nothing without decode", hint='.option("decode", "json")'
        )
    named["decode"] = {**decoding, "schema": schema}
