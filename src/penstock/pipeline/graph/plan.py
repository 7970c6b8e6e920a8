"""Which Spark queries does a pipeline become, and what do they share?"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.graph import Graph
from penstock.core.redaction import as_written, shown_data
from penstock.pipeline.graph.check import check, warnings
from penstock.pipeline.graph.model import Node, Pipeline, streams_between, whole_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.pipeline.graph.model import Stage

__all__ = [
    "Plan",
    "Query",
    "QueryKind",
    "Session",
    "has_branches",
    "has_dead_letter_stage",
    "input_of_first_dead_letter_stage",
    "keeps_state",
    "plan",
    "stem",
    "trunk",
]

#: How the rows of a query get to its sinks: `single`, to its only one; `multiplexed`, to many
#: streams by one writer, with the target in a column; `foreach_batch`, batch by batch, each cached
#: for everything downstream of the trunk.
QueryKind = Literal["single", "multiplexed", "foreach_batch"]


@dataclass(frozen=True, slots=True)
class Query:
    """A streaming query: the unit that Spark runs, restarts and checkpoints."""

    #: The pipeline and its first sink, which stays the same while others are added: the
    #: checkpoint is kept under this name.
    name: str
    pipeline: str
    kind: QueryKind
    sources: tuple[str, ...]
    #: In topological order.
    stages: tuple[str, ...]
    sinks: tuple[str, ...]
    #: The source or stage that all sinks get their rows from; None: there is no such node.
    trunk: str | None
    #: Queries that write what this one reads.
    after: tuple[str, ...]
    #: Why exactly these sinks share a query.
    reason: str


@dataclass(frozen=True, slots=True)
class Session:
    """Settings of the Spark session that runs all pipelines."""

    master: str | None
    spark: dict[str, str]
    shuffle_partitions: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Pipelines and their queries, in the order in which to start them."""

    pipelines: tuple[Pipeline, ...]
    queries: tuple[Query, ...]
    session: Session
    #: Probable mistakes that do not prevent a run.
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
    """Check pipelines, and divide them into as few queries as possible.

    Sinks that share a source or a stage share a query, so that it is read and computed once.
    A sink in another mode than append needs a query of its own, and so does a sink whose source
    reads a stream that the query itself would write. Files and the console are written batch by
    batch, so they share a query only with sinks computed from the same batches.

    :raises ConfigError: the pipelines are not valid.
    """
    all_ = (pipelines,) if isinstance(pipelines, Pipeline) else tuple(pipelines)
    check(all_)
    groups = _cut_at_streams([group for one in all_ for group in _groups(one)], all_)
    queries = tuple(_queries(groups, all_))
    for pipeline in all_:
        _check_errors(pipeline)
        _check_holds(pipeline, queries)
        _check_staging(pipeline, queries)
    return Plan(all_, queries, _session(all_), tuple(map(as_written, warnings(all_))))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sinks of one query."""

    pipeline: Pipeline
    sinks: tuple[str, ...]
    #: Whether it was split off because of a stream between its sinks.
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
        if any(self.pipeline.stages[name].errors == "dead_letter" for name in self.stages()):
            return "foreach_batch"
        if len(self.sinks) == 1:
            return "single"
        if any(self.pipeline.sinks[name].stream is None for name in self.sinks):
            return "foreach_batch"
        shared = self.trunk()
        if shared is None or not has_branches(self.pipeline, self.sinks, shared):
            return "multiplexed"
        return "foreach_batch"


def _groups(pipeline: Pipeline) -> list[_Group]:
    alone = [
        name
        for name, sink in pipeline.sinks.items()
        if sink.mode != "append"
        or (sink.kind == "format" and not has_dead_letter_stage(pipeline, name))
    ]
    together = [name for name in pipeline.sinks if name not in alone]
    joined = [*_joined(pipeline, together), *((name,) for name in alone)]
    order = list(pipeline.sinks)
    joined.sort(key=lambda sinks: order.index(sinks[0]))
    return [_Group(pipeline, sinks) for sinks in joined]


def _joined(pipeline: Pipeline, sinks: Iterable[str]) -> list[tuple[str, ...]]:
    """Group sinks that share a source or a stage, directly or through other sinks."""
    graph = pipeline.graph()
    # A table does not connect sinks: each query reads it anyway.
    needed = [n for n in graph.ancestors(*sinks) if n in sinks or not pipeline.is_static(n)]
    part = Graph(
        {
            node: [above for above in graph.parents(node) if above in needed]
            for node in graph.nodes
            if node in needed
        }
    )
    return [
        piece
        for component in part.components()
        for piece in _by_batches(pipeline, [name for name in component if name in pipeline.sinks])
    ]


def _by_batches(pipeline: Pipeline, sinks: list[str]) -> list[tuple[str, ...]]:
    """Split sinks that need different batches, if any of them is written batch by batch."""
    streams = {
        name
        for name in sinks
        if pipeline.sinks[name].stream is not None and not has_dead_letter_stage(pipeline, name)
    }
    if streams.issuperset(sinks):
        return [tuple(sinks)]
    pieces: dict[str, list[str]] = {}
    for name in sinks:
        above = stem(pipeline, name)
        # Without any it stays alone, under its own unique name.
        pieces.setdefault(above[-1] if above else name, []).append(name)
    with_files = [tuple(piece) for piece in pieces.values() if not streams.issuperset(piece)]
    # The rest are streams, which may share a query without sharing batches.
    left = streams.difference(*with_files)
    return [*with_files, *_joined(pipeline, [name for name in sinks if name in left])]


def _cut_at_streams(groups: list[_Group], pipelines: Sequence[Pipeline]) -> list[_Group]:
    """Split groups that would read a stream that they write themselves."""
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
    """Return the largest number of intermediate streams upstream of each node."""
    streams = set(streams_between(pipelines))
    graph = whole_graph(pipelines)
    level: dict[Node, int] = {}
    for node in graph.topological_order():
        above = graph.parents(node)
        level[node] = max((level[p] + ((p, node) in streams) for p in above), default=0)
    return level


def _feeding(groups: Sequence[_Group], pipelines: Sequence[Pipeline]) -> Graph[int]:
    """Return the graph of groups (by index) in which writers feed readers."""
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


def _check_errors(pipeline: Pipeline) -> None:
    """Check that each stage with `errors: dead_letter` can run batch by batch."""
    for sink in pipeline.sinks:
        above = pipeline.graph().ancestors(sink)
        for name, stage in pipeline.stages.items():
            if name not in above or stage.errors != "dead_letter":
                continue
            is_stateful = keeps_state(stage, joins_tables=len(stage.from_) > 1)
            if is_stateful or name not in _way_up(pipeline, sink):
                raise pipeline.error(
                    ("stages", name, "errors"),
                    "rows are tried batch by batch, and it keeps state"
                    if is_stateful
                    else f"rows are tried batch by batch, and what {sink} gets is joined, counted "
                    "or keeps state after it",
                    hint="write them to a stream, and go on from there",
                    at_key=True,
                )


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
    """Check that streams written by one query have the same staging folder."""
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
    """Explain why exactly these sinks share a query, and how they are written."""
    sinks, first, stages = group.pipeline.sinks, group.sinks[0], group.stages()
    beside = [other for other in others if other.pipeline is group.pipeline]
    rest = _read_also(group, beside)
    if (mode := sinks[first].mode) != "append":
        return f"{first} is in mode {mode}, which takes a query of its own{rest}"
    if sinks[first].kind == "format" and group.kind() == "single":
        return f"{first} is written by Spark's own {sinks[first].format}, in its query{rest}"
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
        case "foreach_batch" if any(group.pipeline.stages[n].errors != "fail" for n in stages):
            tried = next(n for n in stages if group.pipeline.stages[n].errors != "fail")
            return (
                f"{tried} is tried batch by batch, and what it raises for goes to the dead "
                f"letters{rest}"
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
    """Explain which sources other queries read as well; each query reads a stream itself."""
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
    """Name what the sinks share: the last node upstream of all of them, or their sources."""
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


#: SQL for which Spark keeps state from one batch to the next.
_STATEFUL_SQL = re.compile(
    r"\b(group\s+by|join|distinct|intersect|except|limit|over\s*\()", re.IGNORECASE
)


def keeps_state(stage: Stage, *, joins_tables: bool = False) -> bool:
    """Tell whether a stage keeps state across batches, by its description.

    For a function, only `stateful: true` tells; the runner checks it.

    :param joins_tables: whether at most one input is a stream, so that a join keeps no state
    """
    if stage.stateful is not None:
        return stage.stateful
    found = _STATEFUL_SQL.findall(stage.sql or "")
    found = [word for word in found if not (joins_tables and word.lower() == "join")]
    return stage.watermark is not None or bool(found)


def _counts(stage: Stage) -> bool:
    """Tell whether it skips and counts rows; Spark reports such counts for streams only."""
    return stage.decode is not None and stage.decode.get("on_error") == "skip"


def stem(pipeline: Pipeline, sink: str) -> list[str]:
    """Return the nodes upstream of a sink that can supply its batches, the nearest first.

    Downstream of each of them every row is processed independently, so streaming and batch by
    batch give the same result. Stages with `errors: dead_letter` have to be downstream.
    """
    nodes = _way_up(pipeline, sink)
    tried = [i for i, name in enumerate(nodes) if _has_dead_letters(pipeline, name)]
    return nodes[tried[-1] + 1 :] if tried else nodes


def has_dead_letter_stage(pipeline: Pipeline, sink: str) -> bool:
    """Tell whether a stage upstream of a sink has `errors: dead_letter`."""
    return any(_has_dead_letters(pipeline, name) for name in pipeline.graph().ancestors(sink))


def input_of_first_dead_letter_stage(pipeline: Pipeline, node: str) -> str | None:
    """Return the input of the first stage with `errors: dead_letter` up to and including a node."""
    above = pipeline.graph().ancestors(node) | {node}
    for name in pipeline.graph().topological_order():
        if name in above and _has_dead_letters(pipeline, name):
            return pipeline.streams_of(pipeline.stages[name])[0]
    return None


def _has_dead_letters(pipeline: Pipeline, name: str) -> bool:
    return name in pipeline.stages and pipeline.stages[name].errors == "dead_letter"


def _way_up(pipeline: Pipeline, sink: str) -> list[str]:
    """Return the nodes upstream of a sink, nearest first, up to one that combines rows."""
    node, nodes = pipeline.sinks[sink].from_, []
    if (
        node in pipeline.stages
        and pipeline.takes_failures(sink)
        and not _has_dead_letters(pipeline, node)
    ):
        # Rows that a stage could not decode are not in its output.
        inputs = pipeline.stages[node].from_
        if len(inputs) > 1:
            return []
        node = inputs[0]
    nodes = [node]
    while node in pipeline.stages:
        stage = pipeline.stages[node]
        streams = pipeline.streams_of(stage)
        is_joined = len(stage.from_) > 1
        if len(streams) > 1 or keeps_state(stage, joins_tables=is_joined) or _counts(stage):
            break
        node = streams[0]
        nodes.append(node)
    return nodes


def trunk(pipeline: Pipeline, sinks: Iterable[str]) -> str | None:
    """Return the node nearest to the sinks that can supply the batches of all, or None."""
    stems = [stem(pipeline, sink) for sink in sinks]
    return next((node for node in stems[0] if all(node in other for other in stems)), None)


def has_branches(pipeline: Pipeline, sinks: Iterable[str], root: str) -> bool:
    """Tell whether any sink needs more than the rows of the trunk as they are."""
    return any(
        pipeline.sinks[s].from_ != root or pipeline.sinks[s].kind == "dead_letter" for s in sinks
    )
