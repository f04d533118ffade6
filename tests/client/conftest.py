"""The fixtures of support.http_stack: a real server on a real socket before a fake engine."""

from support.http_stack import (  # noqa: F401
    make_module_stack,
    make_stack,
    model_dir,
    module_stack,
    stack,
    tokenizer,
)
