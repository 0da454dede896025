"""The replayed caching allocator: its rules by hand, and what must hold after any sequence of requests."""

import json
import os
import random
import subprocess
import sys
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import pytest
from test_reserved_memory import traces

from finetune.memory import allocator_replay
from finetune.memory.caching_allocator import (
    SMALL_SEGMENT,
    CachingAllocator,
    OutOfMemory,
    Ties,
    segment_bytes,
    ties_of,
)  # fmt: skip
from finetune.units import KIB, MIB

BOTH = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def chains(allocator):
    """Every segment as its blocks in order of address."""
    blocks = {id(block): block for block in allocator.live.values() if block is not None}
    for pool in allocator.pools.values():
        blocks |= {id(entry[-1]): entry[-1] for entry in (*pool.free, *pool.unmapped)}
    for block in blocks.values():
        if block.prev is None:
            chain = [block]
            while chain[-1].next is not None:
                chain.append(chain[-1].next)
            yield chain


def assert_sound(allocator):
    live = [block for block in allocator.live.values() if block is not None]
    pooled = [entry[-1] for pool in allocator.pools.values() for entry in (*pool.free, *pool.unmapped)]
    assert not any(block.free for block in live) and all(block.free for block in pooled)
    segments = list(chains(allocator))
    assert sum(map(len, segments)) == len(live) + len(pooled)
    for chain in segments:
        for before, after in zip(chain, chain[1:], strict=False):
            assert before.address + before.size == after.address  # no overlap, no gap
            assert after.prev is before
            assert not (before.free and after.free and before.mapped == after.mapped)  # else they would have been merged
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.reserved == sum(block.size for chain in segments for block in chain if block.mapped)
    assert all(pool.free == sorted(pool.free, key=lambda entry: entry[:2]) for pool in allocator.pools.values())


def random_requests(allocator, seed, count=600, streams=(0, 0, 0, 1)):
    """Sizes over five orders of magnitude, two streams, now and then an empty cache. Returns the names still live."""
    rng, live = random.Random(seed), []
    for name in range(count):
        if live and rng.random() < 0.48:
            allocator.release(live.pop(rng.randrange(len(live))))
            continue
        size = int(10 ** rng.uniform(1, 7.9))
        allocator.allocate(name, size, stream=rng.choice(streams))
        live.append(name)
        assert allocator.live[name].size >= size
        if rng.random() < 0.01:
            allocator.empty_cache()
        if name % 20 == 0:
            assert_sound(allocator)
    return live


@pytest.mark.parametrize("seed", range(8))
def test_blocks_tile_their_segments_and_sums_agree(seed):
    fixed, growing = allocators = [CachingAllocator(expandable=expandable) for expandable in (False, True)]
    for allocator in allocators:
        for name in random_requests(allocator, seed):
            allocator.release(name)
        assert_sound(allocator)
        assert allocator.allocated == 0 and allocator.peak_reserved >= allocator.peak_allocated
        assert allocator is growing or all(len(chain) == 1 for chain in chains(allocator))  # each segment is one free block
        allocator.empty_cache()
        assert allocator.reserved == 0
    # a large block with at most 1 MiB to spare is not split, except in an expandable segment
    assert growing.peak_allocated <= fixed.peak_allocated


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_with_a_limit_never_more_is_reserved(expandable, seed, monkeypatch):
    free = CachingAllocator(expandable=expandable)
    random_requests(free, seed)
    limit = int(0.97 * free.peak_reserved)
    capped, retries = CachingAllocator(expandable=expandable, limit=limit), []
    monkeypatch.setattr(
        capped, "_new_block", lambda *asked: CachingAllocator._new_block(capped, *asked) or retries.append(asked)
    )
    try:
        random_requests(capped, seed)
    except OutOfMemory as error:
        assert capped.reserved + segment_bytes(*error.args) > limit
    assert capped.peak_reserved <= limit
    assert retries
    assert_sound(capped)


def test_sizes_of_segments_which_blocks_are_split_and_that_the_smallest_one_that_fits_is_taken():
    sizes = (1, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 33 * MIB + 1)
    assert [segment_bytes(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 34]
    for spare, allocated in ((MIB, 12 * MIB), (MIB + 512, 11 * MIB - 512)):
        allocator = CachingAllocator(expandable=False)
        allocator.allocate(0, 12 * MIB)
        allocator.release(0)
        allocator.allocate(1, 12 * MIB - spare)
        assert (allocator.allocated, allocator.reserved) == (allocated, 12 * MIB)
    allocator = CachingAllocator(expandable=False)
    for name, size in enumerate((40, 20, 30)):
        allocator.allocate(name, size * MIB)
    for name in range(3):
        allocator.release(name)
    allocator.allocate(3, 25 * MIB)
    assert allocator.live[3].next is allocator.pools[(0, False)].free[0][2]  # 25 of 30, 5 remain
    assert [size // MIB for size, _, _ in allocator.pools[(0, False)].free] == [5, 20, 40]


def test_expandable_segments_grow_by_pages_and_split_to_the_byte():
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(0, 33 * MIB)
    assert (allocator.allocated, allocator.reserved) == (33 * MIB, 40 * MIB)
    allocator.allocate(1, 20 * MIB)  # 7 MiB are there, one page more
    assert allocator.reserved == 60 * MIB
    allocator.allocate(2, 100 * KIB)
    assert allocator.reserved == 62 * MIB  # the small pool has a segment of its own
    allocator.release(0)
    allocator.empty_cache()  # 33 MiB have one whole page
    assert allocator.reserved == 42 * MIB
    assert_sound(allocator)


def test_cached_blocks_are_freed_at_the_limit_and_not_shared_between_streams():
    allocator = CachingAllocator(expandable=False, limit=50 * MIB)
    allocator.allocate(0, 30 * MIB)
    allocator.release(0)
    allocator.allocate(1, 40 * MIB)
    assert allocator.reserved == 40 * MIB
    with pytest.raises(OutOfMemory, match=str(30 * MIB)):
        allocator.allocate(2, 30 * MIB)
    allocator = CachingAllocator(expandable=False)
    allocator.allocate(0, 30 * MIB)
    allocator.release(0)
    allocator.allocate(1, 30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB


class Recorder(CachingAllocator):
    """Writes down what it is asked, and its sums after that."""

    def __init__(self, **more):
        super().__init__(**more)
        self.asked, self.sums = [], []

    def allocate(self, name, requested, stream=0):
        super().allocate(name, requested, stream)
        self._note([name, requested], requested > 0)

    def release(self, name):
        was = self.live.get(name)
        super().release(name)
        self._note([name, -1], was is not None)

    def empty_cache(self):
        super().empty_cache()
        self._note(None, True)

    def _note(self, event, counts):
        if counts:
            self.asked.append(event)
            self.sums.append([self.allocated, self.reserved])

    def segments_as_torch_shows_them(self):
        """Sizes of the blocks with whether they are free; of an expandable segment, each run of mapped blocks is one."""
        runs = (run for chain in chains(self) for mapped, run in groupby(chain, key=lambda block: block.mapped) if mapped)
        return sorted([[block.size, block.free] for block in run] for run in runs)


def recorded_run(expandable, monkeypatch):
    """The whole replay of a small model's dry run."""
    allocators = []
    monkeypatch.setattr(
        allocator_replay, "CachingAllocator", lambda **more: allocators.append(Recorder(**more)) or allocators[-1]
    )
    allocator_replay.replay(traces()[0], expandable=expandable)
    return allocators[0]


def at_random_addresses(seed):
    """Segments where a driver may put them; until torch 2.12 the lowest address decides between free blocks of one size."""

    class Scattered(CachingAllocator):
        def __init__(self, **more):
            super().__init__(**more)
            self.rng, self._ties = random.Random(seed), Ties.ADDRESS

        def _new_address(self, size):
            return self.rng.randrange(1 << 40) << 22

    return Scattered


@pytest.mark.slow
def test_addresses_that_do_not_rise_change_what_is_reserved_by_no_more_than_a_small_segment(monkeypatch):
    trace, reserved = traces(activation_checkpointing=False)[0], set()
    for seed in range(20):
        monkeypatch.setattr(allocator_replay, "CachingAllocator", at_random_addresses(seed))
        reserved.add(allocator_replay.replay(trace, expandable=False).reserved_bytes)
    monkeypatch.undo()
    rising = allocator_replay.replay(trace, expandable=False).reserved_bytes
    assert len(reserved) > 1 and all(abs(size - rising) <= SMALL_SEGMENT for size in reserved)


def on_torchs_allocator(asked, expandable):
    """What torch's own allocator makes of the requests."""
    process = subprocess.run(
        [sys.executable, Path(__file__).with_name("torch_allocator.py")], input=json.dumps(asked), text=True,
        env={**os.environ, "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}, capture_output=True, check=True,
    )  # fmt: skip
    return json.loads(process.stdout)


#: On a real GPU with a torch before 2.12, where segments lie decides between free blocks of one size.
SCATTERED = ties_of(version("torch")) is Ties.ADDRESS and "STAND_IN_LIBRARIES" not in os.environ


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("what", ["run", 0, 1, 2])
def test_torchs_own_allocator_does_the_same(expandable, what, monkeypatch):
    if what == "run":
        noted = recorded_run(expandable, monkeypatch)
    else:
        random_requests(noted := Recorder(expandable=expandable), what, count=2000, streams=(0,))
    theirs = on_torchs_allocator(noted.asked, expandable)
    if expandable or not SCATTERED:
        assert theirs["sums"] == noted.sums and theirs["segments"] == noted.segments_as_torch_shows_them()
    for (allocated, reserved), sums in zip(noted.sums, theirs["sums"], strict=True):
        assert sums[0] == allocated and abs(sums[1] - reserved) <= 2 * SMALL_SEGMENT
