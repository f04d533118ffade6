"""Matches the regular expressions of an adapter's config, in a process of its own; lora_config.py starts it.

An expression can take hours to match, and ``re`` never lets another thread run meanwhile. An adapter comes from a
tenant, so its expressions must not run in the process that computes steps. This file is run as a script, and imports
the standard library only. Several may run at once: each gives way to the steps, and SIGXCPU ends it at its limit.

Input (JSON): {"names": [name], "patterns": for each field [method, [expression]], "cpu_s": seconds}, method = "match"
or "fullmatch".
Output (JSON): {"hits": for each field {name: [number of the first expression that matches, its group "idx" or ""]}}, or
{"bad": [number of the field, number of the expression], "why": text} for the first expression that is not valid. The
size of the output does not depend on the number of expressions.
"""

import json
import os
import re
import resource
import sys

MAX_MEMORY = 256 << 20
NICE = 10  # a tenth of the time of a thread that computes steps, where both want one core


def main() -> None:
    task = json.load(sys.stdin)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGXCPU would write a core file
    resource.setrlimit(resource.RLIMIT_CPU, (task["cpu_s"], task["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    hits = []
    for at, (method, expressions) in enumerate(task["patterns"]):
        found = {}
        for number, expression in enumerate(expressions):
            try:
                match = getattr(re.compile(expression), method)
            except (re.error, RecursionError, OverflowError) as error:
                json.dump({"bad": [at, number], "why": str(error)}, sys.stdout)
                return
            for name in task["names"]:
                if name not in found and (one := match(name)):
                    found[name] = number, one.groupdict().get("idx") or ""
        hits.append(found)
    json.dump({"hits": hits}, sys.stdout)


if __name__ == "__main__":
    main()
