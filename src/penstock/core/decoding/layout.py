"""Where in a payload is each field of a C struct, a numpy dtype or a `struct` format?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from penstock.core.decoding.schema import Wrong
from penstock.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Item", "Layout", "from_c", "from_dtype", "from_format", "from_items", "is_format"]

ByteOrder = Literal["little", "big"]

#: A larger struct is probably a mistake in its dimensions.
_LARGEST: Final = 1 << 26
_MOST_FIELDS: Final = 10_000
_DEEPEST: Final = 8

_C_TYPES: Final = {
    "char": "i1",
    "signed char": "i1",
    "unsigned char": "u1",
    "bool": "?",
    "_Bool": "?",
    **{f"int{bits}_t": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    "short": "i2",
    "short int": "i2",
    "unsigned short": "u2",
    "unsigned short int": "u2",
    "int": "i4",
    "signed int": "i4",
    "signed": "i4",
    "unsigned": "u4",
    "unsigned int": "u4",
    # As on 64-bit Linux.
    "long": "i8",
    "long int": "i8",
    "unsigned long": "u8",
    "unsigned long int": "u8",
    "long long": "i8",
    "unsigned long long": "u8",
    "size_t": "u8",
    "ssize_t": "i8",
    "float": "f4",
    "double": "f8",
    "_Float16": "f2",
    "float complex": "c8",
    "float _Complex": "c8",
    "double complex": "c16",
    "double _Complex": "c16",
    # LROSE's names.
    **{f"si{bits:02}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"ui{bits:02}": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    "fl32": "f4",
    "fl64": "f8",
}
_KINDS: Final = "biufcSV"

#: Characters of `struct`: the standard size, and the native size.
_FORMAT: Final = {
    "b": ("i1", "i1"),
    "B": ("u1", "u1"),
    "?": ("?", "?"),
    "c": ("V1", "V1"),
    "h": ("i2", "i2"),
    "H": ("u2", "u2"),
    "i": ("i4", "i4"),
    "I": ("u4", "u4"),
    "l": ("i4", "i8"),
    "L": ("u4", "u8"),
    "q": ("i8", "i8"),
    "Q": ("u8", "u8"),
    "n": (None, "i8"),
    "N": (None, "u8"),
    "e": ("f2", "f2"),
    "f": ("f4", "f4"),
    "d": ("f8", "f8"),
}
_FORMAT_ITEM: Final = re.compile(r"\s*(\d{0,9})([a-zA-Z?])")
_WHOLE_FORMAT: Final = re.compile(r"\s*(?:[@=<>!]\s*)?(?:\d*[cbB?hHiIlLqQnNefdspPx]\s*)+")

_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRUCT: Final = re.compile(r"\s*(?:typedef\s+)?struct\s*\w*\s*\{(.*)\}\s*\w*\s*;?\s*", re.DOTALL)
_DECLARATION: Final = re.compile(
    r"((?:[^\W\d]\w*\s+)*?[^\W\d]\w*)\s+([^\W\d]\w*\s*(?:\[[^\]]*\]\s*)*(?:,.*)?)", re.DOTALL
)
_DECLARATOR: Final = re.compile(r"\s*([^\W\d]\w*)\s*((?:\[\s*\d{0,9}\s*\]\s*)*)")


class Item(NamedTuple):
    """One field of a layout."""

    name: str
    dtype: np.dtype[np.generic]
    #: The length of a first dimension of -1 follows from the payload.
    shape: tuple[int, ...] = ()

    @property
    def values(self) -> int:
        """Number of values; per step of the first dimension, if that is open."""
        product = 1
        for length in self.shape:
            product *= abs(length)
        return product

    @property
    def size(self) -> int:
        return self.values * self.dtype.itemsize

    @property
    def is_open(self) -> bool:
        return bool(self.shape) and self.shape[0] == -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Fields, their offsets, and the total size; a tail takes the remaining bytes."""

    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    size: int
    tail: Item | None = None

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The fields without the tail, as a numpy dtype."""
        return np.dtype(
            {
                "names": [f"f{i}" for i in range(len(self.items))],
                "formats": [(item.dtype, item.shape) for item in self.items],
                "offsets": list(self.offsets),
                "itemsize": self.size,
            }
        )

    @property
    def all_items(self) -> tuple[Item, ...]:
        return self.items if self.tail is None else (*self.items, self.tail)

    def expected(self) -> str:
        """Describe the valid payload sizes."""
        if self.tail is None:
            return f"{self.size:,} bytes"
        return f"{self.size:,} bytes and any number of {self.tail.size:,} more"


def from_items(
    given: Iterable[tuple[str, str, Sequence[int]]], byte_order: ByteOrder, *, packed: bool
) -> Layout:
    """Lay out fields in order; unless packed, with the alignment of a C compiler.

    :raises Wrong: a type is unknown, or the fields do not form a struct.
    """
    return _placed(
        (Item(name, _dtype(type, byte_order), tuple(shape)) for name, type, shape in given),
        packed=packed,
    )


def from_c(text: str, byte_order: ByteOrder, *, packed: bool) -> Layout:
    """Read declarations such as `float azimuth; uint16_t gates; float iq[2][64];`.

    :raises Wrong: it does not parse.
    """
    plain = _COMMENT.sub(" ", text)
    if (whole := _STRUCT.fullmatch(plain)) is not None:
        plain = whole[1]
    return _placed(
        (
            item
            for declaration in plain.split(";")
            if declaration.strip()
            for item in _declared(declaration.strip(), byte_order)
        ),
        packed=packed,
    )


def is_format(text: str) -> bool:
    """Tell whether text is a format of Python's `struct`, not C."""
    return _WHOLE_FORMAT.fullmatch(text) is not None


def from_format(text: str, names: Sequence[str] | None) -> Layout:
    """Read a format of Python's `struct`, such as `<dHH`. Default names: f0, f1 and so on.

    :raises Wrong: it does not parse, or the number of names differs from that of the fields.
    """
    plain = text.strip()
    prefix = plain[0] if plain[0] in "@=<>!" else ""
    is_native = prefix in {"", "@"}
    order: ByteOrder = "big" if prefix in {">", "!"} else "little"
    at = len(prefix)
    kinds: list[np.dtype[np.generic]] = []
    offsets: list[int] = []
    size = 0
    while plain[at:].strip():
        item = _FORMAT_ITEM.match(plain, at)
        assert item is not None  # `is_format` checked it
        at = item.end()
        repeat, sign = int(item[1] or 1), item[2]
        if sign == "x":
            size += repeat
            continue
        if sign == "s":
            dtype, repeat = np.dtype(f"V{repeat}"), min(repeat, 1)
        else:
            dtype = _format_dtype(sign, order, is_native=is_native)
        if is_native:
            size += -size % dtype.alignment
        if len(kinds) + repeat > _MOST_FIELDS or size + repeat * dtype.itemsize > _LARGEST:
            raise Wrong("has too many fields", hint="a list of fields can have arrays")
        for _ in range(repeat):
            kinds.append(dtype)
            offsets.append(size)
            size += dtype.itemsize
    chosen = [f"f{i}" for i in range(len(kinds))] if names is None else list(names)
    if len(chosen) != len(kinds):
        raise Wrong(f"has {len(kinds)} fields, and there are {len(chosen)} names")
    items = tuple(Item(name, dtype) for name, dtype in zip(chosen, kinds, strict=True))
    return _checked(Layout(items, tuple(offsets), size))


def from_dtype(dtype: np.dtype[np.generic]) -> Layout:
    """Use the fields of a structured numpy dtype, with their offsets.

    :raises Wrong: it has no fields, or nested ones.
    """
    if dtype.fields is None or dtype.names is None:
        raise Wrong("a dtype needs fields", hint='as in [("azimuth", "f4")]')
    items, offsets = [], []
    for name in dtype.names:
        kind, offset = dtype.fields[name][:2]
        base, shape = kind.subdtype or (kind, ())
        items.append(Item(name, _usable(base, str(kind)), tuple(shape)))
        offsets.append(offset)
    return _checked(Layout(tuple(items), tuple(offsets), dtype.itemsize))


# --- types ----------------------------------------------------------------------------------


def _dtype(text: str, byte_order: ByteOrder) -> np.dtype[np.generic]:
    name = " ".join(text.split())
    try:
        # Some names, such as `long`, are both numpy's (native) and C's: C's come first.
        dtype: np.dtype[np.generic] = np.dtype(_C_TYPES.get(name, name))
    except (TypeError, ValueError, SyntaxError):
        hint = nearest(name, [*_C_TYPES, "f4", "f8", "c8", "i2", "u2", "S16"], "types")
        raise Wrong(f"there is no type {name!r}", hint=hint) from None
    dtype = _usable(dtype, name)
    if name[:1] in {"<", ">", "="} or dtype.byteorder == "|":
        return dtype
    return dtype.newbyteorder("<" if byte_order == "little" else ">")


def _usable(dtype: np.dtype[np.generic], name: str) -> np.dtype[np.generic]:
    if dtype.kind not in _KINDS or dtype.fields is not None or dtype.subdtype is not None:
        raise Wrong(f"type {name} cannot be in a payload")
    if dtype.itemsize == 0 or (dtype.kind == "f" and dtype.itemsize > np.dtype("f8").itemsize):
        raise Wrong(f"type {name} has a size that Spark has no type for")
    if dtype.kind == "c" and dtype.itemsize > np.dtype("c16").itemsize:
        raise Wrong(f"type {name} has a size that Spark has no type for")
    return dtype


def _format_dtype(sign: str, order: ByteOrder, *, is_native: bool) -> np.dtype[np.generic]:
    known = _FORMAT.get(sign, (None, None))[1 if is_native else 0]
    if known is None:
        raise Wrong(f"the format character {sign!r} has no fixed meaning here")
    dtype: np.dtype[np.generic] = np.dtype(known)
    return dtype.newbyteorder("<" if order == "little" else ">")


def _declared(declaration: str, byte_order: ByteOrder) -> Iterator[Item]:
    parts = _DECLARATION.fullmatch(declaration)
    if parts is None:
        raise Wrong(
            f"cannot be read at {declaration[:40]!r}", hint='as in "float azimuth; float iq[64]"'
        )
    type = " ".join(parts[1].split())
    for each in parts[2].split(","):
        declarator = _DECLARATOR.fullmatch(each)
        if declarator is None:
            raise Wrong(f"cannot be read at {each.strip()[:40]!r}", hint="dimensions are numbers")
        lengths = re.findall(r"\[\s*(\d*)\s*\]", declarator[2])
        shape = tuple(int(length) if length else -1 for length in lengths)
        if type == "char" and shape and shape[-1] > 0:  # C's text
            yield Item(declarator[1], np.dtype(f"S{min(shape[-1], _LARGEST + 1)}"), shape[:-1])
        elif type == "char" and shape == (-1,):
            yield Item(declarator[1], np.dtype("S1"), shape)
        else:
            yield Item(declarator[1], _dtype(type, byte_order), shape)


# --- places ---------------------------------------------------------------------------------


def _placed(items: Iterable[Item], *, packed: bool) -> Layout:
    placed: list[Item] = []
    offsets: list[int] = []
    size, alignment = 0, 1
    tail: Item | None = None
    for number, item in zip(count(1), items, strict=False):
        if tail is not None:
            raise Wrong(f"{tail.name}: only the last field can be of any length")
        _check_shape(item)
        if not packed:
            own = item.dtype.alignment
            alignment = max(alignment, own)
            size += -size % own
        if item.is_open:
            tail = item
        else:
            placed.append(item)
            offsets.append(size)
            size += item.size
        if size > _LARGEST or item.size > _LARGEST or number > _MOST_FIELDS:
            raise Wrong(f"{item.name}: the struct becomes larger than {_LARGEST:,} bytes")
    if tail is None and not packed:
        size += -size % alignment
    return _checked(Layout(tuple(placed), tuple(offsets), size, tail))


def _check_shape(item: Item) -> None:
    if len(item.shape) > _DEEPEST:
        raise Wrong(f"{item.name}: has more than {_DEEPEST} dimensions")
    for place, length in enumerate(item.shape):
        if length < 1 and not (length == -1 and place == 0):
            raise Wrong(
                f"{item.name}: {length} is not a length",
                hint="only the first dimension of the last field can be -1",
            )


def _checked(layout: Layout) -> Layout:
    if not layout.all_items:
        raise Wrong("should have at least one field")
    if layout.size > _LARGEST:
        raise Wrong(f"is larger than {_LARGEST:,} bytes")
    for item in layout.all_items:
        if item.dtype.itemsize == 0:
            raise Wrong(f"{item.name}: has no size")
        if not item.name:
            raise Wrong("a field has no name")
    return layout
