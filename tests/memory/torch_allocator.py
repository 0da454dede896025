"""Plays [[name, bytes], [name, -1], null for an empty cache, ...] from stdin on torch's own allocator of the first card.

Writes, as JSON, allocated and reserved bytes after each, and at the end the blocks of each segment. Not a test; run by one, in
a process of its own, because the allocator's settings are read once.
"""

import json
import sys

import torch
from torch.cuda.memory import caching_allocator_alloc, caching_allocator_delete


def main():
    live, sums = {}, []
    for event in json.load(sys.stdin):
        if event is None:
            torch.cuda.empty_cache()
        elif event[1] < 0:
            caching_allocator_delete(live.pop(event[0]))
        else:
            live[event[0]] = caching_allocator_alloc(event[1])
        stats = torch.cuda.memory_stats()
        sums.append([stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]])
    segments = [
        [[block["size"], block["state"] == "inactive"] for block in segment["blocks"]]
        for segment in torch.cuda.memory_snapshot()
    ]
    json.dump({"sums": sums, "segments": sorted(segments)}, sys.stdout)


if __name__ == "__main__":
    main()
