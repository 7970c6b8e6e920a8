"""Which commands are there, and which module has each?

`penstock --help` reads this table alone; a command's module is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "Family"]


class Family(NamedTuple):
    """The commands of one module, under one heading of the help."""

    #: A module of this package, whose `add_to(app)` adds the commands.
    module: str
    heading: str
    #: The first sentence of each command's help.
    commands: Mapping[str, str]


FAMILIES: Final = (
    Family(
        "messages",
        "Messages",
        {"put": "Write messages to a stream, and create it if it is missing."},
    ),
    Family(
        "cat",
        "Messages",
        {
            "cat": "Read messages from a stream and print them.",
            "tail": "Print the last messages of a stream, as cat --from -10 does.",
        },
    ),
    Family("cp", "Messages", {"cp": "Copy a stream to another, of whatever kind."}),
    Family(
        "relays",
        "Messages",
        {
            "relay": "Keep streams in step with others: every relay of a file, until they end or "
            "Ctrl-C."
        },
    ),
    Family(
        "queues",
        "Streams",
        {
            "create": "Create a queue or a log.",
            "info": "Show what a stream holds: its shape, oldest and youngest message, how full "
            "it is.",
            "fmq": "Check and repair Fast Message Queues.",
        },
    ),
    Family(
        "streams",
        "Streams",
        {
            "ls": "List queues and logs: how much is in them, how fast, who writes and reads.",
            "rm": "Remove streams with all that is in them.",
            "resize": "Give a queue another size, and keep its messages and its readers.",
        },
    ),
    Family("logs", "Streams", {"log": "Look at, trim and check durable logs."}),
    Family("psi", "Streams", {"psi-store": "Look at and export stores, psi's and ours."}),
    Family("map", "Streams", {"map": "Show which data a site has, and how fresh they are."}),
    Family(
        "mon",
        "Streams",
        {
            "mon": "Watch a stream, until Ctrl-C: rate, messages, bytes, backlog and losses per "
            "interval."
        },
    ),
    Family(
        "top",
        "Streams",
        {"top": "Show streams on a screen as they change: rates, lag, loss, who writes and reads."},
    ),
    Family(
        "bench",
        "Streams",
        {
            "bench": "Measure a stream: how many messages a second, how late they come, and how "
            "many are lost."
        },
    ),
    Family("stream_ids", "Streams", {"id": "Make, explain and compare stream ids."}),
    Family(
        "latest",
        "Files",
        {
            "latest": "Announce new files, and wait for announced ones: latest_data_info.",
            "on": "Run a command for every new file: in order, at least once, also after a crash.",
        },
    ),
    Family("radar", "Files", {"radar": "Look at files of volumes and grids."}),
    Family(
        "pipelines",
        "Pipelines",
        {
            "plan": "Check a pipeline, draw it, and say which Spark queries it becomes. Nothing "
            "runs.",
            "test": "Check by cases that a pipeline does what it should: rows or messages in, rows "
            "out.",
        },
    ),
    Family(
        "run",
        "Pipelines",
        {"run": "Run pipelines on Spark, until they end or Ctrl-C."},
    ),
    Family("graphs", "Pipelines", {"graph": "Run workers in any language between queues."}),
    Family(
        "prepare",
        "Pipelines",
        {"prepare": "Let Spark start in about half the time on this machine."},
    ),
    Family("serve", "Servers", {"serve": "Serve streams of this machine to others."}),
    Family("jrtc", "Servers", {"jrtc": "Route and forward streams as jrt-controller."}),
    Family(
        "dispatch",
        "Servers",
        {
            "dispatch": "Dispatch uProtocol messages: a message that was taken is delivered, or "
            "is a dead letter that says why."
        },
    ),
    Family(
        "dead",
        "Servers",
        {
            "dead": "Look at uProtocol messages that could not be delivered, and try them again.",
        },
    ),
    Family(
        "chaos",
        "Servers",
        {"chaos": "Stand between two programs and lose, delay, garble and cut what passes."},
    ),
    Family(
        "doctor",
        "This machine",
        {
            "doctor": "Check what this machine has for Penstock. Exit code 1 if something needed "
            "is missing."
        },
    ),
)
