"""The Fast Message Queue: where messages stay until they are read."""
