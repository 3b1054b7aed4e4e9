// Launches in which a GPU serves its clients, ranks of other nodes whose proxy it is (protocol/two_level/). They run
// between the sending and the receiving launch of an op. cpu/proxy.h has the CPU's.
//
//   dispatch            dispatch_lists                  get the clients' lists for this node, mark their tokens
//                       dispatch_forward                get each marked row once, pass on
//   combine, and        combine_first_wait              on one block, if there are enough tokens to justify a launch
//   dispatch backward   combine_forward                 add up each node's partials, put the sums, pass on
//   combine backward    combine_backward_first_wait     as above
//                       combine_backward_forward        get each marked row once, pass on
// Blocks wait for the ranks of their node and for their clients, whose sending launches do not need the multiprocessors
// occupied here, and for no other block of their launch: the last block passes on. Receiving launches wait for what is
// passed on, so no cycle of waits exists.
#pragma once

#include "ops.h"
#include "rdma.h"

namespace moe_rt {

// RdmaSignals of a rank that maps only the ranks of its node.
template <class Net>
class NodeSignals : public RdmaSignals<Net> {
 public:
  MOE_RT_FN NodeSignals(const Net& net, const NetworkMemory& memory)
      : RdmaSignals<Net>(net, memory), net_(net), memory_(memory) {}

  // Announces an op. Of the ranks on other nodes, only this rank's proxies receive it, and only for dispatch-type ops.
  MOE_RT_FN void announce(const World& w, int peer, Kind kind, const Header& header) const {
    if (!w.base[peer] && (kind != Kind::kDispatch || w.nodes.proxy_on[peer] != peer)) return;
    RdmaSignals<Net>::announce(w, peer, kind, header);
  }

  // SYNC POINT signal, passed on: post, or the network's signal after fences, releases what this launch has staged or
  // put. Pairs with wait_signal. This rank has received the source's signal before, so a rank that receives it from
  // here knows that the source's reads of the previous op are over. The header is copied unchanged: a refusal must
  // reach all ranks.
  template <Kind kKind>
  MOE_RT_FN void pass_on(const World& w, int to, int source, uint64_t seq) const {
    const Header& header = w.mailbox(w.rank, kKind, source).header[seq & 1];
    if constexpr (kKind == Kind::kDispatch) {  // target is on this node
      post(w.mailbox(to, kKind, source), read_once(header));
      return;
    }
    network_fence();
    Mailbox* const mailboxes = reinterpret_cast<Mailbox*>(memory_.segment + w.layout.mailboxes);
    Mailbox& there = mailboxes[int(kKind) * w.shape.num_ranks + source];
    net_.fence();  // see RdmaSignals::announce
    net_.put_signal(&there.header[seq & 1], &header, &there.signal, seq, to);
  }

 private:
  const Net& net_;
  const NetworkMemory& memory_;
};

template <class Net>
struct NodeLinks {
  static constexpr bool kWarpsOnly = false, kTwoLevel = true, kOrderedSignals = Net::kOrderedSignals;
  NetworkMemory memory;
  Net net;
  MOE_RT_FN NodeSignals<Net> link() const { return {net, memory}; }
};

template <class Dims, class Elem, class Machine>
struct Forwarding {
  using Acc = typename Elem::Acc;
  const Launch<Dims, Elem, Machine>& launch;
  const Machine& m = launch.m;
  const World& w = launch.w;
  const Control& c = launch.c;

  // First launch after the op's sending launch.
  MOE_RT_FN void dispatch_lists(const DispatchArgs& a) const {
    const int32_t* const served = w.nodes.clients;
    m.await_launch_before();
    const OpSlot slot = last_slot(Kind::kDispatch);
    if (!healthy(m, c) || wait_for_direct(call_of(a, c.tag), slot) != WaitResult::kNoFailure) return;
    for (int i = m.block_index(); i < w.nodes.num_clients; i += m.num_blocks()) {
      int32_t* const forwards =
          launch.plan(a.recv_plan).forwards + int64_t{i} * w.shape.num_max_tokens * w.shape.forward_ints();
      get_lists(served[i], slot.window);
      if (mark_tokens<Acc>(m.block(), w, served[i], slot.window, forwards)) continue;
      const Status corrupt{
          .code = Code::kCorruptPeer, .op = Op::kDispatch, .phase = Phase::kGather, .peer = served[i], .seq = slot.seq};
      fail(w, c, corrupt, m.link());
    }
  }

  MOE_RT_FN void dispatch_forward(const DispatchArgs& a) const {
    const ScaledArgs& s = a.scaled;
    const int64_t row_bytes =
        s.code_bytes ? RowParts{s.code_bytes, s.scale_bytes}.bytes() : bytes_of(launch.dims.codec(Op::kDispatch));
    forward<Kind::kDispatch>(call_of(a, c.tag),
                             [&](int window) { stage(launch.plan(a.recv_plan), window, row_bytes); });
  }
  MOE_RT_FN void combine_backward_forward(const CombineBackwardArgs& a) const {
    const RecvPlan p = launch.plan(a.recv_plan);
    forward<Kind::kDispatch>(call_of(a, c.tag, p),
                             [&](int window) { stage(p, window, bytes_of(launch.dims.codec(Op::kCombineBackward))); });
  }
  MOE_RT_FN void combine_forward(const CombineArgs& a) const {
    const RecvPlan p = launch.plan(a.recv_plan);
    forward<Kind::kCombine>(call_of(a, c.tag, p), [&](int window) { send_home(a, p, window); });
  }

  MOE_RT_FN void combine_first_wait(const CombineArgs& a) const {
    first_wait(call_of(a, c.tag, launch.plan(a.recv_plan)));
  }
  MOE_RT_FN void combine_backward_first_wait(const CombineBackwardArgs& a) const {
    first_wait(call_of(a, c.tag, launch.plan(a.recv_plan)));
  }

 private:
  enum class WaitResult { kNoFailure, kRefused, kNothing };

  MOE_RT_FN int64_t bytes_of(Codec codec) const {
    return codec_row_bytes(codec, launch.dims.hidden(), int64_t{sizeof(Elem)});
  }
  MOE_RT_FN OpSlot last_slot(Kind kind) const { return {c.state->seq[int(kind)], c.state->windows.taken(kind)}; }

  // Waits for the ranks that announce first. Refusals are passed on, and receiving launches judge them. Any other error
  // ends the group: if a peer's signal arrived after this wait, later launches would take rows that were never staged.
  MOE_RT_FN WaitResult wait_for_direct(const Call& call, const OpSlot& slot) const {
    const Kind kind = kind_of(call.op);
    Status mine;
    const uint64_t worst = wait_for_peers(m, w, c, kind, w.header(slot.seq, call), mine,
                                          [&](int peer) { return announces_directly(w, kind, peer); });
    if (worst == kNoFailure) return WaitResult::kNoFailure;
    if (is_refusal(code_of(worst))) return WaitResult::kRefused;
    if (!mine.ok() && severity(mine) == worst) fail(w, c, mine, m.link());
    return WaitResult::kNothing;
  }
  MOE_RT_FN void first_wait(const Call& call) const {
    m.await_launch_before();
    if (healthy(m, c)) wait_for_direct(call, last_slot(kind_of(call.op)));
  }

  // Runs move(window) on every block, once all ranks that announce first have done so; the last block passes their
  // announcements on.
  template <Kind kKind, class Move>
  MOE_RT_FN void forward(const Call& call, Move&& move) const {
    m.await_launch_before();
    const OpSlot slot = last_slot(kKind);
    if (!healthy(m, c)) return;
    const WaitResult result = wait_for_direct(call, slot);
    if (result == WaitResult::kNothing) return;
    if (result == WaitResult::kNoFailure) move(slot.window);
    m.let_next_begin();
    if (!comes_last(m, c)) return;
    pass_on<kKind>(slot.seq);
    if (m.block().rank() == 0) c.state->done = 0;
  }

  // Passes on announcements, one pair of ranks per lane: clients' to this node's ranks in dispatch-type ops, this
  // node's ranks' to clients in combine-type ops.
  template <Kind kKind>
  MOE_RT_FN void pass_on(uint64_t seq) const {
    const auto link = m.link();
    const int32_t num_ranks = w.shape.num_ranks;
    const Range pairs = strided(m.block(), int64_t{w.nodes.num_clients} * num_ranks);
    for (int64_t i = pairs.begin; i < pairs.end; i += pairs.step) {
      const int remote = w.nodes.clients[int32_t(i) / num_ranks], near = int32_t(i) % num_ranks;
      if (w.nodes.node_of[near] != w.nodes.own) continue;
      if constexpr (kKind == Kind::kCombine) {
        link.template pass_on<kKind>(w, remote, near, seq);
      } else {
        if (near != w.rank) link.template pass_on<kKind>(w, near, remote, seq);
      }
    }
  }

  // Gets a source's lists for ranks of this node into the staging area: all in one get if they are small, else counts
  // and ends first, then the entries of each run of this node's ranks. Other contents of the staging area are validated
  // by their readers. Lanes do not sync at the end.
  MOE_RT_FN void get_lists(int source, int window) const {
    const Layout::Window& o = w.layout.window[window];
    const char* const there = m.links.memory.segment;
    const auto lists = RouteLists<Acc>::view(w, source, window);
    const bool at_once = lists_in_one_trip(w);
    m.links.net.get(m.block(), lists.counts.start, there + o.counts, (at_once ? o.tokens : o.pulls) - o.counts, source);
    network_fence();
    if (at_once) return;
    m.block().sync();
    const int64_t tokens = w.shape.num_max_tokens, most_copies = tokens * w.shape.num_topk;
    const auto is_near = [&](int rank) { return w.nodes.node_of[rank] == w.nodes.own; };
    for (int r = 0; r < w.shape.num_ranks; ++r) {
      if (!is_near(r)) continue;
      const int64_t pull = lists.pull_offs[r], copy = lists.copy_offs[r];
      while (r + 1 < w.shape.num_ranks && is_near(r + 1)) ++r;
      const int64_t pulls_end = lists.pull_offs[r + 1], copies_end = lists.copy_offs[r + 1];
      fetch_entries(m, lists.pulls.start, there + o.pulls, pull, pulls_end, tokens * w.shape.num_visits(), source);
      fetch_entries(m, lists.copies.start, there + o.copies, copy, copies_end, most_copies, source);
      fetch_entries(m, lists.weights.start, there + o.weights, copy, copies_end, most_copies, source);
    }
    network_fence();
  }

  MOE_RT_FN void stage(const RecvPlan& p, int window, int64_t row_bytes) const {
    const auto group = m.warps(0);
    const Layout::Staged& staged = w.layout.staged;
    for_wanted(group, w, p.forwards, [&](int64_t, int source, int32_t token) {
      const int64_t offset = staged.lists + w.nodes.client_index[source] * staged.bytes + staged.rows;
      m.links.net.get(group, w.at<char>(w.rank, offset + token * w.shape.row_bytes()),
                      m.links.memory.segment + w.token_row(window, token), row_bytes, source);
    });
    network_fence();
  }

  MOE_RT_FN void send_home(const CombineArgs& a, const RecvPlan& p, int window) const {
    const auto group = m.warps(0);
    const NetworkMemory& memory = m.links.memory;
    char* const coded = memory.scratch_of(group.index);
    const auto put = [&](int to, int64_t offset, const char* row, int64_t bytes) {
      network_fence();
      group.sync();
      m.links.net.put(group, memory.segment + offset, row, bytes, to);
      group.sync();  // the scratch row is reused for another sum
    };
    const auto rows = launch.rows(group, launch.combine_codec(a.op));
    if (launch.dims.sums() == Sums::kInvariant) {
      send_entries(group, w, window, p.forwards, entry_bytes<Acc>(rows.encoded_row_bytes()), put);
    } else {
      send_sums<Dims>(
          group, w, window, p.forwards, rows, a.grad_recv_weights != nullptr, coded + w.shape.row_bytes(),
          [&](int64_t) { return coded; }, put);
    }
    group.sync();
    if (group.leader()) m.links.net.before_signals();  // like RdmaLink::flush
  }
};

template <class Dims, class Elem, class Machine>
Forwarding(const Launch<Dims, Elem, Machine>&) -> Forwarding<Dims, Elem, Machine>;

}  // namespace moe_rt
