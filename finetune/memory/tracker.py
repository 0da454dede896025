"""Tracker of every storage on the GPU: live bytes by part and layer, and the order of events."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from finetune.memory import fake_operators
from finetune.memory.caching_allocator import pinned_bytes, rounded
from finetune.memory.trace import Recording
from finetune.units import MIB

#: Part of layers' weights in host memory. Their pages are pinned in place, so sizes are not rounded up.
OFFLOADED = "offloaded layers"

#: cublasLt keeps a separate workspace for linear layers with a bias (CublasHandlePool.cpp, getCUDABlasLtWorkspaceSize).
CUBLASLT_BYTES = MIB

_DEVICE = torch.ops.prim.device.default
_LINEAR, _ADDMM = torch.ops.aten.linear.default, torch.ops.aten.addmm.default
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default, _LINEAR, _ADDMM}

#: Phases in which operators run on parameters, not on layers.
_UPDATES = ("first step", "optimizer")

#: (part of the ledger, layer number or None)
Tag = tuple[str, int | None]
#: (phase of the step, layer number or None)
PhaseKey = tuple[str, int | None]
#: Live bytes by tag at the peak of one phase and layer.
Peak = Counter[Tag]
#: Arguments of an operator.
Positional = tuple[Any, ...]
Keywords = dict[str, Any]
#: Replaces an operator that allocates differently on a GPU. Runs outside the tracker; enter `with tracker:` to track inside.
Rule = Callable[["StorageTracker", Any, Positional, Keywords], Any]


class StorageTracker(TorchDispatchMode):
    """Live storages of all tensors made inside, tagged with the current `part` and `layer`; real or fake tensors.

    Tensors on `meta` represent host memory and count separately.
    """

    def __init__(self, rules: dict[Any, Rule] | None = None, *, workspace_bytes: int = 0) -> None:
        super().__init__()
        #: Order of events, with cuBLAS's workspaces, which the sums lack.
        self.recording = Recording()
        self._phase = ""
        self._layer: int | None = None
        self.phase, self.part = "load", "weights"
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[tuple[bool, bool]] = set()
        self._source: int | None = None
        #: While set, tensors created outside the layers take the layer of their operator's last argument that has one.
        self.inherits = False
        self.live_bytes = 0
        self.live: Counter[Tag] = Counter()
        self.peaks: dict[PhaseKey, Peak] = {}
        self._peak_bytes: dict[PhaseKey, int] = {}
        #: Corrections of operators that allocate differently on a GPU.
        self._rules = rules or {}
        self.host: Peak = Counter()
        self._host_live: Counter[Tag] = Counter()
        self._sizes: dict[int, tuple[int, Tag]] = {}

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase != self._phase:
            self.recording.begin_phase(phase)
        self._phase = phase

    @property
    def layer(self) -> int | None:
        """The running layer, or the layer of new tensors."""
        return self._layer

    @layer.setter
    def layer(self, layer: int | None) -> None:
        self._layer = layer
        if layer is not None:
            self.recording.running_layer = layer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is traced, and the wrapper takes longer than most operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # each read of a fake tensor's device is dispatched
        if self._phase in _UPDATES and args and isinstance(args[0], torch.Tensor):
            self._set_source(args[0])
        elif self.inherits:
            tensors = (value for value in reversed(args) if isinstance(value, torch.Tensor))
            self._source = next((layer for value in tensors if (layer := self.layer_of(value)) is not None), None)
        rule = self._rules.get(func)
        out = fake_operators.call(func, args, kwargs or {}) if rule is None else rule(self, func, args, kwargs or {})
        if isinstance(out, list) and func.__name__.startswith("_foreach"):
            for leaf, source in zip(out, args[0], strict=True):  # one per parameter, tagged with its layer
                self._set_source(source)
                self.track(leaf, layer=self.layer_of(source))
        else:
            for leaf in tree_iter(out):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf)
        self.record()
        if self._workspace_bytes and func in _MATMULS:
            self._workspace(func is _ADDMM or (func is _LINEAR and len(args) > 2 and args[2] is not None))
        return out

    def record(self, scratch_bytes: int = 0) -> None:
        """Update the peak of the current phase and layer, with the running kernel's scratch bytes."""
        key, total = (self._phase, self._layer), self.live_bytes + scratch_bytes
        if key not in self.peaks or total > self._peak_bytes[key]:
            self._peak_bytes[key] = total
            self.peaks[key] = +self.live
            if scratch_bytes:
                self.peaks[key][("workspace", self._layer)] += scratch_bytes

    def scratch(self, *sizes: int) -> None:
        """Record temporary buffers of a running kernel, in bytes."""
        self.record(sum(rounded(size) for size in sizes))
        self.recording.scratch(sizes, self._layer)

    def retag(self, tensor: torch.Tensor, part: str, layer: int | None = None) -> None:
        """Move a storage to another part, and to `layer` if given."""
        key = tensor.untyped_storage()._cdata
        size, old = self._sizes.get(key, (0, ("", None)))
        if size > 0:
            new = (part, old[1] if layer is None else layer)
            self.live[old] -= size
            self.live[new] += size
            self._sizes[key] = (size, new)

    @contextmanager
    def tagging(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def _workspace(self, biased: bool) -> None:
        # one workspace per thread, allocated at first use; autograd runs backward in another thread
        backward = self._phase in ("loss backward", "backward")
        for lt, size in ((False, self._workspace_bytes), (True, CUBLASLT_BYTES))[: 1 + biased]:
            if (backward, lt) not in self._workspaces:
                self._workspaces.add((backward, lt))
                self.recording.keep(size)

    def _set_source(self, tensor: torch.Tensor) -> None:
        layer = self.recording.layer_of(tensor.untyped_storage()._cdata)
        self._source = self._source if layer is None else layer

    def layer_of(self, tensor: torch.Tensor) -> int | None:
        return self._sizes.get(tensor.untyped_storage()._cdata, (0, ("", None)))[1][1]

    def track(self, tensor: torch.Tensor, *, layer: int | None = None) -> None:
        """Count a tensor's storage once, until its release; `layer` overrides the current layer."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device  # the latter would be dispatched
        inherited = self._source if self.inherits and self.layer is None else self.layer
        tag = (self.part, inherited if layer is None else layer)
        if device.type == "meta":
            size = storage.nbytes() if self.part == OFFLOADED else pinned_bytes(storage.nbytes())
            self._host_live[tag] += size
            if self._host_live.total() > self.host.total():
                self.host = +self._host_live
            self._sizes[key] = (-size, tag)
        else:
            size = rounded(storage.nbytes())
            self.live_bytes += size
            self.live[tag] += size
            self._sizes[key] = (size, tag)
            own = self._source if tag[1] is None and self._phase in _UPDATES else tag[1]
            self.recording.allocate(key, storage.nbytes(), own)
        weakref.finalize(storage, self._released, key).atexit = False

    def _released(self, key: int) -> None:
        size, tag = self._sizes.pop(key)
        if size < 0:  # negative sizes are host memory
            self._host_live[tag] += size
            return
        self.recording.release(key)
        self.live_bytes -= size
        self.live[tag] -= size
