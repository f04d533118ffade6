"""An op raises MemoryError when the system has no memory left: the process lives on, and the next op works. And a
process may end while an op runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PREPARE = """
import resource
import numpy as np, paddle
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.vocabulary import SampleBatch

def allow_only(mebibytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

def refused(error, op, *args):
    try:
        op(*args)
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")
"""


def run_alone(code: str, threads: int) -> None:
    """Run code in a new process, because the limit of the address space stays. Checks that it exits with 0."""
    env = os.environ | {"FASTDEPLOY_CPU_THREADS": str(threads)}
    command = [sys.executable, "-c", PREPARE + code]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, f"exit status {run.returncode}\n{run.stderr}"


def test_a_smaller_call_succeeds_after_a_buffer_could_not_grow():
    run_alone(
        """
ops = CpuOps("bfloat16")
weight = ops.pack_linear([np.ones((16, 1024), np.float32)])
large, small = paddle.empty([40000, 1024]), paddle.ones([64, 1024])
ops.linear(small[:1], weight)
allow_only(40)
refused(MemoryError, ops.linear, large, weight)
assert (ops.linear(small, weight).numpy() == 1024).all()
""",
        threads=1,
    )


def test_an_error_on_any_thread_reaches_the_caller_and_the_next_op_runs():
    """The candidates of a row of 8 Mi equal logits take 64 MiB. Caller and worker begin with one row each."""
    run_alone(
        """
ops = CpuOps("float32")
logits = paddle.zeros([2, 8 << 20])
def batch(top_p):
    one = np.ones(2, np.float32)
    return SampleBatch(one, np.zeros(2, np.int32), np.array(top_p, np.float32), 0 * one, np.full(2, 0.5))
expected = ops.sample(logits, batch([1.0, 1.0])).tolist()
allow_only(30)
for turn in range(5):
    for top_p in ([0.9, 1.0], [1.0, 0.9], [0.9, 0.9]):
        refused(MemoryError, ops.sample, logits, batch(top_p))
        assert ops.sample(logits, batch([1.0, 1.0])).tolist() == expected
""",
        threads=2,
    )


def test_an_op_whose_threads_cannot_start_raises_an_error():
    run_alone(
        """
ops = CpuOps("float32")
logits = paddle.zeros([64, 1000])
greedy = SampleBatch(*(np.zeros(64, kind) for kind in (np.float32, np.int32, np.float32, np.float32, np.float64)))
allow_only(60)
assert "esource" in refused(RuntimeError, ops.sample, logits, greedy)
ops.set_num_threads(2)
assert (ops.sample(logits, greedy) == 0).all()
""",
        threads=64,
    )


def test_a_process_may_end_while_a_thread_copies_weights():
    """The copy that the engine makes for the next update may be under way."""
    run_alone(
        """
import threading, time
ops = CpuOps("bfloat16")
weights = [ops.new_linear(1 << 14, 1 << 12, False) for _ in range(2)]

def copy():
    while True:
        ops.copy_rows(*weights, 0, 1 << 14)

threading.Thread(target=copy, daemon=True).start()
time.sleep(0.3)
""",
        threads=1,
    )
