"""Record the HTTP traffic between a trainer and an engine, and replay it.

file      the records of a recording, and how they are written and read
keys      the removal of keys
writer    the writing of records beside the event loop
headers   what headers say of a body, and which of them a proxy passes on
upstream  the recorder's connections to the engine
record    the recorder: a proxy that writes what passes through it
bodies    when two request bodies are the same, and where they differ
replay    a server that answers from a recording
order     what came before what, in the recording and in the new run
matching  which recorded request a new one is
report    what is different in the new run
summary   a recording as text
http      how the recorder and the replay serve HTTP
"""
