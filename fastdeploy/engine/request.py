"""FastDeploy's path of what the offline ``LLM`` returns. The engine's own requests are in core/request.py."""

from fastdeploy.core.offline_outputs import CompletionOutput, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]
