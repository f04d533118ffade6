"""SkyRL's FullyAsyncTrainerSim, unmodified, on a server of ours. Run by test_skyrl_sim.py in the environment of the
frameworks, with SkyRL's checkout on the path; prints one line of JSON.

usage: skyrl_sim_child.py WORK RUNS

The experiment is the one of SkyRL's example for its simulated trainer, run in this process and not
in another one of Ray. Ours are the data, an environment that rewards a right answer, and the tracker that keeps the
metrics, as SkyRL's other examples have theirs. WORK: a folder for its files. RUNS: JSON, a list of trainings, one after
the other: {"url", "model": folder, "sync": a folder whose weights each sync sends by SkyRL's client, or "" for a sync
that only waits, as SkyRL's does, "rules": faults that are armed before, or []}.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# SkyRL's module of trainer workers imports two functions of flash_attn, which needs a GPU to be built. The simulated
# trainer builds no worker, so nothing calls them.
for name in ("flash_attn", "flash_attn.bert_padding"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)
sys.modules["flash_attn.bert_padding"].__dict__.update(pad_input=None, unpad_input=None)

import datasets  # noqa: E402
import httpx  # noqa: E402
import ray  # noqa: E402
import skyrl_gym  # noqa: E402
from examples.train.fully_async.main_fully_async_sim import FullyAsyncSimPPOExp  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints.main_base import validate_cfg  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim, _SimDispatch  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402

GROUPS, SAMPLES, STEPS = 4, 2, 4  # prompts of a step, answers of each, steps


class Sums(BaseTextEnv):
    """One turn: the reward is 1 for the right number, which the embedded model writes after the last #."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None):
        super().__init__()
        self.answer = (extras or {})["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.removesuffix("<|end|>").rpartition("#")[2] == self.answer)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class Kept:
    """SkyRL's tracker, as far as the trainer calls it. Keeps the metrics of each step, and the error that ended it."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.error: str | None = None

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        self.steps.setdefault(step, {}).update({k: v for k, v in data.items() if isinstance(v, int | float)})

    def log_exception(self, error: BaseException, step: int = 0) -> None:
        self.error = repr(error)

    def finish(self) -> None:
        pass


class Sending(_SimDispatch):
    """SkyRL's stand-in for its weight sync. folder: each sync sends its weights by the calls of SkyRL's client; "" = it
    waits, as SkyRL's does."""

    def __init__(self, client: Any, seconds: float, folder: str):
        super().__init__(client, seconds)
        self.folder = folder

    def finalize_pending_saves(self, model: str) -> None:
        """The trainer calls this after its last step, and SkyRL's stand-in lacks it (a956457): the training would end
        with an AttributeError."""

    async def save_weights_for_sampler(self) -> None:
        if not self.folder:
            await super().save_weights_for_sampler()
            return
        await self._client.pause_generation()
        try:
            await self._client.start_weight_update()
            await self._client.update_named_weights({"model_path": self.folder})
            await self._client.finish_weight_update()
        finally:
            await self._client.resume_generation()
        self._client.increment_weight_version()


class Syncing(FullyAsyncTrainerSim):
    """The simulated trainer, of which each sync sends the weights of ``folder``, if there is one."""

    folder = ""

    def init_weight_sync_state(self) -> None:
        seconds = self.cfg.trainer.fully_async.simulate_weight_sync_seconds
        self.dispatch = Sending(self.inference_engine_client, seconds, self.folder)


class Experiment(FullyAsyncSimPPOExp):
    def __init__(self, cfg: SkyRLTrainConfig):
        self.kept = Kept()
        super().__init__(cfg)

    def get_trainer(self, **parts: Any) -> FullyAsyncTrainerSim:
        return Syncing(**parts)

    def get_tracker(self) -> Any:
        return self.kept

    def get_train_dataset(self) -> PromptDataset:
        # One process instead of the eight that SkyRL starts, which take a minute on two cores.
        cfg = self.cfg
        return PromptDataset(cfg.data.train_data, self.tokenizer, cfg.trainer.max_prompt_length, num_workers=1)


def main(work: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    skyrl_gym.register(id="sums", entry_point="__main__:Sums")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i % 10}+{i // 2}="}],
            "env_class": "sums",
            "reward_spec": {"method": "rule", "ground_truth": str(i % 10 + i // 2)},
        }
        for i in range(GROUPS * STEPS)
    ]
    datasets.Dataset.from_list(rows).to_parquet(work / "train.parquet")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    return [train(work, **run) for run in runs]


def train(work: Path, url: str, model: str, sync: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Train once. Return the metrics of each step, and the error that ended the training."""
    data = str(work / "train.parquet")
    if rules:
        httpx.post(f"{url}/v1/faults", json={"rules": rules}, timeout=60).raise_for_status()
    Syncing.folder = sync
    settings = {
        "data.train_data": [data],
        "data.val_data": [data],
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": "false",
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.simulate_training": "true",
        "trainer.fully_async.simulate_training_step_seconds": 0.2,
        "trainer.fully_async.simulate_weight_sync_seconds": 0.1,
        "trainer.fully_async.max_staleness_steps": 1,
        "trainer.fully_async.num_parallel_generation_workers": GROUPS,
        "trainer.policy.model.path": model,
        "trainer.placement.colocate_all": "false",
        "trainer.strategy": "fsdp",
        "trainer.epochs": 1,
        "trainer.train_batch_size": GROUPS,
        "trainer.policy_mini_batch_size": GROUPS,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.max_prompt_length": 256,
        "trainer.export_path": work / "export",
        "trainer.ckpt_path": work / "ckpt",
        "trainer.log_path": work / "log",
        "trainer.logger": "console",
        "generator.sampling_params.max_generate_length": 64,
        "generator.n_samples_per_prompt": SAMPLES,
        "generator.batched": "false",
        "generator.inference_engine.num_engines": 1,
        "generator.inference_engine.run_engines_locally": "false",
        "generator.inference_engine.external_proxy_url": url,
        "generator.inference_engine.external_server_urls": [url],
        "environment.env_class": "sums",
    }
    cfg = SkyRLTrainConfig.from_cli_overrides([f"{name}={value}" for name, value in settings.items()])
    validate_cfg(cfg)
    experiment = Experiment(cfg)
    error = None
    try:
        experiment.run()
    except Exception as raised:
        error = repr(raised)
    return {"steps": experiment.kept.steps, "error": error, "logged": experiment.kept.error}


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # on a machine with much to do
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
