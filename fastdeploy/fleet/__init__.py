"""Many engines behind one address. The process that holds it is the gateway: an API server whose client is a
:class:`fastdeploy.fleet.client.FleetClient`, which offers what an ``EngineClient`` offers, over all replicas.

A replica is one ``fastdeploy serve``: an engine with its own API servers. The gateway speaks to the engines directly,
in the messages of :mod:`fastdeploy.inter_communicator.messages`, so a token takes no second HTTP hop.
"""
