"""Modules that the benchmark scripts share: HTTP and SSE readers, timelines, verdicts, tables."""
