"""The adapters that an engine has had, as its list of adapters told them."""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy.engine.adapters.registry import AdapterRegistry


class Loaded(NamedTuple):
    """An adapter that was committed. content: k of "a<k>", see FakeAdapterStaging."""

    content: int
    version: str


class AdapterBook:
    """Follows the list of adapters. Every load must name a path "a<k>" or "a<k>-recompute", with a k of its own.

    known: lora_int_id by name. epochs: the last adapter_epoch by lora_int_id, also of unloaded adapters. past: the
    highest one of adapters that were unloaded. loaded: by the label of spans, (name, adapter_epoch), which no two
    adapters have. void: contents that must not be committed any more. given: by name, the adapter_epoch that the next
    commit must have; of other names it is the next one."""

    def __init__(self, registry: AdapterRegistry):
        self._registry = registry
        self.known: dict[str, int] = {}
        self.epochs: dict[int, int] = {}
        self.past = 0
        self.loaded: dict[tuple[str, int], Loaded] = {}
        self.names: dict[int, str] = {}  # by content: the name of the load
        self.void: set[int] = set()
        self.given: dict[str, int] = {}
        self.look()

    def look(self) -> None:
        """Take note of the adapters that are known now."""
        before, self.known = set(self.known.values()), {}
        for entry in self._registry.describe()["adapters"]:
            name, int_id, epoch = entry["lora_name"], entry["lora_int_id"], entry["adapter_epoch"]
            self.known[name] = int_id
            content = int(entry["path"][1:].partition("-")[0])
            told = Loaded(content, entry["version"])
            if (int_id, epoch) not in self.epochs.items():
                self._committed(name, int_id, epoch, told)
            assert self.loaded[name, epoch] == told, "an adapter has changed without a new adapter_epoch"
        unloaded = before - set(self.known.values())
        self.past = max([self.past, *(self.epochs[int_id] for int_id in unloaded)])

    def _committed(self, name: str, int_id: int, epoch: int, told: Loaded) -> None:
        assert (name, epoch) not in self.loaded, f"{name}: two adapters have the adapter_epoch {epoch}"
        if name in self.given:
            assert epoch == self.given.pop(name), f"{name}: {epoch}"
        elif int_id in self.epochs:
            assert epoch == self.epochs[int_id] + 1, f"{name}: {epoch}"
        assert epoch > self.past or int_id in self.epochs, f"{name}: {epoch}, after an adapter with {self.past}"
        assert self.names.get(told.content, name) == name and told.content not in self.void, f"{name}: {told}"
        self.void.add(told.content)  # it may not be committed again
        self.epochs[int_id] = epoch
        self.loaded[name, epoch] = told

    def given_up(self, name: str) -> None:
        """Expect that no load of ``name`` that was called so far is committed later."""
        self.void |= {content for content, owner in self.names.items() if owner == name}
