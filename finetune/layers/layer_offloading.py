"""Layer offloading to CPU or to a file."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from finetune.compat.peft import before_magnitudes
from finetune.compat.transformers import sequential_loading, wrap_checkpoint
from finetune.errors import DiskFull, RecipeError
from finetune.files import cache_dir
from finetune.layers import host_memory
from finetune.layers.checkpointing import base_of, decoder_layers
from finetune.layers.offload import InOrder, SideStream
from finetune.settings.compatibility import BUFFERS
from finetune.system import read_at

if TYPE_CHECKING:
    from finetune.layers.quantised_store import Store
    from finetune.settings import Settings


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's place in a layer's bytes, and the attribute of `owner` with the tensor."""

    #: Name in a file of the layer.
    name: str
    owner: Any
    attribute: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.owner, self.attribute)

    def set_tensor(self, tensor: torch.Tensor) -> None:
        setattr(self.owner, self.attribute, tensor)


def tensor_layout(layer: torch.nn.Module) -> list[TensorSlot]:
    """Return the slots of a layer's offloaded tensors. Raises RecipeError for int8 weights."""
    tensors = [(name, owner, attribute, getattr(owner, attribute)) for name, owner, attribute in _frozen(layer)]
    starts, _ = host_memory.tensor_offsets(tensor.nbytes for *_, tensor in tensors)
    return [
        TensorSlot(name, owner, attribute, tensor.dtype, tuple(tensor.shape), start, tensor.nbytes)
        for (name, owner, attribute, tensor), start in zip(tensors, starts, strict=True)
    ]


def _frozen(layer: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    for name, parameter in layer.named_parameters():
        # norms and biases stay on the GPU
        if parameter.requires_grad or parameter.dim() < 2:
            continue
        if parameter.dtype == torch.int8:
            raise RecipeError(
                "layer_offloading does not work with int8 weights, because bitsandbytes copies them",
                "Set load_in_8bit=false load_in_4bit=true, or layer_offloading=false.",
            )
        yield name, parameter, "data"
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield f"{name}:absmax", state, "absmax"
            if state.nested:
                yield f"{name}:offset", state, "offset"
                yield f"{name}:nested_absmax", state.state2, "absmax"


def layout_bytes(slots: list[TensorSlot]) -> int:
    """Return the bytes of a layer in storage, in whole pages."""
    return host_memory.tensor_offsets(slot.size for slot in slots)[1]


def offloaded_numbers(layers: int, count: int) -> list[int]:
    """Return the numbers of the offloaded layers, spread evenly."""
    # spread evenly, so that resident layers hide copies, too
    count = min(count, layers)
    return [number for number in range(layers) if (number + 1) * count // layers > number * count // layers]


class HostStorage:
    """Offloaded layers in host memory, pinned for CUDA."""

    def __init__(self) -> None:
        self._storage: dict[int, torch.Tensor] = {}

    def add(self, index: int, slots: list[TensorSlot]) -> None:
        """Store a layer. Raises RecipeError if the memory can't be pinned."""
        self._storage[index] = host_memory.host_buffer(layout_bytes(slots), slots[0].tensor)
        _copy_layer(slots, self._storage[index])

    def fetch(self, index: int, into: torch.Tensor, copies: InOrder) -> Any:
        """Start to copy a layer to the GPU, and return a handle for `wait`."""
        return copies.copy(into[: len(self._storage[index])], self._storage[index])

    def wait(self, started: Any, copies: InOrder) -> None:
        """Make later work on the GPU wait for a copy."""
        copies.wait(started)


def _copy_layer(slots: list[TensorSlot], buffer: torch.Tensor) -> None:
    for tensor_slot in slots:
        tensor_slot.view(buffer).copy_(tensor_slot.tensor)


class FileSpan(NamedTuple):
    """Bytes of an open file."""

    file: IO[bytes]
    #: Offset in the file.
    begin: int
    #: Offset in the layer's bytes.
    start: int
    size: int


class FileStorage:
    """Offloaded layers in a temporary file, which a thread reads into host memory."""

    def __init__(self) -> None:
        self._end = 0
        self._spans: dict[int, list[FileSpan]] = {}
        self._sizes: dict[int, int] = {}
        self._staging: list[torch.Tensor] = []
        self._copied: list[Any] = []  # the last copy from each staging buffer
        # one thread: reads stay in order. The page cache keeps the file's pages, so with enough free memory the drive is read
        # once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded layers")

    @functools.cached_property
    def _file(self) -> IO[bytes]:
        folder = cache_dir() / "layers"
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)  # open as long as the model lives

    def add(self, index: int, slots: list[TensorSlot]) -> None:
        """Write a layer. Raises DiskFull."""
        size = self._stage(index, slots)
        staging = self._staging[0][:size]
        _copy_layer(slots, staging)
        try:
            self._file.seek(self._end)
            self._file.write(host_memory.bytes_of(staging))
            self._file.flush()
        except OSError as error:
            raise DiskFull(
                f"the offloaded layers can't be written to {cache_dir()}: {error}",
                "Free some space there or set FINETUNE_CACHE to a folder on another drive, or set layer_offloading=cpu.",
            ) from error
        self._spans[index] = [FileSpan(self._file, self._end, 0, size)]
        self._end += size

    def _stage(self, index: int, slots: list[TensorSlot]) -> int:
        size = self._sizes[index] = layout_bytes(slots)
        if not self._staging or len(self._staging[0]) < size:
            self._staging = [host_memory.host_buffer(size, slots[0].tensor) for _ in range(BUFFERS)]
            self._copied = [None] * BUFFERS
        return size

    def fetch(self, index: int, into: torch.Tensor, copies: InOrder) -> Future[Any]:
        return self._thread.submit(self._read, index, into, copies, copies.mark())

    def wait(self, started: Future[Any], copies: InOrder) -> None:
        copies.wait(started.result())

    def _read(self, index: int, into: torch.Tensor, copies: InOrder, free: Any) -> Any:
        # the oldest staging buffer, whose last copy must end before it is overwritten
        self._staging.append(self._staging.pop(0))
        copied, size = self._copied.pop(0), self._sizes[index]
        staging = self._staging[-1][:size]
        if copied is not None:
            copies.finish(copied)
        for span in self._spans[index]:
            read = read_at(span.file.fileno(), span.begin, host_memory.bytes_of(staging[span.start : span.start + span.size]))
            if read < span.size:
                raise OSError(f"the offloaded layers' file ends {span.size - read:,} bytes too early")
        self._copied.append(copies.copy(into[:size], staging, after=free))
        return self._copied[-1]


# The frozen matrices of an offloaded layer, and the tables of 4-bit ones, form one block of bytes. The GPU has `BUFFERS`
# buffers, and the parameters of the i-th offloaded layer are always views of buffer i mod BUFFERS: only the buffer's content
# changes. A weight that autograd saves is a view of the buffer, which holds the layer again during its backward. So every
# offloaded layer must be recomputed; any other layer is refused when it runs.
class LayerOffloading:
    """The offloaded layers of one model: stored while the model loads, fetched before each use."""

    def __init__(self, layers: list[torch.nn.Module], storage: HostStorage | FileStorage, count: int) -> None:
        self._layers = [layers[number] for number in offloaded_numbers(len(layers), count)]
        self._storage = storage
        self._copies: InOrder | None = None  # chosen by device in `finish`
        self._layouts: dict[int, list[TensorSlot]] = {}
        self._index_of = {id(module): index for index, layer in enumerate(self._layers) for module in layer.modules()}
        # parameters of each layer that are not loaded yet
        self._missing = {
            index: {(id(module), name) for module in layer.modules() for name, p in module._parameters.items() if p is not None}
            for index, layer in enumerate(self._layers)
        }
        self.buffers: list[torch.Tensor] = []
        self._buffered_layers: list[int | None] = []  # the index of the layer that a buffer holds or is about to hold
        self._arriving: dict[int, Any] = {}  # copies into buffers that nobody has waited for yet
        self._running: int | None = None

    def on_parameter_loaded(self, module: torch.nn.Module, name: str) -> None:
        """Offload the layer of `module` once all its parameters are loaded."""
        index = self._index_of.get(id(module))
        if index is not None and index not in self._layouts:
            self._missing[index].discard((id(module), name))
            if not self._missing[index]:
                self._offload(index)

    def _offload(self, index: int) -> None:
        slots = self._layouts[index] = tensor_layout(self._layers[index])
        self._storage.add(index, slots)
        for tensor_slot in slots:
            tensor_slot.set_tensor(tensor_slot.tensor.new_empty(0))

    def finish(self) -> None:
        """After loading: allocate the buffers, and make the offloaded weights views of them."""
        for index in set(self._missing) - set(self._layouts):
            self._offload(index)
        like, size = self._layouts[0][0].tensor, max(map(layout_bytes, self._layouts.values()))
        self.buffers = [like.new_empty(size, dtype=torch.uint8) for _ in range(min(BUFFERS, len(self._layouts)))]
        self._buffered_layers = [None] * len(self.buffers)
        self._copies = SideStream(like.device) if like.device.type == "cuda" else InOrder()
        for index, layer in enumerate(self._layers):
            for tensor_slot in self._layouts[index]:
                tensor_slot.set_tensor(tensor_slot.view(self.buffers[self._buffer_index(index)]))
            layer.register_forward_pre_hook(functools.partial(self._before_layer, index))
            for part in layer.children():
                if any(parameter.dim() > 1 for parameter in part.parameters()):
                    part.register_forward_pre_hook(functools.partial(self._before_part, index))

    def wrap_checkpoints(self) -> None:
        """Fetch the weights before each recomputation. Call it once gradient checkpointing is on."""
        for index, layer in enumerate(self._layers):
            wrap_checkpoint(layer, functools.partial(functools.partial, self._checkpointed, index))

    def fetch_and_prefetch(self, index: int, step: int = 1) -> None:
        """Fetch a layer's weights, and prefetch the layer `step` further."""
        self.ensure_on_device(index)
        following = index + step
        if step > 0 and not torch.is_grad_enabled():  # evaluation and answers begin with the first layer again
            following %= len(self._layers)
        if following in self._layouts and self._buffer_index(following) != self._buffer_index(index):
            self._fetch(following)

    def ensure_on_device(self, index: int) -> None:
        """Fetch a layer's weights for the work issued next."""
        self._fetch(index)
        self._wait_for_copy(self._buffer_index(index))

    def ensure_module_on_device(self, module: torch.nn.Module) -> None:
        """Fetch the weights of the offloaded layer around `module`, if any."""
        index = self._index_of.get(id(module))
        # a forecast has no buffers and no weights
        if index is not None and self.buffers:
            self.ensure_on_device(index)

    def _fetch(self, index: int) -> None:
        buffer_index = self._buffer_index(index)
        if self._buffered_layers[buffer_index] == index:
            return
        assert self._copies is not None
        self._wait_for_copy(buffer_index)
        with _disable_current_modes():  # selective checkpointing's mode expects the forward pass's operators, without copies
            self._arriving[buffer_index] = self._storage.fetch(index, self.buffers[buffer_index], self._copies)
        self._buffered_layers[buffer_index] = index

    def _wait_for_copy(self, buffer_index: int) -> None:
        if buffer_index not in self._arriving:
            return
        assert self._copies is not None
        started, index = self._arriving.pop(buffer_index), self._buffered_layers[buffer_index]
        self._buffered_layers[buffer_index] = None  # stays None if the copy fails
        with _disable_current_modes():
            self._storage.wait(started, self._copies)
        self._buffered_layers[buffer_index] = index

    def _buffer_index(self, index: int) -> int:
        return index % len(self.buffers)

    def _checkpointed(self, index: int, checkpoint: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> Any:
        def run_layer(*layer_inputs: Any) -> Any:
            self.ensure_on_device(index)  # already there unless layers are recomputed in another order
            # `_before_part` checks it: a part may only run inside its layer's recomputation
            before, self._running = self._running, index
            try:
                return function(*layer_inputs)
            finally:
                self._running = before

        self.fetch_and_prefetch(index)
        outputs = checkpoint(run_layer, *inputs)
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if hidden.requires_grad:  # before the layer's backward: a 4-bit matmul reads the weight, not a saved tensor
            hidden.register_hook(lambda _: self.fetch_and_prefetch(index, -1))
        return outputs

    def _before_layer(self, index: int, _layer: Any, _inputs: Any) -> None:
        if not torch.is_grad_enabled():  # in training the checkpoint function fetches
            self.fetch_and_prefetch(index)

    def _before_part(self, index: int, _part: Any, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._running != index:
            raise RuntimeError(
                "an offloaded layer is not recomputed: its backward would read another layer's weights. Turn on gradient "
                "checkpointing for every layer, or use torch.no_grad() without a backward"
            )
        buffer_index = self._buffer_index(index)
        if self._buffered_layers[buffer_index] != index or buffer_index in self._arriving:
            raise RuntimeError("a part of an offloaded layer ran alone, without its weights: call the whole layer")


class QuantisedFileStorage(FileStorage):
    """Offloaded layers read from the files of a quantised model."""

    def __init__(self, store: Store, paths: list[str]) -> None:
        super().__init__()
        self._store, self._paths = store, paths

    def add(self, index: int, slots: list[TensorSlot]) -> None:
        self._stage(index, slots)
        # nothing is written: the tensors are in the layer's file already
        stored = [self._store.tensors[f"{self._paths[index]}.{slot.name}"] for slot in slots]
        self._spans[index] = [
            FileSpan(tensor.file, tensor.begin, slot.start, tensor.size) for tensor, slot in zip(stored, slots, strict=True)
        ]


def offload_layers(model: torch.nn.Module, settings: Settings, *, weights: bool, store: Store | None = None) -> LayerOffloading:
    """Offload layers of a model that is not loaded yet."""
    layers, count = decoder_layers(model), settings.offloaded_layers
    # a forecast (no `weights`) takes host memory: the GPU allocates the same
    storage: HostStorage | FileStorage = HostStorage()
    if settings.layer_offloading == "nvme" and store is not None:
        paths = {module: path for path, module in model.named_modules()}
        storage = QuantisedFileStorage(store, [paths[layers[number]] for number in offloaded_numbers(len(layers), count)])
    elif settings.layer_offloading == "nvme" and weights:
        storage = FileStorage()
    return LayerOffloading(layers, storage, count)


def offload_loaded(model: Any, count: int | None = None) -> LayerOffloading:
    """Offload `count` layers (default: all) of a loaded model with adapters to CPU."""
    base: Any = base_of(model)
    layers = decoder_layers(model)
    offloading = LayerOffloading(layers, HostStorage(), len(layers) if count is None else count)
    offloading.finish()
    # gradient checkpointing, which every offloaded layer needs, may be on already or be turned on later
    base.layer_offloading, enable = offloading, base.activation_checkpointing_enable

    def enable_and_wrap(*arguments: Any, **named: Any) -> None:
        enable(*arguments, **named)
        offloading.wrap_checkpoints()

    base.activation_checkpointing_enable = enable_and_wrap
    if base.is_activation_checkpointing:
        offloading.wrap_checkpoints()
    return offloading


@contextmanager
def layers_offloaded(settings: Settings) -> Iterator[Callable[[Any], None]]:
    """Offload layers one by one while transformers loads a model; yield a function to call at the end."""
    offloadings: list[LayerOffloading] = []

    def loaded(model: Any, module: Any, name: str) -> None:
        if not offloadings:
            offloadings.append(offload_layers(model, settings, weights=True))
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.requires_grad_(False)
        offloadings[0].on_parameter_loaded(module, name)

    def finish(model: Any) -> None:
        offloadings[0].finish()
        model.layer_offloading = offloadings[0]

    with sequential_loading(loaded):
        yield finish


def offloading_of(model: torch.nn.Module) -> LayerOffloading | None:
    """Return the layer offloading of a model or PeftModel, or None."""
    return getattr(base_of(model), "layer_offloading", None)


def weights_for_magnitudes(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which DoRA finds offloaded weights on the GPU."""
    # DoRA computes its magnitudes from the weights of one layer after another
    offloading = offloading_of(model)
    return contextlib.nullcontext() if offloading is None else before_magnitudes(offloading.ensure_module_on_device)
