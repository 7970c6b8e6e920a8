"""The durable log: a directory of wide queues, in sequence."""
