"""Tracker of every storage on the GPU: live bytes by part and layer, and the order of events."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from finetune.memory import fake_operators
from finetune.memory.caching_allocator import pinned_bytes, rounded
from finetune.memory.trace import Recording
from finetune.units import MIB

#: Part of offloaded layers' weights. Their pages in host memory are pinned in place, so sizes are not rounded up.
OFFLOADED = "offloaded layers"
#: cublasLt keeps a separate workspace for linear layers with a bias (CublasHandlePool.cpp, getCUDABlasLtWorkspaceSize).
CUBLASLT_BYTES = MIB

_DEVICE = torch.ops.prim.device.default
_LINEAR, _ADDMM = torch.ops.aten.linear.default, torch.ops.aten.addmm.default
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default, _LINEAR, _ADDMM}
#: Phases in which operators run on parameters, not on layers.
_UPDATE_PHASES = ("first step", "optimizer")
#: (part of the ledger, layer number or None)
Tag = tuple[str, int | None]
#: (phase of the step, layer number or None)
PhaseKey = tuple[str, int | None]
#: Live bytes by tag at the peak of one phase and layer.
Peak = Counter[Tag]
#: Arguments of an operator.
Positional = tuple[Any, ...]
Keywords = dict[str, Any]
#: Replaces an operator that allocates differently on a GPU. It runs untracked, except inside `with tracker:`.
Rule = Callable[["StorageTracker", Any, Positional, Keywords], Any]


class StorageTracker(TorchDispatchMode):
    """Live storages of tensors created inside, by the current `part` and `layer`; tensors on `meta` count as host memory."""

    def __init__(self, rules: dict[Any, Rule] | None = None, *, workspace_bytes: int = 0) -> None:
        super().__init__()
        #: Events in order, also of cuBLAS's workspaces, which `live` lacks.
        self.recording = Recording()
        self._phase = ""
        self._layer: int | None = None
        self.phase, self.part = "load", "weights"
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[tuple[bool, bool]] = set()  # (of the autograd thread, of cublasLt)
        self._argument_layer: int | None = None  # of the running operator
        #: While set, a tensor created outside the layers gets the layer of its operator's last argument that has a layer.
        self.inherits = False
        self.live_bytes = 0
        self.live: Counter[Tag] = Counter()
        self.peaks: dict[PhaseKey, Peak] = {}
        self._peak_bytes: dict[PhaseKey, int] = {}
        self._rules = rules or {}
        #: Live bytes of host memory, at their peak.
        self.host: Peak = Counter()
        self._host_live: Counter[Tag] = Counter()
        self._sizes: dict[int, tuple[int, Tag]] = {}  # by storage; negative sizes are host memory

    @property
    def phase(self) -> str:
        return self._phase

    # a new phase begins a section of the recording
    @phase.setter
    def phase(self, phase: str) -> None:
        if phase != self._phase:
            self.recording.begin_phase(phase)
        self._phase = phase

    @property
    def layer(self) -> int | None:
        """The running layer; new tensors are tagged with this layer."""
        return self._layer

    @layer.setter
    def layer(self, layer: int | None) -> None:
        self._layer = layer
        if layer is not None:
            self.recording.running_layer = layer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo traces nothing here, and its wrapper takes longer than most operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # each read of a fake tensor's device is dispatched
        if self._phase in _UPDATE_PHASES and args and isinstance(args[0], Tensor):
            self._set_argument_layer(args[0])
        elif self.inherits:
            layers = (self.layer_of(value) for value in reversed(args) if isinstance(value, Tensor))
            self._argument_layer = next((layer for layer in layers if layer is not None), None)
        rule = self._rules.get(func)
        out = fake_operators.call(func, args, kwargs or {}) if rule is None else rule(self, func, args, kwargs or {})
        if isinstance(out, list) and func.__name__.startswith("_foreach"):
            for leaf, argument in zip(out, args[0], strict=True):  # an output for each parameter, tagged with its layer
                self._set_argument_layer(argument)
                self.track(leaf, layer=self.layer_of(argument))
        else:
            for leaf in tree_iter(out):
                if isinstance(leaf, Tensor):
                    self.track(leaf)
        self.record()
        if self._workspace_bytes and func in _MATMULS:
            has_bias = func is _ADDMM or (func is _LINEAR and len(args) > 2 and args[2] is not None)
            self._record_workspaces(has_bias)
        return out

    def record(self, scratch_bytes: int = 0) -> None:
        """Update the peak of the current phase and layer, with the running kernel's scratch bytes."""
        key, total_bytes = (self._phase, self._layer), self.live_bytes + scratch_bytes
        if key not in self.peaks or total_bytes > self._peak_bytes[key]:
            self._peak_bytes[key] = total_bytes
            self.peaks[key] = +self.live  # a copy without empty parts
            if scratch_bytes:
                self.peaks[key][("workspace", self._layer)] += scratch_bytes

    def scratch(self, *sizes: int) -> None:
        """Record temporary buffers of the running kernel, in bytes."""
        self.record(sum(rounded(size) for size in sizes))
        self.recording.scratch(sizes, self._layer)

    def retag(self, tensor: Tensor, part: str, layer: int | None = None) -> None:
        """Move a tensor's storage to another part, and to `layer` if given."""
        key = tensor.untyped_storage()._cdata
        size, old_tag = self._sizes.get(key, (0, ("", None)))
        if size > 0:
            new_tag = (part, old_tag[1] if layer is None else layer)
            self.live[old_tag] -= size
            self.live[new_tag] += size
            self._sizes[key] = (size, new_tag)

    @contextmanager
    def tagging(self, part: str) -> Iterator[None]:
        """Temporarily tag new storages with `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def _record_workspaces(self, has_bias: bool) -> None:
        # one workspace per thread, allocated at first use; autograd runs backward in another thread
        is_backward = self._phase in ("loss backward", "backward")
        for is_lt, size in ((False, self._workspace_bytes), (True, CUBLASLT_BYTES)):
            if (has_bias or not is_lt) and (is_backward, is_lt) not in self._workspaces:
                self._workspaces.add((is_backward, is_lt))
                self.recording.add_persistent(size)

    def _set_argument_layer(self, tensor: Tensor) -> None:
        layer = self.recording.layer_of(tensor.untyped_storage()._cdata)
        if layer is not None:
            self._argument_layer = layer

    def layer_of(self, tensor: Tensor) -> int | None:
        """Return the layer in the tag of a tensor's storage."""
        return self._sizes.get(tensor.untyped_storage()._cdata, (0, ("", None)))[1][1]

    def track(self, tensor: Tensor, *, layer: int | None = None) -> None:
        """Count a tensor's storage until its release, unless it is counted; `layer` overrides the current layer."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device  # the latter would be dispatched
        if layer is None:
            layer = self._argument_layer if self.inherits and self.layer is None else self.layer
        tag = (self.part, layer)
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
            recorded_layer = self._argument_layer if layer is None and self._phase in _UPDATE_PHASES else layer
            self.recording.allocate(key, storage.nbytes(), recorded_layer)
        weakref.finalize(storage, self._released, key).atexit = False

    def _released(self, key: int) -> None:
        size, tag = self._sizes.pop(key)
        if size < 0:
            self._host_live[tag] += size
            return
        self.recording.release(key)
        self.live_bytes -= size
        self.live[tag] -= size
