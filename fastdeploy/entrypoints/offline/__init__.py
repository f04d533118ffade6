"""The parts of the offline ``LLM``. The class itself is in entrypoints/llm.py, where FastDeploy has it.

What users give and get is in core/offline_params.py and core/offline_outputs.py, not here: FastDeploy's names for these
modules, ``fastdeploy.engine.sampling_params`` and ``fastdeploy.engine.request``, may import nothing of this layer.
"""
