// Unmapped peers of a CPU rank in flat mode: data fetched from them, and data to be put there.
//
// The protocol is that of a GPU (gpu/rdma.h): a rank pulls what it needs once it is announced, sums a partial row
// here and puts it, and puts the signal last. Fetched data is in private memory, lists and token rows as in the
// source's window, so that roles find them there, and no peer can change validated data. All rows are requested
// together: a lane that waited for each row would pay a round trip per row.
#pragma once

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

  // Fetches the lists of unmapped sources for this rank, and the rows in them. It precedes index_blocks, which
  // validates the lists; nothing more is fetched for an implausible list.
  template <class Weight>
  Status fetch(const World& w, int window, int64_t row_bytes, HostIdle& idle) {
    const Layout::Window& o = w.layout.window[window];
    for (const int r : ranks()) network().get(r, o.counts, mirrors_[r], o.pulls - o.counts);
    if (const Status s = settle(ranks(), Phase::kGather, idle); !s.ok()) return s;
    for (const int r : ranks()) get_lists(w, window, r, RouteLists<Weight>::view(w, r, window), w.rank);
    if (const Status s = settle(ranks(), Phase::kGather, idle); !s.ok()) return s;
    RowGetter rows(w, network(), window, row_bytes, [&](int r) { return rows_[r]; });
    for (const int r : ranks()) {
      const auto lists = RouteLists<Weight>::view(w, r, window);
      const int64_t pull = lists.pull_offs[w.rank], pulls_end = lists.pull_offs[w.rank + 1];
      if (pull < 0 || pulls_end > int64_t{w.shape.num_max_tokens} * w.shape.num_visits()) continue;
      for (int64_t i = pull; i < pulls_end; ++i) rows.get(r, lists.pulls[i].token);
    }
    rows.end();
    return settle(ranks(), Phase::kGather, idle);
  }

  // Fetches the rows of a plan whose sources are unmapped.
  Status fetch(const World& w, int window, const RecvPlan& plan, int64_t row_bytes, HostIdle& idle) {
    RowGetter rows(w, network(), window, row_bytes, [&](int r) { return rows_[r]; });
    for (int32_t i = 0; i < plan.head->num_pulled; ++i) {
      if (!w.base[plan.pulled[i].source]) rows.get(plan.pulled[i].source, plan.pulled[i].token);
    }
    rows.end();
    return settle(ranks(), Phase::kGather, idle);
  }

 private:
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
