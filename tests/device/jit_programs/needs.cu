// Kernels with different resource needs: many live registers, an array that cannot be in registers, shared memory.

// 128 live values per thread and registers for 32: most of them spill.
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* in, float* out) {
  float values[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[127 - i];
}

// The index is known only at run time, so the array is on the stack.
extern "C" __global__ void stacks(const int* in, int* out) {
  int values[256];
#pragma unroll 1
  for (int i = 0; i < 256; ++i) values[i] = in[i];
#pragma unroll 1
  for (int i = 0; i < 256; ++i) values[in[i] & 255] += values[(in[i] >> 8) & 255];
  out[threadIdx.x] = values[threadIdx.x & 255];
}

extern "C" __global__ void shares(const int* in, int* out) {
  __shared__ int values[77];
  values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[76 - threadIdx.x];
}

extern "C" __global__ void multiplies_and_adds(const float* a, float* b) { b[0] = a[0] * a[1] + a[2]; }
