// Unmapped peers of a CPU rank in flat mode: data fetched from them, and data to be put there.
//
// The protocol is that of a GPU (gpu/rdma.h): a rank pulls what it needs once it is announced, sums a partial row
// here and puts it, and puts the signal last. Fetched data is in private memory, lists and token rows as in the
// source's window, so that roles find them there, and no peer can change validated data. Each peer's data is requested as
// soon as that peer has announced the op, by any thread that drives the network: in an op in halves, also while the
// caller computes. All rows of a peer are requested together: a lane that waited for each would pay a round trip per row.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "../cpu/lazy_memory.h"
#include "../protocol/core/plan.h"
#include "remote_network.h"

namespace moe_rt {

class RemotePeers : public RemoteNetwork {
 public:
  // Serves the peers whose `base` is nullptr. Throws std::system_error if the address space for their data cannot be
  // reserved.
  RemotePeers(const Shape& shape, const Layout& layout, const std::vector<char*>& base, Network& network)
      : RemoteNetwork(base, network),
        parts_(shape, layout),
        memory_(int64_t(ranks().size()) * parts_.bytes),
        mirrors_(base.size()),
        rows_(base.size()),
        scalars_(base.size()) {
    char* at = memory_.start();
    for (const int r : ranks()) {
      mirrors_[r] = at, rows_[r] = at + parts_.rows, scalars_[r] = at + parts_.scalars;
      at += parts_.bytes;
    }
  }

  char* const* mirrors() const { return mirrors_.data(); }  // World::mirror

  // Local copy of the row, or scalar, at `offset` of the peer's window. Rows are stored by token, since each token has
  // one row here at a time, in whatever slot; or by token and entry, if rows return by entry.
  char* row(int peer, int64_t offset, int64_t region) const {
    return rows_[peer] + (offset - region) % parts_.row_bytes;
  }
  char* scalar(int peer, int64_t offset, int64_t region) const { return scalars_[peer] + (offset - region); }

  // Lists and rows that a dispatch-type op fetches.
  struct Fetch {
    int window;
    Header header;      // this rank's
    int64_t row_bytes;  // of a row as it travels
    RecvPlan plan{};    // says which rows, unless lists are fetched that do
    bool wide = false;  // weights in lists are doubles
  };

  // Starts to fetch from each peer when it announces the op. Lists come first, then the rows in them, or in the plan. It
  // precedes index_blocks, which validates the lists; nothing more is fetched for an implausible list, or from a peer
  // whose header differs from this rank's.
  void begin(const World& w, const Fetch& fetch) {
    const std::lock_guard lock(mutex_);
    world_ = &w, fetch_ = fetch;
    steps_.assign(ranks().size(), Step::kSignal);
  }
  // Returns once everything is here; PeerDead if a peer is lost.
  Status end(HostIdle& idle) {
    for (size_t i = 0; i < ranks().size(); ++i) {
      const int r = ranks()[i];
      idle.watch({.peer = r, .announcer = r});
      while (!has_all_of(i)) {
        if (const Code code = idle.pause(); code != Code::kOk) return failed(code, Phase::kGather, r);
      }
      if (network().lost(r)) return failed(Code::kPeerDead, Phase::kGather, r);
    }
    stop();
    return {};
  }
  void stop() override {
    const std::lock_guard lock(mutex_);
    steps_.clear();
  }
  int go_on() override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < steps_.size(); ++i) {
      while (take_step(ranks()[i], steps_[i])) {
      }
    }
    return kNever;
  }

 private:
  enum class Step { kSignal, kCounts, kLists, kRows, kEnd };  // what is awaited of a peer

  bool has_all_of(size_t i) {
    const std::lock_guard lock(mutex_);
    return steps_.empty() || steps_[i] == Step::kEnd;
  }

  // Asks a peer for what comes next, if what came before is here.
  bool take_step(int peer, Step& step) {
    const World& w = *world_;
    if (step == Step::kEnd) return false;
    if (step == Step::kSignal) {
      const Mailbox& mailbox = w.mailbox(w.rank, kind_of(op_of(fetch_.header)), peer);
      if (!reached(load_acquire(mailbox.signal), fetch_.header.seq)) return false;
      const Header& theirs = mailbox.header[fetch_.header.seq & 1];
      step = check_header(theirs, fetch_.header, peer).ok() ? first_request(peer) : Step::kEnd;
    } else if (!network().flushed(peer)) {
      return false;
    } else if (step == Step::kRows) {
      step = Step::kEnd;
    } else {
      step = fetch_.wide ? next_request<double>(peer, step) : next_request<float>(peer, step);
    }
    network().flush(peer);
    return true;
  }
  auto row_getter() {
    return RowGetter(*world_, network(), fetch_.window, fetch_.row_bytes, [this](int r) { return rows_[r]; });
  }
  Step first_request(int peer) {
    const Layout::Window& o = world_->layout.window[fetch_.window];
    if (!fetch_.plan.head) {
      network().get(peer, o.counts, mirrors_[peer], o.pulls - o.counts);
      return Step::kCounts;
    }
    const Pulled* const all = fetch_.plan.pulled;
    const Pulled* const end = all + fetch_.plan.head->num_pulled;  // in the order of sources
    RowGetter rows = row_getter();
    for (const Pulled* p = std::partition_point(all, end, [=](const Pulled& q) { return q.source < peer; });
         p != end && p->source == peer; ++p) {
      rows.get(peer, p->token);
    }
    return Step::kRows;
  }
  template <class Weight>
  Step next_request(int peer, Step step) {
    const World& w = *world_;
    const auto lists = RouteLists<Weight>::view(w, peer, fetch_.window);
    if (step == Step::kCounts) {
      get_lists(w, fetch_.window, peer, lists, w.rank);
      return Step::kLists;
    }
    RowGetter rows = row_getter();
    const int64_t pull = lists.pull_offs[w.rank], pulls_end = lists.pull_offs[w.rank + 1];
    if (pull < 0 || pulls_end > int64_t{w.shape.num_max_tokens} * w.shape.num_visits()) return Step::kRows;
    for (int64_t i = pull; i < pulls_end; ++i) rows.get(peer, lists.pulls[i].token);
    return Step::kRows;
  }

  // Offsets of a peer's rows and scalars after its lists, the size of the rows, and of all.
  struct Parts {
    int64_t rows, row_bytes, scalars, bytes;
    Parts(const Shape& s, const Layout& layout) {
      const Layout::Window& o = layout.window[0];  // both windows have lists of one size
      rows = round_up(o.tokens - o.counts, kPage);
      const int32_t each = s.returns_entries() ? s.num_topk : 1;
      row_bytes = int64_t{s.num_max_tokens} * each * s.returned_row_bytes();
      scalars = rows + round_up(row_bytes, kPage);
      bytes = scalars + round_up(s.scalar_bytes(), kPage);
    }
  } parts_;
  LazyMemory memory_;
  std::vector<char*> mirrors_, rows_, scalars_;  // [R]; nullptr for mapped peers
  std::mutex mutex_;
  const World* world_ = nullptr;
  Fetch fetch_{};
  std::vector<Step> steps_;  // of each unmapped peer; none while nothing is fetched
};

// Link to peers of which some are unmapped (protocol/core/link.h). A partial row is put as soon as it is summed.
struct RemoteLink {
  const RemotePeers& remote;
  int window;

  const char* source_row(const World& w, int peer, int64_t offset, int64_t) const {
    return w.base[peer] ? w.at<const char>(peer, offset) : remote.row(peer, offset, w.layout.window[window].tokens);
  }
  char* target_row(const World& w, int peer, int64_t offset) const {
    return w.base[peer] ? w.at<char>(peer, offset) : remote.row(peer, offset, w.layout.window[window].partials);
  }
  void deliver(const World& w, int peer, int64_t offset, int64_t bytes) const {
    if (w.base[peer]) return;
    streaming_store_fence();  // another thread may send it
    remote.network().put(peer, offset, target_row(w, peer, offset), bytes);
  }
  template <class T>
  void put(const World& w, int peer, int64_t offset, T value) const {
    if (w.base[peer]) {
      *w.at<T>(peer, offset) = value;
      return;
    }
    auto* const here = reinterpret_cast<T*>(remote.scalar(peer, offset, w.layout.window[window].scalars));
    *here = value;
    remote.network().put(peer, offset, here, sizeof(T));
  }
};

}  // namespace moe_rt
