"""How does Python access System V shared memory?"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from typing import Final

__all__ = ["Segment", "attach", "create", "find", "remove"]

_IPC_CREAT: Final = 0o1000
_IPC_EXCL: Final = 0o2000
_IPC_RMID: Final = 0
_SHM_RDONLY: Final = 0o10000
_EVERYBODY: Final = 0o666  # docs/specs/lrose.md 1.2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
_libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_libc.shmat.restype = ctypes.c_void_p
_libc.shmdt.argtypes = [ctypes.c_void_p]
_libc.shmctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
_ATTACH_FAILED: Final = ctypes.c_void_p(-1).value


class _ShmidDs(ctypes.Structure):
    """The head of Linux's `struct shmid64_ds`: permissions, then the size."""

    _fields_ = (
        ("perm", ctypes.c_ubyte * 48),
        ("size", ctypes.c_size_t),
        ("rest", ctypes.c_ubyte * 64),
    )


@dataclass
class Segment:
    """An attached segment; `memory` is the view of it, until `detach`."""

    id: int
    memory: memoryview
    _address: int

    def detach(self) -> None:
        """Unmap the segment. All views of its memory must be released before."""
        self.memory.release()
        _libc.shmdt(self._address)


def _check(result: int, doing: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
    return result


def find(key: int) -> int | None:
    """Return the id of the segment with this key, or None.

    :raises OSError: no permission for the segment.
    """
    try:
        return _check(_libc.shmget(key, 0, 0), f"shmget(key {key})")
    except FileNotFoundError:
        return None


def size_of(id: int) -> int:
    """Return the size of a segment in bytes, at least the requested size."""
    status = _ShmidDs()
    ipc_stat = 2
    _check(_libc.shmctl(id, ipc_stat, ctypes.byref(status)), "shmctl(IPC_STAT)")
    return int(status.size)


def create(key: int, size: int) -> int:
    """Return a segment with this key and at least this size; replace a smaller one.

    :raises OSError: no memory, no permission, or the system refuses the size.
    """
    existing = find(key)
    if existing is not None:
        if size_of(existing) >= size:
            return existing
        remove(existing)
    return _check(_libc.shmget(key, size, _IPC_CREAT | _EVERYBODY), f"shmget(key {key})")


def remove(id: int) -> None:
    """Remove a segment; processes that have it attached keep it."""
    try:
        _check(_libc.shmctl(id, _IPC_RMID, None), "shmctl(IPC_RMID)")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EIDRM):
            raise


def attach(id: int, *, writable: bool) -> Segment:
    """Map a segment into this process.

    :raises OSError: the segment is gone, or no permission.
    """
    address = _libc.shmat(id, None, 0 if writable else _SHM_RDONLY)
    if address is None or address == _ATTACH_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"shmat: {os.strerror(number)}")
    size = size_of(id)
    memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    return Segment(id, memory if writable else memory.toreadonly(), address)
