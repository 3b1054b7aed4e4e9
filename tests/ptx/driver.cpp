// The driver API calls that moe_rt and the tests make through cuda-python, and additional queries for tests.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

using ptx::Device;
using ptx::Entry;
using ptx::Launch;

namespace {

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kInvalidImage = 200, kNotFound = 500, kLaunchFailed = 719;
constexpr char kLibraries[] = "// libraries:";
constexpr unsigned kMostShared = 48 << 10;  // without an opt-in
constexpr unsigned kMostAsked = 227 << 10;

using Module = std::map<std::string, const Entry*>;
using Graph = std::vector<std::shared_ptr<const Launch>>;

std::mutex granted_mutex;
std::map<const Entry*, unsigned> granted;  // opted-in shared memory

uint32_t index_of(void* stream) { return uint32_t(reinterpret_cast<uintptr_t>(stream)) - 1; }

std::vector<const Entry*> loaded;
std::pair<std::string, int> muted;  // entry, line

Result alive() { return Device::get().dead() ? kLaunchFailed : kSuccess; }

Result cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
Result cuInit(unsigned) { return kSuccess; }
Result cuCtxGetCurrent(void** context) { return *context = &Device::get(), kSuccess; }
Result cuCtxSetCurrent(void*) { return alive(); }
Result cuGetErrorName(Result error, const char** name) {
  return *name = error ? "CUDA_ERROR" : "CUDA_SUCCESS", kSuccess;
}

// The image is PTX; its first line names the libraries it was translated to.
Result cuModuleLoadData(void** out, const char* image) {
  if (std::strncmp(image, kLibraries, sizeof(kLibraries) - 1) != 0) return kInvalidImage;
  const char* const names = image + sizeof(kLibraries) - 1;
  std::istringstream paths(std::string(names, std::strcspn(names, "\n")));
  auto* const module = new Module;  // modules stay loaded
  for (std::string path; paths >> path;) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto* entry = library ? static_cast<const Entry*>(dlsym(library, "ptx_entry")) : nullptr;
    if (!entry) return std::fprintf(stderr, "%s\n", dlerror()), kInvalidImage;
    (*module)[entry->name] = entry;
    loaded.push_back(entry);
    for (uint32_t i = 0; i < entry->num_sites; ++i) {
      if (muted == std::pair<std::string, int>(entry->name, entry->sites[i].line)) entry->marks[i] |= ptx::kMuted;
    }
  }
  return *out = module, kSuccess;
}

Result cuModuleGetFunction(const void** function, const Module* module, const char* name) {
  const auto found = module->find(name);
  return found == module->end() ? kNotFound : (*function = found->second, kSuccess);
}
Result cuFuncLoad(void*) { return kSuccess; }

// CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, _SHARED_SIZE_BYTES, _LOCAL_SIZE_BYTES.
Result cuFuncGetAttribute(int* value, int attribute, const Entry* entry) {
  if (attribute != 0 && attribute != 1 && attribute != 3) return kInvalidValue;
  *value = int(attribute == 0 ? entry->max_threads : attribute == 1 ? entry->static_bytes : entry->local_bytes);
  return kSuccess;
}

// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, which stays set.
Result cuFuncSetAttribute(const Entry* entry, int attribute, int value) {
  if (attribute != 8 || value < 0 || entry->static_bytes + unsigned(value) > kMostAsked) return kInvalidValue;
  const std::lock_guard lock(granted_mutex);
  granted[entry] = entry->static_bytes + unsigned(value);
  return kSuccess;
}

unsigned most_shared(const Entry* entry) {
  const std::lock_guard lock(granted_mutex);
  const auto found = granted.find(entry);
  return found == granted.end() ? kMostShared : std::max(kMostShared, found->second);
}

Result launch(const Entry* entry, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
              unsigned shared, void* stream, void** params, void** extra, bool early) {
  if (const Result dead = alive()) return dead;
  if (gx == 0 || gy != 1 || gz != 1 || bx == 0 || by != 1 || bz != 1 || bx > entry->max_threads) return kInvalidValue;
  if (entry->static_bytes + shared > most_shared(entry) || extra || !stream) return kInvalidValue;
  auto launch = std::make_shared<Launch>(Launch{entry, gx, bx, shared, {}, early});
  for (uint32_t i = 0; i < entry->num_params; ++i) {
    const auto* const from = static_cast<const char*>(params[i]);
    launch->params.insert(launch->params.end(), from, from + entry->param_bytes[i]);
  }
  return Device::get().launch(index_of(stream), std::move(launch)), kSuccess;
}

Result cuLaunchKernel(const Entry* entry, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void* stream, void** params, void** extra) {
  return launch(entry, gx, gy, gz, bx, by, bz, shared, stream, params, extra, false);
}

// CUlaunchAttribute of cuda.h.
struct Attribute {
  int id, unused;
  int value[16];
};
struct Config {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void* stream;
  const Attribute* attributes;
  unsigned num_attributes;
};

// Accepts CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and no other attribute.
Result cuLaunchKernelEx(const Config* c, const Entry* entry, void** params, void** extra) {
  bool early = false;
  for (unsigned i = 0; i < c->num_attributes; ++i) {
    if (c->attributes[i].id != 6) return kInvalidValue;
    early = c->attributes[i].value[0] != 0;
  }
  return launch(entry, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, params, extra, early);
}

Result cuStreamCreate(void** stream, unsigned) {
  return *stream = reinterpret_cast<void*>(uintptr_t{Device::get().make_stream()} + 1), kSuccess;
}
Result cuStreamSynchronize(void* stream) {
  return Device::get().synchronize(index_of(stream)) ? kSuccess : kLaunchFailed;
}
Result cuStreamBeginCapture(void* stream, int) { return Device::get().begin_capture(index_of(stream)), alive(); }
Result cuStreamIsCapturing(void* stream, int* answer) {
  return *answer = Device::get().capturing(index_of(stream)), kSuccess;
}
Result cuStreamEndCapture(void* stream, void** graph) {
  return *graph = new Graph(Device::get().end_capture(index_of(stream))), kSuccess;
}
Result cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  return *executable = graph, kSuccess;
}
Result cuGraphLaunch(const Graph* graph, void* stream) {
  for (const auto& launch : *graph) Device::get().launch(index_of(stream), std::make_shared<Launch>(*launch));
  return alive();
}

#define KNOWN(name) {#name, reinterpret_cast<void*>(name)}
struct {
  const char* name;
  void* function;
} const kCalls[] = {
    KNOWN(cuDriverGetVersion),   KNOWN(cuInit),
    KNOWN(cuCtxGetCurrent),      KNOWN(cuCtxSetCurrent),
    KNOWN(cuGetErrorName),       KNOWN(cuModuleLoadData),
    KNOWN(cuModuleGetFunction),  KNOWN(cuFuncLoad),
    KNOWN(cuFuncGetAttribute),   KNOWN(cuLaunchKernel),
    KNOWN(cuStreamCreate),       KNOWN(cuStreamSynchronize),
    KNOWN(cuStreamBeginCapture), KNOWN(cuStreamIsCapturing),
    KNOWN(cuStreamEndCapture),   KNOWN(cuGraphInstantiateWithFlags),
    KNOWN(cuGraphLaunch),        KNOWN(cuFuncSetAttribute),
    KNOWN(cuLaunchKernelEx),
};

}  // namespace

extern "C" {
Result cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  *function = nullptr;
  for (const auto& call : kCalls) {
    if (std::strcmp(call.name, name) == 0) *function = call.function;
  }
  if (std::strcmp(name, "cuGetProcAddress") == 0) *function = reinterpret_cast<void*>(cuGetProcAddress_v2);
  if (status) *status = *function ? 0 : 1;
  return *function ? kSuccess : kNotFound;
}
Result cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

void ptx_configure(uint64_t seed, uint32_t room, bool real_time) { Device::get().configure(seed, room, real_time); }
void ptx_slow_network(bool slow) { Device::get().slow_network(slow); }
void ptx_wind(int64_t ns) { Device::get().wind(ns); }
void* ptx_allocate(uint64_t bytes) { return Device::get().allocate(bytes); }
void ptx_free(void* memory) { Device::get().free(memory); }
void ptx_join_network(const uint64_t* begins, uint32_t num_ranks, uint32_t rank, void* stream, uint64_t bytes) {
  Device::get().join_network({begins, begins + num_ranks}, rank, index_of(stream), bytes);
}
bool ptx_narrow(uint64_t begin, uint64_t bytes) { return Device::get().narrow(begin, bytes); }
uint64_t ptx_accesses() { return Device::get().accesses(); }
uint64_t ptx_facts() { return Device::get().facts(); }
uint32_t ptx_early() { return Device::get().early(); }
// Return the fault found, or "". The text is valid until this thread's next call.
const char* ptx_report() {
  thread_local std::string text;
  text = Device::get().report();
  return text.c_str();
}
// Remove the order at this line from modules that are loaded from now on.
void ptx_mute(const char* entry, int line) { muted = {entry, line}; }
// Return `entry line` of each barrier and atomic access executed since the last call. Call it while nothing runs.
const char* ptx_reached() {
  thread_local std::string text;
  text.clear();
  for (const Entry* const entry : loaded) {
    for (uint32_t i = 0; i < entry->num_sites; ++i) {
      if (entry->marks[i] & ptx::kReached) {
        entry->marks[i] &= ~ptx::kReached;
        text += std::string(entry->name) + " " + std::to_string(entry->sites[i].line) + "\n";
      }
    }
  }
  return text.c_str();
}
}
