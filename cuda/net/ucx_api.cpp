// Opens UCX's library at run time and finds its functions by name.
#include "ucx_api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace moe_rt::ucx {

namespace {

Api find_all(const char* library) {
  void* const opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!opened) throw std::runtime_error(dlerror());
  const auto find = [&](auto& function, const std::string& name) {
    void* const found = dlsym(opened, name.c_str());
    if (!found) throw std::runtime_error(std::string(library) + " has no function " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  Api a{};
  find(a.get_version, "ucp_get_version");
  find(a.config_read, "ucp_config_read");
  find(a.config_release, "ucp_config_release");
  find(a.init_version, "ucp_init_version");
  find(a.worker_create, "ucp_worker_create");
  find(a.worker_destroy, "ucp_worker_destroy");
  find(a.worker_get_address, "ucp_worker_get_address");
  find(a.worker_release_address, "ucp_worker_release_address");
  find(a.worker_get_efd, "ucp_worker_get_efd");
  find(a.worker_arm, "ucp_worker_arm");
  find(a.worker_signal, "ucp_worker_signal");
  find(a.worker_progress, "ucp_worker_progress");
  find(a.worker_set_am_recv_handler, "ucp_worker_set_am_recv_handler");
  find(a.ep_create, "ucp_ep_create");
  find(a.ep_close_nbx, "ucp_ep_close_nbx");
  find(a.am_send_nbx, "ucp_am_send_nbx");
  find(a.request_free, "ucp_request_free");
  find(a.status_string, "ucs_status_string");  // in libucs, which libucp loads
  return a;
}

}  // namespace

const Api& Api::open(const char* library) {
  static std::mutex mutex;
  static std::map<std::string, Api> opened;  // never closed: its threads and handlers belong to the process
  const std::lock_guard lock(mutex);
  const auto found = opened.find(library);
  return found != opened.end() ? found->second : opened.emplace(library, find_all(library)).first->second;
}

Handle Api::context() const {
  static std::mutex mutex;
  static std::map<std::pair<const Api*, pid_t>, Handle> contexts;  // a forked child needs a new one
  const std::lock_guard lock(mutex);
  Handle& context = contexts[{this, getpid()}];
  if (context) return context;
  Handle config = nullptr, made = nullptr;
  const auto require = [this](Status status, const char* what) {
    if (status != kOk) throw std::runtime_error(std::string("UCX could not ") + what + ": " + status_string(status));
  };
  require(config_read(nullptr, nullptr, &config), "read its settings");
  Params params{};
  params.field_mask = params.kFeatures;
  params.features = kActiveMessages | kWakeup;
  const Status status = init_version(kMajor, kOldestMinor, &params, config, &made);
  config_release(config);
  require(status, "start");
  return context = made;
}

}  // namespace moe_rt::ucx
