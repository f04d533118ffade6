#!/opt/fastdeploy/bin/python
"""Exit with status 0 if the server of this container has an engine, else with 1 and the reason.

Reads FASTDEPLOY_PORT. Uses the standard library only, so that it starts fast.
"""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4
NOT_MODIFIED = 304  # the answer of FastDeploy's form while a trainer writes new weights


def main() -> int:
    port = os.environ.get("FASTDEPLOY_PORT", "")  # Kubernetes may have put the URL of a service there
    url = f"http://127.0.0.1:{port if port.isdecimal() else 8180}/health"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:
        if error.code == NOT_MODIFIED:
            return 0
        # The body has the reason: it loads, or has died.
        print(error.read().decode(errors="replace"))
    except OSError as error:
        print(error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
