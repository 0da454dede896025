/* A driver library with NVML's interface, for machines without a card. The file that STAND_IN_MACHINE names describes the
   machine; it is read at every start of NVML. Lines are `key = value`; `#` begins a comment.
     driver, cuda        versions, e.g. 580.95.05 and 13000
     start               what every start answers: 0 well, 9 driver not loaded, 18 library and driver do not match
     answer              FUNCTION CODE: that function answers with this error
     card or instance    begins a card by its name, or an instance of the last card (MIG); the lines below describe it
     uuid, pci, capability, total_mib, reserved_mib, used_mib, cores, clock_mhz, pcie (generation x lanes)
     compute, graphics   a process: PID MIB; MIB is - where the driver can't tell, PID self is the calling process
     lost_after          the card answers so many calls, then it is off the bus */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WELL, UNINITIALIZED, INVALID, NOT_SUPPORTED, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15, MOST = 16 };
typedef unsigned long long bytes;
typedef struct { unsigned int pid; bytes used; unsigned int gpu, compute; } process;
typedef struct { process found[MOST]; unsigned int count; } processes;
typedef struct {
  char name[96], uuid[96], pci[32];
  int is_instance, index, major, minor, cores, clock, generation, lanes, lost_after, calls;
  bytes total, reserved, used;
  processes compute, graphics;
} card;
typedef struct { bytes total, free, used; } memory_v1;
typedef struct { unsigned int version; bytes total, reserved, free, used; } memory_v2;
typedef struct { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;

static card cards[MOST];
static char driver[80], refused[MOST][80];
static int count, cuda, start, running, codes[MOST], refusals;

static void add_process(processes *list, const char *value) {
  char pid[16], mib[16];
  if (sscanf(value, "%15s %15s", pid, mib) != 2 || list->count == MOST) return;
  process *one = &list->found[list->count++];
  one->pid = strcmp(pid, "self") ? atoi(pid) : getpid();
  one->used = strcmp(mib, "-") ? (bytes)atoll(mib) << 20 : (bytes)-1;
}

static void read_line(const char *key, const char *value) {
  card *last = count ? &cards[count - 1] : &cards[0];
  if (!strcmp(key, "driver")) snprintf(driver, sizeof driver, "%s", value);
  else if (!strcmp(key, "cuda")) cuda = atoi(value);
  else if (!strcmp(key, "start")) start = atoi(value);
  else if (!strcmp(key, "answer")) { if (sscanf(value, "%79s %d", refused[refusals], &codes[refusals]) == 2) refusals++; }
  else if (!strcmp(key, "card") || !strcmp(key, "instance")) {
    card *one = &cards[count++];
    memset(one, 0, sizeof *one);
    one->is_instance = key[0] == 'i';
    one->lost_after = -1;
    for (int number = 0; number < count - 1; number++) {
      if (one->is_instance) one->index = cards[number].is_instance ? one->index + 1 : 0;
      else one->index += !cards[number].is_instance;
    }
    snprintf(one->name, sizeof one->name, "%s", value);
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

/* What a function answers of itself; for a card also whether it is there. */
static int answer(const char *function) {
  for (int number = 0; number < refusals; number++) if (!strcmp(refused[number], function)) return codes[number];
  return running ? WELL : UNINITIALIZED;
}
static int of_card(const char *function, card *one) {
  if (one->lost_after >= 0 && one->calls++ >= one->lost_after) return LOST;
  return answer(function);
}
#define ASK(wanted) { int code = of_card(__func__, wanted); if (code) return code; }

int nvmlInitWithFlags(unsigned int flags) { int code = read_machine(); if (!code) running++; return code; }
int nvmlShutdown(void) { if (running) running--; return WELL; }
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
int nvmlDeviceGetCount_v2(unsigned int *found) {
  *found = 0;
  for (int number = 0; number < count; number++) *found += !cards[number].is_instance;
  return answer(__func__);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, card **handle) {
  for (int number = 0; number < count; number++)
    if (!cards[number].is_instance && cards[number].index == (int)index) { *handle = &cards[number]; ASK(*handle) return WELL; }
  return INVALID;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, card **handle) {
  for (int number = 0; number < count; number++)
    if (!strcmp(cards[number].uuid, uuid)) { *handle = &cards[number]; ASK(*handle) return WELL; }
  return NOT_FOUND;
}
int nvmlDeviceGetMigMode(card *one, unsigned int *current, unsigned int *pending) {
  ASK(one)
  if (one->major < 8 || one->is_instance) return NOT_SUPPORTED;
  *current = *pending = one + 1 < cards + count && one[1].is_instance;
  return WELL;
}
int nvmlDeviceGetMaxMigDeviceCount(card *one, unsigned int *found) { ASK(one) *found = one->is_instance ? 0 : 7; return WELL; }
int nvmlDeviceGetMigDeviceHandleByIndex(card *one, unsigned int index, card **handle) {
  ASK(one)
  card *wanted = one + 1 + index;
  for (card *each = one + 1; each <= wanted; each++) if (each >= cards + count || !each->is_instance) return NOT_FOUND;
  *handle = wanted;
  return WELL;
}
int nvmlDeviceGetName(card *one, char *text, unsigned int size) { ASK(one) snprintf(text, size, "%s", one->name); return WELL; }
int nvmlDeviceGetUUID(card *one, char *text, unsigned int size) { ASK(one) snprintf(text, size, "%s", one->uuid); return WELL; }
int nvmlDeviceGetIndex(card *one, unsigned int *index) { ASK(one) *index = one->index; return WELL; }
int nvmlDeviceGetPciInfo_v3(card *one, pci_info *info) {
  ASK(one)
  if (one->is_instance) return NOT_SUPPORTED;
  memset(info, 0, sizeof *info);
  snprintf(info->bus_id, sizeof info->bus_id, "%s", one->pci);
  sscanf(one->pci, "%x:%x:%x", &info->domain, &info->bus, &info->device);
  return WELL;
}
int nvmlDeviceGetCudaComputeCapability(card *one, int *major, int *minor) {
  ASK(one)
  *major = one->major; *minor = one->minor;
  return one->is_instance ? NOT_SUPPORTED : WELL;
}
/* The first version counts the driver's reserve as used, the second tells it apart. */
int nvmlDeviceGetMemoryInfo(card *one, memory_v1 *memory) {
  ASK(one)
  memory->total = one->total; memory->used = one->used + one->reserved; memory->free = memory->total - memory->used;
  return WELL;
}
int nvmlDeviceGetMemoryInfo_v2(card *one, memory_v2 *memory) {
  ASK(one)
  memory->total = one->total; memory->reserved = one->reserved; memory->used = one->used;
  memory->free = one->total - one->reserved - one->used;
  return WELL;
}
static int list(processes *held, unsigned int *size, process *found) {
  unsigned int room = *size;
  *size = held->count;
  if (held->count && (!found || room < held->count)) return TOO_SMALL;
  for (unsigned int number = 0; number < held->count; number++) found[number] = held->found[number];
  return WELL;
}
int nvmlDeviceGetComputeRunningProcesses_v3(card *one, unsigned int *size, process *found) { ASK(one) return list(&one->compute, size, found); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(card *one, unsigned int *size, process *found) { ASK(one) return list(&one->graphics, size, found); }
int nvmlDeviceGetMaxPcieLinkGeneration(card *one, unsigned int *generation) {
  ASK(one)
  *generation = one->generation;
  return one->generation ? WELL : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxPcieLinkWidth(card *one, unsigned int *lanes) { ASK(one) *lanes = one->lanes; return one->lanes ? WELL : NOT_SUPPORTED; }
int nvmlDeviceGetNumGpuCores(card *one, unsigned int *cores) { ASK(one) *cores = one->cores; return one->cores ? WELL : NOT_SUPPORTED; }
int nvmlDeviceGetMaxClockInfo(card *one, unsigned int kind, unsigned int *mhz) { ASK(one) *mhz = one->clock; return one->clock ? WELL : NOT_SUPPORTED; }
int nvmlDeviceGetTemperature(card *one, unsigned int sensor, unsigned int *celsius) { ASK(one) *celsius = 45; return WELL; }
int nvmlDeviceGetPowerUsage(card *one, unsigned int *milliwatts) { ASK(one) *milliwatts = 60000; return WELL; }
