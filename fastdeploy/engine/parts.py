"""The parts of one engine, and how they are put together."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy.cache_manager.adapter_memory import AdapterMemory
from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.events import EventLog
from fastdeploy.core.runner import Runner
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.core.weight_source import SourcePolicy
from fastdeploy.engine.adapters.registry import AdapterRegistry
from fastdeploy.engine.admission import AdmissionControl
from fastdeploy.engine.gateway_lease import GatewayLease
from fastdeploy.engine.pauses.scopes import ScopeRegistry
from fastdeploy.engine.requests.delivery import Delivery
from fastdeploy.engine.requests.lifecycle import RequestLifecycle
from fastdeploy.engine.requests.retention import RetainedLog, Retention
from fastdeploy.engine.sleep import Sleeper
from fastdeploy.engine.updates.weight_info import WeightInfo
from fastdeploy.engine.updates.weight_switch import WeightSwitch
from fastdeploy.engine.updates.weights import WeightSessions
from fastdeploy.inter_communicator.messages import Load
from fastdeploy.inter_communicator.transport import Transport
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.drafts import Drafter, NoDrafts
from fastdeploy.scheduler.ngram_drafter import NgramDrafter
from fastdeploy.scheduler.pacer import StepPacer
from fastdeploy.scheduler.scheduler import Scheduler


class EngineParts:
    """The parts of one engine. They are made in this order because each is given some of those before it. For the
    arguments see CommonEngine."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        transport: Transport,
        boot_id: str,
        on_commit: Callable[[bool], None] | None,
        clock: Callable[[], float],
        runs: Callable[[int], bool],
        retained_log: RetainedLog,
        drafter: Drafter | None,
    ):
        info, wake, timeout_s = runner.info, transport.wake, config.stage_timeout_s
        self.runner = runner
        events = self.events = EventLog(clock)
        metrics = self.metrics = EngineMetrics()

        kv = self.kv = KVCacheManager(info.num_blocks, info.block_size, config.enable_prefix_caching)
        memory = AdapterMemory(config.adapter_memory_mb << 20)
        max_step_s = None if config.max_step_ms is None else config.max_step_ms / 1000
        pacer = StepPacer(config.max_num_batched_tokens, max_step_s)
        if drafter is None:
            drafter = NgramDrafter(pacer.cost.cost) if config.enable_speculative_decoding else NoDrafts()
        scheduler = self.scheduler = Scheduler(info, config.max_num_seqs, pacer, kv, memory, drafter, events)

        retention = self.retention = Retention(config.max_retained, config.max_retained_mb << 20, retained_log)
        retain = lambda output: retention.observe(output, clock())  # noqa: E731
        delivery = self.delivery = Delivery(transport, retain, self.load_beside, runs, clock)
        lifecycle = self.lifecycle = RequestLifecycle(scheduler, delivery, retention, metrics, clock)
        scopes = self.scopes = ScopeRegistry(scheduler, lifecycle, delivery, metrics, boot_id, clock, events)
        scopes.base.served = ServedWeights(quantization=info.quantization or "")

        policy = SourcePolicy(config.model_roots, config.upload_dir)
        adapters = self.adapters = AdapterRegistry(
            config, runner, scopes, scheduler, lifecycle, metrics, policy, wake, clock, events
        )
        self.admission = AdmissionControl(
            info, config.max_waiting, scheduler, delivery, lifecycle, retention, scopes, adapters
        )
        pause, clients = scopes.whole_pause, delivery.clients
        switch = self.switch = WeightSwitch(runner, scopes, scheduler, lifecycle.requests, metrics, on_commit, events)
        weights = self.weights = WeightSessions(runner, switch, pause, policy, wake, clock, timeout_s, clients, events)
        folders = policy.upload_folders
        self.weight_info = WeightInfo(runner, scopes.whole, switch.committed, weights, timeout_s, folders)
        self.sleeper = Sleeper(runner, pause, weights, adapters.reads, clock, timeout_s)
        self.gateway_lease = GatewayLease(clock, clients)

    def load_beside(self, client: str) -> Load:
        """Return the load that ``client`` is told."""
        return Load(*self.scheduler.load.beside(client))
