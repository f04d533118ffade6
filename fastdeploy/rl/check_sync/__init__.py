"""The check of a sync: are the weights that serve those of the trainer?

check       check_sync, the public function
weights     the trainer's weights as a server of a dtype would have them
compare     which tensors differ, and the table of ways in which tensors differ
serving     what an engine says of its weights: ours by fingerprints and values, others by their routes
behaviour   prompts and log probabilities: for any engine, and for the KV
report      the results
"""
