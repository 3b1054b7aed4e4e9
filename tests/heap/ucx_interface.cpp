// Compares the parts of UCX's binary interface that moe_rt assumes with the package's headers: it compiles if they
// agree.
#include <ucp/api/ucp.h>

#include <type_traits>

#include "../../cuda/net/ucx_api.h"

namespace {

using namespace moe_rt::ucx;

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), "size of " #theirs)
#define SAME_PLACE(ours, a, theirs, b) static_assert(offsetof(ours, a) == offsetof(theirs, b), #theirs "." #b)

SAME_SIZE(Status, ucs_status_t);
static_assert(kOk == UCS_OK && kInProgress == UCS_INPROGRESS && kBusy == UCS_ERR_BUSY);
static_assert(kMajor == UCP_API_MAJOR && kOldestMinor <= UCP_API_MINOR);

SAME_SIZE(Params, ucp_params_t);
SAME_PLACE(Params, features, ucp_params_t, features);
static_assert(Params::kFeatures == UCP_PARAM_FIELD_FEATURES);
static_assert(uint64_t(kActiveMessages) == UCP_FEATURE_AM && uint64_t(kWakeup) == UCP_FEATURE_WAKEUP);

SAME_SIZE(WorkerParams, ucp_worker_params_t);
SAME_PLACE(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
static_assert(WorkerParams::kThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(WorkerParams::kSerialized == UCS_THREAD_MODE_SERIALIZED);

SAME_SIZE(ReceiveParams, ucp_am_recv_param_t);
SAME_PLACE(ReceiveParams, attributes, ucp_am_recv_param_t, recv_attr);
static_assert(ReceiveParams::kIsOffer == UCP_AM_RECV_ATTR_FLAG_RNDV);

SAME_SIZE(HandlerParams, ucp_am_handler_param_t);
SAME_PLACE(HandlerParams, id, ucp_am_handler_param_t, id);
SAME_PLACE(HandlerParams, flags, ucp_am_handler_param_t, flags);
SAME_PLACE(HandlerParams, on_message, ucp_am_handler_param_t, cb);
SAME_PLACE(HandlerParams, argument, ucp_am_handler_param_t, arg);
static_assert(HandlerParams::kId == UCP_AM_HANDLER_PARAM_FIELD_ID);
static_assert(HandlerParams::kFlags == UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
static_assert(HandlerParams::kFunction == UCP_AM_HANDLER_PARAM_FIELD_CB);
static_assert(HandlerParams::kArgument == UCP_AM_HANDLER_PARAM_FIELD_ARG);
static_assert(HandlerParams::kWholeMessages == UCP_AM_FLAG_WHOLE_MSG);

SAME_SIZE(EndpointParams, ucp_ep_params_t);
SAME_PLACE(EndpointParams, address, ucp_ep_params_t, address);
SAME_PLACE(EndpointParams, error_mode, ucp_ep_params_t, err_mode);
SAME_PLACE(EndpointParams, on_error, ucp_ep_params_t, err_handler.cb);
SAME_PLACE(EndpointParams, argument, ucp_ep_params_t, err_handler.arg);
static_assert(EndpointParams::kAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
static_assert(EndpointParams::kErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
static_assert(EndpointParams::kErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(EndpointParams::kTellPeerErrors == UCP_ERR_HANDLING_MODE_PEER);

SAME_SIZE(RequestParams, ucp_request_param_t);
SAME_PLACE(RequestParams, mask, ucp_request_param_t, op_attr_mask);
SAME_PLACE(RequestParams, flags, ucp_request_param_t, flags);
SAME_PLACE(RequestParams, on_end, ucp_request_param_t, cb);
SAME_PLACE(RequestParams, user_data, ucp_request_param_t, user_data);
static_assert(RequestParams::kCallback == UCP_OP_ATTR_FIELD_CALLBACK);
static_assert(RequestParams::kUserData == UCP_OP_ATTR_FIELD_USER_DATA);
static_assert(RequestParams::kFlags == UCP_OP_ATTR_FIELD_FLAGS);
static_assert(RequestParams::kForceClose == UCP_EP_CLOSE_FLAG_FORCE);
static_assert(RequestParams::kEager == UCP_AM_SEND_FLAG_EAGER);

// Compare functions: the same count of pointers and integers of equal sizes as parameters, and an equal result.
template <class Ours, class... Mine, class Theirs, class... Args>
constexpr bool alike(Ours (*)(Mine...), Theirs (*)(Args...)) {
  if constexpr (sizeof...(Mine) != sizeof...(Args)) {
    return false;
  } else {
    return ((sizeof(Mine) == sizeof(Args)) && ...) && [] {
      if constexpr (std::is_void_v<Ours> || std::is_void_v<Theirs>) {
        return std::is_void_v<Ours> && std::is_void_v<Theirs>;
      } else {
        return sizeof(Ours) == sizeof(Theirs);
      }
    }();
  }
}
static_assert(alike(decltype(HandlerParams::on_message){}, ucp_am_recv_callback_t{}), "ucp_am_recv_callback_t");
#define ALIKE(ours, theirs) static_assert(alike(decltype(Api::ours){}, decltype(&theirs){}), #theirs)

ALIKE(get_version, ucp_get_version);
ALIKE(config_read, ucp_config_read);
ALIKE(config_release, ucp_config_release);
ALIKE(init_version, ucp_init_version);
ALIKE(worker_create, ucp_worker_create);
ALIKE(worker_destroy, ucp_worker_destroy);
ALIKE(worker_get_address, ucp_worker_get_address);
ALIKE(worker_release_address, ucp_worker_release_address);
ALIKE(worker_get_efd, ucp_worker_get_efd);
ALIKE(worker_arm, ucp_worker_arm);
ALIKE(worker_signal, ucp_worker_signal);
ALIKE(worker_progress, ucp_worker_progress);
ALIKE(worker_set_am_recv_handler, ucp_worker_set_am_recv_handler);
ALIKE(ep_create, ucp_ep_create);
ALIKE(ep_close_nbx, ucp_ep_close_nbx);
ALIKE(am_send_nbx, ucp_am_send_nbx);
ALIKE(request_free, ucp_request_free);
ALIKE(status_string, ucs_status_string);

}  // namespace

int main() { return 0; }
