"""Queues of texts over UDP, TCP and Unix sockets, as stream-py's programs speak to them."""

from penstock.protocols.lhhttt.frames import (
    LONGEST,
    FrameDecoder,
    decode,
    decode_bytes,
    encode,
    encode_bytes,
    join_frames,
    split_frames,
)

__all__ = [
    "LONGEST",
    "FrameDecoder",
    "decode",
    "decode_bytes",
    "encode",
    "encode_bytes",
    "join_frames",
    "split_frames",
]
