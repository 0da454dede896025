/* The file that all processes of a stand-in machine share (STAND_IN_USAGE): who holds how many bytes of which GPU, and which GPU
   has fallen off the bus. libcuda.so.1 writes it, libnvidia-ml.so.1 reads it. Plain C: both include it. */
#pragma once
#include <stddef.h>
#include <sys/types.h>

enum { MAX_GPUS = 16, MAX_PROCESSES = 256 };

typedef struct { pid_t pid; size_t used_bytes[MAX_GPUS]; } process_usage;
typedef struct { int is_lost[MAX_GPUS]; process_usage processes[MAX_PROCESSES]; } machine_usage;
