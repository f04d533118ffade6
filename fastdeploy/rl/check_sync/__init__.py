"""The check of a sync: are the weights that serve those of the trainer?

``check`` has check_sync, the public function. Four parts do its work, in this order:

the trainer     weights     its tensors as a server of a dtype would have them
                history     a file with the fingerprints of earlier checks
the engine      serving     the questions to an engine, and HTTP
                own_engine, other_engines   the answers of a server of this package, and of SGLang and vLLM
the tensors     compare     the tensors that differ, by how much, and the table of ways in which tensors differ
                origins, changes, places    these ways: another tensor serves, values were changed, or they were moved
                case        the facts that each way looks at
the answers     behaviour   log probabilities of prompts, for any engine, and the KV
                answers     prompts to an engine, by the routes of vLLM, SGLang or OpenAI
                own_run     the same prompts through a model of our own
                bounds      the statistics: differences that can be rounding, and those that cannot

``report`` has the result and its text.
"""

from fastdeploy.rl.check_sync.check import check_sync
from fastdeploy.rl.check_sync.report import BehaviourReport, Difference, Divergence, ServingState, SyncReport, Verdict

__all__ = ["BehaviourReport", "Difference", "Divergence", "ServingState", "SyncReport", "Verdict", "check_sync"]
