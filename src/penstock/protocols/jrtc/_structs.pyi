from typing import Any, Self

# How the structs of one layout and one message belong together: tables of 32-bit numbers, whose
# rows `structs.py` makes. `largest` is the most bytes that a message can have. ValueError: the
# tables do not fit together.
class Plan:
    def __new__(cls, types: bytes, fields: bytes, largest: int, /) -> Self: ...
    # Payloads are those of a BinaryArray from `first` on. Returns the offsets and the data of as
    # many again, empty where one failed, and of each that failed (row, error, field), in order.
    # OverflowError: they would have more than 2^31 - 1 bytes.
    def serialise(
        self, offsets: Any, data: Any, first: int, count: int, /
    ) -> tuple[bytes, bytes, list[tuple[int, int, int]]]: ...
    # Returns as many structs, zero where a payload failed.
    def deserialise(
        self, offsets: Any, data: Any, first: int, count: int, /
    ) -> tuple[bytearray, list[tuple[int, int, int]]]: ...
