/* A driver library with NVML's interface, for machines without a card: one card of 24 GiB whose state the environment sets.
   CARD_FREE_GIB: free memory. CARD_HOLDER: id of a process that holds the rest. DRIVER_CUDA: 1000 x major + 10 x minor.
   DRIVER_STATUS: what every start answers (0 well, 9 driver not loaded). */
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int usual) { const char *text = getenv(name); return text ? atoi(text) : usual; }
static const unsigned long long gib = 1ULL << 30;

typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } process;

int nvmlInitWithFlags(unsigned int flags) { return number("DRIVER_STATUS", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { strcpy(text, "570.86.16"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = number("DRIVER_CUDA", 12080); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) { *handle = &nvmlShutdown; return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned int size) { strcpy(text, "NVIDIA GeForce RTX 3090"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 8; *minor = 6; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory) {
  memory->total = 24 * gib; memory->reserved = 0;
  memory->free = number("CARD_FREE_GIB", 24) * gib; memory->used = memory->total - memory->free;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process *found) {
  int holder = number("CARD_HOLDER", 0);
  if (!holder) { *count = 0; return 0; }
  if (!found) { *count = 1; return 7; }
  *count = 1; found[0].pid = holder; found[0].used = (24 - number("CARD_FREE_GIB", 24)) * gib;
  return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned int *count, process *found) { *count = 0; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned int *generation) { *generation = 4; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned int *lanes) { *lanes = 16; return 0; }
