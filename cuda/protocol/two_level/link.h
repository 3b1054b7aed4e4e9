// Access to ranks of other nodes, through the segment of their proxy on this node, and the ranks that announce their ops
// here.
//
// A client's rows are staged there, and partials for it are left there, to be added up and sent home. The roles of
// flat/ are unchanged: they name a place in the source's segment, and this link maps it to a place in the proxy's
// segment.
#pragma once

#include "../core/layout.h"

namespace moe_rt {

struct NodeLink {
  int window;

  MOE_RT_FN const char* source_row(const World& w, int peer, int64_t offset, int64_t) const {
    if (w.base[peer]) return w.at<const char>(peer, offset);
    const Layout::Staged& staged = w.layout.staged;
    return at<const char>(w, peer, staged.lists + staged.rows, staged.bytes, offset - w.layout.window[window].tokens);
  }
  MOE_RT_FN char* target_row(const World& w, int peer, int64_t offset) const {
    if (w.base[peer]) return w.at<char>(peer, offset);
    const Layout::Window& o = w.layout.window[window];
    return at<char>(w, peer, o.forwarded, Layout::forwarded_bytes(w.shape), offset - o.partials);
  }
  MOE_RT_FN void deliver(const World&, int, int64_t, int64_t) const {}
  MOE_RT_FN void flush() const {}
  template <class T>
  MOE_RT_FN void put(const World& w, int peer, int64_t offset, T value) const {
    const Layout::Window& o = w.layout.window[window];
    const int64_t bytes = int64_t{w.shape.num_max_tokens} * w.shape.num_topk * w.shape.acc_bytes;
    *(w.base[peer] ? w.at<T>(peer, offset) : at<T>(w, peer, o.forwarded_scalars, bytes, offset - o.scalars)) = value;
  }

 private:
  // Returns the address at offset `inside` of a client's part, which has `bytes` bytes, in the region of its proxy's
  // segment that starts at `first`.
  template <class T>
  MOE_RT_FN static T* at(const World& w, int remote, int64_t first, int64_t bytes, int64_t inside) {
    return w.at<T>(w.nodes.proxy_of[remote], first + w.nodes.client_index[remote] * bytes + inside);
  }
};

// Waits watch the rank that writes a source's announcements into this rank's mailbox: the source itself or a proxy.

// True if `source` announces to this rank itself, before any proxy takes part in the op.
MOE_RT_FN bool announces_directly(const World& w, Kind kind, int source) {
  const Nodes& n = w.nodes;
  return !n.node_of || n.node_of[source] == n.own || (kind == Kind::kDispatch && n.proxy_of[source] == w.rank);
}

// Rank that announces `source` here. Dispatch-type ops: the source's proxy on this node, once it has staged the rows,
// or the source itself if this rank is the proxy. Combine-type ops: this rank's proxy on the source's node, once it has
// sent the sums home.
MOE_RT_FN int announcer_of(const World& w, Kind kind, int source) {
  if (announces_directly(w, kind, source)) return source;
  return kind == Kind::kDispatch ? w.nodes.proxy_of[source] : w.nodes.proxy_on[source];
}

MOE_RT_FN bool announces_itself(const World& w, int source) {
  return announcer_of(w, Kind::kDispatch, source) == source && announcer_of(w, Kind::kCombine, source) == source;
}

}  // namespace moe_rt
