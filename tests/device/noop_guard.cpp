// Tells a torch without CUDA that a CUDA device may be current, so that autograd records fake CUDA tensors.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using CudaGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, CudaGuard)
}  // namespace
