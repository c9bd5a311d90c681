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

#include "streams.hpp"

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
thread_local std::array<c10::StreamId, kMaxDevices> stream_of{};
order::Stream current_stream(DeviceIndex i) { return order::stream_of_device(i, stream_of[i]); }
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
    order::allocated(memory, current_stream(dev));
  }
  ~Block() {
    in_use[dev] -= static_cast<int64_t>(bytes);
    order::freed(memory);
  }
  size_t bytes;
  order::Memory memory;
};
void free_block(void* b) { delete static_cast<Block*>(b); }

c10::DataPtr npu_data(const Storage& cpu, DeviceIndex dev) {
  return {cpu.mutable_data(), new Block(cpu, dev), &free_block, Device(kNpu, dev)};
}
Storage new_cpu_storage(size_t n) {  // full of NaN, as what is freed may be
  Storage fresh(Storage::use_byte_size_t(), n, c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  if (n) std::memset(fresh.mutable_data(), 0xFF, n);
  return fresh;
}
Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}
void record_use(const c10::DataPtr& pointer, const c10::Stream& stream) {
  if (auto* block = block_of(pointer)) order::record(block->memory, order::stream_of_device(stream.device_index(), stream.id()));
}
struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override { return npu_data(new_cpu_storage(n), current); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dst, const void* src, std::size_t n) const override { std::memcpy(dst, src, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_use(pointer, stream); }
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
std::atomic<int64_t> recorded_streams{0};
Tensor cpu_view(const Tensor& t) {  // an NPU tensor as a CPU tensor of the same memory
  if (!t.defined() || !t.is_privateuseone()) return t;
  return with_storage(cpu_storage(t.storage()), c10::DispatchKey::CPU, t);
}
// Tensors in a call of the device's current stream, in the order of their use; those of the host and empty ones do not count.
struct Uses {
  std::vector<order::Use> all;
  void add(const Tensor& t, bool is_write) {
    if (!t.defined() || !t.is_privateuseone() || !t.storage().nbytes()) return;
    if (auto* block = block_of(t.storage().data_ptr())) all.push_back({&block->memory, is_write});
  }
  order::Work launch(const std::string& what, DeviceIndex dev) const { return order::launch(what, current_stream(dev), all); }
};
void launch(const char* what, DeviceIndex dev, std::initializer_list<Tensor> read, std::initializer_list<Tensor> written = {}) {
  Uses uses;
  for (auto& t : read) uses.add(t, false);
  for (auto& t : written) uses.add(t, true);
  uses.launch(what, dev);
}
void wait_for_stream(DeviceIndex dev) { order::host_waits(order::now(current_stream(dev))); }
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
  bool gives_sizes = needs_sizes_from_device(schema.name());
  if (schema.name() == "aten::repeat_interleave") gives_sizes = stack->back().isNone();  // else output_size says it
  Uses uses;
  bool is_view = false, is_write = false;  // of the argument that is looked at
  std::vector<Tensor> seen;  // NPU tensors in, with their CPU views in `views`
  std::vector<Tensor> views;
  std::optional<Device> device;
  std::optional<Tensor> stray;  // a CPU tensor among the arguments
  std::optional<at::Generator> generator;
  bool may_mix = takes_cpu_indices(schema.name());
  const bool joins = schema.name() == "aten::cat" || schema.name() == "aten::_stack";  // takes no number of the host either

  auto swap = [&](const Tensor& t, bool index) -> Tensor {
    if (!t.defined()) return t;
    if (index && t.is_privateuseone() && t.scalar_type() == at::kBool) gives_sizes = true;
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
    if (!is_view) uses.add(t, is_write);
    return views.back();
  };
  std::vector<c10::IValue> original(stack->begin() + first, stack->end());
  for (size_t i = 0; i < n_args; ++i) {
    c10::IValue& v = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    is_write = alias && alias->isWrite();
    is_view = alias && !is_write;
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
  const auto work = uses.launch(schema.name(), dev);
  if (gives_sizes) {
    report("size");
    wait_for_stream(dev);
  }
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
      order::made(block_of(out->storage().data_ptr())->memory, work);
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
    auto made = to_npu(t, dev);
    if (schema.name().rfind("aten::empty", 0) != 0) order::made(block_of(made.storage().data_ptr())->memory, work);
    return made;
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

std::mutex pinned_mutex;
std::set<const void*> pinned;
bool is_pinned(const Tensor& t) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return t.is_cpu() && pinned.count(t.storage().data());
}

void read_scalar(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  report("item");
  const auto t = stack->back().toTensor();
  launch("item", t.get_device(), {t});
  wait_for_stream(t.get_device());
  as_is(op, stack);
}

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  const DeviceIndex dev = (src.is_privateuseone() ? src : dst).get_device();
  Uses uses;
  uses.add(src, false);
  uses.add(dst, true);
  if (src.is_privateuseone() && dst.is_privateuseone() && src.device() != dst.device()) {  // of one device: the others wait
    const auto other = current_stream(dst.get_device());
    order::wait(current_stream(dev), order::now(other));
    uses.launch("a copy", dev);
    order::wait(other, order::now(current_stream(dev)));
  } else if (src.is_privateuseone() && dst.is_privateuseone()) {
    uses.launch("a copy", dev);
  } else {
    const bool is_upload = dst.is_privateuseone();
    const auto work = uses.launch(is_upload ? "an upload" : "a download", dev);
    if (non_blocking && is_pinned(is_upload ? src : dst)) {
      order::put_off({work, order::now(current_stream(dev)), is_upload, is_upload ? src : cpu_view(src).clone(), cpu_view(dst)});
      return dst;
    }
    if (!is_upload || !non_blocking) {
      report(is_upload ? "blocking copy to device" : "copy to host");
      wait_for_stream(dev);
    }
  }
  cpu_view(dst).copy_(cpu_view(src));
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
  launch("convolution", x.get_device(), {x, w, b ? *b : Tensor()});
  auto y = at::convolution(cpu_view(x), cpu_view(w), b ? std::optional<Tensor>(cpu_view(*b)) : b, stride, pad, dil,
                           transposed, out_pad, groups);
  return to_npu(y, x.get_device());
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w,
    at::IntArrayRef stride, at::IntArrayRef pad, at::IntArrayRef dil, bool transposed, at::IntArrayRef out_pad,
    int64_t groups, std::array<bool, 3> mask) {
  launch("convolution_backward", x.get_device(), {g, x, w});
  const auto bias = w.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto r = at::convolution_backward(cpu_view(g), cpu_view(x), cpu_view(w), at::IntArrayRef{bias}, stride, pad, dil,
                                    transposed, out_pad, groups, mask);
  auto up = [&](const Tensor& t) { return t.defined() ? to_npu(t, x.get_device()) : t; };
  return {up(std::get<0>(r)), up(std::get<1>(r)), up(std::get<2>(r))};
}
void record_stream(Tensor& t, c10::Stream stream) {
  ++recorded_streams;
  record_use(t.storage().data_ptr(), stream);
}
bool shallow_copy(const Tensor& a, const Tensor& b) {  // lets Module.to() keep its Parameter objects
  return a.layout() == c10::kStrided && b.layout() == c10::kStrided;
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the 'math' implementation
}
Tensor histc(const Tensor& t, int64_t bins, const Scalar& low, const Scalar& high) {  // the CPU has none of integers
  report("size");
  launch("histc", t.get_device(), {t});
  wait_for_stream(t.get_device());
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

// ---- devices, streams, events ------------------------------------------------------------------
// In turn, so that clocks stay short. As torch has it, streams of a high priority are others, which FSDP's gradients come from.
enum class Round { kNormal, kHigh, kCommunicator };
c10::StreamId next_stream(Round round) {
  static std::atomic<c10::StreamId> given[3]{};
  const auto which = static_cast<int>(round);
  return 1 + 128 * which + given[which]++ % 128;
}
struct Event {
  std::chrono::steady_clock::time_point time;
  order::Clock before;
};
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
  c10::Stream getNewStream(Device d, int priority = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kNpu, checked(d.index())), next_stream(priority < 0 ? Round::kHigh : Round::kNormal));
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    stream_of[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  static order::Stream key(const c10::Stream& s) { return order::stream_of_device(s.device_index(), s.id()); }
  void synchronizeStream(const c10::Stream& s) const override {
    report("synchronize");
    order::host_waits(order::now(key(s)));
  }
  void synchronizeDevice(const DeviceIndex i) const override {
    report("synchronize");
    order::host_waits_for_device(checked(i));
  }
  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), order::now(key(s))};
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void block(void* e, const c10::Stream& s) const override {
    if (e) order::wait(key(s), static_cast<Event*>(e)->before);
  }
  bool queryEvent(void* e) const override {
    if (e) order::host_waits(static_cast<Event*>(e)->before);
    return true;
  }
  void synchronizeEvent(void* e) const override {
    report("synchronize");
    if (e) order::host_waits(static_cast<Event*>(e)->before);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& s) const override { record_use(pointer, s); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(b)->time - static_cast<Event*>(a)->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = std::malloc(std::max<size_t>(n, 1));
    std::memset(p, 0xFF, n);
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
    if (auto* block = block_of(s.data_ptr()); block && n && s.nbytes()) {
      order::launch("resize", current_stream(s.device().index()), {{&block->memory, false}});
    }
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
}  // namespace

#include "collectives.hpp"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &device_count);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int i) { current = checked(static_cast<DeviceIndex>(i)); });
  m.def("default_generator", [](int i) { return default_generator(static_cast<DeviceIndex>(i)); });
  m.def("in_bad_fork", &in_bad_fork);
  m.def("report", &report);
  m.def("watch", &watch);
  m.def("recorded_streams", [] { return recorded_streams.load(); });
  m.def("arrive", [](const std::string& when, unsigned seed) {
    TORCH_CHECK(when == "late" || when == "at once" || when == "random", "copies arrive late, at once or random, not ", when);
    order::Lock lock(order::mutex);
    order::arrival = when;
    order::dice.seed(seed);
  });
  m.def("change_data_ptr", &change_data_ptr);
  m.def("hccl_over", [](c10d::Backend* gloo, std::vector<int64_t> ranks) -> Gloo {
    return c10::make_intrusive<Hccl>(Gloo::reclaim_copy(gloo), std::move(ranks));
  });
}
