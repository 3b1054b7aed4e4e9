// Slots of a token's partials, with and without adding up partials node by node. Routing assigns them and combine's
// push and reduce use them.
#pragma once

#include "../core/layout.h"

namespace moe_rt {

// Slot in which the source finds the result: a partial of its own node in its slot, else the sum of the owner's node.
MOE_RT_FN int32_t home_slot(const World& w, int32_t owner, int32_t slot) {
  const int32_t node = w.nodes.node_of[owner];
  return node == w.nodes.own ? slot : w.shape.num_node_slots() + Nodes::remote_index(node, w.nodes.own);
}

// Slots for lanes that read all entries of a token together: whether the slots of two ranks are counted together, and
// where a slot's row returns to. Slots count all ranks, or those of one node.
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

// Assigns slots while iterating over a token's distinct ranks in rank order. A slot counts the token's earlier ranks:
// all of them, or those of the same node, since each node's partials are added up separately.
template <class Dims>
class NodeSlots {
 public:
  MOE_RT_FN explicit NodeSlots(const World& w) : w_(w) {}

  MOE_RT_FN void begin_token() { num_ranks_ = 0; }
  // `next` is 1 if `owner` is new for the token, 0 if it was visited before, with the slot `last`.
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
  int32_t node_[Dims::kTopkBound];  // node of each rank visited so far
};

}  // namespace moe_rt
