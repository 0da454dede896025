// STAND_IN_TRACE: a file that gets, when a process with a context ends, what it asked of the GPU, as JSON: launches of each kernel,
// synchronisations by call, bytes copied, reads of unknown values. The process id is appended to the name.
#include "gpu.h"
#include <cxxabi.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace standin {
namespace {

std::atomic<size_t> launches, unknown_reads, unknown_read_bytes, copied_bytes[3], skipped_bytes[3];
std::mutex names_mutex;
using Counts = std::unordered_map<const char*, size_t>;
Counts& launches_of = *new Counts;  // never destroyed: the trace is written when the process ends
Counts& synchronisations_of = *new Counts;
const char* trace_path() { static const char* path = getenv("STAND_IN_TRACE"); return path; }

std::string readable(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  free(text);
  return result;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) { if (c == '"' || c == '\\') result += '\\'; result += c; }
  return result;
}

void write_counts(FILE* file, const char* title, const Counts& counts, const char* end) {
  std::map<std::string, size_t> by_name;  // one kernel's name may have several addresses
  for (auto& [name, count] : counts) by_name[readable(name)] += count;
  std::vector<std::pair<size_t, std::string>> sorted;
  for (auto& [name, count] : by_name) sorted.push_back({count, name});
  std::sort(sorted.rbegin(), sorted.rend());
  fprintf(file, "\"%s\": {", title);
  const char* separator = "";
  for (auto& [count, name] : sorted) { fprintf(file, "%s\n  \"%s\": %zu", separator, escaped(name).c_str(), count); separator = ","; }
  fprintf(file, "}%s\n", end);
}

}  // namespace

void count_launch(const char* kernel) {
  launches++;
  if (!trace_path()) return;
  std::lock_guard<std::mutex> guard(names_mutex);
  launches_of[kernel ? kernel : "unknown"]++;
}

void count_synchronisation(const char* call) {
  if (!trace_path()) return;
  std::lock_guard<std::mutex> guard(names_mutex);
  synchronisations_of[call]++;
}

void count_copy(int direction, size_t bytes, bool copied) { (copied ? copied_bytes : skipped_bytes)[direction] += bytes; }
void count_unknown_read(size_t bytes) { unknown_reads++; unknown_read_bytes += bytes; }

void write_trace() {
  if (!trace_path()) return;
  FILE* file = fopen((std::string(trace_path()) + "." + std::to_string(getpid())).c_str(), "w");
  if (!file) return;
  std::lock_guard<std::mutex> guard(names_mutex);
  fprintf(file, "{\"launches\": %zu, \"unknown_reads\": %zu, \"unknown_read_bytes\": %zu,\n", launches.load(), unknown_reads.load(), unknown_read_bytes.load());
  const char* directions[] = {"to_gpu", "from_gpu", "on_gpu"};
  for (int direction = 0; direction < 3; direction++)
    fprintf(file, "\"%s\": {\"copied_bytes\": %zu, \"skipped_bytes\": %zu},\n", directions[direction], copied_bytes[direction].load(), skipped_bytes[direction].load());
  write_counts(file, "synchronisations", synchronisations_of, ",");
  write_counts(file, "kernels", launches_of, "}");
  fclose(file);
}

}  // namespace standin
