// libnccl.so.2: communicators between processes of the machine.
//
// Contributions up to SLOT_BYTES are really exchanged, through a file beside STAND_IN_USAGE, since programs decide by them: shapes
// that DDP compares, sizes of objects, requests to stop. They wait for each other there. Larger ones move nothing, wait for nobody,
// and make what they write unknown. NCCL's own buffers are not allocated.
#include "gpu.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

using namespace standin;

namespace {

constexpr int MOST_RANKS = 16;
constexpr size_t SLOT_BYTES = 64 << 10;
enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6 };
enum Operation { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN };
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };

struct Id { char bytes[128]; };

struct Shared {
  std::atomic<uint32_t> arrived, generation;
  std::atomic<int32_t> pids[MOST_RANKS];
  size_t known_bytes[MOST_RANKS];  // of each slot, from its beginning
  char slots[MOST_RANKS][SLOT_BYTES];
};

struct Communicator {
  Shared* shared = nullptr;
  std::string name;
  int rank = 0, ranks = 1, splits = 0;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{SUCCESS};
};

size_t size_of(int type) {
  switch (type) {
    case INT32: case UINT32: case FLOAT32: return 4;
    case INT64: case UINT64: case FLOAT64: return 8;
    case FLOAT16: case BFLOAT16: return 2;
    default: return 1;
  }
}

std::string folder() {
  std::string usage = getenv("STAND_IN_USAGE") ? getenv("STAND_IN_USAGE") : "/tmp/usage";
  return usage.substr(0, usage.rfind('/') + 1);
}

// Waits until every rank is here; an error where one has ended or this one was aborted.
int meet(Communicator& group) {
  Shared& shared = *group.shared;
  uint32_t generation = shared.generation;
  if (shared.arrived.fetch_add(1) + 1 == uint32_t(group.ranks)) {
    shared.arrived = 0;
    shared.generation++;
    return SUCCESS;
  }
  for (size_t turn = 0; shared.generation == generation; turn++) {
    if (group.is_aborted) return group.error = SYSTEM_ERROR;
    for (int rank = 0; turn % 1000 == 999 && rank < group.ranks; rank++) {
      int pid = shared.pids[rank];
      if (pid && kill(pid, 0) && errno == ESRCH) return group.error = REMOTE_ERROR;
    }
    usleep(turn < 1000 ? 20 : 500);
  }
  return SUCCESS;
}

int join(void** result, int ranks, const std::string& name, int rank) {
  if (ranks > MOST_RANKS || rank >= ranks) return INVALID_ARGUMENT;
  std::string path = folder() + "nccl_" + name;
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return SYSTEM_ERROR;
  void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return SYSTEM_ERROR;
  auto* group = new Communicator;
  group->shared = static_cast<Shared*>(mapped);
  group->name = name;
  group->rank = rank;
  group->ranks = ranks;
  group->shared->pids[rank] = getpid();
  *result = group;
  return meet(*group);
}

std::string name_of(const Id& id) {
  std::string name;
  for (int at = 0; at < 16; at++) {
    char digits[3];
    snprintf(digits, sizeof digits, "%02x", uint8_t(id.bytes[at]));
    name += digits;
  }
  return name;
}

size_t known_beginning(const void* source, size_t bytes) {
  size_t known = 0, end = bytes;  // the first `known` bytes are known, the first `end + 1` are not
  while (known < end) {
    size_t middle = (known + end + 1) / 2;
    if (is_known(source, middle)) known = middle;
    else end = middle - 1;
  }
  return known;
}

// Every rank's bytes in its slot, until `use` of them returns.
template <class Use>
int exchange(Communicator& group, const void* source, size_t bytes, Use use) {
  size_t known = known_beginning(source, bytes);
  group.shared->known_bytes[group.rank] = known;
  memcpy(group.shared->slots[group.rank], source, known);
  if (int error = meet(group)) return error;
  use();
  return meet(group);
}

void take(void* target, const Communicator& group, int rank, size_t offset, size_t bytes) {
  size_t known = group.shared->known_bytes[rank];
  known = known > offset ? std::min(bytes, known - offset) : 0;
  memcpy(target, group.shared->slots[rank] + offset, known);
  mark_unknown(target, bytes);
  mark_known(target, known);
}

template <class Number>
void combine(char* target, const Communicator& group, size_t offset, size_t count, int operation) {
  for (size_t element = 0; element < count; element++) {
    Number result{};
    for (int rank = 0; rank < group.ranks; rank++) {
      Number value;
      memcpy(&value, group.shared->slots[rank] + offset + element * sizeof value, sizeof value);
      if (!rank) result = value;
      else if (operation == PRODUCT) result *= value;
      else if (operation == MAXIMUM) result = std::max(result, value);
      else if (operation == MINIMUM) result = std::min(result, value);
      else result += value;
    }
    if (operation == MEAN) result /= Number(group.ranks);
    memcpy(target + element * sizeof result, &result, sizeof result);
  }
}

// The reduction of all ranks' elements from `offset` bytes on; unknown where one of them is, and of 16-bit floats.
void reduce(void* target, const Communicator& group, size_t offset, size_t count, int type, int operation) {
  char* into = static_cast<char*>(target);
  size_t bytes = count * size_of(type);
  const size_t* known = group.shared->known_bytes;
  bool all_known = std::all_of(known, known + group.ranks, [&](size_t size) { return size >= offset + bytes; });
  if (!all_known || type == FLOAT16 || type >= BFLOAT16 || operation > MEAN) { mark_unknown(target, bytes); return; }
  switch (type) {
    case INT8: combine<int8_t>(into, group, offset, count, operation); break;
    case UINT8: combine<uint8_t>(into, group, offset, count, operation); break;
    case INT32: combine<int32_t>(into, group, offset, count, operation); break;
    case UINT32: combine<uint32_t>(into, group, offset, count, operation); break;
    case INT64: combine<int64_t>(into, group, offset, count, operation); break;
    case UINT64: combine<uint64_t>(into, group, offset, count, operation); break;
    case FLOAT32: combine<float>(into, group, offset, count, operation); break;
    default: combine<double>(into, group, offset, count, operation);
  }
  mark_known(target, bytes);
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) { *version = 22907; return SUCCESS; }

int ncclGetUniqueId(Id* id) {
  memset(id, 0, sizeof *id);
  FILE* random = fopen("/dev/urandom", "rb");
  size_t count = random ? fread(id->bytes, 1, 16, random) : 0;
  if (random) fclose(random);
  return count == 16 ? SUCCESS : SYSTEM_ERROR;
}

int ncclCommInitRank(void** group, int ranks, Id id, int rank) { return join(group, ranks, name_of(id), rank); }
int ncclCommInitRankConfig(void** group, int ranks, Id id, int rank, void*) { return join(group, ranks, name_of(id), rank); }
int ncclCommInitRankScalable(void** group, int ranks, int rank, int, Id* ids, void*) { return join(group, ranks, name_of(*ids), rank); }

int ncclCommSplit(Communicator* group, int color, int key, void** result, void*) {
  int mine[2] = {color, key};
  std::vector<std::pair<int, int>> members;  // (key, rank) of this color
  int error = exchange(*group, mine, sizeof mine, [&] {
    for (int rank = 0; rank < group->ranks; rank++) {
      int its[2];
      memcpy(its, group->shared->slots[rank], sizeof its);
      if (its[0] == color) members.push_back({its[1], rank});
    }
  });
  group->splits++;
  *result = nullptr;
  if (error || color < 0) return error;
  std::sort(members.begin(), members.end());
  int rank = int(std::find(members.begin(), members.end(), std::make_pair(key, group->rank)) - members.begin());
  return join(result, int(members.size()), group->name + "_" + std::to_string(group->splits) + "_" + std::to_string(color), rank);
}

int ncclCommCount(const Communicator* group, int* count) { *count = group->ranks; return SUCCESS; }
int ncclCommUserRank(const Communicator* group, int* rank) { *rank = group->rank; return SUCCESS; }
int ncclCommGetAsyncError(Communicator* group, int* error) { *error = group->error; return SUCCESS; }
int ncclCommAbort(Communicator* group) { group->is_aborted = true; return SUCCESS; }

int ncclAllReduce(const void* source, void* target, size_t count, int type, int operation, Communicator* group, void*) {
  size_t bytes = count * size_of(type);
  if (bytes > SLOT_BYTES) { mark_unknown(target, bytes); return SUCCESS; }
  return exchange(*group, source, bytes, [&] { reduce(target, *group, 0, count, type, operation); });
}

int ncclReduce(const void* source, void* target, size_t count, int type, int operation, int root, Communicator* group, void*) {
  size_t bytes = count * size_of(type);
  if (bytes > SLOT_BYTES) { if (group->rank == root) mark_unknown(target, bytes); return SUCCESS; }
  return exchange(*group, source, bytes, [&] { if (group->rank == root) reduce(target, *group, 0, count, type, operation); });
}

int ncclReduceScatter(const void* source, void* target, size_t count, int type, int operation, Communicator* group, void*) {
  size_t bytes = count * size_of(type);
  if (bytes * group->ranks > SLOT_BYTES) { mark_unknown(target, bytes); return SUCCESS; }
  return exchange(*group, source, bytes * group->ranks, [&] { reduce(target, *group, group->rank * bytes, count, type, operation); });
}

int ncclAllGather(const void* source, void* target, size_t count, int type, Communicator* group, void*) {
  size_t bytes = count * size_of(type);
  if (bytes > SLOT_BYTES) { mark_unknown(target, bytes * group->ranks); return SUCCESS; }
  return exchange(*group, source, bytes, [&] {
    for (int rank = 0; rank < group->ranks; rank++) take(static_cast<char*>(target) + rank * bytes, *group, rank, 0, bytes);
  });
}

int ncclBroadcast(const void* source, void* target, size_t count, int type, int root, Communicator* group, void*) {
  size_t bytes = count * size_of(type);
  bool is_root = group->rank == root;
  if (bytes > SLOT_BYTES) { if (!is_root) mark_unknown(target, bytes); return SUCCESS; }
  return exchange(*group, is_root ? source : target, bytes, [&] { take(target, *group, root, 0, bytes); });
}

int ncclBcast(void* data, size_t count, int type, int root, Communicator* group, void* stream) {
  return ncclBroadcast(data, data, count, type, root, group, stream);
}

int ncclRecv(void* target, size_t count, int type, int, Communicator*, void*) { mark_unknown(target, count * size_of(type)); return SUCCESS; }

int ncclAlltoAll(const void*, void* target, size_t count, int type, Communicator* group, void*) {
  mark_unknown(target, count * size_of(type) * group->ranks);
  return SUCCESS;
}

}  // extern "C"
