"""jrt-controller's streams, towards the outside: schemas, the forwarder and the collector."""
