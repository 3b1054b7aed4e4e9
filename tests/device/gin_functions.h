// NCCL's device functions that cuda/gpu/gin_net.h calls, one a line: return type, name, parameter types.
//
// Included with NCCL_FUNCTION defined, to declare them for a stand-in or to compare them with NCCL's headers. Order is
// the type of kAcquire.
NCCL_FUNCTION(void, ncclGinGet_v2, ncclGin_C*, ncclTeam, int, ncclWindow_t, size_t, ncclWindow_t, size_t, size_t,
              ncclCoopAny, bool, ncclGinDescriptorSmem*, uint32_t, ncclGinSegmentType_t)
NCCL_FUNCTION(void, ncclGinPut_v3, ncclGin_C*, ncclTeam, int, ncclWindow_t, size_t, ncclWindow_t, size_t, size_t,
              ncclGinSignalType, ncclWindow_t, size_t, ncclGinSignal_t, bool, ncclGinSignalOp_t, unsigned long, bool,
              ncclGinCounter_t, ncclCoopAny, bool, ncclGinDescriptorSmem*, cuda::thread_scope, cuda::thread_scope,
              uint32_t, ncclGinSegmentType_t)
NCCL_FUNCTION(void, ncclGinPutValue_v3, ncclGin_C*, ncclTeam, int, ncclWindow_t, size_t, unsigned long, size_t,
              ncclGinSignalType, ncclWindow_t, size_t, ncclGinSignal_t, bool, ncclGinSignalOp_t, unsigned long,
              ncclCoopAny, bool, ncclGinDescriptorSmem*, cuda::thread_scope, cuda::thread_scope, uint32_t)
NCCL_FUNCTION(void, ncclGinSignal_v3, ncclGin_C*, ncclTeam, int, ncclGinSignalType, ncclWindow_t, size_t,
              ncclGinSignal_t, bool, ncclGinSignalOp_t, unsigned long, ncclCoopAny, bool, ncclGinDescriptorSmem*,
              cuda::thread_scope, cuda::thread_scope, uint32_t)
NCCL_FUNCTION(void, ncclGinFlush, ncclGin_C*, ncclCoopAny, Order)
NCCL_FUNCTION(void, ncclGinFlushAsync, ncclGin_C*, ncclTeam, uint32_t, ncclGinRequest_t*, ncclCoopAny, uint32_t, bool,
              ncclGinDescriptorSmem*)
NCCL_FUNCTION(void, ncclGinWait, ncclGin_C*, ncclGinRequest_t*, ncclCoopAny, bool, ncclGinDescriptorSmem*, Order)
