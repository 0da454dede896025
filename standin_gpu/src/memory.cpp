// Memory of the GPU and pinned host memory. Addresses are real and reserved, pages are committed when they are touched.
//
// Bytes of the GPU are *known* where the host copied them, cudaMemset set them, or a kernel whose result answers.cpp computes wrote
// them; all else is unknown, since no kernel ran. A copy to the host gives known bytes as they are and zeros for unknown ones.
// Copies above STAND_IN_COPY_LIMIT (1 MiB) are not made: weights are never read.
#include "gpu.h"
#include <sys/mman.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>

namespace standin {
namespace {

struct Range { size_t size; int device; MemoryKind kind; bool is_mapped_here; };

std::recursive_mutex memory_mutex;
std::map<uintptr_t, Range> ranges;      // GPU and pinned memory by first address
std::map<uintptr_t, size_t> known;      // disjoint intervals of known bytes
std::unordered_map<int, size_t> bytes_in_shared_pages;  // of requests below a page, by device

size_t copy_limit() {
  static size_t limit = getenv("STAND_IN_COPY_LIMIT") ? strtoull(getenv("STAND_IN_COPY_LIMIT"), nullptr, 10) : MIB;
  return limit;
}

size_t whole_pages(size_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

// What a request adds to the pages in use: small ones share pages, as the driver's own suballocation does.
size_t added_pages(int device, size_t bytes) {
  if (bytes >= PAGE_BYTES) return whole_pages(bytes);
  size_t before = bytes_in_shared_pages[device];
  return whole_pages(before + bytes) - whole_pages(before);
}

// Addresses of one kind descend and are not used again, so that a program's choices between free blocks can be repeated.
char* reserve_addresses(size_t bytes, size_t alignment, int protection) {
  static uintptr_t lowest = uintptr_t(0x600000000000);
  constexpr uintptr_t END = uintptr_t(0x200000000000);
  lowest = lowest - bytes - alignment > END ? lowest - bytes - alignment : uintptr_t(0x600000000000);
  void* wanted = reinterpret_cast<void*>(lowest);
  void* start = mmap(wanted, bytes + alignment, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(start);
  char* aligned = reinterpret_cast<char*>((uintptr_t(first) + alignment - 1) / alignment * alignment);
  if (aligned > first) munmap(first, aligned - first);
  munmap(aligned + bytes, first + alignment - aligned);
  return aligned;
}

// Zeros without committing the pages of a large range that was mapped here.
void zero(void* target, size_t bytes) {
  constexpr uintptr_t SYSTEM_PAGE = 4096;
  uintptr_t first = uintptr_t(target), end = first + bytes;
  uintptr_t first_page = (first + SYSTEM_PAGE - 1) / SYSTEM_PAGE * SYSTEM_PAGE, end_page = end / SYSTEM_PAGE * SYSTEM_PAGE;
  auto range = ranges.upper_bound(first);
  bool is_ours = range != ranges.begin() && (--range)->second.is_mapped_here && first < range->first + range->second.size;
  if (!is_ours || end_page <= first_page) { memset(target, 0, bytes); return; }
  memset(target, 0, first_page - first);
  memset(reinterpret_cast<void*>(end_page), 0, end - end_page);
  madvise(reinterpret_cast<void*>(first_page), end_page - first_page, MADV_DONTNEED);
}

void remove_range(std::map<uintptr_t, Range>::iterator range) {
  mark_unknown(reinterpret_cast<void*>(range->first), range->second.size);
  ranges.erase(range);
}

}  // namespace

void* allocate(int device, size_t bytes) {
  if (!bytes) return nullptr;
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  size_t counted = added_pages(device, bytes);
  if (!reserve(device, counted)) return nullptr;
  char* address = reserve_addresses(whole_pages(bytes), PAGE_BYTES, PROT_READ | PROT_WRITE);
  if (!address) { unreserve(device, counted); return nullptr; }
  if (bytes < PAGE_BYTES) bytes_in_shared_pages[device] += bytes;
  ranges[uintptr_t(address)] = {bytes, device, ON_GPU, true};
  return address;
}

bool release(void* address) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  auto range = ranges.find(uintptr_t(address));
  if (range == ranges.end() || range->second.kind != ON_GPU) return false;
  size_t bytes = range->second.size;
  int device = range->second.device;
  if (bytes < PAGE_BYTES) bytes_in_shared_pages[device] -= bytes;
  size_t counted = added_pages(device, bytes);
  remove_range(range);
  munmap(address, whole_pages(bytes));
  unreserve(device, counted);
  return true;
}

void* allocate_pinned(size_t bytes) {
  char* address = reserve_addresses(whole_pages(bytes), PAGE_BYTES, PROT_READ | PROT_WRITE);
  if (!address) return nullptr;
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  ranges[uintptr_t(address)] = {bytes, 0, PINNED, true};
  return address;
}

bool release_pinned(void* address) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  auto range = ranges.find(uintptr_t(address));
  if (range == ranges.end() || range->second.kind != PINNED) return false;
  if (range->second.is_mapped_here) munmap(address, whole_pages(range->second.size));
  ranges.erase(range);
  return true;
}

void register_host(void* address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  ranges[uintptr_t(address)] = {bytes, 0, PINNED, false};
}

void map_device(uintptr_t address, size_t bytes, int device) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  ranges[address] = {bytes, device, ON_GPU, false};
}

void unmap_device(uintptr_t address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  for (auto range = ranges.lower_bound(address); range != ranges.end() && range->first < address + bytes;) remove_range(range++);
}

Location locate(const void* address) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  auto range = ranges.upper_bound(uintptr_t(address));
  if (range == ranges.begin()) return {PAGEABLE, 0, nullptr, 0};
  --range;
  if (uintptr_t(address) >= range->first + range->second.size) return {PAGEABLE, 0, nullptr, 0};
  return {range->second.kind, range->second.device, reinterpret_cast<void*>(range->first), range->second.size};
}

bool is_known(const void* address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  if (locate(address).kind != ON_GPU) return true;
  auto interval = known.upper_bound(uintptr_t(address));
  if (interval == known.begin()) return false;
  uintptr_t end = uintptr_t(address) + bytes, known_end = (--interval)->first + interval->second;
  while (known_end < end && ++interval != known.end() && interval->first == known_end) known_end += interval->second;
  return known_end >= end;
}

void mark_unknown(void* address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  uintptr_t first = uintptr_t(address), end = first + bytes;
  auto interval = known.lower_bound(first);
  if (interval != known.begin()) {
    auto before = std::prev(interval);
    uintptr_t before_end = before->first + before->second;
    if (before_end > first) {
      before->second = first - before->first;
      if (before_end > end) known[end] = before_end - end;
    }
  }
  while (interval != known.end() && interval->first < end) {
    uintptr_t interval_end = interval->first + interval->second;
    interval = known.erase(interval);
    if (interval_end > end) { known[end] = interval_end - end; break; }
  }
}

void mark_known(void* address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  if (!bytes || locate(address).kind != ON_GPU) return;
  mark_unknown(address, bytes);
  known[uintptr_t(address)] = bytes;
}

void mark_block_unknown(void* address) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  if (locate(address).kind != ON_GPU) return;
  constexpr uintptr_t BLOCK = 512;  // torch's blocks begin and end there: what is behind belongs to another tensor, or to a longer one
  uintptr_t first = uintptr_t(address), end = (first / BLOCK + 1) * BLOCK;
  auto interval = known.upper_bound(first);
  if (interval != known.begin()) {
    --interval;
    end = std::max(end, interval->first + interval->second);
  }
  mark_unknown(address, end - first);
}

void copy(void* target, const void* source, size_t bytes) {
  if (!bytes) return;
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  bool to_gpu = locate(target).kind == ON_GPU, from_gpu = locate(source).kind == ON_GPU;
  if (!to_gpu && !from_gpu) { memmove(target, source, bytes); return; }
  bool is_copied = bytes <= copy_limit() && is_known(source, bytes);
  count_copy(to_gpu && from_gpu ? 2 : to_gpu ? 0 : 1, bytes, is_copied);
  if (is_copied) memmove(target, source, bytes);
  else if (!to_gpu) { count_unknown_read(bytes); zero(target, bytes); }
  if (to_gpu && is_copied) mark_known(target, bytes);
  if (to_gpu && !is_copied) mark_unknown(target, bytes);
}

void fill(void* target, int value, size_t element_bytes, size_t count) {
  std::lock_guard<std::recursive_mutex> guard(memory_mutex);
  size_t bytes = element_bytes * count;
  bool on_gpu = locate(target).kind == ON_GPU;
  if (on_gpu && bytes > copy_limit()) { mark_unknown(target, bytes); return; }
  for (size_t at = 0; at < bytes; at += element_bytes) memcpy(static_cast<char*>(target) + at, &value, element_bytes);
  if (on_gpu) mark_known(target, bytes);
}

}  // namespace standin
