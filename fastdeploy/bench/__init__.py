"""Measurement of servers over HTTP: a client of the wire, timelines of streams, loads and figures. ``fastdeploy bench``
and the programs in benchmarks/ and acceptance/ use it."""
