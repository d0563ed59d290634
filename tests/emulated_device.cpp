// Two devices that live in host memory. They have all that tells a GPU from the CPU above its
// kernels: a dispatch key, allocations of their own, a thread each for backward passes, and errors
// where tensors of several devices meet. Every operator runs the CPU's kernel on the same memory.
// Written against PyTorch's documentation of PrivateUse1; see emulated_device.py.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <thread>

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using torch::jit::Stack;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId streams[COUNT] = {};  // the current one of each device
std::atomic<c10::StreamId> made_streams{0};
const auto main_thread = std::this_thread::get_id();
std::atomic<long> ran_elsewhere{0};  // operators in threads other than the main one

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &std::free, Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const final {
    std::memcpy(to, from, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device before(KIND, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  // Streams have names, and everything has happened on them when the call returns.
  static c10::Stream stream(Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, index_of(device), id);
  }
  static Device index_of(Device device) {
    return Device(KIND, device.has_index() ? device.index() : current);
  }
  c10::Stream getStream(Device device) const override {
    return stream(device, streams[index_of(device).index()]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(device, ++made_streams);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    streams[next.device_index()] = next.id();
    return before;
  }
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = &current;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU).clone();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator.allocate(bytes);
    if (storage.data())
      std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == KIND;
}

// The same memory, as a tensor of the host.
Tensor on_host(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto* memory = const_cast<void*>(tensor.storage().data());
  auto free = [](void* kept) { delete static_cast<Tensor*>(kept); };
  c10::DataPtr data(memory, new Tensor(tensor), free, Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
                       c10::GetAllocator(at::kCPU), true);
  auto seen = at::empty({0}, tensor.options().device(at::kCPU));
  auto* impl = seen.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

// A copy of what a kernel made on the host.
Tensor on_device(const Tensor& made, Device device) {
  if (!made.defined()) return made;
  auto result = at::empty_strided(made.sizes(), made.strides(), made.options().device(device));
  on_host(result).copy_(made);
  return result;
}

IValue on_host(const IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isDevice()) return Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_host(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorList().vec())
      list.push_back(tensor ? std::optional<Tensor>(on_host(*tensor)) : tensor);
    return list;
  }
  return value;
}

// The device that an operator runs on, by its arguments: one, or it is an error.
std::optional<Device> device_of(const c10::FunctionSchema& schema,
                                const std::vector<IValue>& given) {
  std::optional<Device> found;
  auto look = [&](const Tensor& tensor) {
    if (!is_ours(tensor) || (tensor.dim() == 0 && found)) return;
    TORCH_CHECK(!found || *found == tensor.device(),
                "Expected all tensors to be on the same device in ", schema.name());
    found = tensor.device();
  };
  for (const IValue& value : given) {
    if (value.isTensor())
      look(value.toTensor());
    else if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) look(tensor);
    else if (value.isDevice() && value.toDevice().type() == KIND)
      found = value.toDevice();
  }
  bool takes_indices = schema.name().find("index") != std::string::npos;
  for (const IValue& value : given)
    if (value.isTensor() && value.toTensor().defined() && !is_ours(value.toTensor()))
      TORCH_CHECK(value.toTensor().dim() == 0 || takes_indices,
                  "Expected all tensors to be on the same device in ", schema.name());
  return found;
}

// Every operator without a kernel here: the CPU's kernel, on the same memory.
void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  ran_elsewhere += std::this_thread::get_id() != main_thread;
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), results = schema.returns().size();
  const std::vector<IValue> given(stack->end() - arguments, stack->end());
  Device device = device_of(schema, given).value_or(Device(KIND, current));
  for (size_t i = 0; i < arguments; i++)
    (*stack)[stack->size() - arguments + i] = on_host(given[i]);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (size_t j = 0; j < results; j++) {
    IValue& result = (*stack)[stack->size() - results + j];
    const auto* alias = schema.returns()[j].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "no kernel for the view ", schema.name());
    bool is_written = false;
    for (size_t i = 0; alias && i < arguments && !is_written; i++) {
      const auto* of_argument = schema.arguments()[i].alias_info();
      if (!of_argument || !(*of_argument == *alias)) continue;
      if (given[i].isTensor() &&
          result.toTensor().sizes() != given[i].toTensor().sizes()) {  // out=
        given[i].toTensor().resize_(result.toTensor().sizes());
        on_host(given[i].toTensor()).copy_(result.toTensor());
      }
      result = given[i];
      is_written = true;
    }
    if (is_written) continue;
    if (result.isTensor()) {
      result = on_device(result.toTensor(), device);
    } else if (result.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& made : result.toTensorVector()) list.push_back(on_device(made, device));
      result = list;
    }
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  return on_host(tensor).item();
}

const Tensor& resize(const Tensor& tensor, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t bytes = (tensor.storage_offset() + c10::multiply_integers(sizes)) * tensor.itemsize();
  if (tensor.storage().nbytes() < bytes)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_strided(Tensor& tensor, c10::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_strided(tensor, other.storage(), other.storage_offset(), other.sizes(),
                     other.strides());
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage) {
  return set_strided(tensor, storage, 0,
                     {static_cast<int64_t>(storage.nbytes() / tensor.itemsize())}, {1});
}

using Ints = c10::SymIntArrayRef;

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   Ints stride, Ints padding, Ints dilation, bool transposed, Ints output_padding,
                   c10::SymInt groups) {
  std::optional<Tensor> given =
      bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return on_device(at::convolution_symint(on_host(x), on_host(weight), given, stride, padding,
                                          dilation, transposed, output_padding, groups),
                   x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x,
                                                        const Tensor& weight, Ints stride,
                                                        Ints padding, Ints dilation,
                                                        bool transposed, Ints output_padding,
                                                        c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  c10::SymInt channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto [of_x, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(x), on_host(weight), Ints(&channels, 1), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  return {on_device(of_x, x.device()), on_device(of_weight, x.device()),
          on_device(of_bias, x.device())};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_strided);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

#define IN_LOW_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){// the macros say m
                                                 AT_FORALL_LOWER_PRECISION_FP(IN_LOW_PRECISION)
                                                     AT_FORALL_FP32(IN_FLOAT32)
                                                         AT_FORALL_PROMOTE(PROMOTED)}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  module.def("ran_elsewhere", [] { return ran_elsewhere.load(); });
}
