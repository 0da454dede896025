"""Frozen weights of decoder layers in host memory or in a file; a few layers of them are on the card at a time.

The frozen matrices of an offloaded layer, and the tables of 4-bit ones, form one run of bytes. On the card there are `BUFFERS`
buffers, and the parameters of the i-th offloaded layer are views of buffer i mod BUFFERS for good: only what the buffer holds
changes. So what autograd keeps of a weight stays a view of the buffer that holds the layer again in its backward. That needs
every offloaded layer to be recomputed; one that is not is refused when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from finetune.compat.peft import before_magnitudes
from finetune.compat.torch import without_modes
from finetune.compat.transformers import loading_in_order, wrap_checkpoint
from finetune.errors import DiskFull, RecipeError
from finetune.files import cache_dir
from finetune.model import host_memory
from finetune.model.checkpointing import base_of, decoder_layers
from finetune.model.offload import Copies, InOrder, SideStream

if TYPE_CHECKING:
    from finetune.model.quantised_store import Store
    from finetune.recipe import Settings

#: Layers on the card at a time: one that computes and one that arrives.
BUFFERS = 2
#: Each tensor of a run begins at a multiple of this, as CUDA kernels read many bytes at a time.
ALIGN = 256


@dataclass(frozen=True)
class Spot:
    """Where one tensor lies in a layer's run of bytes, and whose attribute it is."""

    owner: Any
    attribute: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int

    def view(self, run: torch.Tensor) -> torch.Tensor:
        """The tensor's place in a run or a buffer, with its dtype and shape."""
        return run[self.start : self.start + self.size].view(self.dtype).view(self.shape)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor as it is now."""
        return getattr(self.owner, self.attribute)

    def put(self, tensor: torch.Tensor) -> None:
        """Make this the tensor; of a parameter its data."""
        setattr(self.owner, self.attribute, tensor)


def spots_of(layer: torch.nn.Module) -> list[Spot]:
    """The frozen tensors of a layer that leave the card, one behind the other: parameters of two dimensions and more, and what
    4-bit ones are scaled with. Norms and biases stay. Raises RecipeError for int8 weights."""
    spots, start = [], 0
    for owner, attribute in _frozen(layer):
        tensor = getattr(owner, attribute)
        spots.append(Spot(owner, attribute, tensor.dtype, tuple(tensor.shape), start, tensor.nbytes))
        start += -(-tensor.nbytes // ALIGN) * ALIGN
    return spots


def _frozen(layer: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Owner and attribute of each tensor."""
    for parameter in layer.parameters():
        if parameter.requires_grad or parameter.dim() < 2:
            continue
        if parameter.dtype == torch.int8:
            raise RecipeError(
                "layer_offloading does not work with int8 weights, of which bitsandbytes keeps copies",
                "Set load_in_8bit=false load_in_4bit=true, or layer_offloading=false.",
            )
        yield parameter, "data"
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield state, "absmax"
            if state.nested:
                yield from ((state, "offset"), (state.state2, "absmax"))


def run_bytes(spots: list[Spot]) -> int:
    """Bytes of a layer's run: whole pages."""
    return -(-(spots[-1].start + spots[-1].size) // host_memory.PAGE) * host_memory.PAGE


def offloaded_numbers(layers: int, count: int) -> list[int]:
    """Which layers are offloaded, when `count` of them are: spread evenly, so that the others' time hides copies, too."""
    count = min(count, layers)
    return [number for number in range(layers) if (number + 1) * count // layers > number * count // layers]


class Runs(Protocol):
    """The runs of the offloaded layers, by their place among them."""

    def add(self, place: int, size: int, fill: Callable[[torch.Tensor], None], like: torch.Tensor) -> None:
        """Keep a layer's run, which `fill` writes. `like`: a tensor of the layer, for the device."""

    def fetch(self, place: int, into: torch.Tensor, copies: Copies) -> Any:
        """Start to copy a run to the card, behind what has been issued there; returns what `wait` takes."""

    def wait(self, started: Any, copies: Copies) -> None:
        """Let all that is issued from now on begin after that copy."""


class HostRuns:
    """Runs in host memory, pinned for CUDA."""

    def __init__(self) -> None:
        self._runs: dict[int, torch.Tensor] = {}

    def add(self, place: int, size: int, fill: Callable[[torch.Tensor], None], like: torch.Tensor) -> None:
        """Keep a run. Raises RecipeError where so much memory can't be pinned."""
        self._runs[place] = host_memory.host_run(size, like)
        fill(self._runs[place])

    def fetch(self, place: int, into: torch.Tensor, copies: Copies) -> Any:
        """Start the copy."""
        return copies.copy(into[: len(self._runs[place])], self._runs[place])

    def wait(self, started: Any, copies: Copies) -> None:
        """Order what follows behind the copy."""
        copies.wait(started)


class FileRuns:
    """Runs in a file, which a thread reads into host memory, from where they are copied to the card.

    `file` is open for reading and writing. Free memory of the machine keeps its pages: with enough, the drive is read once.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._end = file, 0
        self._spans: dict[int, tuple[int, int]] = {}
        self._staging: list[torch.Tensor] = []
        self._copied: list[Any] = []  # of each staging buffer, the copy that it took part in last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded layers")

    def add(self, place: int, size: int, fill: Callable[[torch.Tensor], None], like: torch.Tensor) -> None:
        """Write a run. Raises DiskFull."""
        self._stage(size, like)
        run = self._staging[0][:size]
        fill(run)
        try:
            self._file.seek(self._end)
            self._file.write(_bytes_of(run))
            self._file.flush()
        except OSError as error:
            raise DiskFull(
                f"the offloaded layers can't be written to {cache_dir()}: {error}",
                "Free some space there or set FINETUNE_CACHE to a folder on another drive, or set layer_offloading=cpu.",
            ) from error
        self._spans[place] = (self._end, size)
        self._end += size

    def _stage(self, size: int, like: torch.Tensor) -> None:
        if not self._staging or len(self._staging[0]) < size:
            self._staging = [host_memory.host_run(size, like) for _ in range(BUFFERS)]
            self._copied = [None] * BUFFERS

    def fetch(self, place: int, into: torch.Tensor, copies: Copies) -> Future[Any]:
        """Start to read, and then to copy."""
        return self._thread.submit(self._read, place, into, copies, copies.mark())

    def wait(self, started: Future[Any], copies: Copies) -> None:
        """Wait until it is read, and order what follows behind the copy."""
        copies.wait(started.result())

    def _read(self, place: int, into: torch.Tensor, copies: Copies, free: Any) -> Any:
        self._staging.append(self._staging.pop(0))
        copied, (start, size) = self._copied.pop(0), self._spans[place]
        staging = self._staging[-1][:size]
        if copied is not None:
            copies.finish(copied)
        self._file.seek(start)
        read = self._file.readinto(_bytes_of(staging))  # type: ignore[attr-defined]
        if read < size:
            raise OSError(f"the file of the offloaded layers ends {size - read:,} bytes too early")
        self._copied.append(copies.copy(into[:size], staging, after=free))
        return self._copied[-1]


def _bytes_of(run: torch.Tensor) -> memoryview:
    array: Any = run.numpy()
    return memoryview(array)


class LayerOffloading:
    """The offloaded layers of one model: puts them away while it is loaded, then has each on the card while it is used.

    `count`: how many of `layers` are offloaded, see `offloaded_numbers`. `copies`: how the buffers are filled; None is the
    device's own way.
    """

    def __init__(self, layers: list[torch.nn.Module], runs: Runs, *, count: int, copies: Copies | None = None) -> None:
        self._layers = [layers[number] for number in offloaded_numbers(len(layers), count)]
        self._runs, self._copies = runs, copies
        self._spots: dict[int, list[Spot]] = {}
        self._place_of = {id(module): place for place, layer in enumerate(self._layers) for module in layer.modules()}
        self._missing = {
            place: {
                (id(module), name) for module in layer.modules() for name, one in module._parameters.items() if one is not None
            }
            for place, layer in enumerate(self._layers)
        }
        self.buffers: list[torch.Tensor] = []
        self._holds: list[int | None] = []  # the place of the layer that a buffer holds or is about to hold
        self._arriving: dict[int, Any] = {}  # the copy into a buffer, until it was waited for
        self._running: int | None = None
        self.moved_bytes = 0

    def loaded(self, module: torch.nn.Module, name: str) -> None:
        """A parameter was loaded: when it is the last one of its layer, the layer is put away."""
        place = self._place_of.get(id(module))
        if place is not None and place not in self._spots:
            self._missing[place].discard((id(module), name))
            if not self._missing[place]:
                self._put_away(place)

    def _put_away(self, place: int) -> None:
        spots = self._spots[place] = spots_of(self._layers[place])

        def fill(run: torch.Tensor) -> None:
            for spot in spots:
                spot.view(run).copy_(spot.tensor)

        self._runs.add(place, run_bytes(spots), fill, spots[0].tensor)
        for spot in spots:
            spot.put(spot.tensor.new_empty(0))

    def finish(self) -> None:
        """After loading: make the buffers, and let every offloaded layer find its weights there."""
        for place in set(self._missing) - set(self._spots):
            self._put_away(place)
        like, size = self._spots[0][0].tensor, max(map(run_bytes, self._spots.values()))
        self.buffers = [like.new_empty(size, dtype=torch.uint8) for _ in range(min(BUFFERS, len(self._spots)))]
        self._holds = [None] * len(self.buffers)
        if self._copies is None:
            self._copies = SideStream(like.device) if like.device.type == "cuda" else InOrder()
        for place, layer in enumerate(self._layers):
            for spot in self._spots[place]:
                spot.put(spot.view(self.buffers[self._slot(place)]))
            layer.register_forward_pre_hook(functools.partial(self._before_layer, place))
            for part in layer.children():
                if any(parameter.dim() > 1 for parameter in part.parameters()):
                    part.register_forward_pre_hook(functools.partial(self._before_part, place))

    def recompute(self) -> None:
        """Have the weights of each layer on the card when it is recomputed; once gradient checkpointing is on."""
        for place, layer in enumerate(self._layers):
            wrap_checkpoint(layer, functools.partial(_Recomputed, self, place))

    def use(self, place: int, step: int = 1) -> None:
        """Before work of an offloaded layer: its weights are there for what is issued next, and those of the next one, `step`
        further, are on their way."""
        self.have(place)
        following = place + step
        if step > 0 and not torch.is_grad_enabled():  # evaluation and answers begin with the first layer again
            following %= len(self._layers)
        if following in self._spots and self._slot(following) != self._slot(place):
            self._fetch(following)

    def have(self, place: int) -> None:
        """Let what is issued next find a layer's weights on the card."""
        self._fetch(place)
        self._arrive(self._slot(place))

    def have_module(self, module: torch.nn.Module) -> None:
        """The same for the layer that a module is in, if that is offloaded. A forecast's has no weights yet."""
        place = self._place_of.get(id(module))
        if place is not None and self.buffers:
            self.have(place)

    def _fetch(self, place: int) -> None:
        slot = self._slot(place)
        if self._holds[slot] == place:
            return
        assert self._copies is not None
        self._arrive(slot)
        with without_modes():  # that of selective checkpointing expects the operators of the forward pass, without copies
            self._arriving[slot] = self._runs.fetch(place, self.buffers[slot], self._copies)
        self._holds[slot] = place
        self.moved_bytes += run_bytes(self._spots[place])

    def _arrive(self, slot: int) -> None:
        if slot not in self._arriving:
            return
        assert self._copies is not None
        started, place, self._holds[slot] = self._arriving.pop(slot), self._holds[slot], None  # none, if it does not arrive
        with without_modes():
            self._runs.wait(started, self._copies)
        self._holds[slot] = place

    def _slot(self, place: int) -> int:
        return place % len(self.buffers)

    @contextmanager
    def recomputing(self, place: int) -> Iterator[None]:
        """Inside, the layer runs by its checkpoint function, for the first time or again."""
        before, self._running = self._running, place
        try:
            yield
        finally:
            self._running = before

    def _before_layer(self, place: int, _layer: Any, _inputs: Any) -> None:
        if not torch.is_grad_enabled():  # else its checkpoint function does
            self.use(place)

    def _before_part(self, place: int, _part: Any, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._running != place:
            raise RuntimeError(
                "an offloaded layer is not recomputed: its backward would read the weights of another one. Every layer needs "
                "gradient checkpointing; where there is no backward, use torch.no_grad()"
            )
        slot = self._slot(place)
        if self._holds[slot] != place or slot in self._arriving:
            raise RuntimeError("a part of an offloaded layer runs by itself, without its weights: call the whole layer")


class _Recomputed:
    """A layer's checkpoint function, with the layer's weights on the card in forward, recomputation and backward."""

    def __init__(self, offloading: LayerOffloading, place: int, checkpoint: Callable[..., Any]) -> None:
        self._offloading, self._place, self._checkpoint = offloading, place, checkpoint

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run the layer and save its inputs."""

        def present(*again: Any) -> Any:
            self._offloading.have(self._place)  # it is there, unless something recomputes layers in another order
            with self._offloading.recomputing(self._place):
                return function(*again)

        self._offloading.use(self._place)
        outputs = self._checkpoint(present, *inputs)
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if hidden.requires_grad:  # before all of the layer's backward: a 4-bit matmul's reads the weight, not what is saved
            hidden.register_hook(lambda _: self._offloading.use(self._place, -1))
        return outputs


class StoredRuns(FileRuns):
    """Runs that are in the file of quantised weights already; nothing is written."""

    def __init__(self, store: Store, numbers: list[int]) -> None:
        super().__init__(store.file)
        self._places = [store.place(f"layers.{number}")[0] for number in numbers]

    def add(self, place: int, size: int, fill: Callable[[torch.Tensor], None], like: torch.Tensor) -> None:
        """Note where a run is: the matrices and their tables are the beginning of the layer's run in the file."""
        self._spans[place] = (self._places[place], size)
        self._stage(size, like)


def offload_layers(model: torch.nn.Module, settings: Settings, *, weights: bool, store: Store | None = None) -> LayerOffloading:
    """What `settings` offload of a model whose weights are not loaded yet. Raises RecipeError for what it does not work with.

    Without `weights`, in a forecast, layers are always in host memory: on the card there is no difference. `store`: the file
    that the weights come from, where offloaded layers stay with `nvme`.
    """
    if settings.torch_compile or settings.launch.strategy != "ddp":
        other = "torch_compile" if settings.torch_compile else f"launch.strategy {settings.launch.strategy}"
        raise RecipeError(f"layer_offloading has not been shown to work with {other}", "Set layer_offloading=false.")
    runs: Runs = HostRuns()
    if settings.layer_offloading == "nvme" and store is not None:
        runs = StoredRuns(store, offloaded_numbers(len(decoder_layers(model)), settings.offloaded_layers))
    elif settings.layer_offloading == "nvme" and weights:
        folder = cache_dir() / "layers"
        folder.mkdir(parents=True, exist_ok=True)
        runs = FileRuns(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - open as long as the model lives
    return LayerOffloading(decoder_layers(model), runs, count=settings.offloaded_layers)


@contextmanager
def layers_offloaded(settings: Settings) -> Iterator[Callable[[Any], None]]:
    """Inside, a model that transformers loads has its layers put away one by one; the yielded function finishes that."""
    made: list[LayerOffloading] = []

    def loaded(model: Any, module: Any, name: str) -> None:
        if not made:
            made.append(offload_layers(model, settings, weights=True))
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.requires_grad_(False)
        made[0].loaded(module, name)

    def finish(model: Any) -> None:
        made[0].finish()
        model.layer_offloading = made[0]

    with loading_in_order(loaded):
        yield finish


def offloading_of(model: torch.nn.Module) -> LayerOffloading | None:
    """The layer offloading of a model, or of the base model inside a PeftModel; None without."""
    return getattr(base_of(model), "layer_offloading", None)


def weights_for_magnitudes(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Inside, DoRA, which computes its magnitudes from the weights of one layer after another, finds them on the card."""
    offloading = offloading_of(model)
    return contextlib.nullcontext() if offloading is None else before_magnitudes(offloading.have_module)
