"""Layer offloading to CPU or to a file, and the input embedding in host memory."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MethodType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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
    from finetune.settings import Settings


#: Each tensor of a layer's bytes begins at a multiple of this many bytes: CUDA kernels read aligned vectors.
ALIGN = 256


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's place in a layer's bytes, and the attribute of `owner` that holds the tensor."""

    owner: Any
    attribute: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layer_offset: int
    nbytes: int

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.layer_offset : self.layer_offset + self.nbytes].view(self.dtype).view(self.shape)

    @property
    def tensor(self) -> Tensor:
        return getattr(self.owner, self.attribute)


def tensor_layout(layer: nn.Module) -> list[TensorSlot]:
    """Return the slots of a layer's offloaded tensors. Raises RecipeError for int8 weights."""
    slots, end = [], 0
    for owner, attribute in _offloaded_tensors(layer):
        tensor, offset = getattr(owner, attribute), host_memory.round_up(end, ALIGN)
        slots.append(TensorSlot(owner, attribute, tensor.dtype, tuple(tensor.shape), offset, tensor.nbytes))
        end = offset + tensor.nbytes
    return slots


def _offloaded_tensors(layer: nn.Module) -> Iterator[tuple[Any, str]]:
    for parameter in layer.parameters():
        # norms and biases stay on the GPU
        if parameter.requires_grad or parameter.dim() < 2:
            continue
        if parameter.dtype == torch.int8:
            raise RecipeError(
                "layer_offloading does not work with int8 weights, because bitsandbytes copies them",
                "Set load_in_8bit=false load_in_4bit=true, or layer_offloading=false.",
            )
        yield parameter, "data"
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield state, "absmax"
            if state.nested:
                yield state, "offset"
                yield state.state2, "absmax"


def layout_bytes(slots: list[TensorSlot]) -> int:
    """Return the number of bytes of a stored layer, in whole pages."""
    return host_memory.round_up(slots[-1].layer_offset + slots[-1].nbytes, host_memory.PAGE)


def offloaded_numbers(layers: int, count: int) -> list[int]:
    """Return the numbers of the `count` offloaded layers, spread evenly over `layers` layers."""
    # so that resident layers hide copies, too
    count = min(count, layers)
    return [number for number in range(layers) if (number + 1) * count // layers > number * count // layers]


class HostStorage:
    """Offloaded layers in host memory, pinned for CUDA."""

    def __init__(self) -> None:
        self._storage: dict[int, Tensor] = {}

    def add(self, index: int, slots: list[TensorSlot]) -> None:
        """Store a layer. Raises RecipeError if the memory can't be pinned."""
        self._storage[index] = host_memory.host_buffer(layout_bytes(slots), slots[0].tensor)
        _copy_layer(slots, self._storage[index])

    def fetch(self, index: int, buffer: Tensor, copies: InOrder) -> Any:
        """Start to copy a layer into a buffer on the GPU. Return a handle for `wait`."""
        return copies.copy(buffer[: len(self._storage[index])], self._storage[index])

    def wait(self, handle: Any, copies: InOrder) -> None:
        """Make later work on the GPU wait for a copy."""
        copies.wait(handle)


def _copy_layer(slots: list[TensorSlot], buffer: Tensor) -> None:
    for tensor_slot in slots:
        tensor_slot.view(buffer).copy_(tensor_slot.tensor)


class FileStorage:
    """Offloaded layers in a temporary file, which a thread reads into host memory."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int]] = {}  # each layer's offset in the file and size in bytes
        self._staging: deque[tuple[Tensor, Any]] = deque()  # each staging buffer and the last copy from it
        # one thread, so that reads stay in order. With enough free memory, the page cache answers all but the first.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded layers")

    @functools.cached_property
    def _file(self) -> IO[bytes]:
        folder = cache_dir() / "layers"
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)  # the system deletes it when the model is freed

    def add(self, index: int, slots: list[TensorSlot]) -> None:
        """Write a layer. Raises DiskFull."""
        layer_bytes = layout_bytes(slots)
        if not self._staging or len(self._staging[0][0]) < layer_bytes:
            self._staging = deque((host_memory.host_buffer(layer_bytes, slots[0].tensor), None) for _ in range(BUFFERS))
        staging = self._staging[0][0][:layer_bytes]
        _copy_layer(slots, staging)
        try:
            file_offset = self._file.seek(0, os.SEEK_END)
            self._file.write(host_memory.bytes_of(staging))
            self._file.flush()
        except OSError as error:
            raise DiskFull(
                f"the offloaded layers can't be written to {cache_dir()}: {error}",
                "Free some space there or set FINETUNE_CACHE to a folder on another drive, or set layer_offloading=cpu.",
            ) from error
        self._spans[index] = file_offset, layer_bytes

    def fetch(self, index: int, buffer: Tensor, copies: InOrder) -> Future[Any]:
        # the mark: the computation issued so far may still read the buffer
        return self._thread.submit(self._read, index, buffer, copies, copies.mark())

    def wait(self, handle: Future[Any], copies: InOrder) -> None:
        copies.wait(handle.result())

    def _read(self, index: int, buffer: Tensor, copies: InOrder, buffer_free: Any) -> Any:
        # the oldest staging buffer, whose last copy must end before it is overwritten
        (staging_buffer, last_copy), (file_offset, layer_bytes) = self._staging[0], self._spans[index]
        staging = staging_buffer[:layer_bytes]
        if last_copy is not None:
            copies.finish(last_copy)
        n_read = read_at(self._file.fileno(), file_offset, host_memory.bytes_of(staging))
        if n_read < layer_bytes:
            raise OSError(f"the offloaded layers' file ends {layer_bytes - n_read:,} bytes too early")
        handle = copies.copy(buffer[:layer_bytes], staging, after=buffer_free)
        self._staging.popleft()
        self._staging.append((staging_buffer, handle))
        return handle


# The frozen matrices of an offloaded layer, and the tables of 4-bit ones, form one block of bytes. The GPU has `BUFFERS`
# buffers, and the parameters of the i-th offloaded layer are always views of buffer i mod BUFFERS: only the buffer's content
# changes. A weight that autograd saves is a view of the buffer, which holds the layer again during its backward. So every
# offloaded layer must be recomputed; any other layer is refused when it runs.
class LayerOffloading:
    """The offloaded layers of one model: stored while the model loads, fetched before each use."""

    def __init__(self, model: nn.Module, settings: Settings, *, weights: bool) -> None:
        layers = decoder_layers(model)
        self._layers = [layers[number] for number in offloaded_numbers(len(layers), settings.offloaded_layers)]
        # a forecast (no `weights`) needs no file: the GPU allocates the same bytes
        self._storage: HostStorage | FileStorage = (
            FileStorage() if settings.layer_offloading == "nvme" and weights else HostStorage()
        )
        self._copies = InOrder()
        self._layouts: dict[int, list[TensorSlot]] = {}
        self._index_of = {id(module): index for index, layer in enumerate(self._layers) for module in layer.modules()}
        # parameters of each layer that are not loaded yet
        self._missing = {
            index: {(id(module), name) for module in layer.modules() for name, p in module._parameters.items() if p is not None}
            for index, layer in enumerate(self._layers)
        }
        self.buffers: list[Tensor] = []
        self._buffered_layers: list[int | None] = []  # the index of the layer that a buffer holds or is about to hold
        self._arriving: dict[int, Any] = {}  # by buffer index, handles of copies that nothing has waited for yet
        self._running: int | None = None  # the index of the layer inside its checkpoint function

    def on_parameter_loaded(self, module: nn.Module, name: str) -> None:
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
            setattr(tensor_slot.owner, tensor_slot.attribute, tensor_slot.tensor.new_empty(0))

    def finish(self) -> None:
        """Allocate the buffers, and make the offloaded weights views of them. Call it after loading."""
        for index in set(self._missing) - set(self._layouts):
            self._offload(index)
        like, buffer_bytes = self._layouts[0][0].tensor, max(map(layout_bytes, self._layouts.values()))
        self.buffers = [like.new_empty(buffer_bytes, dtype=torch.uint8) for _ in range(min(BUFFERS, len(self._layouts)))]
        self._buffered_layers = [None] * len(self.buffers)
        if like.device.type == "cuda":
            self._copies = SideStream(like.device)
        for index, layer in enumerate(self._layers):
            buffer = self.buffers[self._buffer_index(index)]
            for tensor_slot in self._layouts[index]:
                setattr(tensor_slot.owner, tensor_slot.attribute, tensor_slot.view(buffer))
            layer.register_forward_pre_hook(functools.partial(self._before_layer, index))
            for part in layer.children():
                if any(parameter.dim() > 1 for parameter in part.parameters()):
                    part.register_forward_pre_hook(functools.partial(self._before_part, index))

    def wrap_checkpoints(self) -> None:
        """Fetch the weights before each recomputation. Call it once gradient checkpointing is on."""
        for index, layer in enumerate(self._layers):
            # called with the layer's checkpoint function, returns `_checkpointed` with both arguments bound
            wrap_checkpoint(layer, functools.partial(functools.partial, self._checkpointed, index))

    def fetch_and_prefetch(self, index: int, step: int = 1) -> None:
        """Fetch a layer's weights, and prefetch the next layer: `step` is 1 in forward and -1 in backward."""
        self.ensure_on_device(index)
        next_index = index + step
        if step > 0 and not torch.is_grad_enabled():  # evaluation and answers begin with the first layer again
            next_index %= len(self._layers)
        if next_index in self._layouts and self._buffer_index(next_index) != self._buffer_index(index):
            self._fetch(next_index)

    def ensure_on_device(self, index: int) -> None:
        """Fetch a layer's weights, and make work issued from here on wait for them."""
        self._fetch(index)
        self._wait_for_copy(self._buffer_index(index))

    def ensure_module_on_device(self, module: nn.Module) -> None:
        """Fetch the weights of the offloaded layer around `module`, if any."""
        index = self._index_of.get(id(module))
        # a forecast has no buffers and no weights
        if index is not None and self.buffers:
            self.ensure_on_device(index)

    def _fetch(self, index: int) -> None:
        buffer_index = self._buffer_index(index)
        if self._buffered_layers[buffer_index] == index:
            return
        self._wait_for_copy(buffer_index)
        with _disable_current_modes():  # selective checkpointing's mode expects the forward pass's operators, without copies
            self._arriving[buffer_index] = self._storage.fetch(index, self.buffers[buffer_index], self._copies)
        self._buffered_layers[buffer_index] = index

    def _wait_for_copy(self, buffer_index: int) -> None:
        if buffer_index not in self._arriving:
            return
        handle, index = self._arriving.pop(buffer_index), self._buffered_layers[buffer_index]
        self._buffered_layers[buffer_index] = None  # stays None if the copy fails
        with _disable_current_modes():
            self._storage.wait(handle, self._copies)
        self._buffered_layers[buffer_index] = index

    def _buffer_index(self, index: int) -> int:
        return index % len(self.buffers)

    def _checkpointed(self, index: int, checkpoint: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> Any:
        def run_layer(*layer_inputs: Any) -> Any:
            self.ensure_on_device(index)  # already there unless layers are recomputed in another order
            # `_before_part` checks it: a part may only run inside its layer's recomputation
            outer, self._running = self._running, index
            try:
                return function(*layer_inputs)
            finally:
                self._running = outer

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
                "checkpointing for every layer, or run the model under torch.no_grad()"
            )
        buffer_index = self._buffer_index(index)
        if self._buffered_layers[buffer_index] != index or buffer_index in self._arriving:
            raise RuntimeError("a part of an offloaded layer ran alone, without its weights: call the whole layer")


def offload_while_loading(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Return a context in which transformers offloads each layer of a model as it loads.

    Call `finish` of the model's `layer_offloading` afterwards.
    """

    def on_loaded(model: Any, module: Any, name: str) -> None:
        if offloading_of(model) is None:
            model.layer_offloading = LayerOffloading(model, settings, weights=True)
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.requires_grad_(False)
        model.layer_offloading.on_parameter_loaded(module, name)

    return sequential_loading(on_loaded)


def offloading_of(model: nn.Module) -> LayerOffloading | None:
    """Return the layer offloading of a model or PeftModel, or None."""
    return getattr(base_of(model), "layer_offloading", None)


def weights_for_magnitudes(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which DoRA finds offloaded weights on the GPU."""
    # DoRA computes its magnitudes from the weights of one layer after another
    offloading = offloading_of(model)
    return contextlib.nullcontext() if offloading is None else before_magnitudes(offloading.ensure_module_on_device)


def offloadable_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the input embedding if its table is frozen and not shared with the output layer, else None."""
    base = base_of(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.weight.requires_grad:
        return None
    return None if head is not None and head.weight is embedding.weight else embedding


def offload_embedding(model: nn.Module) -> None:
    """Move the input embedding's table to host memory for good. Raises RecipeError if it is trained or shared."""
    embedding: Any = base_of(model).get_input_embeddings()
    if "weight" not in getattr(embedding, "_parameters", {}) and hasattr(embedding, "weight"):
        return  # already in host memory
    embedding = offloadable_embedding(model)
    if embedding is None:
        raise RecipeError(
            "offload_embeddings: this model's input embedding is trained, or shared with the output layer",
            "Set offload_embeddings=false.",
        )
    # no longer a parameter, so that the table stays in host memory when the model is moved, and out of checkpoints
    weight = embedding._parameters.pop("weight").detach()
    table = host_memory.host_empty(weight, pinned=False)
    table.copy_(weight)
    embedding.weight, embedding.forward = table, MethodType(_look_up, embedding)


def _look_up(self: Any, ids: Tensor) -> Tensor:
    embeddings = torch.empty((*ids.shape, self.embedding_dim), dtype=self.weight.dtype, device=ids.device)
    # pinned, so that the copy overlaps with computation
    pinned = ids.is_cuda and not host_memory.is_in_forecast(ids)
    rows, host_ids = host_memory.host_empty(embeddings, pinned=pinned), host_memory.host_empty(ids, pinned=False)
    host_ids.copy_(ids)
    torch.index_select(self.weight, 0, host_ids.view(-1), out=rows.view(-1, self.embedding_dim))
    return embeddings.copy_(rows, non_blocking=True)
