// Plans that dispatch leaves in the handle, in private memory, for combine and both backward ops: windows are reused,
// plans are not. The receive plan says which rows belong to which pulled token; the send plan says where a token's
// copies went.
#pragma once

#include "layout.h"

namespace moe_rt {

// A token that this rank pulled: its source, its partial's slot there, and its range in the row list.
struct Pulled {
  int32_t token;
  int16_t source, slot;
  int32_t first, copies;
};

inline constexpr int32_t kDropped = -1;  // entry of the row list: the row is beyond capacity
// Matches a plan of any capacity, for ops without a tensor that has a row for each of recv_x.
inline constexpr int64_t kAnyCapacity = -1;

inline constexpr int32_t kNoExpert = -1;  // entry of RecvPlan::ids: that top-k entry's expert is on another rank

// View of the int32 tensor recv_plan: head | pulled | rows | ks | ids or ends | forwards. With RecvLayout::kTokens, all
// copies of a token share the row that its first copy names; the others hold kDropped.
struct RecvPlan {
  struct Head {
    uint64_t mark;                                // World::plan_mark of the engine that made the plan
    uint64_t seq;                                 // seq of the dispatch that made the plan
    int32_t num_tokens;                           // this rank's tokens in that dispatch
    int32_t num_pulled, num_copies, num_dropped;  // entries of `pulled`; of `rows`; rows beyond capacity
    int32_t capacity;                             // rows of recv_x in that dispatch
    int32_t first_own, num_own;                   // range of pulled tokens whose source is this rank, in token order
    int32_t num_rows;                             // delivered rows, without dropped ones
  };
  Head* head;
  Pulled* pulled;
  int32_t* rows;  // row of recv_x, or kDropped
  int32_t* ks;    // index of the copy's entry in the token's top-k
  int32_t* ids;   // kTokens: [capacity][K] local expert of each entry, or kNoExpert
  int32_t* ends;  // kExperts with alignment: [L] end of each expert's rows, without padding
  // [clients][T][Shape::forward_ints]: number of this node's ranks that each client's token visits, or the set of its
  // entries that visit this node.
  int32_t* forwards;
  // Set once leads_inside(w) has accepted the whole plan. GPU ranks check each entry when they follow it instead: their
  // host does not check, and since each block reads lists separately, a peer that rewrites them meanwhile can leave
  // entries that no block has written.
  bool judged = false;

  MOE_RT_FN static int64_t max_pulled(const Shape& s) { return int64_t{s.num_ranks} * s.num_max_tokens; }
  // Below 2^31, which the host has checked, so that a GPU can hold it in one register.
  MOE_RT_FN static int64_t max_copies(const Shape& s, int32_t num_local_experts) {
    return s.num_ranks * s.num_max_tokens * min_of(s.num_topk, num_local_experts);
  }
  MOE_RT_FN static int64_t ids_at(const Shape& s, int32_t num_local_experts) {
    return int64_t(sizeof(Head) + max_pulled(s) * sizeof(Pulled)) / 4 + 2 * max_copies(s, num_local_experts);
  }
  MOE_RT_FN static int64_t forwards_at(const Shape& s, int32_t num_local_experts) {
    const int64_t ends = s.alignment > 1 ? num_local_experts : 0;
    return ids_at(s, num_local_experts) + (s.by_token() ? max_pulled(s) * s.num_topk : ends);
  }
  MOE_RT_FN static int64_t num_ints(const Shape& s, int32_t num_local_experts) {
    return forwards_at(s, num_local_experts) + num_forwards(s);
  }
  MOE_RT_FN static int64_t num_forwards(const Shape& s) {
    return int64_t{s.num_clients} * s.num_max_tokens * s.forward_ints();
  }
  MOE_RT_FN static RecvPlan view(int32_t* ints, const Shape& s, int32_t num_local_experts) {
    RecvPlan p;
    p.head = reinterpret_cast<Head*>(ints);
    p.pulled = reinterpret_cast<Pulled*>(p.head + 1);
    p.rows = reinterpret_cast<int32_t*>(p.pulled + max_pulled(s));
    p.ks = p.rows + max_copies(s, num_local_experts);
    p.ids = p.ends = p.ks + max_copies(s, num_local_experts);
    p.forwards = ints + forwards_at(s, num_local_experts);
    return p;
  }

  // True if a dispatch of this engine, with this many tokens and this capacity, wrote the head, and its sizes are
  // possible. A handle passes through the user's hands: it may belong to another buffer, or be overwritten.
  MOE_RT_FN bool fits(const World& w, int64_t tokens, int64_t capacity) const {
    const Head& h = *head;
    return h.mark == w.plan_mark && h.num_tokens == tokens && below(h.num_pulled, max_pulled(w.shape) + 1) &&
           below(h.num_copies, max_copies(w.shape, w.num_local_experts()) + 1) &&
           (capacity == kAnyCapacity || h.capacity == capacity) && below(h.num_rows, int64_t{h.capacity} + 1) &&
           below(h.first_own, int64_t{h.num_pulled} + 1) && below(h.num_own, int64_t{h.num_pulled} - h.first_own + 1);
  }

  // True if an entry refers to a token, slot and copies that exist. Requires fits.
  MOE_RT_FN bool leads_inside(const World& w, const Pulled& p) const {
    const Shape& s = w.shape;
    return below(p.token, s.num_max_tokens) && below(p.source, s.num_ranks) && below(p.slot, s.num_node_slots()) &&
           below(int64_t{p.copies} - 1, s.num_topk) && below(p.first, int64_t{head->num_copies} - p.copies + 1);
  }
  MOE_RT_FN bool can_follow(const World& w, const Pulled& p) const { return judged || leads_inside(w, p); }
  // Return a copy's row, or kDropped, and its entry of the token's top-k. Results are in range, whatever the plan
  // holds.
  MOE_RT_FN int32_t row(int64_t copy) const {
    const int32_t row = rows[copy];
    return below(row, head->num_rows) ? row : kDropped;
  }
  MOE_RT_FN int32_t k(const Shape& s, int64_t copy) const {
    const int32_t k = ks[copy];
    return below(k, s.num_topk) ? k : 0;
  }

  // True if every entry refers to a token, slot or row that exists. Requires fits. The arithmetic is 32-bit unsigned,
  // so that compilers vectorise it.
  MOE_RT_FN bool leads_inside(const World& w) const {
    const Shape& s = w.shape;
    uint32_t bad = 0;
    for (int32_t e = 0; s.alignment > 1 && e < w.num_local_experts(); ++e) {
      bad |= !below(ends[e], int64_t{head->num_rows} + 1);
    }
    for (int64_t i = 0; i < head->num_pulled; ++i) bad |= !leads_inside(w, pulled[i]);
    const auto num_copies = head->num_copies;
    const auto end_row = uint32_t(head->num_rows) + 1, end_k = uint32_t(s.num_topk);  // dropped rows wrap around to 0
    for (int32_t c = 0; c < num_copies; ++c) bad |= uint32_t(uint32_t(rows[c]) - uint32_t(kDropped) >= end_row);
    for (int32_t c = 0; c < num_copies; ++c) bad |= uint32_t(uint32_t(ks[c]) >= end_k);
    if (s.returns_entries()) return !bad;  // bits of entries that do not exist are never read
    const auto end_slot = uint32_t(s.num_node_slots()) + 1;
    const int64_t num_marks = int64_t{w.nodes.num_clients} * s.num_max_tokens;
    for (int64_t i = 0; i < num_marks; ++i) bad |= uint32_t(uint32_t(forwards[i]) >= end_slot);
    return !bad;
  }
};

// View of topk_idx [T][K], with entries of 8 or 4 bytes.
struct ExpertIds {
  const void* entries;
  bool narrow;
  MOE_RT_FN int64_t operator[](int64_t i) const {
    return narrow ? static_cast<const int32_t*>(entries)[i] : static_cast<const int64_t*>(entries)[i];
  }
};

// One int32 of send_plan[T][K]: the slot where the entry's partial returns, and the token's first entry with the same
// expert, which carries the row for its duplicates; kNowhere for topk_idx -1.
inline constexpr int32_t kNowhere = -1;
MOE_RT_FN constexpr int32_t send_entry(int slot, int first_k) { return first_k << 16 | slot; }
MOE_RT_FN constexpr int send_slot(int32_t entry) { return entry & 0xffff; }
MOE_RT_FN constexpr int send_first_k(int32_t entry) { return entry >> 16; }

// True if every entry refers to a slot and a top-k entry that exist.
MOE_RT_FN bool send_plan_leads_inside(const int32_t* send_plan, int64_t num_tokens, const Shape& s) {
  const auto slots = uint32_t(s.num_slots()), num_topk = uint32_t(s.num_topk);
  uint32_t bad = 0;
  for (int64_t i = 0; i < num_tokens * s.num_topk; ++i) {
    const auto entry = uint32_t(send_plan[i]);
    bad |= uint32_t(entry != uint32_t(kNowhere)) &
           (uint32_t((entry & 0xffff) >= slots) | uint32_t(entry >> 16 >= num_topk));
  }
  return !bad;
}

// Number of ranks that a token visits: slots are assigned in rank order without gaps, so it follows from the highest
// one.
MOE_RT_FN int num_partials(const int32_t* send_plan_row, int num_topk) {
  int n = 0;
  for (int k = 0; k < num_topk; ++k) {
    if (send_plan_row[k] != kNowhere && send_slot(send_plan_row[k]) >= n) n = send_slot(send_plan_row[k]) + 1;
  }
  return n;
}

// List in memory that peers can write, the rank's own window included. Reads load an entry once and return a copy; a
// writer never reads its entries back.
template <class T>
struct SharedList {
  T* start;
  MOE_RT_FN T operator[](int64_t i) const { return read_once(start[i]); }
  MOE_RT_FN void put(int64_t i, const T& value) const { start[i] = value; }
};

// Views of the route lists in a source's window.
template <class Weight>
struct RouteLists {
  SharedList<int32_t> counts, pull_offs, copy_offs;
  SharedList<Pull> pulls;
  SharedList<Copy> copies;
  SharedList<Weight> weights;
  MOE_RT_FN static RouteLists view(const World& w, int source, int window) {
    const Layout::Window& o = w.layout.window[window];
    char* const start = w.window_start(source, window);
    const auto at = [&](int64_t offset) { return start + (offset - o.counts); };
    return {{reinterpret_cast<int32_t*>(start)},           {reinterpret_cast<int32_t*>(at(o.pull_offs))},
            {reinterpret_cast<int32_t*>(at(o.copy_offs))}, {reinterpret_cast<Pull*>(at(o.pulls))},
            {reinterpret_cast<Copy*>(at(o.copies))},       {reinterpret_cast<Weight*>(at(o.weights))}};
  }
  // Returns the lists that the source pushes into the receiver's segment.
  MOE_RT_FN static RouteLists pushed(const World& w, char* segment, int source, int window) {
    const Layout::Lists& o = w.layout.pushed;
    char* const start = segment + (w.layout.window[window].pushed + source * o.bytes);
    return {{reinterpret_cast<int32_t*>(start + o.counts)},    {reinterpret_cast<int32_t*>(start + o.pull_offs)},
            {reinterpret_cast<int32_t*>(start + o.copy_offs)}, {reinterpret_cast<Pull*>(start + o.pulls)},
            {reinterpret_cast<Copy*>(start + o.copies)},       {reinterpret_cast<Weight*>(start + o.weights)}};
  }
  // Returns the lists from which this rank reads what the source sends to it.
  MOE_RT_FN static RouteLists received(const World& w, int source, int window, bool are_pushed) {
    return are_pushed ? pushed(w, w.base[w.rank], source, window) : view(w, source, window);
  }
};

}  // namespace moe_rt
