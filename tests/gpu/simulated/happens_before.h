// Which operation of several streams happens before which, and who uses memory without having waited.
//
// Every stream counts its operations, and has a clock: for each stream the newest operation of it that
// is known to have ended. Waiting for an event or another stream joins two clocks, and the host has a clock
// too. An operation may use what another wrote only if the clock of its stream has that operation. (Lamport
// 1978; as vector clocks Fidge 1988 and Mattern 1989.) Kernels run at once, on the CPU: an operation
// that should have waited gets the right values here, and is found by its clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated {

constexpr int kDevices = 4;
constexpr int kStreams = 512;  // of each device
constexpr int kNobody = -1;

using Clock = std::map<int, uint64_t>;  // a stream -> its newest operation that has ended

struct Access {
  int stream = kNobody;
  uint64_t time = 0;
  std::string operation;
};

// An allocation: of a device, or pinned memory of the host.
struct Block {
  size_t nbytes;
  int device, stream;  // where it was made
  uint64_t made;
  bool pinned;
  Access written;
  std::map<int, Access> reads;  // since it was written, the newest of each stream
  std::set<int> recorded;       // streams for which record_stream was called
};

inline int stream_key(int device, int stream) { return device * kStreams + stream; }
inline int device_of(int key) { return key / kStreams; }

class History {
 public:
  // Held during every call below, by those who call.
  std::recursive_mutex mutex;

  // Starts an operation on a stream. Whatever the host waited for has ended.
  uint64_t launch(int stream) {
    join(clocks_[stream], host_);
    return clocks_[stream][stream] = ++counts_[stream];
  }

  const Clock& clock(int stream) { return clocks_[stream]; }
  void wait_for(int stream, const Clock& event) { join(clocks_[stream], event); }
  void host_waits_for(const Clock& event) { join(host_, event); }

  bool stream_knows(int stream, const Access& access) {
    return access.stream == stream || knows(clocks_[stream], access);
  }
  bool host_knows(const Access& access) { return knows(host_, access); }

  // An operation reads or writes the memory at `data`.
  void use(const void* data, int stream, uint64_t time, bool writes, const std::string& operation) {
    Block* block = find(data);
    if (block == nullptr) return;
    const std::string who = operation + " on " + name(stream);
    const bool copies = operation.rfind("copy", 0) == 0;  // may reach another device
    if (!block->pinned && block->device != device_of(stream) && !copies)
      report(who + " uses memory of device " + std::to_string(block->device));
    if (!block->pinned && !stream_knows(stream, {block->stream, block->made, ""}))
      report(who + " uses memory made on " + name(block->stream) + " without waiting");
    if (!stream_knows(stream, block->written))
      report(who + (writes ? " overwrites" : " reads") + " what " + name(block->written) +
             " writes, without waiting");
    if (!writes) {
      block->reads[stream] = {stream, time, operation};
      return;
    }
    for (const auto& [_, read] : block->reads)
      if (!stream_knows(stream, read))
        report(who + " overwrites what " + name(read) + " reads, without waiting");
    block->reads.clear();
    block->written = {stream, time, operation};
  }

  // Memory is full of NaN before its first write and after it is freed.
  void* allocate(size_t nbytes, int device, int stream, bool pinned) {
    if (nbytes == 0) return nullptr;
    auto* data = static_cast<char*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64));
    std::memset(data, 0xFF, nbytes);
    blocks_[data] = {nbytes, device, stream, counts_[stream], pinned, {}, {}, {}};
    return data;
  }

  // What uses the memory next is the stream that made it: it must know of every use by others.
  void free(void* data) {
    if (data == nullptr) return;
    Block& block = blocks_.at(static_cast<char*>(data));
    if (!block.pinned) {
      check_free(block, block.written);
      for (const auto& [_, read] : block.reads) check_free(block, read);
    }
    std::memset(data, 0xFF, block.nbytes);
    blocks_.erase(static_cast<char*>(data));
    std::free(data);
  }

  Block* find(const void* data) {
    auto after = blocks_.upper_bound(static_cast<const char*>(data));
    if (data == nullptr || after == blocks_.begin()) return nullptr;
    auto& [start, block] = *std::prev(after);
    return static_cast<const char*>(data) < start + block.nbytes ? &block : nullptr;
  }

  void report(const std::string& problem) {
    if (problems.size() < 200) problems.push_back(problem);
  }

  static std::string name(int stream) {
    return "stream " + std::to_string(stream % kStreams) + " of device " +
           std::to_string(device_of(stream));
  }

  std::vector<std::string> problems;
  std::map<std::string, int> ran;  // operation -> how often it ran

 private:
  static std::string name(const Access& access) {
    return access.operation + " on " + name(access.stream);
  }

  static void join(Clock& clock, const Clock& other) {
    for (const auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
  }

  static bool knows(const Clock& clock, const Access& access) {
    if (access.stream == kNobody) return true;
    auto found = clock.find(access.stream);
    return found != clock.end() && found->second >= access.time;
  }

  void check_free(const Block& block, const Access& access) {
    if (access.stream == kNobody || block.recorded.count(access.stream)) return;
    if (!host_knows(access) && !stream_knows(block.stream, access))
      report("memory is freed on " + name(block.stream) + " while " + name(access) +
             " may still use it");
  }

  Clock clocks_[kDevices * kStreams], host_;
  uint64_t counts_[kDevices * kStreams] = {};
  std::map<const char*, Block> blocks_;
};

// Never destroyed: tensors may be freed after the library's own objects.
inline History& history() {
  static History* const history = new History();
  return *history;
}

}  // namespace simulated
