"""Python imports this at its start where the folder is on PYTHONPATH.

It lets vLLM believe that this CPU has AVX-512 and neither AVX512_BF16 nor AMX, so that it loads the library and chooses
the kernels that it has for such machines.
"""

import torch.cpu

for instructions in ("amx_tile", "amx_fp16", "avx512_bf16"):
    name = f"_is_{instructions}_supported"
    assert hasattr(torch.cpu, name), f"torch.cpu has no {name} any more"
    setattr(torch.cpu, name, lambda: False)
