"""Record the HTTP traffic between a trainer and an engine, and replay it.

The recorder is a proxy: each event of the traffic becomes a record, and a thread writes the records, without keys, to a
file. The replay is a server: it looks up each new request in the file, answers as the engine did, and reports how the
new run differs.

Both:
file      the records, and how they are written and read
keys      the removal of keys
headers   what headers say of a body, and which of them a proxy passes on
http      the HTTP server of the recorder and of the replay

The recorder:
record    the proxy
upstream  its connections to the engine
writer    the thread that writes

The replay:
replay    the server
bodies    when two requests are the same, and where their bodies differ
matching  which recorded request answers a new one
order     which calls control the engine, and what came before and after them in each run
report    the differences of the new run
summary   a recording as text, for --show
"""
