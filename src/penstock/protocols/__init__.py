"""Ways in and out of a queue: one package a protocol, wire format apart from sockets."""
