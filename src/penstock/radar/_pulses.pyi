from typing import Any

# Each says ValueError of what lies outside of a buffer.

# Return what a packet at a place says of itself: its kind, whether it is swapped, its length. None:
# it is no packet; kind -1: there are too few bytes to tell. `least` and `extra` (int32, by kind)
# are the bytes that a kind needs, and how many more it may have; none if it has to be exact.
def head(
    data: Any, place: int, is_exact: bool, least: Any, extra: Any, /
) -> tuple[int, int, int] | None: ...

# Find packets from a place on, each followed by another or the end. Write rows of int64: kind,
# swapped, start, length and number of packets that are alike. Return how many rows, and where they
# end: where bytes are no packet, or none follows, or there is no room for more rows.
def in_line(data: Any, place: int, least: Any, extra: Any, runs: Any, /) -> tuple[int, int]: ...

# Copy `size` bytes from each of some places (int64).
def gather(data: Any, places: Any, size: int, out: Any, /) -> None: ...

# Copy so many float32 from each of some places (int64); 0 becomes 1e-20.
def fl32(data: Any, places: Any, values: int, out: Any, /) -> None: ...

# Multiply so many 16-bit values from each of some places with its scale; 0 becomes 1e-20.
def si16(data: Any, places: Any, values: int, scales: Any, out: Any, /) -> None: ...

# Sum up dwells (x pulses x channels x gates, complex64) into float64 rows of gates. Three rows a
# channel: the power, and of the products of each sample with the conjugate of the one `lag` pulses
# before, the real and the imaginary part. With `cross` three more: nothing, and of channel 1 times
# the conjugate of channel 0 both parts; powers are then without the last pulse, and so are these.
def pulse_pairs(
    iq: Any,
    dwells: int,
    pulses: int,
    channels: int,
    gates: int,
    lag: int,
    cross: bool,
    sums: Any,
    /,
) -> None: ...
