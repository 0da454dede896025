"""Simulation of torch's CUDA caching allocator.

Rules come from c10/cuda/CUDACachingAllocator.cpp, `DeviceCachingAllocator`, and sizes from c10/core/AllocatorConfig.h; each
rule names its function.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from finetune.units import MIB

#: kMinBlockSize: requests are rounded up to multiples of this (`round_size`).
MIN_BLOCK = 512
#: kSmallSize: requests up to this come from the small pool (`get_pool`), whose segments have kSmallBuffer bytes.
SMALL_REQUEST, SMALL_SEGMENT = MIB, 2 * MIB
#: kMinLargeAlloc: smaller requests share segments of `large_segment_size`; larger requests are rounded up to kRoundLarge.
LARGE_REQUEST, LARGE_SEGMENT, LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB
#: Address space of one expandable segment, in whole pages; torch reserves 9/8 of the card (`ExpandableSegment`), which no run
#: fills.
_ADDRESS_SPACE = LARGE_SEGMENT << 20


class OutOfMemory(Exception):
    """A request for these bytes fails even after freeing every cached block."""


class Ties(Enum):
    """How torch chooses among free blocks of equal size."""

    ADDRESS = "the block at the lowest address; the driver's addresses descend from segment to segment"
    BLOCK_AGE = "the block that was created first"
    SEGMENT_AGE = "the block in the oldest segment, and among these the block at the lowest address"


def ties_of(torch_version: str) -> Ties:
    """Return the rule of a torch version: pytorch#178362 came with 2.12, pytorch#183591 with 2.13."""
    minor = Version(torch_version).release[:2]
    if minor < (2, 12):
        return Ties.ADDRESS
    return Ties.BLOCK_AGE if minor < (2, 13) else Ties.SEGMENT_AGE


class Block:
    """A piece of a segment: allocated, free, or unmapped address space."""

    __slots__ = ("address", "free", "mapped", "next", "number", "pool", "prev", "size")

    def __init__(self, size: int, address: int, pool: Pool) -> None:
        self.size, self.address, self.pool = size, address, pool
        self.free = self.mapped = True
        pool.blocks_created += 1
        self.number = pool.blocks_created  # order of creation
        self.prev: Block | None = None
        self.next: Block | None = None

    def split(self, size: int) -> Block:
        """Shrink the block to its first `size` bytes; return a new block with the remaining bytes."""
        tail = Block(self.size - size, self.address + size, self.pool)
        _link(self, tail, self.next)
        self.size = size
        return tail


class Pool:
    """Blocks of one stream and size class. `page_bytes`: a page of the class's expandable segments."""

    __slots__ = ("blocks_created", "free", "page_bytes", "ties", "unmapped")

    def __init__(self, page_bytes: int, ties: Ties) -> None:
        self.page_bytes, self.ties = page_bytes, ties
        self.blocks_created = 0
        self.free: list[tuple[int, int, Block]] = []  # sorted by size, then by `ties` (`BlockComparatorSize`)
        self.unmapped: list[tuple[int, Block]] = []  # sorted by address

    def add(self, block: Block) -> None:
        insort(*self._list_and_entry(block))

    def remove(self, block: Block) -> None:
        entries, entry = self._list_and_entry(block)
        del entries[bisect_left(entries, entry)]

    def _list_and_entry(self, block: Block) -> tuple[list[Any], tuple[Any, ...]]:
        if not block.mapped:
            return self.unmapped, (block.address, block)
        tie_breaker = block.number if self.ties is Ties.BLOCK_AGE else block.address
        return self.free, (block.size, tie_breaker, block)


# Frees take effect immediately, as for tensors used on one stream. tests/memory replays random and recorded requests on the
# allocator of each supported torch (`make test-card TORCH=...`) and compares the blocks.
class CachingAllocator:
    """One GPU's allocator. Sizes are in bytes; `number` identifies a request until its release."""

    def __init__(self, *, expandable: bool, limit: int | None = None, ties: Ties | None = None) -> None:
        # most reserved bytes, as set by `set_per_process_memory_fraction`; None: no limit
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.segments = self.peak_segments = 0  # torch does not count expandable segments
        self.live: dict[int, Block | None] = {}  # by request; None: a request for no bytes
        self._ties = ties or ties_of(version("torch"))
        self.pools: dict[tuple[int, bool], Pool] = {}  # by stream and whether blocks are small
        self._next_address = 0

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved, self.peak_segments = self.allocated, self.reserved, self.segments

    def allocate(self, number: int, requested: int, stream: int = 0) -> None:
        """Find a block as `malloc` does: best fit, new segment, or new segment without cached blocks. Raises OutOfMemory."""
        if requested == 0:
            self.live[number] = None
            return
        size = rounded(requested)
        is_small = size <= SMALL_REQUEST
        pool = self.pools.get((stream, is_small))
        if pool is None:
            pool = self.pools[(stream, is_small)] = Pool(SMALL_SEGMENT if is_small else LARGE_SEGMENT, self._ties)
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block is None:  # as torch does at its limit
            self.empty_cache()
            block = self._new_block(pool, size)
            if block is None:
                raise OutOfMemory(size)
        least_remainder = MIN_BLOCK if is_small or self.expandable else SMALL_REQUEST + 1
        if block.size - size >= least_remainder:  # should_split
            tail = block.split(size)
            block.number, tail.number = tail.number, block.number  # torch makes a new block for the request
            pool.add(tail)
        block.free = False
        self.live[number] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def release(self, number: int) -> None:
        """Release a block and merge free neighbours (`free_block`)."""
        block = self.live.pop(number)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Free segments without an allocated block, or every whole free page (`release_cached_blocks`)."""
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:  # release_block
                    pool.remove(block)
                    self.segments -= 1
                    self.reserved -= block.size

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """`get_free_block`: return the smallest free block that fits."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.expandable:
            # torch compares blocks by their size after growth into the unmapped space behind
            while index + 1 < len(free) and _grown_size(free[index + 1][2]) < _grown_size(free[index][2]):
                index += 1
        return free.pop(index)[2]

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """`alloc_block`: return None beyond the limit."""
        segment = segment_bytes(size)
        # torch tests the limit with a whole segment, even where an expandable segment grows by less
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        if self.expandable:
            return self._expand_segment(pool, size)
        self.segments += 1
        self.peak_segments = max(self.peak_segments, self.segments)
        self._reserve(segment)
        return Block(segment, self._new_address(segment), pool)

    def _new_address(self, size: int) -> int:
        # Addresses only decide between free blocks of equal size, and the order of unmapped space. Before torch 2.12 they are
        # the driver's, in no fixed order; tests/memory/test_caching_allocator.py bounds the effect.
        if self._ties is Ties.SEGMENT_AGE:
            self._next_address += size
            return self._next_address - size
        self._next_address -= size
        return self._next_address

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _merge(self, block: Block) -> None:
        before, after = block.prev, block.next
        if before is not None and before.free and before.mapped is block.mapped:
            before.pool.remove(before)
            block.size += before.size
            block.address = before.address
            _link(before.prev, block, after)
        if after is not None and after.free and after.mapped is block.mapped:
            after.pool.remove(after)
            block.size += after.size
            _link(block.prev, block, after.next)

    def _expand_segment(self, pool: Pool, size: int) -> Block:
        """`try_allocate_expandable_block`: return a block of `size` bytes or more."""
        block = self._growable_space(pool, size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            following = block.next
            assert following is not None
            self._map(following, min(size - block.size, following.size))
            block = following  # `_map` has merged the previous block into this one
        pool.remove(block)
        return block

    def _growable_space(self, pool: Pool, size: int) -> Block:
        """`find_expandable_block`: return free space that can grow to `size`."""
        # by address: torch takes the lowest addresses at which enough free space follows
        for _, space in pool.unmapped:
            start = space.prev if space.prev is not None and space.prev.free else space
            free_bytes, block = 0, start
            while block is not None and block.free and free_bytes < size:
                free_bytes += block.size
                block = block.next  # type: ignore[assignment]
            if free_bytes >= size:
                return start
        block = Block(_ADDRESS_SPACE, self._new_address(_ADDRESS_SPACE), pool)
        block.mapped = False
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> None:
        """`map_block`: map whole pages at the start of an unmapped block."""
        page_bytes = block.pool.page_bytes
        mapped_bytes = min(-(-size // page_bytes) * page_bytes, block.size)
        block.pool.remove(block)
        if mapped_bytes < block.size:
            unmapped = block.split(mapped_bytes)
            unmapped.mapped = False
            block.pool.add(unmapped)
        block.mapped = True
        self._merge(block)
        block.pool.add(block)
        self._reserve(mapped_bytes)

    def _unmap(self, block: Block) -> None:
        """`unmap_block`: release the whole pages inside a free block to the driver."""
        pool, page_bytes = block.pool, block.pool.page_bytes
        start = -(-block.address // page_bytes) * page_bytes
        end = (block.address + block.size) // page_bytes * page_bytes
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            head, block = block, block.split(start - block.address)
            head.number, block.number = block.number, head.number  # torch makes a new block for the head
            pool.add(head)
        if end < block.address + block.size:
            pool.add(block.split(end - block.address))
        block.mapped = False
        self.reserved -= block.size
        self._merge(block)
        pool.add(block)


def rounded(requested: int) -> int:
    """Round up to multiples of 512 bytes (`round_size`)."""
    return -(-requested // MIN_BLOCK) * MIN_BLOCK


def pinned_bytes(size: int) -> int:
    """Return the host bytes that torch pins for `size` bytes: the next power of two (CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment that a request makes torch reserve (`get_allocation_size`)."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // LARGE_ROUND) * LARGE_ROUND


def _grown_size(block: Block) -> int:
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size


def _link(before: Block | None, block: Block, after: Block | None) -> None:
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block
