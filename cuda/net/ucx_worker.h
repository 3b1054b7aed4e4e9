// State shared by UcxNetwork and its thread: the worker, the segment, and an endpoint for each peer.
//
// One lock protects every call of UCX, and its callbacks run inside calls. Flags that waits read are accessed through
// atomics.h, so that reading them takes no lock.
#pragma once

#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "../protocol/core/layout.h"
#include "ucx_api.h"
#include "ucx_inbox.h"
#include "ucx_peer.h"

namespace moe_rt {

class UcxWorker {
 public:
  // Arguments and exceptions are UcxNetwork's.
  UcxWorker(const char* library, int descriptor, const Shape& shape, int rank)
      : api_(ucx::Api::open(library)),
        layout_(Layout::make(shape)),
        rank_(rank),
        peers_(shape.num_ranks),
        inbox_(layout_, peers_) {
    try {
      make(descriptor);
    } catch (...) {
      tear_down();
      throw;
    }
  }
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // Starts a thread that serves peers and holds `self` as long as it runs.
  void start(std::shared_ptr<UcxWorker> self) {
    const std::lock_guard lock(all().mutex);
    std::thread([self = std::move(self)] { self->serve(); }).detach();
    all().running.insert(this);  // the thread needs the lock before it can leave
  }

  void connect(int peer, const std::string& address, uint64_t secret) {
    const std::lock_guard lock(mutex_);
    UcxPeer& p = peers_.at(peer);
    ucx::EndpointParams params{};
    params.field_mask = params.kAddress | params.kErrorMode | params.kErrorHandler;
    params.address = address.data();
    params.error_mode = params.kTellPeerErrors;
    params.on_error = on_error;
    params.argument = &p;
    ucx::Handle endpoint = nullptr;
    require(api_.ep_create(worker_, &params, &endpoint), "connect to a peer");
    p.connect(api_, endpoint, rank_, secret);
    p.get(0, nullptr, 0);  // the answer shows that each reaches the other
    p.flush();
    inbox_.connected(peer);
  }

  // Calls act(peer), unless the peer is lost, which UcxPeer::lost reports.
  template <class Act>
  void ask(int peer, Act&& act) {
    const std::lock_guard lock(mutex_);
    if (peers_[peer].can_be_asked()) act(peers_[peer]);
  }
  void keep(std::shared_ptr<Background> background, const char* segment) {
    const std::lock_guard lock(mutex_);
    if (!stop_) kept_ = std::move(background), callers_segment_ = segment;
  }
  // Returns the same place in the mapping that lasts: a failed rank unmaps its segment while replies to it may be
  // pending.
  template <class T>
  T* lasting(T* place) const {
    const uint64_t at = reinterpret_cast<uintptr_t>(place) - reinterpret_cast<uintptr_t>(callers_segment_);
    return callers_segment_ && at < uint64_t(layout_.bytes) ? reinterpret_cast<T*>(segment_ + at) : place;
  }
  void drive() {
    std::shared_ptr<Background> kept;
    {
      const std::lock_guard lock(mutex_);
      if (worker_) api_.worker_progress(worker_);
      kept = kept_;
    }
    if (kept) kept->go_on();  // it asks for more
  }
  void set_driven(bool driven) {
    const std::lock_guard lock(mutex_);
    driven_ = driven;
    if (!driven) changed_.notify_one();
  }
  void wake() {
    const std::lock_guard lock(mutex_);
    wake_up();
  }

  // The thread ends once no peer reads this segment any more.
  void leave(const std::vector<uint64_t>& last_seqs) {
    const std::lock_guard lock(mutex_);
    if (leaving_ || stop_) return;
    leaving_ = true, left_ = Clock::now();
    last_seqs_ = last_seqs;
    for (UcxPeer& p : peers_) {
      if (!p.can_be_asked()) continue;
      for (size_t kind = 0; kind < last_seqs_.size(); ++kind) {
        p.put(mailbox_offset(kind, rank_) + int64_t{offsetof(Mailbox, closed)}, &kOne, sizeof(kOne));
      }
      p.flush();
    }
    wake_up();
  }
  // The thread ends immediately.
  void stop() {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_up();
  }
  static void await_all(double seconds) {
    std::unique_lock lock(all().mutex);
    const auto none_leaving = [] {
      for (UcxWorker* w : all().running) {
        if (w->leaving()) return false;
      }
      return true;
    };
    if (all().ended.wait_for(lock, std::chrono::duration<double>(seconds), none_leaving)) return;
    for (UcxWorker* w : all().running) {
      if (w->leaving()) w->stop();
    }
    all().ended.wait_for(lock, kLastWords, none_leaving);
  }

  bool leaving() {
    const std::lock_guard lock(mutex_);
    return leaving_;
  }
  std::string problem(int peer) {
    const std::lock_guard lock(mutex_);
    return peers_.at(peer).problem();
  }
  const UcxPeer& peer(int rank) const { return peers_[rank]; }
  const std::string& address() const { return address_; }
  uint64_t secret() const { return inbox_.secret(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint64_t kOne = 1;
  static constexpr int kPollMs = 1000, kPollLeavingMs = 20, kClosingSteps = 1000;
  static constexpr std::chrono::milliseconds kLastWords{1000};  // time for peers to read why the group ended

  struct All {
    std::mutex mutex;
    std::condition_variable ended;
    std::set<UcxWorker*> running;
  };
  static All& all() {
    static auto* const all = new All;  // threads may outlive static objects
    return *all;
  }

  void require(ucx::Status status, const char* what) const {
    if (status == ucx::kOk) return;
    throw std::runtime_error(std::string("UCX could not ") + what + ": " + api_.status_string(status));
  }
  // Kinds are those of all channels, in order.
  int64_t mailbox_offset(size_t kind, int source) const {
    return layout_.mailboxes + (int64_t(kind * peers_.size()) + source) * int64_t{sizeof(Mailbox)};
  }

  void make(int descriptor) {
    void* const mapped = mmap(nullptr, layout_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    segment_ = static_cast<char*>(mapped);
    inbox_.open(segment_);
    ucx::WorkerParams of_worker{};
    of_worker.field_mask = of_worker.kThreadMode;
    of_worker.thread_mode = of_worker.kSerialized;
    require(api_.worker_create(api_.context(), &of_worker, &worker_), "make a worker");
    require(api_.worker_get_efd(worker_, &descriptor_), "give a descriptor to sleep on");
    ucx::HandlerParams of_messages{};
    of_messages.field_mask = of_messages.kId | of_messages.kFlags | of_messages.kFunction | of_messages.kArgument;
    of_messages.id = ucx::kMessageId, of_messages.flags = of_messages.kWholeMessages;
    of_messages.on_message = on_message, of_messages.argument = this;
    require(api_.worker_set_am_recv_handler(worker_, &of_messages), "take messages");
    void* bytes = nullptr;
    size_t num_bytes = 0;
    require(api_.worker_get_address(worker_, &bytes, &num_bytes), "give its address");
    address_.assign(static_cast<char*>(bytes), num_bytes);
    api_.worker_release_address(worker_, bytes);
  }

  static void on_error(void* peer, void*, ucx::Status status) {
    UcxPeer& p = *static_cast<UcxPeer*>(peer);
    p.lose(p.words_of(status));
  }
  static ucx::Status on_message(void* worker, const void* head, size_t head_bytes, void* data, size_t bytes,
                                const ucx::ReceiveParams* how) noexcept {
    const bool is_here = (how->attributes & how->kIsOffer) == 0;
    static_cast<UcxWorker*>(worker)->inbox_.take(head, head_bytes, data, bytes, is_here);
    return ucx::kOk;
  }

  // The thread. It releases the lock between steps, since an op may want to drive.
  void serve() {
    {
      std::unique_lock lock(mutex_);
      while (!stop_ && !(leaving_ && everyone_is_done())) {
        if (driven_ && !leaving_) {
          changed_.wait(lock);
          continue;
        }
        const bool idle = api_.worker_progress(worker_) == 0;
        const std::shared_ptr<Background> kept = kept_;
        lock.unlock();
        const int wanted_ms = kept ? kept->go_on() : Background::kNever;
        lock.lock();
        const int timeout_ms = std::min(wanted_ms, leaving_ ? kPollLeavingMs : kPollMs);
        const bool sleeps = idle && timeout_ms > 0 && api_.worker_arm(worker_) != ucx::kBusy;
        pollfd events{descriptor_, POLLIN, 0};
        lock.unlock();
        if (sleeps) poll(&events, 1, timeout_ms);
        lock.lock();
      }
      stop_ = true;
      tear_down();
    }
    const std::lock_guard lock(all().mutex);
    all().running.erase(this);
    all().ended.notify_all();
  }

  // True if no peer reads this segment any more, and all have received this rank's messages. A peer that has closed, or
  // has announced a later op of a channel, has read everything that this rank announced there. Once the group has ended,
  // peers read only last words.
  bool everyone_is_done() const {
    const bool over = load_acquire(*reinterpret_cast<const uint64_t*>(segment_ + layout_.poison)) != 0;
    if (over && Clock::now() > left_ + kLastWords) return true;
    for (size_t r = 0; r < peers_.size(); ++r) {
      const UcxPeer& p = peers_[r];
      if (!p.is_connected() || p.lost()) continue;
      if (!p.flushed() || !has_gone_on(int(r))) return false;
    }
    return true;
  }
  bool has_gone_on(int peer) const {
    for (size_t channel = 0; channel < last_seqs_.size(); channel += kNumKinds) {
      bool gone_on = false;
      for (size_t kind = channel; kind < channel + kNumKinds; ++kind) {
        const auto& mailbox = *reinterpret_cast<const Mailbox*>(segment_ + mailbox_offset(kind, peer));
        gone_on |= load_acquire(mailbox.closed) || reached(load_acquire(mailbox.signal), last_seqs_[kind] + 1);
      }
      if (!gone_on) return false;
    }
    return true;
  }

  void wake_up() {
    changed_.notify_one();
    if (worker_) api_.worker_signal(worker_);
  }

  void tear_down() {
    const auto under_way = [](const UcxPeer& p) { return !p.flushed(); };
    for (int i = 0; worker_ && i < kClosingSteps && std::any_of(peers_.begin(), peers_.end(), under_way); ++i) {
      api_.worker_progress(worker_);
    }
    std::vector<void*> closing;
    for (UcxPeer& p : peers_) {
      if (void* const request = p.close()) closing.push_back(request);
    }
    for (int i = 0; i < kClosingSteps && !closing.empty(); ++i) api_.worker_progress(worker_);
    for (void* const request : closing) api_.request_free(request);
    if (worker_) api_.worker_destroy(worker_);
    if (segment_) munmap(segment_, layout_.bytes);
    kept_.reset();
    worker_ = nullptr, segment_ = nullptr;
  }

  const ucx::Api& api_;
  Layout layout_;
  int rank_, descriptor_ = -1;
  std::vector<UcxPeer> peers_;
  UcxInbox inbox_;
  ucx::Handle worker_ = nullptr;
  char* segment_ = nullptr;
  const char* callers_segment_ = nullptr;  // the caller's mapping of the same memory
  std::string address_;
  std::shared_ptr<Background> kept_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool driven_ = false, leaving_ = false, stop_ = false;
  std::vector<uint64_t> last_seqs_;  // of each channel and kind
  Clock::time_point left_;
};

}  // namespace moe_rt
