from collections.abc import Sequence

# The groups of a batch: the places of their messages in it, the messages, their ids, the times in
# them (milliseconds since 1970 UTC), where the attributes begin and end in each, those behind the
# id, and whether there is a payload. Where nothing is found there is no id, and both are 0.
def scan(
    messages: Sequence[bytes], largest: int, /
) -> list[tuple[list[int], list[bytes], list[bytes], list[int], int, int, bytes, bool]]: ...
