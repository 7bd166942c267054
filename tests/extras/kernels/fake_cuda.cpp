// What PyTorch asks of CUDA before it computes, answered without a GPU: so that its CPU build traces tensors of the
// device "cuda", forward and backward. Tensors have no memory there (FakeTensorMode), and no kernel ever runs.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kCuda;
  c10::Stream only() const { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }

  c10::DeviceType type() const override { return kCuda; }
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

const c10::impl::DeviceGuardImplRegistrar registered(kCuda, new OneDevice());

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at {
using ::CUDAHooks; // PyTorch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
