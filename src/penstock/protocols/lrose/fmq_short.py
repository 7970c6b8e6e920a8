"""How is a WRITE of one plain message, the most usual request, made and known at a glance?

Whole frames, because each layer that looks at a request costs as much as sending it. Whatever has
another form is not known here: `fmq_wire` takes it apart.
"""

from __future__ import annotations

from typing import Final

from penstock.protocols.lrose._short import Forms
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_messages import encode_message
from penstock.protocols.lrose.fmq_wire import SOCKET_ID, Op
from penstock.protocols.lrose.sku import encode_header

__all__ = ["PAYLOAD_AT", "encode_write", "encode_written", "find_write", "find_written"]

#: Where the payload of such a request begins.
PAYLOAD_AT: Final = 164

_REQUEST: Final = encode_message(DsMessage(Op.WRITE), b"", 0, 0)
_REPLY: Final = DsMessage(Op.REPLY, Op.WRITE).to_bytes()
_FORMS: Final = Forms(
    encode_header(SOCKET_ID, 1, len(_REQUEST)) + _REQUEST,
    encode_header(SOCKET_ID, 1, len(_REPLY)) + _REPLY,
)

encode_write = _FORMS.encode_write
find_write = _FORMS.find_write
encode_written = _FORMS.encode_written
find_written = _FORMS.find_written
