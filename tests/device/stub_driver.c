// A libcuda that prints launches instead of running them, to check calls of the driver without a GPU.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;

CUresult cuDriverGetVersion(int* version) {
  const char* told = getenv("STUB_DRIVER");
  return *version = told ? atoi(told) : 99000, 0;
}
CUresult cuInit(unsigned flags) { return (void)flags, 0; }
CUresult cuModuleLoadData(void** module, const void* image) {
  *module = (void*)0x1000;
  return memcmp(image, "\177ELF", 4) == 0 ? 0 : 200;
}
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = (void*)((unsigned long)module + strlen(name));
  return printf("function %s\n", name), 0;
}
CUresult cuFuncLoad(void* function) { return printf("load %lu\n", (unsigned long)function - 0x1000), 0; }
CUresult cuFuncSetAttribute(void* function, int attribute, int value) {
  return printf("set %lu attribute %d %d\n", (unsigned long)function - 0x1000, attribute, value), 0;
}
CUresult cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void* stream, void** params, void** extra) {
  printf("launch %lu grid %u %u %u block %u %u %u shared %u stream %lu extra %d words",
         (unsigned long)function - 0x1000, gx, gy, gz, bx, by, bz, shared, (unsigned long)stream, extra != 0);
  for (int i = 0; i < 2; ++i) printf(" %lu", *(unsigned long*)params[i]);
  return printf("\n"), gx >= 1000 ? 1 : 0;  // CUDA_ERROR_INVALID_VALUE
}
// The structs of cuda.h.
struct attribute {
  int id;
  char pad[4];
  union {
    char pad[64];
    int allowed;
  } value;
};
struct config {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void* stream;
  struct attribute* attributes;
  unsigned num_attributes;
};
CUresult cuLaunchKernelEx(const struct config* c, void* function, void** params, void** extra) {
  for (unsigned i = 0; i < c->num_attributes; ++i) {
    printf("launch with attribute %d of %d\n", c->attributes[i].id, c->attributes[i].value.allowed);
  }
  return cuLaunchKernel(function, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, params, extra);
}
CUresult cuCtxGetCurrent(void** context) { return *context = (void*)0x77, 0; }
CUresult cuCtxSetCurrent(void* context) { return printf("context %lx\n", (unsigned long)context), 0; }
CUresult cuGetErrorName(CUresult error, const char** name) { return *name = error ? "error" : "success", 0; }

static struct {
  const char* name;
  void* function;
} table[] = {
    {"cuDriverGetVersion", (void*)cuDriverGetVersion},
    {"cuInit", (void*)cuInit},
    {"cuModuleLoadData", (void*)cuModuleLoadData},
    {"cuModuleGetFunction", (void*)cuModuleGetFunction},
    {"cuFuncLoad", (void*)cuFuncLoad},
    {"cuLaunchKernel", (void*)cuLaunchKernel},
    {"cuGetErrorName", (void*)cuGetErrorName},
    {"cuCtxGetCurrent", (void*)cuCtxGetCurrent},
    {"cuCtxSetCurrent", (void*)cuCtxSetCurrent},
    {"cuLaunchKernelEx", (void*)cuLaunchKernelEx},
    {"cuFuncSetAttribute", (void*)cuFuncSetAttribute},
};

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* status) {
  (void)version, (void)flags;
  *function = 0;
  for (unsigned i = 0; i < sizeof(table) / sizeof(table[0]); ++i) {
    if (strcmp(table[i].name, name) == 0) *function = table[i].function;
  }
  if (strcmp("cuGetProcAddress", name) == 0) *function = (void*)cuGetProcAddress_v2;
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
CUresult cuGetProcAddress(const char* name, void** function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
