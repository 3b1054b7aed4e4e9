// Lets a torch without CUDA accept a current CUDA device, so that autograd records fake CUDA tensors.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using CudaGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, CudaGuard)
}  // namespace
