"""Shared by the benchmark scripts: HTTP and SSE readers, timelines, verdicts, tables."""
