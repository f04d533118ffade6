#!/opt/fastdeploy/bin/python
"""Exit with status 0 if the server of this container has an engine, else with 1 and the reason.

Reads FASTDEPLOY_PORT. Uses the standard library only, so that it starts fast.
"""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('FASTDEPLOY_PORT', '8180')}/health"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:  # the body has the reason: it loads, or has died
        print(error.read().decode(errors="replace"))
    except OSError as error:
        print(error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
