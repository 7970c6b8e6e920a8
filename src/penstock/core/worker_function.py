"""What does a worker make of a message, and to which of its outputs does each result go?"""

from __future__ import annotations

import functools
import inspect
from hashlib import blake2b
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, ParamSpec, TypeVar
from typing import overload as overloaded

from penstock.core.errors import PenstockError
from penstock.core.functions import FunctionNotFound, load_function
from penstock.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.message import Message

__all__ = [
    "BadResult",
    "Output",
    "Takes",
    "To",
    "WorkerFunction",
    "load_worker_function",
    "outputs_of",
    "place_of",
    "stable_hash",
    "worker",
]

# --- keys ---------------------------------------------------------------------------------------

_WORD: Final = 2**64
#: A linear congruential generator of 64 bits, as the jump hash has it.
_FACTOR: Final = 2_862_933_555_777_941_757


def stable_hash(key: str | bytes) -> int:
    """Hash a key to 64 bits. Python's own hash of a text differs between processes."""
    data = key.encode() if isinstance(key, str) else key
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def place_of(key: str | bytes | int, count: int) -> int:
    """Return the index of a key among `count` places.

    An integer key is the index itself, modulo `count`. Other keys use a consistent hash: with one
    place more, only the keys that move there change theirs (Lamping and Veach, "A Fast, Minimal
    Memory, Consistent Hash Algorithm").
    """
    if isinstance(key, int):
        return key % count
    state = stable_hash(key)
    place, following = 0, 0
    while following < count:
        place = following
        state = (state * _FACTOR + 1) % _WORD
        following = int((place + 1) * (2**31 / ((state >> 33) + 1)))
    return place


# --- the function -------------------------------------------------------------------------------

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

#: A function's argument: the payload as text or bytes, or the complete message.
Takes = Literal["text", "bytes", "message"]
#: A key and a result.
_PAIR: Final = 2


class BadResult(PenstockError, TypeError):
    """A worker returned a result that cannot be sent."""


class To(NamedTuple):
    """A result for one output, by the name of its edge."""

    edge: str
    result: object


class Output(NamedTuple):
    """One message that a worker returned, and its edge."""

    edge: str
    payload: bytes


class WorkerFunction(Generic[_Given, _Result]):
    """A function marked by `@worker`. A call runs the function itself."""

    def __init__(
        self,
        function: Callable[_Given, _Result],
        takes: Takes = "text",
        state: Callable[[], Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.takes = takes
        #: Creates the function's state, once in each process; None: it has none.
        self.state = state

    def __call__(self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        return self.function(*args, **kwargs)

    def bound(self, options: Mapping[str, object]) -> Callable[[Message], object]:
        """Return a callable from a message to results, with a state of its own.

        :raises BadResult: the function does not accept these options.
        """
        function: Callable[..., object] = self.function
        given: dict[str, object] = dict(options)
        if self.state is not None:
            given["state"] = self.state()
        try:
            inspect.signature(function).bind(None, **given)
        except TypeError as error:
            raise BadResult(f"{self.function.__qualname__} cannot be called so: {error}") from None
        match self.takes:
            case "text":
                return lambda message: function(str(message.payload, "utf-8"), **given)
            case "bytes":
                return lambda message: function(bytes(message.payload), **given)
            case "message":
                return lambda message: function(message, **given)


@overloaded
def worker(
    function: Callable[_Given, _Result], /
) -> WorkerFunction[_Given, _Result]: ...  # pragma: no cover
@overloaded
def worker(
    *, takes: Takes = "text", state: Callable[[], Any] | None = None
) -> Callable[[Callable[_Given, _Result]], WorkerFunction[_Given, _Result]]: ...  # pragma: no cover
def worker(
    function: Callable[..., Any] | None = None,
    /,
    *,
    takes: Takes = "text",
    state: Callable[[], Any] | None = None,
) -> Any:
    """Mark a function as the work of a vertex: one message in; none, one or many out.

        @worker
        def words(text):
            for word in text.split():
                yield word, word  # a key, which selects the output, and a result

        @worker(state=Counter)
        def count(text, state):
            state[text] += 1
            return f"{text} {state[text]}"

    It returns a text, bytes or a number; None for nothing; a list, or yields, for many. A result
    goes to every output of the vertex. `(key, result)` goes to one, which the key selects: a number
    is its index, anything else is distributed by a hash that is the same everywhere.
    `To(edge, result)` names it.

    :param takes: the function's argument: `text`, `bytes`, or the complete `message`
    :param state: creates the object passed as `state=`; each worker process has its own, which ends
        with it
    """
    if function is None:
        return lambda marked: WorkerFunction(marked, takes, state)
    return WorkerFunction(function, takes, state)


def load_worker_function(name: str) -> WorkerFunction[..., Any]:
    """Return the function that `module:function` names.

    :raises FunctionNotFound: it does not exist, or is not marked by `@worker`.
    """
    found = load_function(name)
    if not isinstance(found, WorkerFunction):
        raise FunctionNotFound(f"{name} is no worker", hint="put @worker above the function")
    return found


def outputs_of(result: object, edges: Sequence[str]) -> Iterator[Output]:
    """Yield the messages of a function's result.

    :param edges: the outputs of its vertex
    :raises BadResult: it is not a valid result.
    """
    results: Iterable[object]
    results = result if isinstance(result, list | GeneratorType) else (result,)
    for each in results:
        if each is None:
            continue
        yield from _outputs(each, edges)


def _outputs(result: object, edges: Sequence[str]) -> Iterator[Output]:
    if not edges:
        raise BadResult(
            "there is a result, and no output", hint="give the vertex to:, or return None"
        )
    if isinstance(result, To):
        if result.edge not in edges:
            raise BadResult(
                f"no output is called {result.edge!r}",
                hint=nearest(result.edge, edges, "there are"),
            )
        yield Output(result.edge, _payload(result.result))
    elif isinstance(result, tuple):
        if len(result) != _PAIR or not isinstance(result[0], str | bytes | int):
            raise BadResult(
                "a tuple should be a key and a result", hint="a list has several results"
            )
        key, kept = result
        yield Output(edges[place_of(key, len(edges))], _payload(kept))
    else:
        payload = _payload(result)
        for edge in edges:
            yield Output(edge, payload)


def _payload(result: object) -> bytes:
    """Return the bytes of a result. `0` and `""` are valid results."""
    if isinstance(result, str):
        return result.encode()
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result)
    if isinstance(result, int | float):
        return str(result).encode()
    raise BadResult(
        f"a worker returned {type(result).__name__}",
        hint="return text, bytes, a number, None, or a list of such",
    )
