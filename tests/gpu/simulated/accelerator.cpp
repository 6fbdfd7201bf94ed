// A simulated accelerator: four devices with streams and events, behind torch's key for third parties.
//
// Tensors are on `simulated:0` … `simulated:3`, in memory of the host. torch's autograd runs a thread for
// each of the devices, as for GPUs. Every operation falls back to the CPU's kernel, and is refused when its
// tensors are on several devices. Memory and streams are watched as happens_before.h says.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "happens_before.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using OptionalTensor = std::optional<Tensor>;
using Lock = std::lock_guard<std::recursive_mutex>;

constexpr auto kSimulated = c10::kPrivateUse1;

thread_local int current_device = 0;
thread_local int current_stream[kDevices] = {};
thread_local int depth = 0;  // above 0 inside of an operation: what it calls is a part of it

int stream_on(int device) { return stream_key(device, current_stream[device]); }
bool is_simulated(const Tensor& tensor) { return tensor.is_privateuseone(); }
const void* memory_of(const Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().data() : nullptr;
}

struct Inside {
  Inside() { ++depth; }
  ~Inside() { --depth; }
};

// -- memory -------------------------------------------------------------------------------------

void free_memory(void* data) {
  Lock lock(history().mutex);
  history().free(data);
}

struct Allocator final : c10::Allocator {
  explicit Allocator(bool pinned) : pinned(pinned) {}
  c10::DataPtr allocate(size_t nbytes) override {
    Lock lock(history().mutex);
    void* data = history().allocate(nbytes, current_device, stream_on(current_device), pinned);
    return {data, data, &free_memory, pinned ? Device(c10::kCPU) : Device(kSimulated, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  const bool pinned;
};

Allocator device_allocator(false), pinned_allocator(true);
REGISTER_ALLOCATOR(kSimulated, &device_allocator);

// -- copies to pinned memory, whose data arrive when somebody has waited for them ------------------

struct Arriving {
  Access copied;
  Tensor target, data;
};

std::vector<Arriving>& arriving() {
  static auto* const copies = new std::vector<Arriving>();
  return *copies;
}

template <class Condition>
void let_arrive(Condition has_waited) {
  std::vector<Arriving> rest;
  for (auto& copy : arriving()) {
    if (has_waited(copy))
      copy.target.copy_(copy.data);
    else
      rest.push_back(copy);
  }
  arriving().swap(rest);
}

void host_waits(const Clock& event) {
  history().host_waits_for(event);
  let_arrive([](const Arriving& copy) { return history().host_knows(copy.copied); });
}

// -- devices, streams and events ------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kSimulated; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kSimulated, static_cast<DeviceIndex>(current_device)}; }
  Device exchangeDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices);
    const Device before = getDevice();
    current_device = device.index();
    return before;
  }
  void setDevice(Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }

  static int index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static int key_of(const Stream& stream) { return stream_key(stream.device_index(), stream.id()); }
  static Stream stream_of(Device device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(kSimulated, index_of(device)), id);
  }
  Stream getStream(Device device) const noexcept override {
    return stream_of(device, current_stream[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static int made[kDevices] = {};
    Lock lock(history().mutex);
    const int id = ++made[index_of(device)];
    TORCH_CHECK(id < kStreams, "too many streams");
    return stream_of(device, id);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    const Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }

  // An event is the clock of its stream when it was recorded.
  void record(void** event, const Stream& stream, DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of device ", int(device),
                " is recorded on a stream of device ", int(stream.device_index()));
    auto& known = history();
    Lock lock(known.mutex);
    known.launch(key_of(stream));
    if (*event == nullptr) *event = new Clock();
    *static_cast<Clock*>(*event) = known.clock(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(history().mutex);
    if (event != nullptr) history().wait_for(key_of(stream), *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override {
    Lock lock(history().mutex);
    if (event != nullptr) host_waits(*static_cast<Clock*>(event));
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(history().mutex);
    host_waits(history().clock(key_of(stream)));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock(history().mutex);
    for (int id = 0; id < kStreams; ++id) host_waits(history().clock(stream_key(device, id)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Lock lock(history().mutex);
    if (auto* block = history().find(data.get())) block->recorded.insert(key_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  Device getDeviceFromPtr(void*) const override { return Guard().getDevice(); }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(history().mutex);
    const auto* block = history().find(data);
    return block != nullptr && block->pinned;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  // Random numbers are the CPU's, so that results can be compared with those of the CPU.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto data = device_allocator.allocate(nbytes);
    const size_t kept = std::min<size_t>(nbytes, impl->nbytes());
    if (kept > 0) std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

// -- operations -----------------------------------------------------------------------------------

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

OptionalTensor on_cpu(const OptionalTensor& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  return on_cpu(*tensor);
}

Device device_or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kSimulated, current_device);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           at::dtype_or_default(dtype));
}

// What a copy does to streams. True if its data arrive later.
bool record_copy(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto& known = history();
  Lock lock(known.mutex);
  const bool from_device = is_simulated(source), to_device = is_simulated(target);
  const bool with_host = from_device != to_device;
  const int stream = stream_on((from_device ? source : target).get_device());
  // As in CUDA, a copy between devices waits for both of their current streams, and both wait for it.
  const bool between = !with_host && source.get_device() != target.get_device();
  const int other = between ? stream_on(target.get_device()) : stream;
  if (between) {
    known.launch(other);
    known.wait_for(stream, known.clock(other));
  }
  const auto time = known.launch(stream);
  const auto place = [](const Tensor& t) { return is_simulated(t) ? std::to_string(t.get_device()) : "host"; };
  const std::string operation = "copy " + place(source) + "->" + place(target);
  known.ran[operation + (non_blocking ? " non-blocking" : "")]++;
  known.use(memory_of(source), stream, time, false, operation);
  known.use(memory_of(target), stream, time, true, operation);
  if (between) known.wait_for(other, known.clock(stream));
  if (!with_host) return false;
  if (to_device)
    let_arrive([&](const Arriving& copy) {
      return memory_of(copy.target) == memory_of(source) && known.stream_knows(stream, copy.copied);
    });
  const auto* block = known.find(memory_of(from_device ? target : source));
  const bool pinned = block != nullptr && block->pinned;
  if (non_blocking && pinned) {
    if (from_device) arriving().push_back({{stream, time, operation}, target, on_cpu(source).clone()});
    return from_device;
  }
  if (non_blocking && from_device) known.report(operation + " into memory that is not pinned");
  host_waits(known.clock(stream));
  return false;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (depth == 0 && record_copy(source, target, non_blocking)) return target;
  Tensor written = is_simulated(target) ? on_cpu(target) : target;
  written.copy_(is_simulated(source) ? on_cpu(source) : source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void record_stream(Tensor& tensor, Stream stream) {
  Lock lock(history().mutex);
  if (auto* block = history().find(memory_of(tensor))) block->recorded.insert(Guard::key_of(stream));
  history().ran["record_stream"]++;
}

// An operation on the current stream of a device, with the tensors that it reads and writes.
class Operation {
 public:
  Operation(std::string name, int device) : name_(std::move(name)), device_(device) {
    Lock lock(history().mutex);
    stream_ = stream_on(device);
    time_ = history().launch(stream_);
    history().ran[name_]++;
  }
  void reads(const Tensor& tensor) const { use(tensor, false); }
  void writes(const Tensor& tensor) const { use(tensor, true); }
  void waits() const {
    Lock lock(history().mutex);
    host_waits(history().clock(stream_));
  }
  // A result of the CPU as a tensor of the device.
  Tensor result(const Tensor& computed) const {
    if (!computed.defined()) return computed;
    Tensor made;
    {
      Inside inside;
      made = at::empty_strided(computed.sizes(), computed.strides(),
                               computed.options().device(Device(kSimulated, device_)));
      made.copy_(computed);
    }
    writes(made);
    return made;
  }

 private:
  void use(const Tensor& tensor, bool writes) const {
    if (!tensor.defined()) return;
    TORCH_CHECK(is_simulated(tensor) && tensor.get_device() == device_,
                "Expected all tensors to be on the same device, but ", name_, " has ", tensor.device(),
                " and simulated:", device_);
    Lock lock(history().mutex);
    history().use(memory_of(tensor), stream_, time_, writes, name_);
  }

  std::string name_;
  int device_, stream_;
  uint64_t time_;
};

Operation operation_on(const char* name, const Tensor& first, std::initializer_list<OptionalTensor> read) {
  Operation operation(name, first.get_device());
  operation.reads(first);
  for (const auto& tensor : read)
    if (tensor) operation.reads(*tensor);
  return operation;
}

at::Scalar item(const Tensor& tensor) {
  operation_on("item", tensor, {}).waits();
  return on_cpu(tensor).item();
}

// Calls `visit(tensor, written)` for every tensor among arguments or results.
template <class Visit>
void each_tensor(const torch::jit::Stack& stack, const std::vector<c10::Argument>& arguments, bool results,
                 Visit visit) {
  const size_t start = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[start + i];
    const auto* alias = arguments[i].alias_info();
    const bool written = results || (alias != nullptr && alias->isWrite());
    const auto visit_one = [&](const c10::IValue& one) {
      if (one.isTensor() && one.toTensor().defined()) visit(one.toTensor(), written);
    };
    visit_one(value);
    if (value.isList())
      for (const c10::IValue& one : value.toListRef()) visit_one(one);
  }
}

// The device of an operation's tensors, or else of its arguments, or else the current one.
int device_of_arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  int device = -1;
  each_tensor(stack, schema.arguments(), false, [&](const Tensor& tensor, bool) {
    if (device < 0 && is_simulated(tensor)) device = tensor.get_device();
  });
  for (size_t i = stack.size() - schema.arguments().size(); device < 0 && i < stack.size(); ++i)
    if (stack[i].isDevice()) device = Guard::index_of(stack[i].toDevice());
  return device < 0 ? current_device : device;
}

// Any operation without a kernel of its own: the CPU's kernel, on copies.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const int device = device_of_arguments(schema, *stack);
  c10::DeviceGuard guard(Device(kSimulated, device));
  if (depth > 0) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  const Operation operation(name, device);
  const bool indexes = name.find("index") != std::string::npos;  // takes indices of the host
  each_tensor(*stack, schema.arguments(), false, [&](const Tensor& tensor, bool written) {
    const bool of_host = tensor.is_cpu() && (tensor.dim() == 0 || indexes || tensor.numel() == 0);
    if (of_host) return;
    written ? operation.writes(tensor) : operation.reads(tensor);
  });
  {
    Inside inside;
    at::native::cpu_fallback(op, stack);
  }
  each_tensor(*stack, schema.returns(), true, [&](const Tensor& tensor, bool) {
    if (is_simulated(tensor)) operation.writes(tensor);
  });
  static const std::set<std::string> waiting{"aten::nonzero", "aten::masked_select", "aten::equal",
                                             "aten::_unique2", "aten::is_nonzero"};
  if (waiting.count(name)) operation.waits();
}

// -- operations that torch does not let fall back ---------------------------------------------------

Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                   at::IntArrayRef output_padding, int64_t groups) {
  const auto operation = operation_on("convolution", x, {weight, bias});
  at::AutoDispatchBelowAutograd below;
  return operation.result(at::convolution(on_cpu(x), on_cpu(weight), on_cpu(bias), stride, padding, dilation,
                                          transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const auto operation = operation_on("convolution_backward", grad, {x, weight});
  at::AutoDispatchBelowAutograd below;
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [grad_x, grad_weight, grad_bias] = at::convolution_backward(
      on_cpu(grad), on_cpu(x), on_cpu(weight), at::OptionalIntArrayRef(bias_sizes), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {operation.result(grad_x), operation.result(grad_weight), operation.result(grad_bias)};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const OptionalTensor& weight,
                                              const OptionalTensor& bias, const OptionalTensor& mean,
                                              const OptionalTensor& variance, bool training, double momentum,
                                              double eps) {
  const auto operation = operation_on("native_batch_norm", x, {weight, bias, mean, variance});
  at::AutoDispatchBelowAutograd below;
  const auto [y, saved_mean, saved_inverse] =
      at::native_batch_norm(on_cpu(x), on_cpu(weight), on_cpu(bias), on_cpu(mean), on_cpu(variance), training,
                            momentum, eps);
  if (training)
    for (const auto& buffer : {mean, variance})
      if (buffer) operation.writes(*buffer);
  return {operation.result(y), operation.result(saved_mean), operation.result(saved_inverse)};
}

// The CPU has no fused cell, which torch asks of any other device.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden,
                                             const Tensor& cell, const OptionalTensor& input_bias,
                                             const OptionalTensor& hidden_bias) {
  const auto operation = operation_on("lstm_cell", from_input, {from_hidden, cell, input_bias, hidden_bias});
  at::AutoDispatchBelowAutograd below;
  Tensor gates = on_cpu(from_input) + on_cpu(from_hidden);
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = gates + on_cpu(*bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const Tensor next = f * on_cpu(cell) + i * g;
  return {operation.result(o * next.tanh()), operation.result(next),
          operation.result(at::cat({i, f, g, o}, 1))};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hidden,
                                                      const OptionalTensor& grad_next, const Tensor& cell,
                                                      const Tensor& next, const Tensor& gates, bool has_bias) {
  const auto operation = operation_on("lstm_cell_backward", gates, {grad_hidden, grad_next, cell, next});
  at::AutoDispatchBelowAutograd below;
  const auto parts = on_cpu(gates).chunk(4, 1);
  const Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  const Tensor bounded = on_cpu(next).tanh();
  const Tensor hidden = on_cpu(grad_hidden).value_or(at::zeros_like(bounded));
  const Tensor grad = hidden * o * (1 - bounded * bounded) + on_cpu(grad_next).value_or(at::zeros_like(bounded));
  const Tensor grad_gates =
      at::cat({grad * g * i * (1 - i), grad * on_cpu(cell) * f * (1 - f), grad * i * (1 - g * g),
               hidden * bounded * o * (1 - o)},
              1);
  return {operation.result(grad_gates), operation.result(grad * f),
          has_bias ? operation.result(grad_gates.sum(0)) : Tensor()};
}

// -- views, which compute nothing -------------------------------------------------------------------

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, c10::Storage source) { return at::native::set_(self, std::move(source)); }
Tensor& set_storage_part(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv3d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

// The value, and an empty one in its place.
template <class T>
T take(T& value) {
  Lock lock(history().mutex);
  return std::exchange(value, {});
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.attr("device_count") = kDevices;
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = device; });
  m.def("take_problems", [] { return take(history().problems); }, "What was used without waiting, since the last call.");
  m.def("take_counts", [] { return take(history().ran); }, "How often each operation ran, since the last call.");
}
