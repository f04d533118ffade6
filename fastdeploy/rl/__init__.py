"""The trainer's side: a client of one or many servers, and integrations of RL frameworks. Imports no Paddle,
except for scoring/, which is a layer of its own.

client, sync_client   the public classes: RolloutClient, and the same without an event loop
generate              one request until it is finished, over many attempts; continuation joins the attempts
rollout, staleness    the result of a generation, and how old the weights of its tokens are
routing, replica      the choice of a server for a request; one server
replies               parsing of a server's replies
fan_out               one call to all servers
holds, hold_renewal   pause and resume of all servers as one, and the renewal of a pause's ttl
adapters              adapters to all servers, and the count of their loads
publish               weights to all servers in two phases; state_transfer makes parts, state_encoding encodes them
frameworks/           integrations of TRL, verl and SkyRL
scoring/              log probabilities by the engine's own ops, with gradients
"""
