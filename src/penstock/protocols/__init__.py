"""Protocols to and from queues: one package per protocol, wire format apart from sockets."""
