"""What is one message?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, overload

from penstock.core.errors import InvalidOption, Malformed

if TYPE_CHECKING:
    import builtins
    import ctypes

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from penstock.core.stream_id import StreamId

__all__ = ["CopiedMessage", "Message", "UnfitPayload"]

_C = TypeVar("_C", bound="ctypes.Structure | ctypes.Union | ctypes.Array[Any]")
_Scalar = TypeVar("_Scalar", bound="np.generic")


class Message(NamedTuple):
    """One payload of bytes with its header.

    A named tuple, because a reader creates one for every message.
    """

    #: Position in the queue: 64 bits, unwrapped, only grows within one epoch of the queue.
    seq: int
    #: When it happened at the source ("originating time"), nanoseconds since 1970 UTC.
    time_ns: int
    #: When it was appended to this queue, nanoseconds since 1970 UTC.
    created_ns: int
    #: The sender's own kind of message, any signed 32-bit number.
    type: int
    #: A finer kind within `type`, any signed 32-bit number.
    subtype: int
    #: The stream it belongs to, if known.
    stream: StreamId | None
    #: The opaque header of its protocol, if any.
    attributes: bytes | None
    #: The bytes themselves.
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes in the payload."""
        return len(self.payload)

    @property
    def origin_ns(self) -> int:
        """When it was appended to its first queue, before it was copied here."""
        return self.created_ns

    # In this class `type` is a field.
    @overload
    def cast(self, kind: builtins.type[_C]) -> _C: ...
    @overload
    def cast(self, kind: builtins.type[_Scalar] | np.dtype[_Scalar]) -> NDArray[_Scalar]: ...
    @overload
    def cast(self, kind: DTypeLike) -> NDArray[Any]: ...
    def cast(self, kind: Any) -> Any:
        """Return the payload as C data.

        A ctypes structure, union or array returns one instance, a copy; the payload must have
        exactly its size. A numpy dtype, or a value that numpy accepts as one, returns an array of
        all items: read-only, without a copy.

        :raises Malformed: the payload does not have this size, or a multiple of the item size.
        :raises InvalidOption: the dtype does not describe plain bytes.
        """
        # Imported here: most programs that read messages need neither.
        import ctypes  # noqa: PLC0415

        with memoryview(self.payload) as payload:
            size = payload.nbytes
        is_class = isinstance(kind, type)
        if is_class and issubclass(kind, (ctypes.Structure, ctypes.Union, ctypes.Array)):
            if size != ctypes.sizeof(kind):
                raise self._size_error(kind.__name__, ctypes.sizeof(kind), size)
            return kind.from_buffer_copy(self.payload)

        import numpy as np  # noqa: PLC0415

        dtype = np.dtype(kind)
        if dtype.hasobject or not dtype.itemsize:
            raise InvalidOption("kind", kind, "must be of a fixed size, without Python objects")
        if size % dtype.itemsize:
            raise self._size_error(str(dtype), f"a multiple of {dtype.itemsize}", size)
        items = np.frombuffer(self.payload, dtype)
        items.flags.writeable = False  # other readers may see the same memory
        return items

    def _size_error(self, kind: str, expected: object, found: int) -> Malformed:
        what = f"message {self.seq} as {kind}"
        return Malformed(what, "size in bytes", expected, found)


class UnfitPayload(Malformed):
    """A payload is not what its target takes; the message was not written."""


class CopiedMessage(Message):
    """A message that was copied to its queue, with the time it was appended to the first one."""

    origin_ns: int = 0

    @classmethod
    def of(cls, message: Message, origin_ns: int) -> Self:
        copied = cls(*message)
        copied.origin_ns = origin_ns
        return copied

    def _replace(self, **fields: Any) -> Self:
        changed = super()._replace(**fields)
        changed.origin_ns = self.origin_ns
        return changed
