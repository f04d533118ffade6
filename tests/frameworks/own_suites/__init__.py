"""One module for each framework: SUITE, its own tests that talk to an engine."""

from __future__ import annotations

import importlib
import pkgutil

from frameworks.own_tests import Suite

SUITES: dict[str, Suite] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").SUITE for module in pkgutil.iter_modules(__path__)
}
