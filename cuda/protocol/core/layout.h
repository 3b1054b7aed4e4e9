// Layout of a rank's symmetric segment: one walk computes the size and every offset. Every role finds a segment's parts
// through World, at the end of this file.
//
//   control     segment header | poison | mailboxes [channel][kind][source rank] | members [R] | op records [64] | last
//               words
//   2 windows   route counts, offsets, lists and weights | tokens [T][H] | partials [S][T][H] | scalars [T][K]
//               pushed lists [R] and pushed rows [R][T'] of small batches, from each source (flat/pushing.h);
//               CPU ranks have no pushed regions
// with T = num_max_tokens_per_rank and S = min(K, R), the maximum number of ranks that one token can visit. Rows are
// padded to 64 bytes. Nothing depends on how many tokens a peer really sends, so the segment is sized once. Only the
// small per-expert and per-rank arrays, and the space for pushed data, grow with E and R.
//
// If ranks are on N nodes and rows go from node to node (two_level/), S = min(K, G) + N - 1 with G ranks on the largest
// node: a partial of each rank of the own node and a sum of each other node. Each node has a block of scalars, and each
// of this rank's clients (remote sources whose proxy it is, see Nodes) has
//   staged        route lists and tokens [T][H], as in the source's window
//   2 windows     forwarded partials [min(K, G)][T][H] | forwarded scalars [T][K]
//
// With depth D there are D channels, each with its own mailboxes, windows and staged data; an op is in one of them
// (docs/protocol.md, "Depth"). Layout::of_channel gives the layout of each.
//
// With Sums::kInvariant a row returns for each of a token's K entries, followed by its scalar: [K][T][H + 1] in place of
// partials, of forwarded partials and of all scalars.
#pragma once

#include "dims.h"
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

// Meaning of a row of recv_x: one (token, local expert) pair, grouped by expert, or one token, grouped by source.
enum class RecvLayout : int32_t { kExperts = 0, kTokens = 1 };

struct Shape {
  int32_t num_ranks, num_experts, num_max_tokens, hidden, num_topk;
  int32_t elem_bytes, acc_bytes;  // payload element; accumulator and routing weight (fp32, or fp64 for fp64 payloads)
  RecvLayout recv_layout = RecvLayout::kExperts;
  int32_t alignment = 1;          // kExperts: each expert's rows begin and end at a multiple of it
  int32_t num_pushed_tokens = 0;  // largest batch whose lists are written to the receiver's segment
  int32_t num_pushed_rows = 0;    // largest batch whose rows are, too; <= num_pushed_tokens
  int32_t num_nodes = 1;          // nodes between which rows go in two levels; 1 means flat
  int32_t most_node_ranks = 0;    // ranks of the largest node, if there are several nodes
  int32_t num_clients = 0;        // maximum number of clients of a rank
  Sums sums = Sums::kRanked;
  int32_t depth = 1;  // channels
  MOE_RT_FN bool by_token() const { return recv_layout == RecvLayout::kTokens; }
  MOE_RT_FN bool two_level() const { return num_nodes > 1; }
  // Maximum number of ranks that a token visits: of all ranks, and of one node.
  MOE_RT_FN int32_t num_visits() const { return min_of(num_topk, num_ranks); }
  MOE_RT_FN int32_t num_node_slots() const { return two_level() ? min_of(num_topk, most_node_ranks) : num_visits(); }
  // Number of places to which an entry of the send plan may point: partials of the own node, and sums of the others.
  MOE_RT_FN int32_t num_slots() const { return num_node_slots() + num_nodes - 1; }
  MOE_RT_FN bool returns_entries() const { return sums == Sums::kInvariant; }
  // Maximum number of rows that return to the source for one token, and through a proxy.
  MOE_RT_FN int32_t num_returned() const { return returns_entries() ? num_topk : num_slots(); }
  MOE_RT_FN int32_t num_forwarded() const { return returns_entries() ? num_topk : num_node_slots(); }
  // Ints that say what a node returns for one of a client's tokens: a number of ranks, or a set of entries.
  MOE_RT_FN int32_t forward_ints() const { return returns_entries() ? (num_topk + 31) / 32 : 1; }
  // Rounds up to the next multiple of alignment. Alignment is nearly always 1, and the test is cheaper than a division.
  MOE_RT_FN int64_t aligned(int64_t rows) const { return alignment == 1 ? rows : round_up(rows, alignment); }
  MOE_RT_FN int64_t row_bytes() const { return round_up(int64_t{hidden} * elem_bytes, kRowAlign); }
  // Bytes between two rows that return, with space for a scalar if each has its own. Coded rows are no longer.
  MOE_RT_FN int64_t returned_row_bytes() const {
    return returns_entries() ? round_up(int64_t{hidden} * elem_bytes + acc_bytes, kRowAlign) : row_bytes();
  }
  MOE_RT_FN int64_t scalar_bytes() const {
    return returns_entries() ? 0 : int64_t{num_max_tokens} * num_topk * acc_bytes;
  }
};

struct Layout {
  int64_t poison, mailboxes, members, op_records, last_words;  // offsets in bytes; the segment header is at 0
  int64_t channel,
      channel_bytes;  // channel of the mailboxes, windows and staged data; from one channel's to the next's
  // Offsets in the segment of one window's parts, in the order of the list above.
  struct Window {
    int64_t counts, pull_offs, copy_offs, pulls, copies, weights, tokens, partials, scalars, pushed, pushed_rows;
    int64_t forwarded, forwarded_scalars;
  } window[2];
  // Offsets in the segment of the staging area of this rank's clients.
  struct Staged {
    int64_t lists, rows, bytes;  // lists of the first client; its rows, from `lists`; bytes per client
  } staged;
  // Pushed lists of one source: offsets from their start.
  struct Lists {
    int64_t counts, pull_offs, copy_offs, pulls, copies, weights, bytes;
  } pushed;
  int64_t bytes;  // size of the segment

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
    l.mailboxes = take(s.depth * mailboxes_bytes(s), kLinePair);
    l.members = take(int64_t{s.num_ranks} * sizeof(Member), kLinePair);
    l.op_records = take(int64_t{kNumOpRecords} * sizeof(OpRecordSlot), kLinePair);
    l.last_words = take(sizeof(LastWords), kLinePair);
    const int64_t first_channel = cursor;
    for (Window& w : l.window) {
      take_lists(w, tokens);
      w.tokens = take(tokens * s.row_bytes(), kPage);
      w.partials = take(tokens * s.num_returned() * s.returned_row_bytes(), kPage);
      w.scalars = take(s.num_nodes * s.scalar_bytes(), kLinePair);
      w.pushed = take(s.num_ranks * l.pushed.bytes, kLinePair);
      w.pushed_rows = take(int64_t{s.num_ranks} * s.num_pushed_rows * s.row_bytes(), s.num_pushed_rows ? kPage : 1);
      w.forwarded = take(s.num_clients * forwarded_bytes(s), s.num_clients ? kPage : 1);
      w.forwarded_scalars = take(s.num_clients * s.scalar_bytes(), s.num_clients ? kLinePair : 1);
    }
    if (s.num_clients > 0) {
      l.staged.rows = round_up(l.window[0].tokens - l.window[0].counts, kPage);
      l.staged.bytes = round_up(l.staged.rows + tokens * s.row_bytes(), kPage);
      l.staged.lists = take(s.num_clients * l.staged.bytes, kPage);
    }
    l.channel_bytes = round_up(cursor - first_channel, kPage);
    l.bytes = round_up(cursor + (s.depth - 1) * l.channel_bytes, kPage);
    return l;
  }
  // Returns the layout whose mailboxes, windows and staged data are those of a channel; `make` returns the first one's.
  MOE_RT_FN static Layout of_channel(const Shape& s, int64_t channel) {
    Layout l = make(s);
    const int64_t past = channel * l.channel_bytes;
    l.channel = channel;
    l.mailboxes += channel * mailboxes_bytes(s);
    for (Window& w : l.window) {
      w.counts += past, w.pull_offs += past, w.copy_offs += past, w.pulls += past, w.copies += past, w.weights += past;
      w.tokens += past, w.partials += past, w.scalars += past, w.pushed += past, w.pushed_rows += past;
      w.forwarded += past, w.forwarded_scalars += past;
    }
    l.staged.lists += past;
    return l;
  }
  // Bytes of one channel's mailboxes.
  MOE_RT_FN static int64_t mailboxes_bytes(const Shape& s) {
    return int64_t{kNumKinds} * s.num_ranks * int64_t{sizeof(Mailbox)};
  }
  // Bytes of the rows that return through a proxy to one client.
  MOE_RT_FN static int64_t forwarded_bytes(const Shape& s) {
    return int64_t{s.num_forwarded()} * s.num_max_tokens * s.returned_row_bytes();
  }
};

// Tables of experts in placement order (by rank, then by local index), identical on every rank.
struct Placement {
  const int32_t* position;    // [E] expert id -> place in that order
  const int32_t* owner;       // [E] place -> rank
  const int32_t* rank_first;  // [R + 1] first place of each rank
  const int32_t* entries;     // [E] expert id -> owner and place in one word (flat/entries.h)
};

// Nodes of the group as one rank sees them, if rows go in two levels. A rank has a proxy on each other node
// (`proxy_of`): what it sends to that node arrives through the proxy, which also adds up what returns. Its clients are
// the remote ranks whose proxy it is (`clients`).
struct Nodes {
  int32_t own = 0;                        // this rank's node
  int32_t num_clients = 0;                // number of this rank's clients
  const int32_t* node_of = nullptr;       // [R]
  const int32_t* proxy_of = nullptr;      // [R] a remote rank's proxy on this node; a rank of this node itself
  const int32_t* client_index = nullptr;  // [R] a remote rank's index among its proxy's clients
  const int32_t* clients = nullptr;       // [num_clients] this rank's clients, in rank order
  const int32_t* proxy_on = nullptr;      // [R] this rank's proxy on a remote rank's node; a rank of this node itself

  // Index of another node among all nodes but `from`.
  MOE_RT_FN static int32_t remote_index(int32_t node, int32_t from) { return node < from ? node : node - 1; }
};

// One rank's view of its group: all inputs of a role function other than its tensors.
struct World {
  Shape shape;
  Layout layout;
  Placement placement;
  char* const* base;    // [R] address of each rank's segment in this process; nullptr if not mapped
  char* const* mirror;  // nullptr, or [R] copies of unmapped ranks' route lists (gpu/rdma.h)
  int32_t rank;
  uint64_t config;     // hash of shape, dtype and placement; equal on all ranks
  uint64_t plan_mark;  // identifies this rank's engine: it follows only its own plans (plan.h)
  Nodes nodes{};       // set if the shape has several nodes

  MOE_RT_FN int32_t num_local_experts() const { return num_local_experts_of(rank); }
  MOE_RT_FN int32_t num_local_experts_of(int r) const { return placement.rank_first[r + 1] - placement.rank_first[r]; }
  // Maximum number of padding rows that a rank's experts may need.
  MOE_RT_FN int64_t most_padding(int r) const { return int64_t{num_local_experts_of(r)} * (shape.alignment - 1); }
  // Number of parts of recv_x, each of which ends at an entry of offs: local experts, or sources.
  MOE_RT_FN int32_t num_parts() const { return shape.by_token() ? shape.num_ranks : num_local_experts(); }
  template <class T>
  MOE_RT_FN T* at(int peer, int64_t offset) const {
    return reinterpret_cast<T*>(base[peer] + offset);
  }
  MOE_RT_FN uint64_t& poison(int peer) const { return *at<uint64_t>(peer, layout.poison); }
  MOE_RT_FN Mailbox& mailbox(int owner, Kind kind, int source) const {
    return at<Mailbox>(owner, layout.mailboxes)[static_cast<int>(kind) * shape.num_ranks + source];
  }
  // Number of the dispatch-type op `seq` of this channel, unlike that of any such op of another channel.
  MOE_RT_FN uint64_t op_number(uint64_t seq) const { return (seq - 1) * shape.depth + layout.channel + 1; }
  // Returns the header that this rank announces for its op and compares with its peers' headers. Headers are created
  // only here; a rank that refuses the op adds the refusal.
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
  // The functions below take an op's window, 0 or 1 (window_selector.h). A rank's route lists are at its window's
  // start.
  MOE_RT_FN char* window_start(int source, int window) const {
    return mirror && mirror[source] ? mirror[source] : base[source] + layout.window[window].counts;
  }
  // Offsets in a segment, in bytes.
  MOE_RT_FN int64_t token_row(int window, int64_t token) const {
    return layout.window[window].tokens + token * shape.row_bytes();
  }
  // Row that a source has pushed into the receiver's segment.
  MOE_RT_FN int64_t pushed_row(int window, int source, int64_t token) const {
    return layout.window[window].pushed_rows + (int64_t{source} * shape.num_pushed_rows + token) * shape.row_bytes();
  }
  // Tokens are contiguous within a slot, so that hardware that reads ahead of a row fetches the next row that is
  // needed.
  MOE_RT_FN int64_t partial_row(int window, int64_t token, int64_t slot) const {
    return layout.window[window].partials + (slot * shape.num_max_tokens + token) * shape.row_bytes();
  }
  // Row of the token's k-th entry, if rows return by entry.
  MOE_RT_FN int64_t entry_row(int window, int64_t token, int64_t k) const {
    return layout.window[window].partials + (k * shape.num_max_tokens + token) * shape.returned_row_bytes();
  }
  MOE_RT_FN int64_t scalar(int window, int64_t token, int64_t k) const {
    return layout.window[window].scalars + (token * shape.num_topk + k) * shape.acc_bytes;
  }
  // Scalars from other nodes follow those from the own node.
  MOE_RT_FN int64_t remote_scalar(int window, int64_t token, int64_t k, int64_t remote_index) const {
    return scalar(window, (remote_index + 1) * shape.num_max_tokens + token, k);
  }
};
// The host fills these bytes and kernels read them, so two compilers must agree on their layout.
static_assert(sizeof(World) == 536 && sizeof(Header) == 56 && sizeof(Layout) == 352, "the host's layout");

}  // namespace moe_rt
