// Ranks that write a source's announcements into this rank's mailbox: the source itself or, in two levels, a proxy.
// Waits use it to choose the rank to watch.
#pragma once

#include "../core/layout.h"

namespace moe_rt {

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
