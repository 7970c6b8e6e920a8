"""Which Spark queries does a pipeline become?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.graph import Graph
from penstock.core.redaction import as_written, shown_data
from penstock.pipeline.checking import check, warnings
from penstock.pipeline.links import Node, streams_between, whole_graph
from penstock.pipeline.model import Pipeline
from penstock.pipeline.trunks import has_branches, stem, trunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Plan", "Query", "QueryKind", "Session", "plan"]

#: How the rows of a query get to its sinks: `single`, to its only one; `multiplexed`, to many
#: streams by one writer, which tells them apart by a column; `foreach_batch`, batch by batch, each
#: of which is kept for all that follows the trunk.
QueryKind = Literal["single", "multiplexed", "foreach_batch"]


@dataclass(frozen=True, slots=True)
class Query:
    """A streaming query: what Spark runs, restarts and checkpoints as one."""

    #: The pipeline and its first sink, which stays the same while others are added: the
    #: checkpoint is kept under this name.
    name: str
    pipeline: str
    kind: QueryKind
    sources: tuple[str, ...]
    #: Each after those that it takes its rows from.
    stages: tuple[str, ...]
    sinks: tuple[str, ...]
    #: The source or stage whose rows all sinks get, or begin with. None: they share a part only.
    trunk: str | None
    #: Queries that write what this one reads.
    after: tuple[str, ...]
    #: Why these sinks are in one query, and not in more or fewer.
    reason: str


@dataclass(frozen=True, slots=True)
class Session:
    """What the pipelines ask of the Spark session that runs them all."""

    master: str | None
    spark: dict[str, str]
    shuffle_partitions: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Pipelines, and the queries that they become, in the order in which to start them."""

    pipelines: tuple[Pipeline, ...]
    queries: tuple[Query, ...]
    session: Session
    #: What is probably not meant, though it can run.
    warnings: tuple[str, ...]

    def pipeline(self, name: str) -> Pipeline:
        return next(pipeline for pipeline in self.pipelines if pipeline.name == name)

    def queries_of(self, node: Node) -> list[Query]:
        """Return the queries in which a source, stage or sink runs."""
        return [
            query
            for query in self.queries
            if query.pipeline == node.pipeline
            and node.name in (*query.sources, *query.stages, *query.sinks)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "pipelines": [_as_dict(pipeline) for pipeline in self.pipelines],
            "streams": [
                {"sink": str(sink), "source": str(source)}
                for sink, source in streams_between(self.pipelines)
            ],
            "queries": [asdict(query) for query in self.queries],
            "warnings": list(self.warnings),
        }


def plan(pipelines: Pipeline | Iterable[Pipeline]) -> Plan:
    """Check pipelines, and cut them into as few queries as they can be.

    Sinks that share a source or a stage share a query, so that it is read and worked out once.
    A sink in another mode than append needs a query of its own, and so does whatever reads a
    stream that the query would write itself. Files and the console are written batch by batch, so
    they share a query only with what is worked out of the same batches.

    :raises ConfigError: something does not fit together.
    """
    all_ = (pipelines,) if isinstance(pipelines, Pipeline) else tuple(pipelines)
    check(all_)
    groups = _cut_at_streams([group for one in all_ for group in _groups(one)], all_)
    queries = tuple(_queries(groups, all_))
    for pipeline in all_:
        _check_holds(pipeline, queries)
        _check_staging(pipeline, queries)
    return Plan(all_, queries, _session(all_), tuple(map(as_written, warnings(all_))))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sinks that go into one query."""

    pipeline: Pipeline
    sinks: tuple[str, ...]
    #: Whether others are left out of it because it reads what they write, or the other way round.
    is_cut: bool = False

    def sources(self) -> list[str]:
        needed = self.pipeline.graph().ancestors(*self.sinks)
        return [name for name in self.pipeline.sources if name in needed]

    def stages(self) -> list[str]:
        graph = self.pipeline.graph()
        needed = graph.ancestors(*self.sinks)
        return [
            name
            for name in graph.topological_order()
            if name in needed and name in self.pipeline.stages
        ]

    def trunk(self) -> str | None:
        return trunk(self.pipeline, self.sinks)

    def kind(self) -> QueryKind:
        if len(self.sinks) == 1:
            return "single"
        if any(self.pipeline.sinks[name].stream is None for name in self.sinks):
            return "foreach_batch"
        shared = self.trunk()
        if shared is None or not has_branches(self.pipeline, self.sinks, shared):
            return "multiplexed"
        return "foreach_batch"


def _groups(pipeline: Pipeline) -> list[_Group]:
    alone = [name for name, sink in pipeline.sinks.items() if sink.mode != "append"]
    together = [name for name in pipeline.sinks if name not in alone]
    joined = [*_joined(pipeline, together), *((name,) for name in alone)]
    order = list(pipeline.sinks)
    joined.sort(key=lambda sinks: order.index(sinks[0]))
    return [_Group(pipeline, sinks) for sinks in joined]


def _joined(pipeline: Pipeline, sinks: Iterable[str]) -> list[tuple[str, ...]]:
    """Put those sinks together that share a source or a stage, if only through others of them."""
    graph = pipeline.graph()
    needed = graph.ancestors(*sinks)
    part = Graph({node: graph.parents(node) for node in graph.nodes if node in needed})
    return [
        piece
        for component in part.components()
        for piece in _by_batches(pipeline, [name for name in component if name in pipeline.sinks])
    ]


def _by_batches(pipeline: Pipeline, sinks: list[str]) -> list[tuple[str, ...]]:
    """Part those that cannot be written from the same batches, if any is written batch by batch."""
    streams = {name for name in sinks if pipeline.sinks[name].stream is not None}
    if streams.issuperset(sinks):
        return [tuple(sinks)]
    pieces: dict[str, list[str]] = {}
    for name in sinks:
        above = stem(pipeline, name)
        # Without any it stands alone: its own name is nobody else's.
        pieces.setdefault(above[-1] if above else name, []).append(name)
    with_files = [tuple(piece) for piece in pieces.values() if not streams.issuperset(piece)]
    # What is left are streams, which may share a query without sharing batches.
    left = streams.difference(*with_files)
    return [*with_files, *_joined(pipeline, [name for name in sinks if name in left])]


def _cut_at_streams(groups: list[_Group], pipelines: Sequence[Pipeline]) -> list[_Group]:
    """Cut those groups that would wait for a stream that they write themselves."""
    knotted = {index for knot in _feeding(groups, pipelines).knots() for index in knot}
    level = _levels(pipelines) if knotted else {}
    result: list[_Group] = []
    for index, group in enumerate(groups):
        if index not in knotted:
            result.append(group)
            continue
        by_level: dict[int, list[str]] = {}
        for sink in group.sinks:
            by_level.setdefault(level[Node(group.pipeline.name, sink)], []).append(sink)
        result.extend(
            _Group(group.pipeline, piece, is_cut=len(by_level) > 1)
            for sinks in by_level.values()
            for piece in _joined(group.pipeline, sinks)
        )
    return result


def _levels(pipelines: Sequence[Pipeline]) -> dict[Node, int]:
    """Return how many streams of these pipelines at most lie before each node."""
    streams = set(streams_between(pipelines))
    graph = whole_graph(pipelines)
    level: dict[Node, int] = {}
    for node in graph.topological_order():
        above = graph.parents(node)
        level[node] = max((level[p] + ((p, node) in streams) for p in above), default=0)
    return level


def _feeding(groups: Sequence[_Group], pipelines: Sequence[Pipeline]) -> Graph[int]:
    """Return which groups, by their index, write what others read."""
    writer = {
        Node(group.pipeline.name, sink): index
        for index, group in enumerate(groups)
        for sink in group.sinks
    }
    parents: dict[int, list[int]] = {index: [] for index in range(len(groups))}
    readers = [
        {Node(group.pipeline.name, source) for source in group.sources()} for group in groups
    ]
    for sink, source in streams_between(pipelines):
        for index, sources in enumerate(readers):
            if source in sources:
                parents[index].append(writer[sink])
    return Graph(parents)


def _queries(groups: Sequence[_Group], pipelines: Sequence[Pipeline]) -> list[Query]:
    feeding = _feeding(groups, pipelines)
    names = [_name(group) for group in groups]
    return [
        Query(
            name=names[index],
            pipeline=groups[index].pipeline.name,
            kind=groups[index].kind(),
            sources=tuple(groups[index].sources()),
            stages=tuple(groups[index].stages()),
            sinks=groups[index].sinks,
            trunk=groups[index].trunk(),
            after=tuple(names[before] for before in feeding.parents(index)),
            reason=_reason(groups[index], [g for g in groups if g is not groups[index]]),
        )
        for index in feeding.topological_order()
    ]


def _check_holds(pipeline: Pipeline, queries: Sequence[Query]) -> None:
    for name, source in pipeline.sources.items():
        readers = [q.name for q in queries if q.pipeline == pipeline.name and name in q.sources]
        if source.hold is not None and len(readers) > 1:
            raise pipeline.error(
                ("sources", name, "hold"),
                f"{_listed(readers)} read {name}, each for itself, and a hold is one reader's",
                hint="make a source for each, and a hold for each; a writer waits for all that it "
                "is told of: hold=one,two",
            )


def _check_staging(pipeline: Pipeline, queries: Sequence[Query]) -> None:
    """Make sure that streams which are written together are staged in one place."""
    for query in (query for query in queries if query.pipeline == pipeline.name):
        given = {name: pipeline.sinks[name].options for name in query.sinks}
        staging = {name: o["staging"] for name, o in given.items() if "staging" in o}
        for name, folder in staging.items():
            first = next(iter(staging))
            if folder != staging[first]:
                raise pipeline.error(
                    ("sinks", name, "options", "staging"),
                    f"{first} has {staging[first]}, and one query writes both",
                )


def _reason(group: _Group, others: Sequence[_Group]) -> str:
    """Say why these sinks, and not more, are written together, and how."""
    sinks, first = group.pipeline.sinks, group.sinks[0]
    beside = [other for other in others if other.pipeline is group.pipeline]
    rest = _read_also(group, beside)
    if (mode := sinks[first].mode) != "append":
        return f"{first} is in mode {mode}, which takes a query of its own{rest}"
    if group.is_cut:
        rest = (
            f"; a stream lies between {'it' if len(group.sinks) == 1 else 'them'} and others{rest}"
        )
    match group.kind():
        case "multiplexed":
            return (
                f"{_listed(group.sinks)} share {_shared(group)} and are all streams: "
                f"one writer, which tells them apart by a column{rest}"
            )
        case "foreach_batch":
            other = next((name for name in group.sinks if sinks[name].stream is None), None)
            why = "" if other is None else f", and {other} is no stream but {sinks[other].kind}"
            return (
                f"{_listed(group.sinks)} share {_shared(group)}{why}: each batch is kept, "
                f"and written to each of them{rest}"
            )
    if not beside:
        return f"{first} is the only sink"
    if not rest:
        return f"{first} shares no source with the other sinks"
    return f"{first} has nobody to share a query with{rest}"


def _read_also(group: _Group, others: Sequence[_Group]) -> str:
    """Say what is read more than once; a stream is read once by each query."""
    sources = group.sources()
    said = ""
    for other in others:
        if also := [source for source in sources if source in other.sources()]:
            verb = "is" if len(also) == 1 else "are"
            said += f"; {_listed(also)} {verb} read by {_name(other)} as well"
    return said


def _name(group: _Group) -> str:
    return f"{group.pipeline.name}-{group.sinks[0]}"


def _shared(group: _Group) -> str:
    """Name what joins the sinks: the last node that leads to all of them, or what they read."""
    graph = group.pipeline.graph()
    common = set.intersection(*(graph.ancestors(sink) for sink in group.sinks))
    last = [node for node in graph.topological_order() if node in common]
    return last[-1] if last else _listed(group.sources())


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _session(pipelines: Sequence[Pipeline]) -> Session:
    settings = [pipeline.settings for pipeline in pipelines]
    return Session(
        next((one.master for one in settings if one.master is not None), None),
        {key: value for one in settings for key, value in one.spark.items()},
        next((one.shuffle_partitions for one in settings if one.shuffle_partitions), None),
    )


def _as_dict(pipeline: Pipeline) -> dict[str, Any]:
    """Return a pipeline as it would be written in a file."""
    sections = {
        section: {
            name: part.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            for name, part in getattr(pipeline, section).items()
        }
        for section in ("sources", "stages", "sinks")
    }
    settings = pipeline.settings.model_dump(mode="json", exclude_defaults=True)
    return {"pipeline": pipeline.name, **shown_data({**sections, "settings": settings})}
