"""FastDeploy's own tests of a server, tests/ce/server, unmodified on a server with --fastdeploy-form.

They are read from a copy of its repository: ``make test-fastdeploy FASTDEPLOY=/path``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from e2e.server import Server

CHECKOUT = os.environ.get("FASTDEPLOY_CHECKOUT", "")
PYTHON = os.environ.get("FASTDEPLOY_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHECKOUT and PYTHON), reason="make test-fastdeploy FASTDEPLOY=/path/to/its/repository"),
]
WORDS = "compares the answer with the words, or the log probabilities, of Baidu's model"
MORE = "checks a limit of stop strings (5, of 8 tokens each); this server takes 64, of 256 characters each"
NOT_APPLICABLE = {
    "test_stop_sequence": WORDS,
    "test_stop_sequence1": WORDS,
    "test_multi_turn_conversation": WORDS,
    "test_bad_words_filtering1": WORDS,
    "test_n_parameters": WORDS,
    "test_n_parameters1": WORDS,
    "test_n_parameters2": WORDS,
    "test_n_parameters_stream": WORDS,
    "test_stop_multiple_strings": WORDS,
    "test_stop_with_newlines": WORDS,
    "test_unstream_with_logprobs": WORDS,
    "test_unstream_without_logprobs": WORDS,
    "test_stream_with_logprobs": WORDS,
    "test_stream_without_logprobs": WORDS,
    "test_stream_with_temp_scaled_logprobs": WORDS,
    "test_stream_with_top_p_normalized_logprobs": WORDS,
    "test_stop_seq_exceed_num": MORE,
    "test_stop_seq_exceed_length": MORE,
    "test_concurrency": "needs answers so long that ten requests overlap, and a server with --max-concurrency 5",
    "test_waiting_time": "needs a server so slow that some of 1333 requests wait too long, and --max-waiting-time 1",
    "test_incremental_image_reasoning_consistency": "sends an image",
    "test_repetition_early_stop": "needs a server that ends answers which repeat themselves",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Return whether each of FastDeploy's tests passed."""
    folder = tmp_path_factory.mktemp("ce")
    shutil.copytree(Path(CHECKOUT) / "tests" / "ce" / "server", folder / "server")
    report = folder / "report.xml"
    with Server("--fastdeploy-form") as server:
        port = server.url.rpartition(":")[2]
        subprocess.run(
            [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "."],
            cwd=folder / "server",
            env={
                **os.environ,
                "URL": f"http://localhost:{port}/v1/chat/completions",
                "TEMPLATE": "TOKEN_LOGPROB",
                "FD_API_PORT": port,
            },
            timeout=1200,
            check=False,
        )
    cases = ElementTree.parse(report).iter("testcase")
    return {case.attrib["name"]: case.find("failure") is None and case.find("error") is None for case in cases}


def test_every_test_passes_that_needs_no_words_of_a_model_and_no_other_server(outcomes, capsys):
    passed = {name for name, good in outcomes.items() if good}
    missing = NOT_APPLICABLE.keys() & outcomes.keys() - passed
    with capsys.disabled():
        print(
            f"\nFastDeploy's tests/ce/server: {len(outcomes)} run, {len(passed)} passed, {len(missing)} not applicable"
        )
        for name in sorted(missing):
            print(f"  {name}: {NOT_APPLICABLE[name]}")
    assert outcomes.keys() - passed - NOT_APPLICABLE.keys() == set()
    assert len(passed) >= 58
