#!/opt/fastdeploy/bin/python
"""Wait until no request is left in the server of this container, then exit. For the preStop hook of a pod.

    fastdeploy-drain [SECONDS]

First it waits for SETTLE_S, in which the service stops sending requests here. Then it asks /metrics each second until
no request runs or waits, for at most SECONDS (300). What runs then still ends in order: the server answers it, as
aborted with its tokens, when the stop signal comes. Reads FASTDEPLOY_METRICS_PORT and FASTDEPLOY_PORT. Uses the
standard library only.
"""

import os
import sys
import time
import urllib.request

LIMIT_S = 300.0
SETTLE_S = 5.0
POLL_S = 1.0
COUNTED = ("fastdeploy:num_requests_running", "fastdeploy:num_requests_waiting")


def requests_left(text: str) -> int:
    """Return the choices that run or wait, of all replicas, in a text of /metrics."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(COUNTED))
    return sum(int(float(value)) for _, value in samples)


def main() -> int:
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else LIMIT_S
    given = (os.environ.get(name, "") for name in ("FASTDEPLOY_METRICS_PORT", "FASTDEPLOY_PORT"))
    port = next((text for text in given if text.isdecimal()), "8180")  # Kubernetes may have put a URL there
    end = time.monotonic() + limit_s
    time.sleep(min(SETTLE_S, limit_s))
    left = 0
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                left = requests_left(reply.read().decode())
        except OSError as error:
            print(f"no metrics, so nothing to wait for: {error}")
            return 0
        if not left:
            return 0
        time.sleep(POLL_S)
    print(f"{left} choices still run or wait after {limit_s:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
