"""Consumer groups: several readers of one name share the messages of a log or a ring."""
