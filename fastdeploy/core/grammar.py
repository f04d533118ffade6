"""What the API server, which checks grammars, and the worker, which follows them, have in common: the limits of
llguidance, and a thread to compile on.

A grammar is llguidance's JSON: {"grammars": [{"json_schema": ...}]}, or {"grammars": [{"lark_grammar": "..."}]}. There
may be a second one with a "name", to which the first one refers.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_GRAMMAR_CHARS = 65536
# llguidance follows chains of rules and references on the stack. This is enough for all that a grammar can have.
STACK_BYTES = 64 << 20
# Arguments of llguidance's LLParserLimits. With them the slowest grammar compiles in some 0.15 s, and a mask takes 10
# ms. A state of the lexer takes 1 to 2 KB.
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_stack_size = threading.Lock()


def compiling_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread whose stack suffices for every grammar."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(before)
    return executor
