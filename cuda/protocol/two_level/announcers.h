// Who writes what a source announces into this rank's mailbox, where rows go in two levels and where they do not.
#pragma once

#include "../core/layout.h"

namespace moe_rt {

// Whether `source` announces before any forwarder has to do with the op.
MOE_RT_FN bool announces_first(const World& w, Kind kind, int source) {
  const Nodes& n = w.nodes;
  return !n.node_of || n.node_of[source] == n.own || (kind == Kind::kDispatch && n.forwarder[source] == w.rank);
}

// Of a dispatch-type op the source's forwarder here, once it has staged its rows, or the source itself, where that is
// this rank; of a combine-type op this rank's forwarder there, once it has sent the sums home.
MOE_RT_FN int announcer_of(const World& w, Kind kind, int source) {
  if (announces_first(w, kind, source)) return source;
  return kind == Kind::kDispatch ? w.nodes.forwarder[source] : w.nodes.serving[source];
}

MOE_RT_FN bool announces_itself(const World& w, int source) {
  return announcer_of(w, Kind::kDispatch, source) == source && announcer_of(w, Kind::kCombine, source) == source;
}

}  // namespace moe_rt
