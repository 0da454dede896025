// What the stand-in driver (libcuda.so.1) offers to the stand-in runtime (libcudart.so).
#pragma once
#include <cstddef>
#include <cstdint>

namespace standin {

constexpr size_t MIB = size_t(1) << 20;
constexpr size_t PAGE_BYTES = 2 * MIB;  // the driver hands out physical memory in pages of 2 MiB

struct Gpu {
  char name[96];
  char uuid[64];
  unsigned char uuid_bytes[16];
  char pci[32];
  int major, minor, cores, clock_mhz, multiprocessors;
  int index;             // in the machine; CUDA_VISIBLE_DEVICES gives the program other numbers
  size_t total_bytes;    // as CUDA sees it: without the driver's reserve
  size_t others_bytes;   // what programs of the description hold (used_mib)
  size_t context_bytes;  // what CUDA takes for each process that opens a context
};

// machine.cpp: the machine's description, and what its processes hold
int driver_version();                       // newest CUDA that the driver supports: 13000
int gpu_count();                            // GPUs that this process may see
const Gpu& gpu(int device);
int current_device();                       // device of this thread
void set_current_device(int device);
bool is_lost(int device);
void open_context(int device);              // counts the context once per process and GPU
bool has_context(int device);
size_t free_bytes(int device);
bool reserve(int device, size_t bytes);     // false: out of memory
void unreserve(int device, size_t bytes);
int device_attribute(int attribute, int device);

// memory.cpp: addresses, and which bytes behind them are known
void* allocate(int device, size_t bytes);   // nullptr: out of memory
bool release(void* address);
void* allocate_pinned(size_t bytes);        // host memory that the GPU can read; pages are not committed before they are touched
bool release_pinned(void* address);
void register_host(void* address, size_t bytes);
void map_device(uintptr_t address, size_t bytes, int device);  // an expandable segment's page
void unmap_device(uintptr_t address, size_t bytes);

enum MemoryKind { PAGEABLE, PINNED, ON_GPU };
struct Location { MemoryKind kind; int device; void* base; size_t size; };
Location locate(const void* address);

void copy(void* target, const void* source, size_t bytes);
void fill(void* target, int value, size_t element_bytes, size_t count);
bool is_known(const void* address, size_t bytes);
void mark_known(void* address, size_t bytes);
void mark_unknown(void* address, size_t bytes);
void mark_block_unknown(void* address);     // what a kernel wrote there: to the end of torch's smallest block, or of what was known

// trace.cpp: what was called
void count_launch(const char* kernel);
void count_synchronisation(const char* call);
void count_copy(int direction, size_t bytes, bool copied);  // direction: 0 to the GPU, 1 from it, 2 on it
void count_unknown_read(size_t bytes);
void write_trace();

void* driver_function(const char* name);    // any version of it

}  // namespace standin
