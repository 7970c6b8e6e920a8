"""What can every codec do, and what does it know of its payload?

(docs/specs/psi.md 6)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.errors import UnknownType
from penstock.protocols.psi.wire import Cursor

if TYPE_CHECKING:
    import numpy as np

    from penstock.core.interfaces import BytesLike
    from penstock.protocols.psi.codecs.library import CodecLibrary

__all__ = ["Codec", "Decoded", "RawCodec", "UnknownCodec", "ValueReader", "ValueWriter", "refuse"]

_WHAT: Final = "psi payload"
#: Most nested objects. psi has no limit; Python's own is not far beyond.
_DEEPEST: Final = 100
#: Objects that a payload may hold for each of its bytes, and in any case: a schema from outside
#: can describe many that take no bytes at all.
_OBJECTS_PER_BYTE: Final = 4
_OBJECTS_ANYWAY: Final = 1024
#: No struct is larger.
_LARGEST_DEFAULT: Final = 4096
#: In the list of objects, one whose content is not known yet.
_UNFINISHED: Final = object()


class Decoded(NamedTuple):
    """A value, and its bytes in the payload; bytes after them are stale."""

    value: Any
    size: int


class ValueReader(Cursor):
    """A payload, and the objects seen in it so far."""

    __slots__ = ("_allowed", "_depth", "library", "objects")

    def __init__(self, data: bytes, library: CodecLibrary) -> None:
        super().__init__(data, _WHAT)
        self.library = library
        #: In the order of their first appearance, as references count them.
        self.objects: list[Any] = []
        self._depth = 0
        self._allowed = _OBJECTS_ANYWAY + _OBJECTS_PER_BYTE * len(data)

    def enter(self) -> None:
        """Start an object.

        :raises Malformed: there are too many objects, or they are nested too deep.
        """
        self._depth += 1
        self._allowed -= 1
        if self._depth > _DEEPEST:
            raise Malformed(_WHAT, "depth", f"at most {_DEEPEST} objects", "more")
        if self._allowed < 0:
            raise Malformed(_WHAT, "objects", "no more than the bytes can hold", "more")

    def leave(self) -> None:
        """End an object."""
        self._depth -= 1

    def new(self, value: Any = _UNFINISHED) -> int:
        """Give an object its number; its value may follow."""
        self.objects.append(value)
        return len(self.objects) - 1

    def existing(self, number: int) -> Any:
        """Return an earlier object by its number.

        :raises Malformed: no object has this number, or it is incomplete.
        """
        if not number < len(self.objects):
            raise Malformed(_WHAT, "reference", f"below {len(self.objects)}", number)
        value = self.objects[number]
        if value is _UNFINISHED:
            raise Malformed(_WHAT, "reference", "to an object that is whole", number)
        return value


class ValueWriter:
    """A payload under way, and the objects written so far."""

    __slots__ = ("_depth", "_numbers", "_objects", "library", "parts")

    def __init__(self, library: CodecLibrary) -> None:
        self.library = library
        self.parts: list[bytes] = []
        self._depth = 0
        self._objects = 0
        #: The objects themselves, too: another one could get the identity of one that is gone.
        self._numbers: dict[int, tuple[int, Any]] = {}

    def enter(self, value: Any) -> None:
        """Start an object.

        :raises InvalidOption: the objects are nested too deep.
        """
        self._depth += 1
        if self._depth > _DEEPEST:
            refuse(value, f"has more than {_DEEPEST} objects within each other")

    def leave(self) -> None:
        """End an object."""
        self._depth -= 1

    def number_of(self, value: Any) -> int | None:
        """Assign a number to an object; return the number if it has one already, else None.

        Only mutable objects are shared; equal texts and numbers are written each time.
        """
        if isinstance(value, (dict, list)):
            number, _ = self._numbers.setdefault(id(value), (self._objects, value))
            if number != self._objects:
                return number
        self._objects += 1
        return None


def refuse(value: Any, reason: str) -> NoReturn:
    """Raise the error for a value that cannot be encoded."""
    text = repr(value)
    raise InvalidOption("value", text if len(text) < 200 else f"{text[:200]}…", reason)  # noqa: PLR2004


class Codec(ABC):
    """Decodes payloads of one type to Python values, and encodes them."""

    #: The type is unknown: payloads stay bytes.
    is_raw = False
    #: Values are dicts of members.
    is_record = False
    #: numpy's type, if every value has the same size.
    dtype: np.dtype[Any] | None = None

    def __init__(self, type_name: str, library: CodecLibrary) -> None:
        #: Without assemblies.
        self.type_name = type_name
        self.library = library

    def decode(self, payload: BytesLike) -> Any:
        """Return the value at the start of a payload.

        :raises Malformed: the payload does not hold a value of the type.
        :raises UnknownType: it holds a type without a schema.
        """
        return self.decode_sized(payload).value

    def decode_sized(self, payload: BytesLike) -> Decoded:
        """Return the value at the start of a payload, and its size.

        :raises Malformed: the payload does not hold a value of the type.
        :raises UnknownType: it holds a type without a schema.
        """
        data = payload if isinstance(payload, bytes) else bytes(payload)
        reader = ValueReader(data, self.library)
        return Decoded(self.read(reader), reader.at)

    def trim(self, payload: BytesLike) -> bytes:
        """Return the payload without the stale bytes after its value.

        :raises Malformed: the payload does not hold a value.
        """
        return bytes(payload[: self.decode_sized(payload).size])

    def missing_type(self, payload: BytesLike) -> str | None:  # noqa: ARG002
        """Return the type that a payload names and of which there is no schema, if it is open.

        :raises Malformed: the payload does not hold a value.
        """
        return None

    def encode(self, value: Any) -> bytes:
        """Return the payload of a value, of exactly its size.

        :raises InvalidOption: it is not of this type, or out of range.
        """
        writer = ValueWriter(self.library)
        self.write(writer, value)
        return b"".join(writer.parts)

    def default(self) -> Any:
        """Return .NET's default value: all bits are 0."""
        return self.decode(bytes(_LARGEST_DEFAULT))

    @abstractmethod
    def read(self, reader: ValueReader) -> Any:
        """Read a value at the current place in a payload."""

    @abstractmethod
    def write(self, writer: ValueWriter, value: Any) -> None:
        """Append a value to a payload."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.type_name}>"


class RawCodec(Codec):
    """For unknown types: the payload unchanged, stale bytes included."""

    is_raw = True

    def read(self, reader: ValueReader) -> bytes:
        return reader.take(reader.left, "payload")

    def write(self, writer: ValueWriter, value: Any) -> None:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            refuse(value, f"must be bytes: there is no schema of {self.type_name}")
        writer.parts.append(bytes(value))


class UnknownCodec(Codec):
    """A part of unknown size, such as an enum without a schema: what holds it is not decoded.

    `is_final`: no schema that may still come changes it.
    """

    def __init__(self, type_name: str, library: CodecLibrary, *, is_final: bool) -> None:
        super().__init__(type_name, library)
        self._is_final = is_final

    def read(self, reader: ValueReader) -> NoReturn:  # noqa: ARG002
        if self._is_final:
            raise Malformed(_WHAT, "type", "one whose layout psi tells", self.type_name)
        raise UnknownType(self.type_name)

    def write(self, writer: ValueWriter, value: Any) -> NoReturn:  # noqa: ARG002
        refuse(value, f"cannot be written: there is no schema of {self.type_name}")
