"""What can be asked of the Spark source and sink?"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.core.errors import InvalidOption
from penstock.core.options import Size  # noqa: TC001 - pydantic reads it at run time
from penstock.core.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SinkOptions", "SourceOptions", "parse_spark_options"]


def _urls(value: object) -> object:
    """Accept one URL, a JSON list of them, or several with commas between."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        return json.loads(text)
    return [part.strip() for part in text.split(",") if part.strip()] if "," in text else [text]


def _starting(value: object) -> object:
    text = str(value).strip()
    if text.lower() in {"earliest", "latest"}:
        return text.lower()
    return json.loads(text) if text.startswith("{") else int(text)


def _moment(value: object) -> object:
    text = str(value)
    return int(text) if text.lstrip("-").isdigit() else parse_time(text)


#: `earliest`, `latest`, a sequence number for all URLs, or JSON with one for each URL.
Starting = Annotated[
    Literal["earliest", "latest"] | int | dict[str, int], BeforeValidator(_starting)
]


class SparkOptions(BaseModel):
    """Base of what is given by `.option(…)`: Spark does not keep upper and lower case apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceOptions(SparkOptions):
    """Options of `format("penstock")` as a source. Words that Kafka's source has mean the same."""

    url: Annotated[list[str], BeforeValidator(_urls), Field(min_length=1)]
    startingOffsets: Starting = "earliest"  # noqa: N815 - the words of Spark's users
    #: Batch only.
    endingOffsets: Starting = "latest"  # noqa: N815
    #: Batch: from and up to (not including) a time of appending: ISO 8601, or nanoseconds.
    startingTime: Annotated[int | None, BeforeValidator(_moment)] = None  # noqa: N815
    endingTime: Annotated[int | None, BeforeValidator(_moment)] = None  # noqa: N815
    #: The same as a number in `startingOffsets`.
    startingSeq: int | None = None  # noqa: N815
    maxOffsetsPerTrigger: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    maxBytesPerTrigger: Size | None = None  # noqa: N815
    failOnDataLoss: bool = True  # noqa: N815
    minPartitions: Annotated[int | None, Field(ge=1)] = None  # noqa: N815
    #: Deliver messages of this type only.
    type: int | None = None
    #: Let the writer wait for what the query has not finished; the name of the reader.
    hold: str | None = None
    #: A log to copy a stream to that cannot be read again, such as a UDP port.
    stage: str | None = None
    #: With failOnDataLoss=false: a stream that gets a message for every range that was lost.
    lossUrl: str | None = None  # noqa: N815


def _outputs(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


class SinkOptions(SparkOptions):
    """Options of `format("penstock")` as a sink."""

    #: Where all rows go; without it each row's column `url` says it.
    url: str | None = None
    #: JSON, names to URLs: where rows go whose column `output` has that name.
    outputs: Annotated[dict[str, str], BeforeValidator(_outputs)] = {}
    #: A folder that driver and executors have in common; by default beside the stream.
    staging: str | None = None
    #: Spark's own.
    checkpointLocation: str | None = None  # noqa: N815


_AnyOptions = TypeVar("_AnyOptions", bound=SparkOptions)


def parse_spark_options(given: Mapping[str, Any], model: type[_AnyOptions]) -> _AnyOptions:
    """Check what was given by `.option(…)`.

    :raises InvalidOption: one is unknown or missing, or its value does not fit.
    """
    names = {name.lower(): name for name in model.model_fields}
    named = {names.get(key.lower(), key): value for key, value in given.items()}
    named.pop("path", None) if "url" in named else _take_path(named)
    try:
        return model.model_validate(named)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "options"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name.lower(), names, n=1)
            hint = (
                f"did you mean {names[near[0]]}?"
                if near
                else f"known: {', '.join(sorted(names.values()))}"
            )
            raise InvalidOption(
                name, first["input"], "there is no such option", hint=hint
            ) from None
        if first["type"] == "missing":
            example = f'.option("{name}", "fmq:/path/name")' if name == "url" else None
            raise InvalidOption(name, None, "is missing", hint=example) from None
        raise InvalidOption(
            name, first["input"], str(first["msg"]).removeprefix("Value error, ")
        ) from None


def _take_path(named: dict[str, Any]) -> None:
    """`.load("fmq:/path")` gives the URL as `path`."""
    if "path" in named:
        named["url"] = named.pop("path")
