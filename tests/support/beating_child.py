"""A child that says "alive" every 0.02 s: ``python -m support.beating_child HOW --event-fd N``. HOW: "gentle", or
"stubborn", which ignores SIGTERM."""

from __future__ import annotations

import argparse
import signal
import time

from fastdeploy.entrypoints.child import EventPipe

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["gentle", "stubborn"])
parser.add_argument("--event-fd", type=int, required=True)
args = parser.parse_args()
if args.how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
events = EventPipe(args.event_fd)
while True:
    events.beat()
    time.sleep(0.02)
