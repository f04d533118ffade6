"""The adapters that an engine has had, as its list of adapters told them."""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy.engine.adapters import AdapterRegistry


class Loaded(NamedTuple):
    """An adapter that was committed. content: k of "a<k>", see FakeAdapterStaging."""

    content: int
    version: str


class AdapterBook:
    """Follows the list of adapters. Every load must name a path "a<k>" or "a<k>-recompute", with a k of its own.

    known: lora_int_id by name. epochs: the last adapter_epoch by lora_int_id, also of unloaded adapters. loaded: by
    (lora_int_id, adapter_epoch). void: contents that must not be committed any more. given: by name, the
    adapter_epoch that the next commit must have; of other names it is the next one."""

    def __init__(self, registry: AdapterRegistry):
        self._registry = registry
        self.known: dict[str, int] = {}
        self.epochs: dict[int, int] = {}
        self.loaded: dict[tuple[int, int], Loaded] = {}
        self.names: dict[int, str] = {}  # by content: the name of the load
        self.void: set[int] = set()
        self.given: dict[str, int] = {}
        self.look()

    def look(self) -> None:
        """Take note of the adapters that are known now."""
        self.known = {}
        for entry in self._registry.describe()["adapters"]:
            name, int_id, epoch = entry["lora_name"], entry["lora_int_id"], entry["adapter_epoch"]
            self.known[name] = int_id
            content = int(entry["path"][1:].partition("-")[0])
            told = Loaded(content, entry["version"])
            if (int_id, epoch) not in self.loaded:
                self._committed(name, int_id, epoch, told)
            assert self.loaded[int_id, epoch] == told, "an adapter has changed without a new adapter_epoch"

    def _committed(self, name: str, int_id: int, epoch: int, told: Loaded) -> None:
        assert epoch == self.given.pop(name, self.epochs.get(int_id, 0) + 1), f"{name}: {epoch}"
        assert self.names.get(told.content, name) == name and told.content not in self.void, f"{name}: {told}"
        self.void.add(told.content)  # it may not be committed again
        self.epochs[int_id] = epoch
        self.loaded[int_id, epoch] = told

    def given_up(self, name: str) -> None:
        """Expect that no load of ``name`` that was called so far is committed later."""
        self.void |= {content for content, owner in self.names.items() if owner == name}
