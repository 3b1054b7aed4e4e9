// One peer of a UCX worker: its endpoint, what is under way to it, and whether it is lost. All under the worker's lock.
//
// Words that waits look at without the lock are of atomics.h.
#pragma once

#include "../protocol/core/atomics.h"
#include "ucx_api.h"

namespace moe_rt {

struct UcxPeer {
  ucx::Handle endpoint = nullptr, key = nullptr;
  const ucx::Api* api = nullptr;
  uint64_t base = 0, last = 0;
  uint32_t flushing = 0, lost = 0;
  ucx::Status why = ucx::kOk;

  bool can_be_asked() const { return endpoint && !load_relaxed(lost); }
  bool is_flushing() const { return load_relaxed(flushing) != 0; }
  void lose(ucx::Status status) {
    if (load_relaxed(lost)) return;
    why = status;
    store_release(lost, 1u);
  }
  // Of a call that names this peer.
  ucx::RequestParams params() {
    ucx::RequestParams params{};
    params.mask = params.kCallback | params.kUserData;
    params.on_end = end;
    params.user_data = this;
    return params;
  }
  // What a call has answered at once.
  void judge(const void* answer) {
    if (const ucx::Status status = ucx::status_of(answer); status < 0) lose(status);
  }
  void flush() {
    if (!can_be_asked()) return;
    ucx::RequestParams given = params();
    given.on_end = end_flush;
    store_relaxed(flushing, load_relaxed(flushing) + 1);
    const void* const answer = api->ep_flush_nbx(endpoint, &given);
    if (ucx::is_request(answer)) return;
    judge(answer);
    store_release(flushing, load_relaxed(flushing) - 1);
  }
  void put(int64_t offset, const void* from, int64_t bytes) {
    const ucx::RequestParams given = params();
    judge(api->put_nbx(endpoint, from, bytes, base + offset, key, &given));
  }
  void get(int64_t offset, void* to, int64_t bytes) {
    const ucx::RequestParams given = params();
    judge(api->get_nbx(endpoint, to, bytes, base + offset, key, &given));
  }
  // Whatever is under way is cancelled. What is to be progressed until it has ended, or nullptr.
  void* close() {
    if (key && !is_flushing()) api->rkey_destroy(key);  // else what is under way may look at it
    if (!endpoint) return nullptr;
    ucx::RequestParams given{};
    given.mask = given.kFlags, given.flags = given.kForceClose;
    void* const answer = api->ep_close_nbx(endpoint, &given);
    endpoint = key = nullptr;
    lose(ucx::kOk);
    return ucx::is_request(answer) ? answer : nullptr;
  }

 private:
  static void end(void* request, ucx::Status status, void* peer) {
    auto& p = *static_cast<UcxPeer*>(peer);
    if (status != ucx::kOk) p.lose(status);
    p.api->request_free(request);
  }
  // SYNC POINT flush, writer side: pairs with UcxNetwork::flushed. Release: what was got comes before the count.
  static void end_flush(void* request, ucx::Status status, void* peer) {
    auto& p = *static_cast<UcxPeer*>(peer);
    end(request, status, peer);
    store_release(p.flushing, load_relaxed(p.flushing) - 1);
  }
};

}  // namespace moe_rt
