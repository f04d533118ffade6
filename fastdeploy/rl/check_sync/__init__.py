"""The check of a sync: are the weights that serve those of the trainer?

check       check_sync, the public function
weights     the trainer's weights as a server of a dtype would have them
history     the fingerprints of the weights of earlier checks
serving     what an engine is asked: our own by fingerprints and values (own_engine), others by their routes
            (other_engines)
compare     which tensors differ, by how much, and the table of ways in which tensors differ: another tensor serves
            (origins), the values are others (changes), or they are not at their places (places)
behaviour   prompts and log probabilities: for any engine, and for the KV
report      the results, and their text
"""

from fastdeploy.rl.check_sync.check import check_sync
from fastdeploy.rl.check_sync.report import BehaviourReport, Difference, Divergence, ServingState, SyncReport, Verdict

__all__ = ["BehaviourReport", "Difference", "Divergence", "ServingState", "SyncReport", "Verdict", "check_sync"]
