// The order of a device's work, as far as streams, events and waits of the host give one: nothing else does on an accelerator.
//
// Each piece of work has a number on its stream. A clock tells, for every stream, up to which number work is known to be complete
// (Lamport 1978; Mattern 1989, "Virtual Time and Global States of Distributed Systems"). Kernels are computed at once, in the order
// of the calls, and the same bits come out in any order that clocks allow if no work touches memory before it knows the work that
// touched it last: that is checked, and says which of the two did not wait.
//
// Copies between the device and page-locked memory are made late, at once or at random, because the host sees their results.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace order {
using Stream = int64_t;  // of all devices
inline Stream stream_of_device(int device, int64_t id) { return (static_cast<int64_t>(device) << 48) | id; }
inline std::string name_of(Stream s) {
  return s & ((1LL << 48) - 1) ? "stream " + std::to_string(s & ((1LL << 48) - 1)) : "the default stream";
}

struct Work {
  Stream stream = 0;
  uint64_t number = 0;  // 0: none
  std::string what;
};
struct Clock {
  std::map<Stream, uint64_t> until;
  uint64_t waits = 0;  // of the host, up to which it was joined
  bool knows(Stream stream, uint64_t number) const {
    auto found = until.find(stream);
    return found != until.end() && found->second >= number;
  }
  bool knows(const Work& work) const { return !work.number || knows(work.stream, work.number); }
  void join(const Clock& other) {
    for (auto& [stream, number] : other.until) {
      auto& own = until[stream];
      own = std::max(own, number);
    }
  }
};
struct Memory {  // how it was used
  Stream home = 0;  // whose later work gets the memory when it is freed
  std::map<Stream, Work> earlier;  // of other tensors that may have had it before, and was not complete when they were freed
  Work written;
  std::map<Stream, Work> read;
  std::set<Stream> recorded;
};
struct Use {
  Memory* memory;
  bool is_write;
};

inline std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
inline std::map<Stream, Clock> clocks;
inline Clock host;  // what the host has waited for, and how often
inline std::map<Stream, std::map<Stream, Work>> left;  // for whose memory comes next, by home: work on what was freed

inline Clock& clock_of(Stream stream) {
  auto& clock = clocks[stream];
  if (clock.waits != host.waits) clock.join(host);  // work begins after the call that asks for it
  clock.waits = host.waits;
  return clock;
}

// ---- copies between the device and page-locked memory ---------------------------------------------------------------------
struct Copy {
  Work work;
  Clock before;
  bool is_upload;
  at::Tensor value, place;  // of an upload: the memory of the host, which is read when the copy is made
};
inline std::vector<Copy> late;
inline std::string arrival = "late";  // or "at once", "random"
inline std::mt19937 dice;

// Those that are complete when the ones for which ``is_due`` holds are, in their order.
template <class Due>
std::vector<Copy> taken(Due is_due) {
  std::vector<Copy> due, rest;
  std::vector<bool> goes(late.size());
  for (size_t i = late.size(); i-- > 0;) {
    goes[i] = is_due(late[i]);
    for (size_t j = i + 1; j < late.size() && !goes[i]; ++j) goes[i] = goes[j] && late[j].before.knows(late[i].work);
  }
  for (size_t i = 0; i < late.size(); ++i) (goes[i] ? due : rest).push_back(std::move(late[i]));
  late = std::move(rest);
  return due;
}
inline void make(const std::vector<Copy>& copies) {  // without the mutex: a tensor's end may need Python
  at::AutoDispatchBelowAutograd guard;
  for (auto& copy : copies) copy.place.copy_(copy.value);
}
inline void put_off(Copy copy) {
  std::vector<Copy> due;
  {
    Lock lock(mutex);
    late.push_back(std::move(copy));
    if (arrival == "at once") due = taken([](const Copy&) { return true; });
  }
  make(due);
}

// ---- work ------------------------------------------------------------------------------------------------------------------
inline void check(const Work& before, const Clock& clock, const Work& work, const char* does, std::string& error) {
  if (clock.knows(before) || !error.empty()) return;
  error = work.what + " on " + name_of(work.stream) + " touches memory that " + before.what + " on " + name_of(before.stream) +
          " " + does + ", and does not wait for it";
}
inline void check_earlier(const Memory& memory, const Clock& clock, const Work& work, std::string& error) {
  for (auto& [_, before] : memory.earlier)
    check(before, clock, work, "used until it was freed (record_stream keeps it)", error);
}
// A call that a stream makes.
inline Work launch(const std::string& what, Stream stream, const std::vector<Use>& uses) {
  std::vector<Copy> due;
  Work work{stream, 0, what};
  std::string error;
  {
    Lock lock(mutex);
    auto& clock = clock_of(stream);
    work.number = ++clock.until[stream];
    for (auto& use : uses) {
      check_earlier(*use.memory, clock, work, error);
      check(use.memory->written, clock, work, "writes", error);
      if (use.is_write)
        for (auto& [_, before] : use.memory->read) check(before, clock, work, "reads", error);
    }
    for (auto& use : uses) {
      if (use.is_write) {
        use.memory->written = work;
        use.memory->read.clear();
        use.memory->earlier.clear();
      } else {
        use.memory->read[stream] = work;
      }
    }
    if (!late.empty()) {
      const bool is_random = arrival == "random";
      due = taken([&](const Copy& copy) { return (copy.is_upload && clock.knows(copy.work)) || (is_random && dice() % 4 == 0); });
    }
  }
  make(due);
  TORCH_CHECK(error.empty(), "npu: ", error);
  return work;
}
inline void allocated(Memory& memory, Stream stream) {  // earlier work of the stream may still use what it gets
  Lock lock(mutex);
  auto& clock = clock_of(stream);
  auto& before = left[stream];
  for (auto each = before.begin(); each != before.end();) each = clock.knows(each->second) ? before.erase(each) : std::next(each);
  memory.home = stream;
  memory.earlier = before;
  memory.written = {stream, clock.until[stream], "what had the memory before"};
}
inline void made(Memory& memory, const Work& work) {  // by work that began before it had the memory
  std::string error;
  {
    Lock lock(mutex);
    check_earlier(memory, clock_of(work.stream), work, error);
    memory.earlier.clear();
    memory.written = work;
  }
  TORCH_CHECK(error.empty(), "npu: ", error);
}
inline void freed(const Memory& memory) {
  Lock lock(mutex);
  auto& clock = clock_of(memory.home);
  auto note = [&](const Work& work) {
    if (work.stream == memory.home || memory.recorded.count(work.stream) || clock.knows(work)) return;
    auto& last = left[memory.home][work.stream];
    if (last.number < work.number) last = work;
  };
  note(memory.written);
  for (auto& [_, work] : memory.read) note(work);
}
inline void record(Memory& memory, Stream stream) {
  Lock lock(mutex);
  memory.recorded.insert(stream);
}

// ---- waiting ---------------------------------------------------------------------------------------------------------------
inline Clock now(Stream stream) {
  Lock lock(mutex);
  return clock_of(stream);
}
inline void wait(Stream stream, const Clock& clock) {
  Lock lock(mutex);
  clocks[stream].join(clock);
}
inline void host_waits(const Clock& clock) {
  std::vector<Copy> due;
  {
    Lock lock(mutex);
    host.join(clock);
    ++host.waits;
    due = taken([](const Copy& copy) { return host.knows(copy.work); });
  }
  make(due);
}
inline void host_waits_for_device(int device) {
  Clock all;
  {
    Lock lock(mutex);
    for (auto& [stream, clock] : clocks)
      if (stream >> 48 == device) all.join(clock);
  }
  host_waits(all);
}
}  // namespace order
