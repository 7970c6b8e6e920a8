from typing import Any, Self

# How payloads are parsed, and into which columns: tables of 32-bit numbers, and the names of enums.
# `protobuf.py` says what their rows are. ValueError: the tables do not fit together.
class Plan:
    def __new__(
        cls,
        types: bytes,
        fields: bytes,
        enums: bytes,
        values: bytes,
        columns: bytes,
        names: bytes,
        /,
    ) -> Self: ...
    # The payloads are those of a LargeBinaryArray from `first` on. Returns a capsule with an Arrow
    # array of structs, without those that failed, and of each of these (row, error, field), in
    # order. OverflowError: a column would have more than 2^31 - 1 values or bytes.
    def parse(
        self, offsets: Any, data: Any, first: int, count: int, max_size: int, /
    ) -> tuple[Any, list[tuple[int, int, int]]]: ...
