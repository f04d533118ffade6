"""The tokens that a version must give, computed by an engine of its own, which nobody pauses or kills.

    python -m acceptance.lib.soak.reference FOLDER SEED

Reads questions from stdin and prints answers, as JSON, one a line: {"step", "prompt", "tokens"} -> a list of token ids.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from acceptance.lib.soak.policy import Policy
from fastdeploy import LLM, SamplingParams
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.state_encoding import HostTensor, write_folder
from fastdeploy.testing.tensors import WEIGHTS, to_bfloat16


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    shutil.copytree(MODEL_DIR, folder, dirs_exist_ok=True)
    policy, served = Policy(seed, MODEL_DIR), 0
    with LLM(str(folder), max_num_seqs=1, num_gpu_blocks_override=256) as llm:
        for line in sys.stdin:
            question = json.loads(line)
            if question["step"] != served:
                policy.go_to(question["step"])
                state = {
                    name: HostTensor("BF16", values.shape, to_bfloat16(values).data.cast("B"))
                    for name, values in policy.state.items()
                }
                (folder / WEIGHTS).unlink()
                write_folder(state, folder)
                llm.update_weights(str(folder))
                served = policy.step
            greedy = SamplingParams(max_tokens=question["tokens"], ignore_eos=True, temperature=0.0)
            answer = llm.generate([question["prompt"]], greedy)[0].outputs[0]
            print(json.dumps(list(answer.token_ids)), flush=True)


if __name__ == "__main__":
    main()
