"""Names that TRL imports for its NCCL transfer, which is not used here."""

from __future__ import annotations


class NCCLTrainerSendWeightsArgs:
    pass


class NCCLWeightTransferEngine:
    pass
