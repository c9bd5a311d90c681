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
#include <set>
#include <sstream>
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
      "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::histc"};
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
// ---- 'hccl': another backend (gloo) on the memory of the NPU tensors -------------------------
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// What NCCL has: ncclDataType in torch's ProcessGroupNCCL.
bool has_dtype(ScalarType type) {
  static const std::set<ScalarType> types = {at::kChar, at::kByte, at::kFloat, at::kDouble, at::kInt, at::kLong, at::kHalf,
      at::kBool, at::kBFloat16, at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz};
  return types.count(type) > 0;
}
Tensor cpu_of(const Tensor& t) {
  TORCH_CHECK(t.is_privateuseone(), "hccl works on npu tensors, got one on ", t.device());
  TORCH_CHECK(has_dtype(t.scalar_type()), "Input tensor data type is not supported for hccl: ", t.scalar_type());
  return cpu_view(t);
}
Tensors cpu_of(const Tensors& l) {
  Tensors r;
  for (const auto& t : l) r.push_back(cpu_of(t));
  return r;
}
std::vector<Tensors> cpu_of(const std::vector<Tensors>& l) {
  std::vector<Tensors> r;
  for (const auto& t : l) r.push_back(cpu_of(t));
  return r;
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

struct NpuWork final : c10d::Work {  // gloo's work, with NPU tensors for its result
  std::vector<WorkPtr> gloo;
  Tensors out;
  NpuWork(std::vector<WorkPtr> w, Tensors o) : gloo(std::move(w)), out(std::move(o)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& w : gloo) w->wait(timeout);
    return true;
  }
  bool isCompleted() override { return std::all_of(gloo.begin(), gloo.end(), [](auto& w) { return w->isCompleted(); }); }
  bool isSuccess() const override { return std::all_of(gloo.begin(), gloo.end(), [](auto& w) { return w->isSuccess(); }); }
  int sourceRank() const override { return gloo.at(0)->sourceRank(); }
  void synchronize() override { for (auto& w : gloo) w->wait(); }
  Tensors result() override { return out; }
  FuturePtr getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), all_devices());
    FuturePtr inner;
    try {
      if (gloo.size() == 1) inner = gloo[0]->getFuture();
    } catch (const c10::Error&) {}  // some of gloo's works have none
    if (!inner) {
      synchronize();
      future->markCompleted(c10::IValue(out));
      return future;
    }
    inner->addCallback([future, out = out](c10::ivalue::Future& f) {
      if (f.hasError()) future->setError(f.exception_ptr());
      else future->markCompleted(c10::IValue(out));
    });
    return future;
  }
};

struct Hccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::optional<std::vector<WorkPtr>> batch;  // between startCoalescing and endCoalescing
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> g) : Backend(g->getRank(), g->getSize()), gloo(std::move(g)) {}
  WorkPtr work(const WorkPtr& w, Tensors out) {
    if (batch) batch->push_back(w);
    return c10::make_intrusive<NpuWork>(std::vector<WorkPtr>{w}, std::move(out));
  }
  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch.emplace(); }
  WorkPtr endCoalescing() override {
    auto w = c10::make_intrusive<NpuWork>(std::move(*batch), Tensors{});
    batch.reset();
    return w;
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return work(gloo->barrier(o), {}); }
#define IN_PLACE(NAME, OPTS)                                  \
  WorkPtr NAME(Tensors& t, const c10d::OPTS& o) override {    \
    auto c = cpu_of(t);                                       \
    return work(gloo->NAME(c, o), t);                         \
  }
  IN_PLACE(broadcast, BroadcastOptions)
  IN_PLACE(allreduce, AllreduceOptions)
  IN_PLACE(allreduce_coalesced, AllreduceCoalescedOptions)
  IN_PLACE(reduce, ReduceOptions)
#define TO_FROM(NAME, OUT, IN, OPTS, RESULT)                              \
  WorkPtr NAME(OUT out, IN in, const c10d::OPTS& o) override {            \
    auto a = cpu_of(out);                                                 \
    auto b = cpu_of(in);                                                  \
    return work(gloo->NAME(a, b, o), RESULT);                             \
  }
  TO_FROM(allgather, std::vector<Tensors>&, Tensors&, AllgatherOptions, flat(out))
  TO_FROM(allgather_into_tensor_coalesced, Tensors&, Tensors&, AllgatherOptions, out)
  TO_FROM(gather, std::vector<Tensors>&, Tensors&, GatherOptions, flat(out))
  TO_FROM(scatter, Tensors&, std::vector<Tensors>&, ScatterOptions, out)
  TO_FROM(reduce_scatter, Tensors&, std::vector<Tensors>&, ReduceScatterOptions, out)
  TO_FROM(reduce_scatter_tensor_coalesced, Tensors&, Tensors&, ReduceScatterOptions, out)
  TO_FROM(alltoall, Tensors&, Tensors&, AllToAllOptions, out)
#define FLAT(NAME, OPTS)  /* gloo splits along the first dimension, hccl the bytes */ \
  WorkPtr NAME(Tensor& out, Tensor& in, const c10d::OPTS& o) override {               \
    auto a = cpu_of(out).view(-1), b = cpu_of(in).reshape(-1);                        \
    return work(gloo->NAME(a, b, o), {out});                                          \
  }
  FLAT(_allgather_base, AllgatherOptions)
  FLAT(_reduce_scatter_base, ReduceScatterOptions)
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is,
                        const c10d::AllToAllOptions& o) override {
    auto a = cpu_of(out), b = cpu_of(in);
    return work(gloo->alltoall_base(a, b, os, is, o), {out});
  }
  WorkPtr send(Tensors& t, int dst, int tag) override { auto c = cpu_of(t); return work(gloo->send(c, dst, tag), {}); }
  WorkPtr recv(Tensors& t, int src, int tag) override { auto c = cpu_of(t); return work(gloo->recv(c, src, tag), t); }
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
  m.def("hccl_over", [](c10d::Backend* gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(gloo));
  });
}
