from penstock.core.message import Message

# Messages from their columns, all of one length; `times` serves for both times of a message.
def make_messages(
    kind: type[Message],
    seqs: list[int],
    times: list[int],
    types: list[int],
    subtypes: list[int],
    payloads: list[bytes],
    /,
) -> list[Message]: ...
