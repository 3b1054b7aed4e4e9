// Part of UCX's binary interface that moe_rt uses, found in a library that is opened at run time.
//
// The build needs no UCX header: the structs are common to all versions from 1.13 on, and a field mask says which
// fields are filled in. tests/heap/ucx_interface.cpp compares each with the headers of the installed package.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_rt::ucx {

using Status = int8_t;  // zero is success, negative values are errors
inline constexpr Status kOk = 0, kInProgress = 1, kBusy = -15;
inline constexpr unsigned kMajor = 1, kOldestMinor = 13;  // version of the interface, and so of the oldest library

enum Feature : uint64_t { kWakeup = 1 << 4, kActiveMessages = 1 << 6 };
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

struct ReceiveParams {
  static constexpr uint64_t kIsOffer = 1 << 17;  // flag: the sender keeps the data until it is fetched
  uint64_t attributes;
  void* reply_endpoint;
};

inline constexpr unsigned kMessageId = 0;  // id of moe_rt's only handler
struct HandlerParams {
  static constexpr uint64_t kId = 1, kFlags = 2, kFunction = 4, kArgument = 8;
  static constexpr uint32_t kWholeMessages = 1;
  uint64_t field_mask;
  uint32_t id, flags;
  Status (*on_message)(void* argument, const void* head, size_t head_bytes, void* data, size_t bytes,
                       const ReceiveParams*);
  void* argument;
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
  static constexpr uint32_t kForceClose = 1;  // a flag of closing an endpoint
  static constexpr uint32_t kEager = 1 << 1;  // flag of sending a message
  uint32_t mask, flags;
  void* request;
  void (*on_end)(void* request, Status status, void* user_data);
  uint64_t datatype;
  void* user_data;
  char unused[56];
};

// Result of a call: complete, an error, or a request.
inline bool is_request(const void* answer) { return reinterpret_cast<uintptr_t>(answer) - 1 < uintptr_t(-100) - 1; }
inline Status status_of(const void* answer) {
  return is_request(answer) ? kInProgress : static_cast<Status>(reinterpret_cast<intptr_t>(answer));
}

using Handle = void*;  // a context, worker or endpoint
struct Api {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*config_read)(const char* prefix, const char* file, Handle* config);
  void (*config_release)(Handle config);
  Status (*init_version)(unsigned major, unsigned minor, const Params*, Handle config, Handle* context);
  Status (*worker_create)(Handle context, const WorkerParams*, Handle* worker);
  void (*worker_destroy)(Handle worker);
  Status (*worker_get_address)(Handle worker, void** address, size_t* bytes);
  void (*worker_release_address)(Handle worker, void* address);
  Status (*worker_get_efd)(Handle worker, int* descriptor);
  Status (*worker_arm)(Handle worker);
  Status (*worker_signal)(Handle worker);
  unsigned (*worker_progress)(Handle worker);
  Status (*worker_set_am_recv_handler)(Handle worker, const HandlerParams*);
  Status (*ep_create)(Handle worker, const EndpointParams*, Handle* endpoint);
  void* (*ep_close_nbx)(Handle endpoint, const RequestParams*);
  void* (*am_send_nbx)(Handle endpoint, unsigned id, const void* head, size_t head_bytes, const void* data,
                       size_t bytes, const RequestParams*);
  void (*request_free)(void* request);
  const char* (*status_string)(Status);

  // Opens the library at a path, or with a name that the system's loader finds; once per process. Throws
  // std::runtime_error if it is missing, or has another interface.
  static const Api& open(const char* library);

  // The process's only context: creating it takes half a second for finding the machine's devices. Never cleaned up.
  // Throws std::runtime_error if UCX refuses.
  Handle context() const;
};

}  // namespace moe_rt::ucx
