// A simulated Ascend NPU: device type PrivateUse1 (renamed 'npu'), memory on the host.
// Every kernel is the CPU kernel, run on a CPU tensor that shares the NPU tensor's memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace py = pybind11;

namespace {
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Storage;
constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

int device_count() {  // NPU_SIM_DEVICE_COUNT (2 unless set), of those ASCEND_RT_VISIBLE_DEVICES names
  static const int n = [] {
    const char* count = std::getenv("NPU_SIM_DEVICE_COUNT");
    const int all = count ? std::min(std::atoi(count), kMaxDevices) : 2;
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!visible) return all;
    int seen = 0;
    std::stringstream list(visible);
    for (std::string id; std::getline(list, id, ',') && !id.empty() && std::atoi(id.c_str()) < all;) ++seen;
    return seen;
  }();
  return n;
}
// ---- what makes the host wait, or takes a value off the device: reported to a Python function ------------------------
py::object* watcher = nullptr;  // never freed: the interpreter may end before this library
void report(const char* what) {
  if (!watcher) return;
  py::gil_scoped_acquire gil;
  if (watcher) (*watcher)(what);
}
void watch(const py::object& function) {
  delete watcher;
  watcher = function.is_none() ? nullptr : new py::object(function);
}

pid_t owner = 0;  // the process that first used the device
bool in_bad_fork() { return owner && owner != getpid(); }
thread_local DeviceIndex current = 0;
DeviceIndex checked(DeviceIndex i) {
  if (i < 0) return current;
  TORCH_CHECK(i < device_count(), "Invalid NPU device ID ", int(i), ": this machine has ", device_count());
  return i;
}

// ---- memory -------------------------------------------------------------------------------
std::array<std::atomic<int64_t>, kMaxDevices> in_use{}, peak{};

struct Block {  // what an NPU storage's DataPtr owns: the CPU storage with the same bytes
  Storage cpu;
  DeviceIndex dev;
  Block(Storage s, DeviceIndex d) : cpu(std::move(s)), dev(d) {
    TORCH_CHECK(!in_bad_fork(), "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, "
                "you must use the 'spawn' start method");
    owner = getpid();
    auto now = in_use[dev] += static_cast<int64_t>(cpu.nbytes());
    if (now > peak[dev]) peak[dev] = now;
    bytes = cpu.nbytes();
  }
  ~Block() { in_use[dev] -= static_cast<int64_t>(bytes); }
  size_t bytes;
};
void free_block(void* b) { delete static_cast<Block*>(b); }

c10::DataPtr npu_data(const Storage& cpu, DeviceIndex dev) {
  return {cpu.mutable_data(), new Block(cpu, dev), &free_block, Device(kNpu, dev)};
}
Storage new_cpu_storage(size_t n) {
  return Storage(Storage::use_byte_size_t(), n, c10::GetAllocator(c10::kCPU), /*resizable=*/true);
}
struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override { return npu_data(new_cpu_storage(n), current); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dst, const void* src, std::size_t n) const override { std::memcpy(dst, src, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    for (auto* stat : {&s.allocated_bytes[0], &s.reserved_bytes[0]}) {
      stat->current = in_use[checked(i)];
      stat->peak = peak[checked(i)];
    }
    return s;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex i) override { peak[checked(i)] = in_use[checked(i)].load(); }
} allocator;

// A CPU storage over the same bytes as an NPU storage.
Storage cpu_storage(const Storage& npu) {
  auto& dp = npu.data_ptr();
  if (dp.get_deleter() == &free_block) return static_cast<Block*>(dp.get_context())->cpu;
  c10::DataPtr alias(npu.mutable_data(), new Storage(npu), [](void* s) { delete static_cast<Storage*>(s); }, c10::kCPU);
  return Storage(Storage::use_byte_size_t(), npu.nbytes(), std::move(alias), c10::GetAllocator(c10::kCPU), true);
}
Tensor with_storage(Storage s, c10::DispatchKey key, const Tensor& meta) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(key), meta.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(meta.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  t._set_conj(meta.is_conj());
  t._set_neg(meta.is_neg());
  return t;
}
thread_local std::array<c10::StreamId, kMaxDevices> stream_of{};
// A copy to the device on another stream than the first is made when something else is done on that stream, a stream waits
// for it, or the host for the device.
std::vector<std::pair<Tensor, Tensor>> uploads;
std::atomic<int64_t> recorded_streams{0};
void arrive(bool all = true);
Tensor cpu_view(const Tensor& t) {  // an NPU tensor as a CPU tensor of the same memory
  if (!t.defined() || !t.is_privateuseone()) return t;
  if (stream_of[current]) arrive(false);
  return with_storage(cpu_storage(t.storage()), c10::DispatchKey::CPU, t);
}
Tensor to_npu(const Tensor& t, DeviceIndex dev) {  // a fresh CPU tensor as an NPU tensor, no copy
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kStrided, "npu_sim: only strided tensors");
  Storage s(Storage::use_byte_size_t(), t.storage().nbytes(), npu_data(t.storage(), dev), &allocator, true);
  return with_storage(std::move(s), c10::DispatchKey::PrivateUse1, t);
}

// ---- random numbers: one generator per device, apart from the CPU's ------------------------
// As accelerators have it: a seed and an offset, 16 bytes, of which every kernel takes some numbers.
struct NpuGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::detail::getNonDeterministicRandom(), offset_ = 0;
  explicit NpuGenerator(DeviceIndex i) : GeneratorImpl(Device(kNpu, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte && state.is_cpu(), "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    set_offset(words[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  NpuGenerator* clone_impl() const override { return new NpuGenerator(*this); }
  NpuGenerator(const NpuGenerator& other) : NpuGenerator(other.device_.index()) { seed_ = other.seed_; offset_ = other.offset_; }
  uint64_t next() {  // a seed for the numbers of one kernel: SplitMix64
    uint64_t z = seed_ + 0x9E3779B97F4A7C15 * (offset_ / 4 + 1);
    offset_ += 4;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
};
const at::Generator& default_generator(DeviceIndex i) {
  static std::vector<at::Generator> gens = [] {
    std::vector<at::Generator> v;
    for (int d = 0; d < device_count(); ++d) v.push_back(at::make_generator<NpuGenerator>(d));
    return v;
  }();
  return gens[checked(i)];
}
struct SwapRng {  // lets a CPU kernel draw from an NPU generator
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor saved = cpu.get_state();
  explicit SwapRng(const at::Generator& npu) { cpu.set_current_seed(npu.get<NpuGenerator>()->next()); }
  ~SwapRng() { cpu.set_state(saved); }
};

// ---- the kernels ----------------------------------------------------------------------------
bool takes_cpu_indices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
}

bool needs_sizes_from_device(const std::string& name) {  // the shape or the value of what they give is in the data
  static const std::set<std::string> names = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave"};
  return names.count(name) > 0;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n_args = schema.arguments().size();
  const auto first = stack->size() - n_args;
  if (needs_sizes_from_device(schema.name())) report("size");
  std::vector<Tensor> seen;  // NPU tensors in, with their CPU views in `views`
  std::vector<Tensor> views;
  std::optional<Device> device;
  std::optional<Tensor> stray;  // a CPU tensor among the arguments
  std::optional<at::Generator> generator;
  bool may_mix = takes_cpu_indices(schema.name());
  const bool joins = schema.name() == "aten::cat" || schema.name() == "aten::_stack";  // takes no number of the host either

  auto swap = [&](const Tensor& t, bool index) -> Tensor {
    if (!t.defined()) return t;
    if (index && t.is_privateuseone() && t.scalar_type() == at::kBool) report("size");
    if (!t.is_privateuseone()) {
      if ((t.dim() > 0 || joins) && !(index && may_mix)) stray = t;
      return t;
    }
    TORCH_CHECK(!device || !device->has_index() || *device == t.device() || seen.empty(),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", t.device(), "! (when checking arguments of ", schema.name(), ")");
    device = t.device();
    seen.push_back(t);
    views.push_back(cpu_view(t));
    return views.back();
  };
  std::vector<c10::IValue> original(stack->begin() + first, stack->end());
  for (size_t i = 0; i < n_args; ++i) {
    c10::IValue& v = (*stack)[first + i];
    if (v.isTensor()) {
      v = swap(v.toTensor(), false);
    } else if (v.isTensorList()) {
      std::vector<Tensor> l;
      for (const auto& t : v.toTensorVector()) l.push_back(swap(t, false));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> l;
      for (const std::optional<Tensor>& t : v.toOptionalTensorList())
        l.push_back(t ? std::optional<Tensor>(swap(*t, true)) : std::nullopt);
      v = l;
    } else if (v.isDevice() && v.toDevice().is_privateuseone()) {
      if (seen.empty()) device = Device(kNpu, checked(v.toDevice().index()));
      v = Device(c10::kCPU);
    } else if (v.isGenerator()) {
      generator = v.toGenerator();
      TORCH_CHECK(generator->device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
                  generator->device().type(), "'");
      v = c10::IValue();
    }
  }
  TORCH_CHECK(!stray || seen.empty(),
      "Expected all tensors to be on the same device, but found at least two devices, ",
      seen.empty() ? Device(kNpu) : seen[0].device(), " and cpu! (when checking arguments of ", schema.name(), ")");
  const DeviceIndex dev = device && device->has_index() ? device->index() : current;
  {
    std::optional<SwapRng> rng;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) rng.emplace(generator ? *generator : default_generator(dev));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  // A kernel may have resized what it wrote to.
  for (size_t i = 0; i < seen.size(); ++i) {
    auto* out = seen[i].unsafeGetTensorImpl();
    if (out->storage().data() != views[i].storage().data()) {
      out->storage().set_data_ptr_noswap(npu_data(views[i].storage(), seen[i].get_device()));
      out->storage().set_nbytes(views[i].storage().nbytes());
    }
    if (out->sizes() != views[i].sizes() || out->strides() != views[i].strides()) {
      out->set_storage_offset(views[i].storage_offset());
      out->set_sizes_and_strides(views[i].sizes(), views[i].strides());
    }
  }
  auto back = [&](const Tensor& t) -> Tensor {
    if (!t.defined() || !t.is_cpu() || (!device && seen.empty())) return t;
    for (size_t i = 0; i < views.size(); ++i)
      if (t.is_same(views[i])) return seen[i];
    for (size_t i = 0; i < views.size(); ++i)  // a view of an argument
      if (t.storage().unsafeGetStorageImpl() == views[i].storage().unsafeGetStorageImpl())
        return with_storage(seen[i].storage(), c10::DispatchKey::PrivateUse1, t);
    return to_npu(t, dev);
  };
  for (auto it = stack->end() - schema.returns().size(); it != stack->end(); ++it) {
    if (it->isTensor()) {
      *it = back(it->toTensor());
    } else if (it->isTensorList()) {
      std::vector<Tensor> l;
      for (const auto& t : it->toTensorVector()) l.push_back(back(t));
      *it = l;
    }
  }
}

// Shape and storage operators: the CPU kernels work on any device.
void as_is(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// A copy into page-locked memory that nobody waits for is made when somebody waits: whoever reads too early sees what was
// there before.
std::mutex pinned_mutex, late_mutex;
std::set<const void*> pinned;
std::vector<std::pair<Tensor, Tensor>> late;  // what the source held when it was asked for, and where it goes
bool is_pinned(const Tensor& t) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return t.is_cpu() && pinned.count(t.storage().data());
}
void arrive(bool all) {
  std::vector<std::pair<Tensor, Tensor>> due;
  {
    std::lock_guard<std::mutex> lock(late_mutex);
    due.swap(uploads);
    if (all) {
      due.insert(due.end(), late.begin(), late.end());
      late.clear();
    }
  }
  at::AutoDispatchBelowAutograd guard;
  for (auto& [value, place] : due) place.copy_(value);
}
void wait_for_device() {
  report("synchronize");
  arrive();
}

void read_scalar(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  report("item");
  arrive();
  as_is(op, stack);
}

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (non_blocking && is_pinned(dst)) {
    auto value = cpu_view(src).clone();
    std::lock_guard<std::mutex> lock(late_mutex);
    late.emplace_back(value, dst);
    return dst;
  }
  if (!dst.is_privateuseone()) {
    report("copy to host");
    arrive();
  }
  if (!src.is_privateuseone() && is_pinned(src)) arrive();  // the device makes its copies in order
  if (!src.is_privateuseone() && !non_blocking) report("blocking copy to device");
  auto d = cpu_view(dst);
  if (non_blocking && is_pinned(src) && stream_of[current]) {
    std::lock_guard<std::mutex> lock(late_mutex);
    uploads.emplace_back(src, d);
    return dst;
  }
  d.copy_(cpu_view(src));
  return dst;
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
void same_device(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              a.device(), " and ", b.device(), "!");
}
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef stride,
    at::IntArrayRef pad, at::IntArrayRef dil, bool transposed, at::IntArrayRef out_pad, int64_t groups) {
  same_device(x, w);
  if (b && b->defined()) same_device(x, *b);
  auto y = at::convolution(cpu_view(x), cpu_view(w), b ? std::optional<Tensor>(cpu_view(*b)) : b, stride, pad, dil,
                           transposed, out_pad, groups);
  return to_npu(y, x.get_device());
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w,
    at::IntArrayRef stride, at::IntArrayRef pad, at::IntArrayRef dil, bool transposed, at::IntArrayRef out_pad,
    int64_t groups, std::array<bool, 3> mask) {
  const auto bias = w.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto r = at::convolution_backward(cpu_view(g), cpu_view(x), cpu_view(w), at::IntArrayRef{bias}, stride, pad, dil,
                                    transposed, out_pad, groups, mask);
  auto up = [&](const Tensor& t) { return t.defined() ? to_npu(t, x.get_device()) : t; };
  return {up(std::get<0>(r)), up(std::get<1>(r)), up(std::get<2>(r))};
}
void record_stream(Tensor&, c10::Stream) { ++recorded_streams; }
bool shallow_copy(const Tensor& a, const Tensor& b) {  // lets Module.to() keep its Parameter objects
  return a.layout() == c10::kStrided && b.layout() == c10::kStrided;
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the 'math' implementation
}
Tensor histc(const Tensor& t, int64_t bins, const Scalar& low, const Scalar& high) {  // the CPU has none of integers
  report("size");
  return to_npu(at::histc(cpu_view(t).to(at::kDouble), bins, low, high).to(t.scalar_type()), t.get_device());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto name : {"as_strided", "view", "_reshape_alias", "unfold", "resize_", "set_", "set_.source_Tensor",
                    "set_.source_Storage", "set_.source_Storage_storage_offset"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_is>());
  m.impl("_local_scalar_dense", torch::CppFunction::makeFromBoxedFunction<&read_scalar>());
  for (auto name : {"native_layer_norm", "native_group_norm", "_stack", "addr"})  // not PyTorch's composite kernels
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  for (auto name : {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_",
                    "_fused_sgd_.tensor_lr"})  // kernels of its own, for who asks
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
  m.impl("_has_compatible_shallow_copy_type", shallow_copy);
}

// The CPU's copy resolves lazy conjugates and negatives; torch would copy them to resolve them before a copy, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---- autocast: the operator lists PyTorch keeps for every backend ---------------------------
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define F32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define F32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
Tensor bce_banned(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast; use binary_cross_entropy_with_logits");
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(F32)
  AT_FORALL_FP32_SET_OPT_DTYPE(F32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  m.impl("binary_cross_entropy", bce_banned);
}

// ---- devices, streams, events: all work but some copies is done when a call returns ----------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return Device(kNpu, current); }
  void setDevice(Device d) const override { current = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  c10::Stream getStream(Device d) const override {
    auto i = checked(d.index());
    return c10::Stream(c10::Stream::UNSAFE, Device(kNpu, i), stream_of[i]);
  }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, Device(kNpu, checked(d.index())), 0); }
  c10::Stream getNewStream(Device d, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, Device(kNpu, checked(d.index())), next++);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    stream_of[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device(); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for_device(); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new std::chrono::steady_clock::time_point;
    *static_cast<std::chrono::steady_clock::time_point*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<std::chrono::steady_clock::time_point*>(e); }
  void block(void*, const c10::Stream&) const override { arrive(false); }
  bool queryEvent(void*) const override {
    arrive();
    return true;
  }
  void synchronizeEvent(void*) const override { wait_for_device(); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    using P = std::chrono::steady_clock::time_point*;
    return std::chrono::duration<double, std::milli>(*static_cast<P>(b) - *static_cast<P>(a)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = std::malloc(std::max<size_t>(n, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(p);
    return {p, p, &release, c10::kCPU};
  }
  static void release(void* p) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(p);
    std::free(p);
  }
  void copy_data(void* dst, const void* src, std::size_t n) const override { std::memcpy(dst, src, n); }
} pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<NpuGenerator>(checked(i)); }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(p);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex i) const override { current = checked(i); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { auto old = current; current = checked(i); return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current : exchangeDevice(i); }
  at::Device getDeviceFromPtr(void*) const override { return Device(kNpu, current); }
  void resizePrivateUse1Bytes(const Storage& s, size_t n) const override {
    auto fresh = npu_data(new_cpu_storage(n), s.device().index());
    if (n && s.nbytes()) std::memcpy(fresh.get(), s.data(), std::min<size_t>(n, s.nbytes()));
    s.set_data_ptr_noswap(std::move(fresh));
    s.set_nbytes(n);
  }
};
[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kNpu, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// torch_npu.npu_change_data_ptr: make dst's storage begin at src's storage + offset elements.
void change_data_ptr(const Tensor& dst, const Tensor& src, int64_t offset) {
  auto base = cpu_storage(src.storage());
  const size_t at = offset * src.element_size(), n = dst.storage().nbytes();
  TORCH_CHECK(offset >= 0 && at + n <= src.storage().nbytes(), "Offsets overflow");
  c10::DataPtr inner(static_cast<char*>(base.mutable_data()) + at, new Storage(base),
                     [](void* s) { delete static_cast<Storage*>(s); }, c10::kCPU);
  Storage part(Storage::use_byte_size_t(), n, std::move(inner), c10::GetAllocator(c10::kCPU), true);
  dst.storage().set_data_ptr_noswap(npu_data(part, dst.get_device()));
}
// ---- 'hccl': another backend (gloo) on the memory of the NPU tensors, as strict as torch's ProcessGroupNCCL -------------
//
// A call returns at once. What it receives is in memory when somebody has waited, not before, and what it sends must not change
// until then. Calls on a communicator (a group; a pair of a group, for messages outside of a batch) are made one after the other;
// before each of them the processes compare their calls.
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using Gloo = c10::intrusive_ptr<c10d::Backend>;
constexpr int kTextSize = 1024, kCalls = 1 << 20, kBatches = 1 << 21;  // bytes of a call's text; tags of gloo's messages

bool has_dtype(ScalarType type) {  // of ncclDataType in ProcessGroupNCCL
  static const std::set<ScalarType> types = {at::kChar, at::kByte, at::kFloat, at::kDouble, at::kInt, at::kLong, at::kHalf,
      at::kBool, at::kBFloat16, at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz};
  return types.count(type) > 0;
}
Tensor cpu_of(const Tensor& t, bool is_message) {
  TORCH_CHECK(t.is_privateuseone(), "hccl works on npu tensors, got one on ", t.device());
  TORCH_CHECK(has_dtype(t.scalar_type()), "Input tensor data type is not supported for hccl: ", t.scalar_type());
  TORCH_CHECK(is_message || t.is_contiguous() || t.is_contiguous(t.suggest_memory_format()), "Tensors must be contiguous");
  TORCH_CHECK(!t.is_neg(), "hccl would send a lazy negative as it is in memory");
  return cpu_view(t);
}
std::string text_of(const Tensors& tensors) {
  std::stringstream text;
  for (const auto& t : tensors) text << ' ' << t.scalar_type() << '[' << t.numel() << ']';
  return text.str();
}
std::string text_of(const c10d::ReduceOp& op) {
  static const char* names[] = {"sum", "avg", "product", "min", "max"};
  const auto kind = static_cast<size_t>(op.op_);
  TORCH_CHECK(kind < 5, "Cannot use bitwise ReduceOps with hccl");
  return names[kind];
}
Tensors flat(const std::vector<Tensors>& l) {
  Tensors r;
  for (const auto& t : l) r.insert(r.end(), t.begin(), t.end());
  return r;
}
std::vector<Device> all_devices() {
  std::vector<Device> v;
  for (int i = 0; i < device_count(); ++i) v.emplace_back(kNpu, i);
  return v;
}
Tensor as_text(const std::string& text) {
  auto t = at::zeros({kTextSize}, at::kByte);
  std::memcpy(t.data_ptr(), text.data(), std::min<size_t>(text.size(), kTextSize - 1));
  return t;
}
std::string as_string(const Tensor& text) { return static_cast<const char*>(text.data_ptr()); }

struct Message {  // between two processes
  int peer;
  bool is_sent;
  Tensor buffer;
};
struct Call {  // one of a process
  std::string what;
  bool is_batch = false;
  std::vector<Message> messages;  // or
  std::function<WorkPtr()> start;  // a call of all processes of the group
  std::vector<std::pair<Tensor, Tensor>> sent;      // memory of the device, and what was in it at the call
  std::vector<std::pair<Tensor, Tensor>> received;  // memory of the device, and what comes into it
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false, has_arrived = false, arrives_itself = false;
  std::exception_ptr error;
  std::function<void()> then;

  void arrive() {  // with the mutex
    if (has_arrived || error) return;
    has_arrived = true;
    for (auto& [memory, before] : sent)
      TORCH_CHECK(std::memcmp(memory.contiguous().data_ptr(), before.data_ptr(), before.nbytes()) == 0,
                  "hccl: ", what, ": the tensor was changed before anybody waited");
    for (auto& [memory, value] : received) memory.copy_(value);
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return is_done; });
    if (error) std::rethrow_exception(error);
    arrive();
  }
  void finish(std::exception_ptr reason) {
    std::function<void()> next;
    {
      std::lock_guard<std::mutex> lock(mutex);
      error = std::move(reason);
      is_done = true;
      try {
        if (arrives_itself) arrive();
      } catch (...) { error = std::current_exception(); }
      next = std::move(then);
    }
    changed.notify_all();
    if (next) next();
  }
};

void compare(const Gloo& gloo, const std::vector<int64_t>& ranks, const Call& call) {
  std::vector<Tensor> mine{as_text(call.what)};
  std::vector<Tensors> all(1);
  for (int r = 0; r < gloo->getSize(); ++r) all[0].push_back(at::zeros({kTextSize}, at::kByte));
  gloo->allgather(all, mine)->wait();
  for (int r = 0; r < gloo->getSize(); ++r)
    TORCH_CHECK(as_string(all[0][r]) == call.what.substr(0, kTextSize - 1), "hccl: rank ", ranks[gloo->getRank()], " calls ",
                call.what, ", and rank ", ranks[r], " calls ", as_string(all[0][r]), " on the same communicator");
}
// The messages of a process to a peer must be what the peer receives, in the same order, and the other way round.
std::string text_for(const Call& call, int peer, bool is_sent) {
  Tensors found;
  for (auto& m : call.messages)
    if (m.peer == peer && m.is_sent == is_sent) found.push_back(m.buffer);
  return text_of(found);
}
void exchange(const Gloo& gloo, const std::vector<int64_t>& ranks, const Call& call) {
  const int tag = call.is_batch ? kBatches : kCalls;
  std::set<int> peers;
  for (auto& m : call.messages) peers.insert(m.peer);
  std::vector<WorkPtr> works;
  std::vector<Tensors> keep;
  std::map<int, Tensor> theirs;
  auto begin = [&](const Tensor& t, int peer, bool is_sent, int with) {
    keep.push_back({t});
    works.push_back(is_sent ? gloo->send(keep.back(), peer, with) : gloo->recv(keep.back(), peer, with));
  };
  for (int peer : peers) {
    theirs[peer] = at::zeros({kTextSize}, at::kByte);
    begin(as_text("sends" + text_for(call, peer, true) + " and receives" + text_for(call, peer, false)), peer, true, tag);
    begin(theirs[peer], peer, false, tag);
  }
  for (auto& w : works) w->wait();
  for (int peer : peers) {
    auto expected = "sends" + text_for(call, peer, false) + " and receives" + text_for(call, peer, true);
    TORCH_CHECK(as_string(theirs[peer]) == expected.substr(0, kTextSize - 1), "hccl: rank ", ranks[gloo->getRank()], " sends",
                text_for(call, peer, true), " and receives", text_for(call, peer, false), ", and rank ", ranks[peer], " ",
                as_string(theirs[peer]), " on the same communicator");
  }
  works.clear();
  for (auto& m : call.messages) begin(m.buffer, m.peer, m.is_sent, tag + 1);
  for (auto& w : works) w->wait();
}

struct Line {  // a communicator: the calls in their order, by a thread of its own
  Gloo gloo;
  std::vector<int64_t> ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Call>> waiting;
  bool is_closed = false, has_ended = false;
  static std::shared_ptr<Line> open(const Gloo& gloo, const std::vector<int64_t>& ranks) {
    auto line = std::make_shared<Line>();
    line->gloo = gloo;
    line->ranks = ranks;
    std::thread([line] { line->run(); }).detach();
    return line;
  }
  void push(std::shared_ptr<Call> call) {
    std::lock_guard<std::mutex> lock(mutex);
    waiting.push_back(std::move(call));
    changed.notify_all();
  }
  void close() {  // and let go of gloo, unless a call will never end
    std::unique_lock<std::mutex> lock(mutex);
    is_closed = true;
    changed.notify_all();
    changed.wait_for(lock, std::chrono::seconds(1), [this] { return has_ended; });
  }
  void run() {
    while (true) {
      std::shared_ptr<Call> call;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return is_closed || !waiting.empty(); });
        if (waiting.empty()) {
          gloo.reset();
          has_ended = true;
          changed.notify_all();
          return;
        }
        call = waiting.front();
        waiting.pop_front();
      }
      std::exception_ptr error;
      try {
        if (call->messages.empty()) {
          compare(gloo, ranks, *call);
          call->start()->wait();
        } else {
          exchange(gloo, ranks, *call);
        }
      } catch (const std::exception& reason) {
        const std::string text = reason.what();
        error = std::make_exception_ptr(c10::Error(
            {__func__, __FILE__, __LINE__}, text.rfind("hccl: ", 0) == 0 ? text : "hccl: " + call->what + ": " + text));
      }
      call->start = nullptr;
      call->finish(error);
    }
  }
};

struct NpuWork final : c10d::Work {
  std::vector<std::shared_ptr<Call>> calls;
  Tensors out;
  NpuWork(std::vector<std::shared_ptr<Call>> c, Tensors o) : calls(std::move(c)), out(std::move(o)) {}
  bool wait(std::chrono::milliseconds) override {
    for (auto& c : calls) c->wait();
    return true;
  }
  bool isCompleted() override {
    return std::all_of(calls.begin(), calls.end(), [](auto& c) {
      std::lock_guard<std::mutex> lock(c->mutex);
      return c->is_done;
    });
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return out; }
  FuturePtr getFuture() override {  // who asks for it waits for it in streams
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), all_devices());
    TORCH_CHECK(calls.size() == 1, "hccl: a batch has no future");
    auto call = calls[0];
    auto complete = [future, out = out, call = call.get()] {
      if (call->error) future->setError(call->error);
      else future->markCompleted(c10::IValue(out));
    };
    {
      std::lock_guard<std::mutex> lock(call->mutex);
      call->arrives_itself = true;
      if (!call->is_done) {
        call->then = complete;
        return future;
      }
      call->arrive();
    }
    complete();
    return future;
  }
};

struct Hccl final : c10d::Backend {
  Gloo gloo;
  std::vector<int64_t> ranks;
  std::shared_ptr<Line> all;
  std::map<int, std::shared_ptr<Line>> pairs;
  std::optional<std::vector<std::shared_ptr<Call>>> batch;  // between startCoalescing and endCoalescing
  std::string owner;  // the thread of Python that has used it
  Hccl(Gloo g, std::vector<int64_t> r) : Backend(g->getRank(), g->getSize()), gloo(std::move(g)), ranks(std::move(r)) {
    for (int i = static_cast<int>(ranks.size()); i < getSize(); ++i) ranks.push_back(i);
  }
  ~Hccl() override {
    if (all) all->close();
    for (auto& [peer, line] : pairs) line->close();
  }
  void check_thread(const std::string& what) {  // not those of autograd, which run while another one waits
    py::gil_scoped_acquire gil;
    auto threading = py::module_::import("threading");
    auto found = threading.attr("_active").attr("get")(threading.attr("get_ident")());
    if (found.is_none() || py::isinstance(found, threading.attr("_DummyThread"))) return;
    auto name = found.attr("name").cast<std::string>();
    if (owner.empty()) owner = name;
    TORCH_CHECK(owner == name, "hccl: thread ", name, " calls ", what, " on a communicator of thread ", owner);
  }
  WorkPtr push(std::shared_ptr<Call> call, Tensors out, bool is_alone = false) {
    check_thread(call->what);
    auto& line = is_alone ? pairs[call->messages[0].peer] : all;
    if (!line) line = Line::open(gloo, ranks);
    line->push(call);
    if (batch && !is_alone) batch->push_back(call);
    return c10::make_intrusive<NpuWork>(std::vector<std::shared_ptr<Call>>{call}, std::move(out));
  }
  // Gloo works on copies of both. The sizes of ``compared`` are the same on all processes.
  template <class Start>
  WorkPtr make(const std::string& what, const Tensors& in, const Tensors& out, Start start, const Tensors& compared) {
    auto call = std::make_shared<Call>();
    Tensors sent, received;
    for (auto& t : in) {
      auto memory = cpu_of(t, false);
      sent.push_back(memory.clone());
      call->sent.emplace_back(memory, memory.clone(at::MemoryFormat::Contiguous));
    }
    const bool in_place = in.size() == out.size() && std::equal(in.begin(), in.end(), out.begin(), [](auto& a, auto& b) {
      return a.is_same(b);
    });
    for (size_t i = 0; i < out.size(); ++i) {
      auto memory = cpu_of(out[i], false);
      received.push_back(in_place ? sent[i] : memory.clone());
      call->received.emplace_back(memory, received.back());
    }
    call->what = what + text_of(compared);
    call->start = [start = std::move(start), sent, received]() mutable { return start(sent, received); };
    return push(call, out);
  }
  WorkPtr message(const Tensors& tensors, int peer, bool is_sent) {
    TORCH_CHECK(tensors.size() == 1, "hccl sends one tensor");
    TORCH_CHECK(peer >= 0, "hccl receives from no unknown rank");
    auto memory = cpu_of(tensors[0], true);
    auto buffer = memory.clone(at::MemoryFormat::Contiguous);
    const bool is_open = batch.has_value();
    if (is_open && (batch->empty() || !batch->back()->is_batch)) {
      batch->push_back(std::make_shared<Call>());
      batch->back()->is_batch = true;
    }
    auto call = is_open ? batch->back() : std::make_shared<Call>();
    call->messages.push_back({peer, is_sent, buffer});
    call->what += std::string(call->what.empty() ? "" : ", ") + (is_sent ? "send to " : "receive from ") +
                  std::to_string(ranks[peer]) + text_of({memory});
    if (is_sent) call->sent.emplace_back(memory, buffer);
    else call->received.emplace_back(memory, buffer);
    if (!is_open) return push(call, is_sent ? Tensors{} : tensors, true);
    return c10::make_intrusive<NpuWork>(std::vector<std::shared_ptr<Call>>{}, tensors);
  }
  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch.emplace(); }
  WorkPtr endCoalescing() override {
    auto calls = std::move(*batch);
    batch.reset();
    for (auto& call : calls)
      if (call->is_batch) push(call, {});
    return c10::make_intrusive<NpuWork>(std::move(calls), Tensors{});
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return make("barrier", {}, {}, [g = gloo, o](Tensors&, Tensors&) { return g->barrier(o); }, {});
  }
#define IN_PLACE(NAME, OPTS, WHAT)                                                                     \
  WorkPtr NAME(Tensors& t, const c10d::OPTS& o) override {                                             \
    return make(WHAT, t, t, [g = gloo, o](Tensors& in, Tensors&) { return g->NAME(in, o); }, t);       \
  }
  IN_PLACE(broadcast, BroadcastOptions, "broadcast from " + std::to_string(ranks[o.rootRank]))
  IN_PLACE(allreduce, AllreduceOptions, "all_reduce " + text_of(o.reduceOp))
  IN_PLACE(allreduce_coalesced, AllreduceCoalescedOptions, "all_reduce_coalesced " + text_of(o.reduceOp))
  IN_PLACE(reduce, ReduceOptions, "reduce " + text_of(o.reduceOp) + " to " + std::to_string(ranks[o.rootRank]))
#define MANY_TO_ONE(NAME, OPTS, WHAT) /* lists of tensors for one of every process */                  \
  WorkPtr NAME(std::vector<Tensors>& out, Tensors& in, const c10d::OPTS& o) override {                 \
    return make(WHAT, in, flat(out), [g = gloo, o, has = !out.empty()](Tensors& a, Tensors& b) {       \
      std::vector<Tensors> lists;                                                                      \
      if (has) lists.push_back(b);                                                                     \
      return g->NAME(lists, a, o);                                                                     \
    }, in);                                                                                            \
  }
  MANY_TO_ONE(allgather, AllgatherOptions, "all_gather")
  MANY_TO_ONE(gather, GatherOptions, "gather to " + std::to_string(ranks[o.rootRank]))
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    return make("reduce_scatter " + text_of(o.reduceOp), flat(in), out, [g = gloo, o](Tensors& a, Tensors& b) {
      std::vector<Tensors> lists{a};
      return g->reduce_scatter(b, lists, o);
    }, flat(in));
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    return make("scatter from " + std::to_string(ranks[o.rootRank]), flat(in), out, [g = gloo, o, has = !in.empty()](Tensors& a, Tensors& b) {
      std::vector<Tensors> lists;
      if (has) lists.push_back(a);
      return g->scatter(b, lists, o);
    }, out);
  }
#define TO_FROM(NAME, OPTS, WHAT)                                                                      \
  WorkPtr NAME(Tensors& out, Tensors& in, const c10d::OPTS& o) override {                              \
    return make(WHAT, in, out, [g = gloo, o](Tensors& a, Tensors& b) { return g->NAME(b, a, o); }, in); \
  }
  TO_FROM(allgather_into_tensor_coalesced, AllgatherOptions, "all_gather_coalesced")
  TO_FROM(reduce_scatter_tensor_coalesced, ReduceScatterOptions, "reduce_scatter_coalesced " + text_of(o.reduceOp))
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return make("all_to_all", in, out, [g = gloo, o](Tensors& a, Tensors& b) { return g->alltoall(b, a, o); }, {});
  }
#define FLAT(NAME, OPTS, WHAT)  /* gloo splits along the first dimension, hccl the bytes */            \
  WorkPtr NAME(Tensor& out, Tensor& in, const c10d::OPTS& o) override {                                \
    return make(WHAT, {in}, {out}, [g = gloo, o](Tensors& a, Tensors& b) {                             \
      auto from = a[0].view(-1), to = b[0].view(-1);                                                   \
      return g->NAME(to, from, o);                                                                     \
    }, {in});                                                                                          \
  }
  FLAT(_allgather_base, AllgatherOptions, "all_gather_into_tensor")
  FLAT(_reduce_scatter_base, ReduceScatterOptions, "reduce_scatter_tensor " + text_of(o.reduceOp))
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is,
                        const c10d::AllToAllOptions& o) override {
    return make("all_to_all_single", {in}, {out}, [g = gloo, o, os, is](Tensors& a, Tensors& b) mutable {
      return g->alltoall_base(b[0], a[0], os, is, o);
    }, {});
  }
  WorkPtr send(Tensors& t, int dst, int) override { return message(t, dst, true); }
  WorkPtr recv(Tensors& t, int src, int) override { return message(t, src, false); }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &device_count);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int i) { current = checked(static_cast<DeviceIndex>(i)); });
  m.def("default_generator", [](int i) { return default_generator(static_cast<DeviceIndex>(i)); });
  m.def("in_bad_fork", &in_bad_fork);
  m.def("report", &report);
  m.def("watch", &watch);
  m.def("recorded_streams", [] { return recorded_streams.load(); });
  m.def("change_data_ptr", &change_data_ptr);
  m.def("hccl_over", [](c10d::Backend* gloo, std::vector<int64_t> ranks) -> Gloo {
    return c10::make_intrusive<Hccl>(Gloo::reclaim_copy(gloo), std::move(ranks));
  });
}
