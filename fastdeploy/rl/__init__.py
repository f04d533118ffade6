"""The trainer's side: a client of one address (a server or a fleet), and integrations of RL frameworks. Imports no
Paddle, except for rollout_model and scoring/, which are layers of their own.

client, sync_client   the public classes: RolloutClient, and the same without an event loop
connection            HTTP with one address; server_state knows whether requests may be sent
generate              one request until it is finished, over many attempts; continuation joins the attempts
sessions              sessions of agents with clients of their own, and their rows
rollout, staleness    the result of a generation, and how old the weights of its tokens are
holds                 pause and resume, and the renewal of a pause's ttl
publish               new weights and adapters, and the count of both
state_transfer        what is sent: a state or its difference (deltas), as safetensors (state_encoding), by uploads
frameworks/           integrations of TRL, verl and SkyRL
rollout_config,       FastDeploy's model that a trainer fills, by its names and in its layout
rollout_model
scoring/              log probabilities by the engine's own ops, with gradients
"""
