"""The durable log: a directory of wide queues, one behind the other."""
