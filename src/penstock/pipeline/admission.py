"""How many messages of each stream fit into the next batch?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["shares"]


def shares(waiting: Mapping[str, int], most: int, turn: int) -> dict[str, int]:
    """Share out `most` messages in proportion to what is waiting in each stream.

    What is left by rounding goes one by one to those that wait, each time beginning with another
    (`turn`), so that a stream with little is not passed over for as long as others have much.
    """
    total = sum(waiting.values())
    if total <= most:
        return dict(waiting)
    given = {url: most * count // total for url, count in waiting.items()}
    left = most - sum(given.values())
    behind = [url for url, count in sorted(waiting.items()) if count > given[url]]
    for i in range(min(left, len(behind))):
        given[behind[(turn + i) % len(behind)]] += 1
    return given
