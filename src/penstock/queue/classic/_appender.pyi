from typing import TypeAlias

#: Everything that fitted in one chunk was written (see the count).
WRITTEN: int
#: Another writer holds the lock.
BUSY: int
#: The path names another queue, or none.
GONE: int
#: The queue is inconsistent: check it under the lock.
IRREGULAR: int
#: The first message can never fit.
TOO_LARGE: int
#: The reader of a blocking queue has to move on first.
WAIT: int
#: This process is a child of the one that opened the files: open them again.
FORKED: int

#: payload, uncompressed length, type, subtype, time in seconds, 1 if compressed
Entry: TypeAlias = tuple[bytes | bytearray | memoryview, int, int, int, int, int]

# Another thread is in a call of the same appender.
class SecondThread(RuntimeError): ...

class Appender:
    def __init__(
        self,
        lock_fd: int,
        *,
        stat_fd: int = ...,
        buf_fd: int = ...,
        stat_mem: memoryview = ...,
        buf_mem: memoryview = ...,
        shm_key: int = ...,
        stat_shm_id: int = ...,
        buf_shm_id: int = ...,
    ) -> None: ...
    # How many messages the last call wrote, and the id of the last of them.
    count: int
    last_id: int
    # Writes one chunk of `entries[start:]`; returns the outcome.
    def append(
        self, entries: list[Entry], start: int, now: int, blocking: bool, held: bool, /
    ) -> int: ...
    # Writes one plain message, `buffer[begin:end]`, stored at `now`; returns the outcome.
    def append_one(
        self,
        buffer: bytes | bytearray | memoryview,
        begin: int,
        end: int,
        type: int,
        subtype: int,
        now: int,
        blocking: bool,
        /,
    ) -> int: ...
