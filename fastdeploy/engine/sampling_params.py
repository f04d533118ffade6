"""FastDeploy's path of the parameters that users give. The engine's own are in core/sampling_params.py."""

from fastdeploy.core.offline_params import GuidedDecodingParams, SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams"]
