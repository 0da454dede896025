/* libnvidia-ml.so.1 of a stand-in machine. The file that STAND_IN_MACHINE names describes it and is read at every start of NVML.
   Lines are `key = value`; `#` begins a comment.
     driver, cuda        versions, e.g. 580.95.05 and 13000
     start               what every start answers: 0 success, 9 driver not loaded, 18 library and driver do not match
     answer              FUNCTION CODE: that function answers with this error
     card                begins a GPU by its name; the lines below describe it
     uuid, pci, capability, total_mib, reserved_mib, used_mib, cores, clock_mhz, pcie (generation x lanes)
     compute, graphics   a process: PID MIB; MIB is - where the driver can't tell, PID self is the calling process
     mig                 1: the GPU is split
     lost_after          the GPU answers so many calls, then it is off the bus
   Memory that processes hold through the stand-in driver (usage.h) is added to what the description says. */
#include "usage.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15, MAX_ENTRIES = 16 };
typedef unsigned long long bytes;
typedef struct process { unsigned int pid; bytes used; unsigned int gpu_instance, compute_instance; } process;
typedef struct { process entries[MAX_ENTRIES]; unsigned int count; } process_list;
typedef struct {
  char name[96], uuid[96], pci[32];
  int number, mig, major, minor, cores, clock, generation, lanes, lost_after, calls;
  bytes total, reserved, used;
  process_list compute, graphics;
} gpu;
typedef struct { bytes total, free, used; } memory_v1;
typedef struct { unsigned int version; bytes total, reserved, free, used; } memory_v2;
typedef struct { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;

static gpu gpus[MAX_ENTRIES];
static char driver[80], refused[MAX_ENTRIES][80];
static int count, cuda, start, running, codes[MAX_ENTRIES], refusals;

static void add_process(process_list *list, const char *value) {
  char pid[16], mib[16];
  if (sscanf(value, "%15s %15s", pid, mib) != 2 || list->count == MAX_ENTRIES) return;
  process *entry = &list->entries[list->count++];
  entry->pid = strcmp(pid, "self") ? atoi(pid) : getpid();
  entry->used = strcmp(mib, "-") ? (bytes)atoll(mib) << 20 : (bytes)-1;
}

static void read_line(const char *key, const char *value) {
  gpu *last = count ? &gpus[count - 1] : &gpus[0];
  if (!strcmp(key, "driver")) snprintf(driver, sizeof driver, "%s", value);
  else if (!strcmp(key, "cuda")) cuda = atoi(value);
  else if (!strcmp(key, "start")) start = atoi(value);
  else if (!strcmp(key, "answer")) { if (sscanf(value, "%79s %d", refused[refusals], &codes[refusals]) == 2) refusals++; }
  else if (!strcmp(key, "card")) {
    gpu *device = &gpus[count++];
    memset(device, 0, sizeof *device);
    device->number = count - 1;
    device->lost_after = -1;
    snprintf(device->name, sizeof device->name, "%s", value);
  }
  else if (!strcmp(key, "uuid")) snprintf(last->uuid, sizeof last->uuid, "%s", value);
  else if (!strcmp(key, "pci")) snprintf(last->pci, sizeof last->pci, "%s", value);
  else if (!strcmp(key, "capability")) sscanf(value, "%d.%d", &last->major, &last->minor);
  else if (!strcmp(key, "total_mib")) last->total = (bytes)atoll(value) << 20;
  else if (!strcmp(key, "reserved_mib")) last->reserved = (bytes)atoll(value) << 20;
  else if (!strcmp(key, "used_mib")) last->used = (bytes)atoll(value) << 20;
  else if (!strcmp(key, "cores")) last->cores = atoi(value);
  else if (!strcmp(key, "clock_mhz")) last->clock = atoi(value);
  else if (!strcmp(key, "pcie")) sscanf(value, "%d x %d", &last->generation, &last->lanes);
  else if (!strcmp(key, "compute")) add_process(&last->compute, value);
  else if (!strcmp(key, "graphics")) add_process(&last->graphics, value);
  else if (!strcmp(key, "mig")) last->mig = atoi(value);
  else if (!strcmp(key, "lost_after")) last->lost_after = atoi(value);
}

static int read_machine(void) {
  const char *path = getenv("STAND_IN_MACHINE");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) return NOT_LOADED;
  char line[256], key[40], value[120];
  count = cuda = start = refusals = 0;
  while (fgets(line, sizeof line, file))
    if (sscanf(line, " %39[a-z_] = %119[^#\n]", key, value) == 2) {
      for (int end = strlen(value); end && value[end - 1] == ' ';) value[--end] = 0;
      read_line(key, value);
    }
  fclose(file);
  return start;
}

/* What the machine's processes hold: zeros where no stand-in driver shares it. */
static const machine_usage *usage(void) {
  static const machine_usage *mapped;
  static machine_usage nobody;
  if (mapped) return mapped;
  const char *path = getenv("STAND_IN_USAGE");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return &nobody;
  if (lseek(file, 0, SEEK_END) < (off_t)sizeof nobody) { close(file); return &nobody; }
  void *address = mmap(NULL, sizeof nobody, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (address == MAP_FAILED) return &nobody;
  return mapped = address;
}
static int uses(const process_usage *process, const gpu *device) {
  return process->pid && process->used_bytes[device->number] && !(kill(process->pid, 0) && errno == ESRCH);
}
static bytes used_bytes(const gpu *device) {
  bytes sum = device->used;
  for (const process_usage *process = usage()->processes; process < usage()->processes + MAX_PROCESSES; process++)
    if (uses(process, device)) sum += process->used_bytes[device->number];
  return sum;
}

/* What a function answers of itself; of a GPU also whether it is there. */
static int answer(const char *function) {
  for (int number = 0; number < refusals; number++) if (!strcmp(refused[number], function)) return codes[number];
  return running ? SUCCESS : UNINITIALIZED;
}
static int of_gpu(const char *function, gpu *device) {
  if (usage()->is_lost[device->number]) return LOST;
  if (device->lost_after >= 0 && device->calls++ >= device->lost_after) return LOST;
  return answer(function);
}
#define ASK(wanted) { int code = of_gpu(__func__, wanted); if (code) return code; }

int nvmlInitWithFlags(unsigned int flags) { int code = read_machine(); if (!code) running++; return code; }
int nvmlShutdown(void) { if (running) running--; return SUCCESS; }
const char *nvmlErrorString(int status) {
  switch (status) {
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case NOT_LOADED: return "Driver Not Loaded";
    case 4: return "Insufficient Permissions";
    case 13: return "Function Not Found";
    case LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { snprintf(text, size, "%s", driver); return answer(__func__); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = cuda; return answer(__func__); }
int nvmlDeviceGetCount_v2(unsigned int *number_of) { *number_of = count; return answer(__func__); }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, gpu **handle) {
  if (index >= count) return INVALID;
  *handle = &gpus[index];
  ASK(*handle)
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **handle) {
  for (int number = 0; number < count; number++)
    if (!strcmp(gpus[number].uuid, uuid)) { *handle = &gpus[number]; ASK(*handle) return SUCCESS; }
  return NOT_FOUND;
}
int nvmlDeviceGetMigMode(gpu *device, unsigned int *current, unsigned int *pending) {
  ASK(device)
  *current = *pending = device->mig;
  return device->mig || device->major >= 8 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetName(gpu *device, char *text, unsigned int size) { ASK(device) snprintf(text, size, "%s", device->name); return SUCCESS; }
int nvmlDeviceGetUUID(gpu *device, char *text, unsigned int size) { ASK(device) snprintf(text, size, "%s", device->uuid); return SUCCESS; }
int nvmlDeviceGetIndex(gpu *device, unsigned int *index) { ASK(device) *index = device->number; return SUCCESS; }
int nvmlDeviceGetPciInfo_v3(gpu *device, pci_info *info) {
  ASK(device)
  memset(info, 0, sizeof *info);
  snprintf(info->bus_id, sizeof info->bus_id, "%s", device->pci);
  sscanf(device->pci, "%x:%x:%x", &info->domain, &info->bus, &info->device);
  return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(gpu *device, int *major, int *minor) {
  ASK(device)
  *major = device->major; *minor = device->minor;
  return SUCCESS;
}
/* The first version counts the driver's reserve as used, the second tells it apart. */
int nvmlDeviceGetMemoryInfo(gpu *device, memory_v1 *memory) {
  ASK(device)
  memory->total = device->total; memory->used = used_bytes(device) + device->reserved;
  memory->free = memory->used > memory->total ? 0 : memory->total - memory->used;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(gpu *device, memory_v2 *memory) {
  ASK(device)
  memory->total = device->total; memory->reserved = device->reserved; memory->used = used_bytes(device);
  memory->free = memory->used + memory->reserved > memory->total ? 0 : memory->total - memory->reserved - memory->used;
  return SUCCESS;
}
static int list_processes(const process_list *list, unsigned int *size, process *entries) {
  unsigned int capacity = *size;
  *size = list->count;
  if (list->count && (!entries || capacity < list->count)) return TOO_SMALL;
  for (unsigned int number = 0; number < list->count; number++) entries[number] = list->entries[number];
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu *device, unsigned int *size, process *entries) {
  ASK(device)
  process_list list = device->compute;
  for (const process_usage *process = usage()->processes; process < usage()->processes + MAX_PROCESSES; process++)
    if (uses(process, device) && list.count < MAX_ENTRIES)
      list.entries[list.count++] = (struct process){process->pid, process->used_bytes[device->number], ~0u, ~0u};
  return list_processes(&list, size, entries);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(gpu *device, unsigned int *size, process *entries) {
  ASK(device)
  return list_processes(&device->graphics, size, entries);
}
int nvmlDeviceGetMaxPcieLinkGeneration(gpu *device, unsigned int *generation) {
  ASK(device)
  *generation = device->generation;
  return device->generation ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxPcieLinkWidth(gpu *device, unsigned int *lanes) { ASK(device) *lanes = device->lanes; return device->lanes ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetNumGpuCores(gpu *device, unsigned int *cores) { ASK(device) *cores = device->cores; return device->cores ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetMaxClockInfo(gpu *device, unsigned int kind, unsigned int *mhz) { ASK(device) *mhz = device->clock; return device->clock ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetTemperature(gpu *device, unsigned int sensor, unsigned int *celsius) { ASK(device) *celsius = 45; return SUCCESS; }
int nvmlDeviceGetPowerUsage(gpu *device, unsigned int *milliwatts) { ASK(device) *milliwatts = 60000; return SUCCESS; }

/* What torch asks besides. */
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, gpu **handle) {
  for (int number = 0; number < count; number++)
    if (!strcmp(gpus[number].pci, pci)) { *handle = &gpus[number]; ASK(*handle) return SUCCESS; }
  return NOT_FOUND;
}
int nvmlDeviceGetUtilizationRates(gpu *device, unsigned int *percent) { ASK(device) percent[0] = percent[1] = 0; return SUCCESS; }
int nvmlDeviceGetClockInfo(gpu *device, unsigned int kind, unsigned int *mhz) { ASK(device) *mhz = device->clock; return SUCCESS; }
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu *device, unsigned int link, unsigned int *kind) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu *device, unsigned int link, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(gpu *device, unsigned int link, unsigned int *state) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(gpu *device, void *info) { return SUCCESS; } /* torch has written "not supported" into it */
/* The function without a version has the entries' first layout. */
typedef struct { unsigned int pid; bytes used; } process_v1;
int nvmlDeviceGetComputeRunningProcesses(gpu *device, unsigned int *size, process_v1 *entries) {
  process list[MAX_ENTRIES];
  unsigned int capacity = *size;
  *size = MAX_ENTRIES;
  int code = nvmlDeviceGetComputeRunningProcesses_v3(device, size, list);
  if (code) return code;
  if (*size > capacity) return TOO_SMALL;
  for (unsigned int number = 0; number < *size; number++) { entries[number].pid = list[number].pid; entries[number].used = list[number].used; }
  return SUCCESS;
}
