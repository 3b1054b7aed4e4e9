// The part of UCX's binary interface that moe_rt uses, found in a library that is opened at run time.
//
// No header of UCX is needed to build: structs are those that all versions from 1.13 on share, of which a field mask
// says what is filled in. tests/heap/ucx_interface.cpp compares each with the headers of the installed package.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_rt::ucx {

using Status = int8_t;  // zero is success, negative ones are errors
inline constexpr Status kOk = 0, kInProgress = 1, kBusy = -15;
inline constexpr unsigned kMajor = 1, kOldestMinor = 13;  // of the interface, and so of the oldest library

enum Feature : uint64_t { kRma = 1 << 1, kWakeup = 1 << 4 };
struct Params {
  static constexpr uint64_t kFeatures = 1;
  uint64_t field_mask, features;
  char unused[72];
};

struct WorkerParams {
  static constexpr uint64_t kThreadMode = 1;
  static constexpr int kSerialized = 1;  // several threads, one at a time
  uint64_t field_mask;
  int32_t thread_mode;
  char unused[188];
};

struct MapParams {
  static constexpr uint64_t kAddress = 1, kLength = 2;
  uint64_t field_mask;
  void* address;
  size_t length;
  char unused[24];
};

struct EndpointParams {
  static constexpr uint64_t kAddress = 1, kErrorMode = 2, kErrorHandler = 4;
  static constexpr int kTellPeerErrors = 1;
  uint64_t field_mask;
  const void* address;
  int32_t error_mode;
  void (*on_error)(void* argument, void* endpoint, Status status);
  void* argument;
  char unused[64];
};

struct RequestParams {
  static constexpr uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4;
  static constexpr uint32_t kForceClose = 1;
  uint32_t mask, flags;
  void* request;
  void (*on_end)(void* request, Status status, void* user_data);
  uint64_t datatype;
  void* user_data;
  char unused[56];
};

// A call's answer: nothing more to come, an error, or a request.
inline bool is_request(const void* answer) { return reinterpret_cast<uintptr_t>(answer) - 1 < uintptr_t(-100) - 1; }
inline Status status_of(const void* answer) {
  return is_request(answer) ? kInProgress : static_cast<Status>(reinterpret_cast<intptr_t>(answer));
}

using Handle = void*;  // of a context, worker, endpoint, memory or remote key
struct Api {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*config_read)(const char* prefix, const char* file, Handle* config);
  void (*config_release)(Handle config);
  Status (*init_version)(unsigned major, unsigned minor, const Params*, Handle config, Handle* context);
  Status (*mem_map)(Handle context, const MapParams*, Handle* memory);
  Status (*mem_unmap)(Handle context, Handle memory);
  Status (*rkey_pack)(Handle context, Handle memory, void** buffer, size_t* bytes);
  void (*rkey_buffer_release)(void* buffer);
  Status (*worker_create)(Handle context, const WorkerParams*, Handle* worker);
  void (*worker_destroy)(Handle worker);
  Status (*worker_get_address)(Handle worker, void** address, size_t* bytes);
  void (*worker_release_address)(Handle worker, void* address);
  Status (*worker_get_efd)(Handle worker, int* descriptor);
  Status (*worker_arm)(Handle worker);
  Status (*worker_signal)(Handle worker);
  unsigned (*worker_progress)(Handle worker);
  Status (*ep_create)(Handle worker, const EndpointParams*, Handle* endpoint);
  void* (*ep_close_nbx)(Handle endpoint, const RequestParams*);
  void* (*ep_flush_nbx)(Handle endpoint, const RequestParams*);
  Status (*ep_rkey_unpack)(Handle endpoint, const void* buffer, Handle* rkey);
  void (*rkey_destroy)(Handle rkey);
  void* (*get_nbx)(Handle endpoint, void* to, size_t bytes, uint64_t from, Handle rkey, const RequestParams*);
  void* (*put_nbx)(Handle endpoint, const void* from, size_t bytes, uint64_t to, Handle rkey, const RequestParams*);
  void (*request_free)(void* request);
  const char* (*status_string)(Status);

  // The library of a path, or of a name that the system's loader finds; opened once in a process. Throws
  // std::runtime_error where there is none, or one of another interface.
  static const Api& open(const char* library);

  // The process's one context: it takes half a second to find the machine's devices. Never cleaned up. Throws
  // std::runtime_error where UCX refuses.
  Handle context() const;
};

}  // namespace moe_rt::ucx
