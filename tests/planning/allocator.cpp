// Counts what torch's allocator of the CPU gives out and gets back, on all threads: those of gloo free memory too,
// which torch.profiler does not see. Libraries that allocate without torch, and Python itself, are not counted.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, int64_t> sizes;
int64_t live = 0;
int64_t peak = 0;
c10::Allocator* torchs = nullptr;

void give_back(void* memory) {
  if (memory == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = sizes.find(memory);
    if (found != sizes.end()) {
      live -= found->second;
      sizes.erase(found);
    }
  }
  torchs->raw_deleter()(memory);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = torchs->raw_allocate(size);
    if (memory != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[memory] = static_cast<int64_t>(size);
      live += static_cast<int64_t>(size);
      peak = std::max(peak, live);
    }
    return {memory, memory, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

Counting counting;

}  // namespace

extern "C" {

void count_allocations() {
  if (torchs == nullptr) {
    torchs = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&counting, 255);
  }
}

int64_t bytes_live() {
  std::lock_guard<std::mutex> guard(mutex);
  return live;
}

int64_t bytes_peak() {
  std::lock_guard<std::mutex> guard(mutex);
  return peak;
}

void forget_peak() {
  std::lock_guard<std::mutex> guard(mutex);
  peak = live;
}
}
