"""What can be asked of the Spark source and sink?"""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.core.errors import InvalidOption
from penstock.core.options import Size  # noqa: TC001 - pydantic reads it at run time
from penstock.core.units import parse_time
from penstock.core.url import URL
from penstock.pipeline.fields import PLACES, Url
from penstock.pipeline.rows import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SinkOptions", "SourceOptions", "check_target", "parse_spark_options"]

#: A comma that begins another URL; others belong to the URL that they are in.
_BETWEEN_URLS: Final = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*:)")

_NUMBER: Final = re.compile(r"-?[0-9]+")

#: Options of readers that would hide messages from the source, or take a place of their own.
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
    """Accept one URL, a JSON list of them, or several with commas between."""
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
    """Make sure that batches can be appended one after the other to what a URL names.

    :raises InvalidURL: it names nothing.
    :raises InvalidOption: it would be emptied each time.
    """
    if URL.parse(url).options.get("create") == "always":
        raise InvalidOption(
            "url", url, "create=always would empty it with every batch", hint="leave it out"
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
    """Accept names with commas between."""
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
#: Where a sink writes.
Target = Annotated[str, BeforeValidator(_target)]


class SparkOptions(BaseModel):
    """Base of what is given by `.option(…)`: Spark does not keep upper and lower case apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def refuse(self, names: set[str], reason: str) -> None:
        """Make sure that none of these is given.

        :raises InvalidOption: one is.
        """
        for name in sorted(names & self.model_fields_set):
            raise InvalidOption(name, getattr(self, name), reason)


class SourceOptions(SparkOptions):
    """Options of `format("penstock")` as a source. Words that Kafka's source has mean the same."""

    url: Annotated[list[str], BeforeValidator(_urls), Field(min_length=1)]
    startingOffsets: Place = "earliest"  # noqa: N815 - the words of Spark's users
    #: Batch only.
    endingOffsets: Place = "latest"  # noqa: N815
    #: From this time of appending on.
    startingTime: Moment = None  # noqa: N815
    #: Batch only: up to this time of appending, not including it.
    endingTime: Moment = None  # noqa: N815
    #: The same as a number in `startingOffsets`.
    startingSeq: Annotated[int | None, Field(ge=0)] = None  # noqa: N815
    maxOffsetsPerTrigger: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    maxBytesPerTrigger: Annotated[Size, Field(ge=1)] | None = None  # noqa: N815
    failOnDataLoss: bool = True  # noqa: N815
    minPartitions: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    #: Deliver messages of this type only.
    type: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    #: Let the writer wait for what the query has not finished; the name of the reader.
    hold: Annotated[str | None, Field(min_length=1)] = None
    #: A log to copy a stream to that cannot be read again, such as a UDP port.
    stage: Annotated[str | None, Field(pattern="^log:")] = None
    #: The columns that are needed: Spark asks for all of them, whatever a query selects.
    columns: Annotated[list[str] | None, BeforeValidator(_columns)] = None
    #: How payloads become columns: a format, or JSON with the options of `decode`. The option
    #: `schema` is its schema.
    decode: Annotated[dict[str, Any] | None, BeforeValidator(_decoding)] = None
    #: With failOnDataLoss=false: a stream that gets a message for every range that was lost.
    lossUrl: Url | None = None  # noqa: N815
    #: Where tasks tell what they lost, until it is counted; by default in the temporary directory.
    lossFolder: Annotated[str | None, Field(min_length=1)] = None  # noqa: N815

    def check_stream(self) -> None:
        """Make sure that a stream can be followed as they say.

        :raises InvalidOption: it cannot.
        """
        self.check_together()
        self.refuse({"endingOffsets", "endingTime"}, "is for spark.read only")

    def check_together(self) -> None:
        """Make sure that nothing is said twice.

        :raises InvalidOption: it is: there are two starts, or two ends.
        """
        for names in (
            ("startingOffsets", "startingTime", "startingSeq"),
            ("endingOffsets", "endingTime"),
        ):
            given = [name for name in names if name in self.model_fields_set]
            for name in given[1:]:
                raise InvalidOption(name, getattr(self, name), f"{given[0]} is given as well")
        self._check_order()
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

    def _check_order(self) -> None:
        numbers = self.startingOffsets if self.startingSeq is None else self.startingSeq
        for name, start, end in (
            ("endingTime", self.startingTime, self.endingTime),
            ("endingOffsets", numbers, self.endingOffsets),
        ):
            if isinstance(start, int) and isinstance(end, int) and 0 <= end < start:
                raise InvalidOption(name, end, f"is before the start, which is {start}")


def _outputs(value: object) -> object:
    if not isinstance(value, str):
        return value
    return _json(value, '{"name": "log:/path/name"}')


class SinkOptions(SparkOptions):
    """Options of `format("penstock")` as a sink."""

    #: Where all rows go; without it each row's column `url` says it.
    url: Target | None = None
    #: JSON, names to URLs: where rows go whose column `output` has that name.
    outputs: Annotated[dict[str, Target], BeforeValidator(_outputs)] = {}
    #: A folder that driver and executors have in common; by default beside the stream.
    staging: Annotated[str | None, Field(min_length=1)] = None
    #: Batch: the query and the number of the batch that is written, to append it only once.
    query: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    batch: Annotated[int | None, Field(ge=0)] = None
    #: Spark's own.
    checkpointLocation: str | None = None  # noqa: N815
    queryName: str | None = None  # noqa: N815

    def check_part(self) -> None:
        """Make sure that who names a part names all of it.

        :raises InvalidOption: one of the two is missing.
        """
        if (self.query is None) != (self.batch is None):
            missing = "query" if self.query is None else "batch"
            raise InvalidOption(missing, None, "query and batch go together")


_AnyOptions = TypeVar("_AnyOptions", bound=SparkOptions)


def parse_spark_options(given: Mapping[str, Any], model: type[_AnyOptions]) -> _AnyOptions:
    """Check what was given by `.option(…)`.

    :raises InvalidOption: one is unknown or missing, or its value does not fit.
    """
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
    """`.load("fmq:/path")` and `.start("log:/path")` give the URL as `path`, a list as `paths`."""
    path = named.pop("path", None) or named.pop("paths", None)
    if path is None:
        return
    if named.setdefault("url", path) != path:
        raise InvalidOption("path", path, f"url={named['url']} is given as well")


def _take_schema(named: dict[str, Any]) -> None:
    """Make the option `schema` a part of how payloads are decoded."""
    schema = named.pop("schema", None)
    if schema is None:
        return
    decoding = _decoding(named.get("decode"))
    if not isinstance(decoding, dict):
        raise InvalidOption(
            "schema", schema, "says nothing without decode", hint='.option("decode", "json")'
        )
    named["decode"] = {**decoding, "schema": schema}
