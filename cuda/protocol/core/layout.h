// Where everything lies in a rank's symmetric segment: one walk yields the size and every offset.
//
//   control     segment header | poison | mailboxes [kind][source rank] | members [R] | op records [64] | last words
//   2 windows   route counts, offsets, lists and weights | tokens [T][H] | partials [S][T][H] | scalars [T][K]
//               pushed lists [R] and pushed rows [R][T']: of small batches, from each source (flat/pushing.h); none on a
//               CPU
// with T = num_max_tokens_per_rank and S = min(K, R), the most ranks one token can visit. Rows are padded to 64 bytes.
// Nothing depends on how many tokens a peer really sends, so the segment is sized once, and only the small lists of
// per-expert and per-rank numbers, and room for what is pushed, grow with E and R.
//
// Where ranks are on N nodes and rows go from node to node (two_level/), S = min(K, G) + N - 1 with G ranks on the
// largest node: a partial of each rank of the own node and a sum of each other node; there is a block of scalars for
// each node, and for each of the far sources that this rank serves
//   staged        route lists and tokens [T][H], as in the source's window
//   2 windows     forwarded partials [min(K, G)][T][H] | forwarded scalars [T][K]
#pragma once

#include "op_record.h"
#include "signal.h"

namespace moe_rt {

inline constexpr int64_t kLinePair = 128;
inline constexpr int64_t kPage = 4096;
inline constexpr int64_t kRowAlign = 64;

// One token that a destination rank pulls from this source.
struct Pull {
  int32_t token, slot;    // slot: which of the token's distinct ranks, in rank order, the destination is
  int32_t first, copies;  // its entries in the copy list
};

// One (token, local expert) row at the destination: the index-th row that this source sends to that expert.
struct Copy {
  int32_t expert, index, k, unused;
};

// What a row of recv_x is: one for each (token, local expert), by experts, or one for each token, by sources.
enum class RecvLayout : int32_t { kExperts = 0, kTokens = 1 };

struct Shape {
  int32_t num_ranks, num_experts, num_max_tokens, hidden, num_topk;
  int32_t elem_bytes, acc_bytes;  // payload element; accumulator and routing weight (fp32, or fp64 for fp64 payloads)
  RecvLayout recv_layout = RecvLayout::kExperts;
  int32_t alignment = 1;          // where rows are for experts: those of each begin and end at a multiple
  int32_t num_pushed_tokens = 0;  // of a batch, at most, whose lists are written to where they are read
  int32_t num_pushed_rows = 0;    // of a batch, at most, whose rows are, too; no more than those
  int32_t num_nodes = 1;          // between which rows go in two levels; 1 where all ranks are alike
  int32_t most_node_ranks = 0;    // of one of several nodes
  int32_t num_served = 0;         // far sources, at most, that a rank serves
  MOE_RT_FN bool by_token() const { return recv_layout == RecvLayout::kTokens; }
  MOE_RT_FN bool two_level() const { return num_nodes > 1; }
  // Ranks that a token may visit: of all, and of one node.
  MOE_RT_FN int32_t num_visits() const { return smaller(num_topk, num_ranks); }
  MOE_RT_FN int32_t num_node_slots() const { return two_level() ? smaller(num_topk, most_node_ranks) : num_visits(); }
  // Rows that may come home for a token.
  MOE_RT_FN int32_t num_slots() const { return num_node_slots() + num_nodes - 1; }
  // Up to the next multiple. Nearly always there is nothing to do, and a division would be the longest part of it.
  MOE_RT_FN int64_t aligned(int64_t rows) const { return alignment == 1 ? rows : round_up(rows, alignment); }
  MOE_RT_FN int64_t row_bytes() const { return round_up(int64_t{hidden} * elem_bytes, kRowAlign); }
};

struct Layout {
  int64_t poison, mailboxes, members, op_records, last_words;  // the segment header is at 0
  struct Window {
    int64_t counts, pull_offs, copy_offs, pulls, copies, weights, tokens, partials, scalars, pushed, pushed_rows;
    int64_t forwarded, forwarded_scalars;
  } window[2];
  // Of the far sources that this rank serves: the first one's lists, its rows from there, and how far the next one is.
  struct Staged {
    int64_t lists, rows, bytes;
  } staged;
  // Of one source's pushed lists, from where they begin.
  struct Lists {
    int64_t counts, pull_offs, copy_offs, pulls, copies, weights, bytes;
  } pushed;
  int64_t bytes;

  MOE_RT_FN static Layout make(const Shape& s) {
    Layout l{};
    int64_t cursor = 0;
    auto take = [&cursor](int64_t bytes, int64_t align) {
      const int64_t at = round_up(cursor, align);
      cursor = at + bytes;
      return at;
    };
    const int64_t tokens = s.num_max_tokens;
    const auto take_lists = [&](auto& lists, int64_t of_tokens) {
      lists.counts = take(int64_t{4} * s.num_experts, kLinePair);
      lists.pull_offs = take(int64_t{4} * (s.num_ranks + 1), kLinePair);
      lists.copy_offs = take(int64_t{4} * (s.num_ranks + 1), kLinePair);
      lists.pulls = take(of_tokens * s.num_visits() * int64_t{sizeof(Pull)}, kLinePair);
      lists.copies = take(of_tokens * s.num_topk * int64_t{sizeof(Copy)}, kLinePair);
      lists.weights = take(of_tokens * s.num_topk * s.acc_bytes, kLinePair);
    };
    if (s.num_pushed_tokens > 0) {
      take_lists(l.pushed, s.num_pushed_tokens);
      l.pushed.bytes = round_up(cursor, kLinePair);
      cursor = 0;
    }
    take(sizeof(SegmentHeader), kLinePair);
    l.poison = take(sizeof(uint64_t), kLinePair);
    l.mailboxes = take(int64_t{kNumKinds} * s.num_ranks * sizeof(Mailbox), kLinePair);
    l.members = take(int64_t{s.num_ranks} * sizeof(Member), kLinePair);
    l.op_records = take(int64_t{kNumOpRecords} * sizeof(OpRecordSlot), kLinePair);
    l.last_words = take(sizeof(LastWords), kLinePair);
    for (Window& w : l.window) {
      take_lists(w, tokens);
      w.tokens = take(tokens * s.row_bytes(), kPage);
      w.partials = take(tokens * s.num_slots() * s.row_bytes(), kPage);
      w.scalars = take(s.num_nodes * tokens * s.num_topk * s.acc_bytes, kLinePair);
      w.pushed = take(s.num_ranks * l.pushed.bytes, kLinePair);
      w.pushed_rows = take(int64_t{s.num_ranks} * s.num_pushed_rows * s.row_bytes(), s.num_pushed_rows ? kPage : 1);
      w.forwarded = take(s.num_served * forwarded_bytes(s), s.num_served ? kPage : 1);
      w.forwarded_scalars = take(s.num_served * tokens * s.num_topk * s.acc_bytes, s.num_served ? kLinePair : 1);
    }
    if (s.num_served > 0) {
      l.staged.rows = round_up(l.window[0].tokens - l.window[0].counts, kPage);
      l.staged.bytes = round_up(l.staged.rows + tokens * s.row_bytes(), kPage);
      l.staged.lists = take(s.num_served * l.staged.bytes, kPage);
    }
    l.bytes = round_up(cursor, kPage);
    return l;
  }
  // Partials of one far source's tokens.
  MOE_RT_FN static int64_t forwarded_bytes(const Shape& s) {
    return int64_t{s.num_node_slots()} * s.num_max_tokens * s.row_bytes();
  }
};

// Experts in placement order: by rank, then by local index. Tables are the same on every rank.
struct Placement {
  const int32_t* position;    // [E] expert id -> place in that order
  const int32_t* owner;       // [E] place -> rank
  const int32_t* rank_first;  // [R + 1] first place of each rank
  const int32_t* entries;     // [E] expert id -> its owner and its place at once (flat/routing_tiles.h)
};

// Who is on which node, as one rank sees it, where rows go in two levels. A rank's forwarder on another node is the rank
// there that serves it: what it sends to that node comes in through it, and what comes home is added up by it.
struct Nodes {
  int32_t own = 0;                     // this rank's node
  int32_t num_served = 0;              // far ranks that this rank serves
  const int32_t* node_of = nullptr;    // [R]
  const int32_t* forwarder = nullptr;  // [R] of a far rank, on this node; of a neighbour itself
  const int32_t* served_at = nullptr;  // [R] a far rank's place among those that its forwarder serves
  const int32_t* served = nullptr;     // [num_served] the far ranks that this rank serves, in rank order
  const int32_t* serving = nullptr;    // [R] of a far rank's node, the rank that serves this one; of a neighbour itself

  // The place of another node among those that are not `from`.
  MOE_RT_FN static int32_t far_index(int32_t node, int32_t from) { return node < from ? node : node - 1; }
};

// One rank's view of its group: everything a role function needs besides its tensors.
struct World {
  Shape shape;
  Layout layout;
  Placement placement;
  char* const* base;    // [R] where each rank's segment is mapped here; nullptr where it is not
  char* const* mirror;  // nullptr, or [R] copies of the route lists of ranks that are not mapped (device/rdma.h)
  int32_t rank;
  uint64_t config;     // hash of shape, dtype and placement; equal on all ranks
  uint64_t plan_mark;  // of this rank's engine alone: whose plans it follows (plan.h)
  Nodes nodes{};       // where the shape is of several nodes

  MOE_RT_FN int32_t num_local_experts() const { return num_local_experts_of(rank); }
  MOE_RT_FN int32_t num_local_experts_of(int r) const { return placement.rank_first[r + 1] - placement.rank_first[r]; }
  // The most rows of padding that a rank's experts may need.
  MOE_RT_FN int64_t most_padding(int r) const { return int64_t{num_local_experts_of(r)} * (shape.alignment - 1); }
  // Parts that recv_x is divided into, each of which ends at an entry of offs: experts here, or sources.
  MOE_RT_FN int32_t num_parts() const { return shape.by_token() ? shape.num_ranks : num_local_experts(); }
  template <class T>
  MOE_RT_FN T* at(int peer, int64_t offset) const {
    return reinterpret_cast<T*>(base[peer] + offset);
  }
  MOE_RT_FN uint64_t& poison(int peer) const { return *at<uint64_t>(peer, layout.poison); }
  MOE_RT_FN Mailbox& mailbox(int owner, Kind kind, int source) const {
    return at<Mailbox>(owner, layout.mailboxes)[static_cast<int>(kind) * shape.num_ranks + source];
  }
  // What this rank announces of its op, and compares with what peers do. Made here and nowhere else; who refuses adds
  // that.
  MOE_RT_FN Header header(uint64_t seq, const Call& call) const {
    return {.seq = seq,
            .config = config,
            .call = call_word(call),
            .status = Code::kOk,
            .num_tokens = call.num_tokens,
            .got = 0,
            .expected = 0,
            .max_tokens = call.max_tokens,
            .capacity = call.capacity};
  }
  MOE_RT_FN OpRecordSlot& op_record(uint64_t number) const {
    return at<OpRecordSlot>(rank, layout.op_records)[number % kNumOpRecords];
  }
  // Each takes the window that an op uses, 0 or 1 (window_selector.h). Its start is where a rank's route lists are.
  MOE_RT_FN char* window_start(int source, int window) const {
    return mirror && mirror[source] ? mirror[source] : base[source] + layout.window[window].counts;
  }
  // Offsets in a segment.
  MOE_RT_FN int64_t token_row(int window, int64_t token) const {
    return layout.window[window].tokens + token * shape.row_bytes();
  }
  // At home, the row that a source has pushed.
  MOE_RT_FN int64_t pushed_row(int window, int source, int64_t token) const {
    return layout.window[window].pushed_rows + (int64_t{source} * shape.num_pushed_rows + token) * shape.row_bytes();
  }
  // Token after token in each slot: whoever reads ahead of a row finds the next one that it wants.
  MOE_RT_FN int64_t partial_row(int window, int64_t token, int64_t slot) const {
    return layout.window[window].partials + (slot * shape.num_max_tokens + token) * shape.row_bytes();
  }
  MOE_RT_FN int64_t scalar(int window, int64_t token, int64_t k) const {
    return layout.window[window].scalars + (token * shape.num_topk + k) * shape.acc_bytes;
  }
  // A token's scalars of other nodes lie behind those of the own one.
  MOE_RT_FN int64_t far_scalar(int window, int64_t token, int64_t k, int64_t far_index) const {
    return scalar(window, (far_index + 1) * shape.num_max_tokens + token, k);
  }
};
// The host makes these bytes and kernels read them: two compilers must lay them out alike.
static_assert(sizeof(World) == 512 && sizeof(Header) == 56 && sizeof(Layout) == 336, "the host's layout");

}  // namespace moe_rt
