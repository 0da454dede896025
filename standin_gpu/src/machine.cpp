// The machine: its GPUs from the description that STAND_IN_MACHINE names, and how many bytes each process holds of them.
//
// The description is that of nvml.c. From it come also: context_mib (default 400).
// CUDA_VISIBLE_DEVICES is read as the driver reads it: numbers or beginnings of UUIDs, and an invalid one hides those after it.
#include "gpu.h"
#include "usage.h"
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace standin {
namespace {

std::recursive_mutex machine_mutex;
std::vector<Gpu> visible_gpus;
int driver_cuda = 13000;
machine_usage* usage;
int usage_file = -1;
bool context_is_open[MAX_GPUS];
pid_t context_owner;
thread_local int device_of_thread;

void read_uuid(Gpu& gpu, const char* text) {
  snprintf(gpu.uuid, sizeof gpu.uuid, "%s", text);
  int digit = 0;
  for (const char* at = text + 4; *at && digit < 32; at++) {
    int value = *at >= '0' && *at <= '9' ? *at - '0' : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : -1;
    if (value < 0) continue;
    gpu.uuid_bytes[digit / 2] |= value << (digit % 2 ? 0 : 4);
    digit++;
  }
}

int cores_per_multiprocessor(const Gpu& gpu) { return gpu.major == 7 || (gpu.major == 8 && gpu.minor == 0) ? 64 : 128; }

void finish_gpu(Gpu& gpu, size_t reserved_bytes) {
  gpu.total_bytes -= std::min(gpu.total_bytes, reserved_bytes);
  if (!gpu.multiprocessors) gpu.multiprocessors = std::max(1, gpu.cores / cores_per_multiprocessor(gpu));
}

std::vector<Gpu> read_description() {
  std::vector<Gpu> gpus;
  const char* path = getenv("STAND_IN_MACHINE");
  FILE* file = path ? fopen(path, "r") : nullptr;
  if (!file) return gpus;
  char line[256], key[40], value[160];
  size_t reserved_bytes = 0;
  while (fgets(line, sizeof line, file)) {
    if (sscanf(line, " %39[a-z_] = %159[^#\n]", key, value) != 2) continue;
    for (size_t end = strlen(value); end && value[end - 1] == ' ';) value[--end] = 0;
    if (!strcmp(key, "cuda")) driver_cuda = atoi(value);
    if (!strcmp(key, "card")) {
      if (!gpus.empty()) finish_gpu(gpus.back(), reserved_bytes);
      Gpu next{};
      next.major = 8;
      next.minor = 9;
      next.context_bytes = 400 * MIB;
      snprintf(next.name, sizeof next.name, "%s", value);
      reserved_bytes = 0;
      next.index = gpus.size();
      gpus.push_back(next);
    }
    if (gpus.empty()) continue;
    Gpu& gpu = gpus.back();
    if (!strcmp(key, "uuid")) read_uuid(gpu, value);
    else if (!strcmp(key, "pci")) snprintf(gpu.pci, sizeof gpu.pci, "%s", value);
    else if (!strcmp(key, "capability")) sscanf(value, "%d.%d", &gpu.major, &gpu.minor);
    else if (!strcmp(key, "total_mib")) gpu.total_bytes = size_t(atof(value) * MIB);
    else if (!strcmp(key, "reserved_mib")) reserved_bytes = size_t(atof(value) * MIB);
    else if (!strcmp(key, "used_mib")) gpu.others_bytes = size_t(atof(value) * MIB);
    else if (!strcmp(key, "context_mib")) gpu.context_bytes = size_t(atof(value) * MIB);
    else if (!strcmp(key, "cores")) gpu.cores = atoi(value);
    else if (!strcmp(key, "multiprocessors")) gpu.multiprocessors = atoi(value);
    else if (!strcmp(key, "clock_mhz")) gpu.clock_mhz = atoi(value);
  }
  if (!gpus.empty()) finish_gpu(gpus.back(), reserved_bytes);
  fclose(file);
  return gpus;
}

void see_gpus() {
  std::vector<Gpu> gpus = read_description();
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) { visible_gpus = gpus; return; }
  std::string list(visible), entry;
  for (size_t at = 0; at <= list.size(); at++) {
    if (at < list.size() && list[at] != ',') { entry += list[at]; continue; }
    const Gpu* chosen = nullptr;
    if (!entry.empty() && isdigit(entry[0])) { if (size_t(atoi(entry.c_str())) < gpus.size()) chosen = &gpus[atoi(entry.c_str())]; }
    else for (const Gpu& gpu : gpus) if (!entry.empty() && !strncmp(gpu.uuid, entry.c_str(), entry.size())) chosen = &gpu;
    if (!chosen) break;
    visible_gpus.push_back(*chosen);
    entry.clear();
  }
}

void map_usage() {
  static machine_usage of_this_process_only;
  usage = &of_this_process_only;
  const char* path = getenv("STAND_IN_USAGE");
  if (!path || (usage_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)) < 0) return;
  if (lseek(usage_file, 0, SEEK_END) < off_t(sizeof *usage) && ftruncate(usage_file, sizeof *usage)) return;
  void* mapped = mmap(nullptr, sizeof *usage, PROT_READ | PROT_WRITE, MAP_SHARED, usage_file, 0);
  if (mapped != MAP_FAILED) usage = static_cast<machine_usage*>(mapped);
}

void start() {
  static bool is_started;
  if (is_started) return;
  is_started = true;
  see_gpus();
  map_usage();
}

bool has_ended(pid_t pid) { return kill(pid, 0) && errno == ESRCH; }

process_usage& usage_of_this_process() {
  pid_t pid = getpid();
  process_usage* unused = nullptr;
  for (process_usage& process : usage->processes) {
    if (process.pid == pid) return process;
    if (!unused && (!process.pid || has_ended(process.pid))) unused = &process;
  }
  if (!unused) abort();
  *unused = {};
  unused->pid = pid;
  return *unused;
}

struct UsageLock {  // against this process's threads and other processes
  UsageLock() { machine_mutex.lock(); if (usage_file >= 0) flock(usage_file, LOCK_EX); }
  ~UsageLock() { if (usage_file >= 0) flock(usage_file, LOCK_UN); machine_mutex.unlock(); }
};

size_t used_bytes(const Gpu& gpu) {
  size_t sum = gpu.others_bytes;
  for (process_usage& process : usage->processes) {
    if (!process.pid || !process.used_bytes[gpu.index]) continue;
    if (process.pid != getpid() && has_ended(process.pid)) { process = {}; continue; }
    sum += process.used_bytes[gpu.index];
  }
  return sum;
}

struct AtExit {
  ~AtExit() {
    if (!usage || context_owner != getpid()) return;
    write_trace();
    usage_of_this_process() = {};
  }
} at_exit;

}  // namespace

int driver_version() { gpu_count(); return driver_cuda; }
int gpu_count() { std::lock_guard<std::recursive_mutex> guard(machine_mutex); start(); return visible_gpus.size(); }
const Gpu& gpu(int device) { gpu_count(); return visible_gpus[device]; }
int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }
bool is_lost(int device) { return device < gpu_count() && usage->is_lost[gpu(device).index]; }
bool has_context(int device) { return device < gpu_count() && context_is_open[gpu(device).index] && context_owner == getpid(); }

void open_context(int device) {
  if (device >= gpu_count() || has_context(device)) return;
  UsageLock lock;
  if (getenv("STAND_IN_ABORT_ON_CONTEXT")) abort();  // python -X faulthandler then shows who opens it
  if (context_owner != getpid()) std::fill(std::begin(context_is_open), std::end(context_is_open), false);
  context_owner = getpid();
  context_is_open[gpu(device).index] = true;
  usage_of_this_process().used_bytes[gpu(device).index] += gpu(device).context_bytes;
}

size_t free_bytes(int device) {
  open_context(device);
  UsageLock lock;
  size_t used = used_bytes(gpu(device));
  return used > gpu(device).total_bytes ? 0 : gpu(device).total_bytes - used;
}

bool reserve(int device, size_t bytes) {
  open_context(device);
  UsageLock lock;
  if (used_bytes(gpu(device)) + bytes > gpu(device).total_bytes) return false;
  usage_of_this_process().used_bytes[gpu(device).index] += bytes;
  return true;
}

void unreserve(int device, size_t bytes) { UsageLock lock; usage_of_this_process().used_bytes[gpu(device).index] -= bytes; }

// Shared memory that a kernel may ask for, KiB, and threads of a multiprocessor: CUDA's programming guide, technical specifications
// by compute capability. The others are the same for all supported GPUs, or read by nobody who decides anything by them.
int device_attribute(int attribute, int device) {
  const Gpu& card = gpu(device);
  bool is_data_center = (card.major == 8 && card.minor == 0) || card.major == 9 || card.major == 10;
  int shared_kib = card.major == 7 ? 64 : is_data_center && card.major > 8 ? 227 : is_data_center ? 163 : 99;
  int domain = 0, bus = 1, slot = 0;
  sscanf(card.pci, "%x:%x:%x", &domain, &bus, &slot);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return shared_kib << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return (shared_kib + 1) << 10;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return card.clock_mhz * 1000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 10501000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 384;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return card.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return card.major == 7 ? 1024 : is_data_center ? 2048 : 1536;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return is_data_center ? 32 : 16;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 48 << 20;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return card.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return card.minor;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: return domain;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return bus;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: return slot;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return card.major >= 9;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: return 1;
    default: return 0;
  }
}

}  // namespace standin
