"""How are the bytes of a session changed for psi's parsers?"""

from __future__ import annotations

from support.mutation import cut, double, mutator, set_byte, set_piece, set_word

__all__ = ["mutated"]

_NUMBERS = [
    *(b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\0\0\0\x80", b"\xff\xff\0\0"),
    *(
        b"\0\0\0\x40",
        b"\x01\0\0\x40",
        b"\xd5\xc7\x26\xcb",
        b"\x85\xe8\xfb\xf4",
        b"\xfe\xff\xff\xff",
    ),
]

mutated = mutator(
    (1, 2, 3, 4), set_byte, cut(39), set_word(_NUMBERS), set_piece(_NUMBERS), double(59)
)
