// Which slot a token's partial has, where partials are added up node by node and where they are not.
#pragma once

#include "../core/layout.h"

namespace moe_rt {

// Where the source finds what comes home: a partial of its own node in that slot, else the sum of the rank's node.
MOE_RT_FN int32_t home_slot(const World& w, int32_t owner, int32_t slot) {
  const int32_t node = w.nodes.node_of[owner];
  return node == w.nodes.own ? slot : w.shape.num_node_slots() + Nodes::far_index(node, w.nodes.own);
}

// For lanes that look at all entries of a token at once: whether two ranks' slots are counted together, and where a
// slot's row comes home. Slots of all ranks, or node by node.
template <bool kNodes>
struct SlotRule {
  const World& w;
  MOE_RT_FN bool together(int32_t owner, int32_t other) const {
    if constexpr (kNodes) return w.nodes.node_of[owner] == w.nodes.node_of[other];
    return true;
  }
  MOE_RT_FN int32_t at_home(int32_t owner, int32_t slot) const {
    if constexpr (kNodes) return home_slot(w, owner, slot);
    return slot;
  }
};

// Goes through a token's distinct ranks in rank order. A slot counts the ranks of the token before it: all of them, or
// those of the same node, since each node's partials are added up apart.
template <class Dims>
class NodeSlots {
 public:
  MOE_RT_FN explicit NodeSlots(const World& w) : w_(w) {}

  MOE_RT_FN void begin_token() { num_ranks_ = 0; }
  // `next` is 1 where the token comes to `owner` now, 0 where it was there before, with the slot `last`.
  MOE_RT_FN int32_t slot_of(int32_t owner, int32_t next, int32_t last) {
    if (!w_.shape.two_level()) return last + next;
    if (!next) return last;
    const int32_t node = w_.nodes.node_of[owner];
    int32_t slot = 0;
    for (int i = 0; i < num_ranks_; ++i) slot += node_[i] == node;
    node_[num_ranks_++] = node;
    return slot;
  }
  MOE_RT_FN int32_t slot_at_home(int32_t owner, int32_t slot) const {
    return w_.shape.two_level() ? home_slot(w_, owner, slot) : slot;
  }

 private:
  const World& w_;
  int num_ranks_ = 0;
  int32_t node_[Dims::kTopkBound];  // of each rank that the token has come to
};

}  // namespace moe_rt
