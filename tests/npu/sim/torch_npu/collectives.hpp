// Collectives of the simulated device: a part of device.cpp, which has what is used here.
#pragma once

namespace {
// ---- 'hccl': another backend (gloo) on the memory of the NPU tensors, as strict as torch's ProcessGroupNCCL -------------
//
// A call returns at once, but the first on a communicator (a group; a pair of a group, for messages outside of a batch) waits for
// the other processes, as NCCL's communicators are made. What a call receives is in memory when somebody has waited, not before,
// and what it sends must not change until then. Calls on a communicator are made one after the other; before each of them the
// processes compare their calls.
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using Gloo = c10::intrusive_ptr<c10d::Backend>;
constexpr int kTextSize = 1024, kCalls = 1 << 20, kBatches = 1 << 21, kOpens = 1 << 22;  // bytes of a call's text; gloo's tags

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
  c10::Stream stream{c10::Stream::DEFAULT, Device(kNpu, 0)};  // of the communicator
  order::Clock complete;
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
  c10::Stream stream{c10::Stream::UNSAFE, Device(kNpu, current), next_stream(Round::kCommunicator)};
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
    for (auto& c : calls) {
      c->wait();
      for (int i = 0; i < device_count(); ++i) order::wait(current_stream(i), c->complete);
    }
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
      struct OnStream {  // whose events the future records
        c10::Stream before;
        explicit OnStream(c10::Stream s) : before(Guard().exchangeStream(s)) {}
        ~OnStream() { Guard().exchangeStream(before); }
      } on_stream(call->stream);
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
    for (auto& [peer, line] : pairs)
      if (line) line->close();
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
  std::shared_ptr<Line>& line(std::optional<int> peer = std::nullopt) {
    auto& found = peer ? pairs[*peer] : all;
    if (!found) {
      meet(peer);
      found = Line::open(gloo, ranks);
    }
    return found;
  }
  void meet(std::optional<int> peer) {  // as ncclCommInitRank does
    std::vector<WorkPtr> works;
    std::deque<Tensors> keep;
    for (int other = 0; other < getSize(); ++other) {
      if (other == getRank() || (peer && other != *peer)) continue;
      for (bool is_sent : {true, false}) {
        keep.push_back({at::zeros({1})});
        const int tag = kOpens + (peer ? 1 : 0);
        works.push_back(is_sent ? gloo->send(keep.back(), other, tag) : gloo->recv(keep.back(), other, tag));
      }
    }
    try {
      for (auto& work : works) work->wait();
    } catch (const std::exception&) {
      TORCH_CHECK(false, "hccl: rank ", ranks[getRank()], " waits for the first call on a communicator of others",
                  peer ? ": rank " + std::to_string(ranks[*peer]) : "");
    }
  }
  // The communicator's stream waits for the caller's. It keeps the memory, as torch's does.
  static void begin(Call& call, const Line& line, const std::string& what, const Tensors& in, const Tensors& out) {
    const auto own = order::stream_of_device(line.stream.device_index(), line.stream.id());
    for (int i = 0; i < device_count(); ++i) order::wait(own, order::now(current_stream(i)));
    Uses uses;
    for (auto& t : in) uses.add(t, false);
    for (auto& t : out) uses.add(t, true);
    order::launch(what, own, uses.all);
    for (auto& use : uses.all) order::record(*use.memory, own);
    call.stream = line.stream;
    call.complete = order::now(own);
  }
  WorkPtr push(std::shared_ptr<Call> call, Tensors out, bool is_alone = false) {
    check_thread(call->what);
    line(is_alone ? std::make_optional(call->messages[0].peer) : std::nullopt)->push(call);
    if (batch && !is_alone) batch->push_back(call);
    return c10::make_intrusive<NpuWork>(std::vector<std::shared_ptr<Call>>{call}, std::move(out));
  }
  // Gloo works on copies of both. The sizes of ``compared`` are the same on all processes.
  template <class Start>
  WorkPtr make(const std::string& what, const Tensors& in, const Tensors& out, Start start, const Tensors& compared) {
    auto call = std::make_shared<Call>();
    Tensors sent, received;
    for (auto& t : in) cpu_of(t, false);
    for (auto& t : out) cpu_of(t, false);
    begin(*call, *line(), what, in, out);
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
    const bool is_open = batch.has_value();
    if (is_open && (batch->empty() || !batch->back()->is_batch)) {
      batch->push_back(std::make_shared<Call>());
      batch->back()->is_batch = true;
    }
    auto call = is_open ? batch->back() : std::make_shared<Call>();
    begin(*call, *line(is_open ? std::nullopt : std::make_optional(peer)), is_sent ? "send" : "receive",
          is_sent ? tensors : Tensors{}, is_sent ? Tensors{} : tensors);
    auto buffer = memory.clone(at::MemoryFormat::Contiguous);
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
