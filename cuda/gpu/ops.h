// Bodies of the CUDA launches, two for each op, written for any machine of blocks and lanes: `*_send` begins the op,
// `*_receive` finishes it (exchange.h).
//
//   dispatch            dispatch_send          publish, route    | dispatch_receive          wait, index, gather
//   combine             combine_send           push              | combine_receive           wait, reduce
//   dispatch backward   combine_send           push, scalars     | combine_receive           wait, reduce, scalars
//   combine backward    combine_backward_send  publish           | combine_backward_receive  wait, gather_grad
// Between the two, `*_wait` may wait on one block: the blocks of the receiving launch then find all signals there.
// whole_ops.h has ops in one launch, and forwarding.h the launches of proxies in between. A Machine has block(),
// shared(), scratch(), num_blocks(), block_index(), clock_ns(), nap(), link(), and groups of lanes that move rows:
// warps(first), and warps(first, n) with n warps of a block per group, over the launch's blocks from `first` on.
// Neighbouring groups are in different blocks, so that a few rows are spread over all.
#pragma once

#include "../protocol/core/calls.h"
#include "../protocol/flat/combine_entries.h"
#include "../protocol/flat/dispatch.h"
#include "../protocol/flat/pushing.h"
#include "../protocol/two_level/reduce.h"
#include "exchange.h"
#include "moving.h"
#include "rows.h"
#include "scaled_rows.h"
#include "sizes.h"

namespace moe_rt {

// Number of a block's warps that take a row together: the maximum at which no row waits for another, or one.
MOE_RT_FN int warps_together(int64_t num_rows, int64_t num_blocks, int warps) {
  int together = warps;
  while (together > 1 && num_rows > num_blocks * (warps / together)) together = together % 2 == 0 ? together / 2 : 1;
  return together;
}

// Runs fn on groups of lanes for `num_rows` rows: all warps have work for any number, and one more row adds little
// time.
template <class Machine, class Fn>
MOE_RT_FN void with_groups(const Machine& m, int first_block, int64_t num_rows, Fn&& fn) {
  if constexpr (Machine::kWarpsOnly) {
    fn(m.warps(first_block));
  } else {
    const int warps = m.block().size() / decltype(m.warps(first_block))::kTeamLanes;
    fn(m.warps(first_block, warps_together(num_rows, m.num_blocks() - first_block, warps)));
  }
}

template <class Dims, class Elem, class Machine>
struct Launch {
  using Acc = typename Elem::Acc;
  const Machine& m;
  const Dims& dims;
  const World& w;
  const Control& c;

  template <class Group, class Moving = ByLanes>
  MOE_RT_FN DeviceRows<Elem, Dims, Group, Moving> rows(const Group& group, Codec codec,
                                                       const Moving& moving = {}) const {
    return {dims, group, codec, moving};
  }
  template <class Group>
  MOE_RT_FN DeviceScaledRows<Dims, Group> rows(const Group& group, const ScaledArgs& a, const ByLanes& = {}) const {
    return {
        group, {a.code_bytes, a.scale_bytes}, static_cast<const char*>(a.scales), static_cast<char*>(a.recv_scales)};
  }
  // Calls fn(group, rows) like with_groups, with rows(group, kind). All rows have arrived when it returns.
  template <class Kind, class Fn>
  MOE_RT_FN void with_rows(int first_block, int64_t num_rows, const Kind& kind, Fn&& fn) const {
    with_groups(m, first_block, num_rows, [&](const auto& group) {
      with_moving<Kind>(m, group, dims.num_topk(), [&](const auto& moving) { fn(group, rows(group, kind, moving)); });
    });
  }
  // Link of a group's lanes to their peers, in an op that uses this window.
  template <class Group>
  MOE_RT_FN auto link(const Group& group, [[maybe_unused]] int window) const {
    if constexpr (Machine::kTwoLevel) {
      return NodeLink{window};
    } else {
      return m.link(group);
    }
  }
  // Codec of a combine or a dispatch backward: a test fewer than for any op.
  MOE_RT_FN Codec combine_codec(Op op) const {
    return dims.codec(op == Op::kCombine ? Op::kCombine : Op::kDispatchBackward);
  }
  MOE_RT_FN RecvPlan plan(int32_t* ints) const { return RecvPlan::view(ints, w.shape, w.num_local_experts()); }

  // False if the handle is not from a dispatch of this engine with this many tokens, or rows are missing.
  template <class Args>
  MOE_RT_FN bool can_follow(const RecvPlan& p, const Args& a) const {
    return p.fits(w, a.num_tokens, a.capacity) && p.head->num_rows <= a.num_rows;
  }
  // Result of can_follow, identical on every lane; if false, the op is announced as refused.
  template <class Args>
  MOE_RT_FN bool followed(const RecvPlan& p, const Args& a) const {
    if (can_follow(p, a)) return true;
    fetch_min_relaxed(c.state->bad_entry, int64_t{0});
    return false;
  }
  template <class Args>
  MOE_RT_FN void refuse(Header& header, const RecvPlan& p, const Args& a) const {
    const bool fits = p.fits(w, a.num_tokens, a.capacity);
    header.refuse(Code::kInvalidInput, fits ? a.num_rows : 0, fits ? p.head->num_rows : 0);
  }

  // `kind` is the argument of rows(group, kind).
  template <class Kind>
  MOE_RT_FN void publish(int first_block, int window, const void* x, int64_t num_tokens, const Kind& kind) const {
    with_rows(first_block, num_tokens, kind, [&](const auto& group, const auto& moved) {
      publish_rows(group, w, window, static_cast<const char*>(x), num_tokens, moved);
    });
  }

  // Pushes this rank's rows to the ranks that they visit. Network peers pull rows instead.
  template <class Kind>
  MOE_RT_FN void push_tokens(int first_block, int window, const RoutingTables& tables, const ExpertIds& ids,
                             const DispatchArgs& a, const Kind& kind) const {
    with_rows(first_block, a.num_tokens, kind, [&](const auto& group, const auto& moved) {
      push_rows(group, dims, w, tables, ids, window, static_cast<const char*>(a.x), a.num_tokens, moved);
    });
  }
  template <class Kind>
  MOE_RT_FN void send_tokens(int first_block, int window, const ExpertIds& ids, const DispatchArgs& a,
                             const Kind& kind) const {
    if constexpr (!Machine::kWarpsOnly && !Machine::kTwoLevel) {
      if (pushes_rows(w, a.max_tokens)) return push_tokens(first_block, window, RoutingTables::of(w), ids, a, kind);
    }
    publish(first_block, window, a.x, a.num_tokens, kind);
  }

  // Number of a launch's first blocks that route: one for each tile of tokens, but at most one block in
  // kBlocksPerRouter. A launch has at least two blocks.
  MOE_RT_FN int num_routers(const Tiles& tiles, int64_t num_tokens) const {
    const int64_t most = m.num_blocks() < 2 * tuning::kBlocksPerRouter ? 1 : m.num_blocks() / tuning::kBlocksPerRouter;
    return int(min_of(Tiles::count(num_tokens, tiles.tokens), most));
  }

  MOE_RT_FN void dispatch_send(const DispatchArgs& a) const {
    const ExpertIds ids = ids_of(a);
    const auto send = [&](int window) {
      const Tiles tiles = Tiles::view(m.scratch(), w.shape, tile_for(m.block().size(), w.shape));
      const int routers = num_routers(tiles, a.num_tokens);
      if (m.block_index() >= routers) {
        if (a.scaled.row_format) return send_tokens(routers, window, ids, a, a.scaled);
        return send_tokens(routers, window, ids, a, dims.codec(Op::kDispatch));
      }
      const RoutingTables tables = RoutingTables::of(w);
      const ListsFor<Acc> lists{w, w.base, window, pushes_lists(w, a.max_tokens)};
      const TileRouter router{m.block(),
                              dims,
                              w,
                              tables,
                              ids,
                              static_cast<const Acc*>(a.topk_weights),
                              a.num_tokens,
                              tiles,
                              lists,
                              a.send_plan,
                              SlotRule<Machine::kTwoLevel>{w},
                              c.state->bad_entry};
      router.route(m.block_index(), routers);
    };
    begin(m, w, c, call_of(a, c.tag), send, [&](Header& header, int64_t bad) { refuse(header, bad, a); });
  }
  MOE_RT_FN void refuse(Header& header, int64_t bad, const DispatchArgs& a) const {
    header.refuse(Code::kInvalidRouting, ids_of(a)[bad], w.shape.num_experts);
  }

  // True on the block that writes offs and the plan's head: the last one, which has the fewest rows.
  MOE_RT_FN bool writes_index() const { return m.block_index() == m.num_blocks() - 1; }

  // Writes empty outputs: later launches that receive them read and write nothing through them.
  MOE_RT_FN void receive_nothing(const DispatchArgs& a) const {
    if (!writes_index()) return;
    const Range parts = strided(m.block(), w.num_parts());
    for (int64_t i = parts.begin; i < parts.end; i += parts.step) a.offs[i] = 0;
    if (m.block().rank() == 0) *plan(a.recv_plan).head = {};
  }

  // The wait of a receiving launch, without its reads. It reports the errors that it finds, and the receiving launch
  // then does nothing.
  MOE_RT_FN void wait(const Call& call) const {
    finish(m, w, c, call, [](uint64_t, int) {}, [] {});
  }
  MOE_RT_FN void dispatch_wait(const DispatchArgs& a) const { wait(call_of(a, c.tag)); }
  MOE_RT_FN void combine_wait(const CombineArgs& a) const { wait(call_of(a, c.tag, plan(a.recv_plan))); }
  MOE_RT_FN void combine_backward_wait(const CombineBackwardArgs& a) const {
    wait(call_of(a, c.tag, plan(a.recv_plan)));
  }

  MOE_RT_FN void dispatch_receive(const DispatchArgs& a) const {
    const auto receive = [&](uint64_t seq, int window) {
      receive_tokens(a, seq, window, pushes_lists(w, a.max_tokens), pushes_rows(w, a.max_tokens));
    };
    finish(m, w, c, call_of(a, c.tag), receive, [&] { receive_nothing(a); });
  }

  // Receives a dispatch that all ranks have announced; lists and rows are in this rank's segment or at their sources.
  MOE_RT_FN void receive_tokens(const DispatchArgs& a, uint64_t seq, int window, bool pushed_lists,
                                bool pushed_rows) const {
    const auto block = m.block();
    Blocks blocks = Blocks::view(m.scratch(), w.shape, w.num_local_experts());
    blocks.pushed = pushed_lists, blocks.pushed_rows = pushed_rows;
    Status status{.op = Op::kDispatch, .phase = Phase::kGather, .seq = seq};
    status.peer = index_blocks<Acc>(block, w, window, a.expert_rows, blocks);
    if (status.peer >= 0) {
      status.code = Code::kCorruptPeer;
    } else if (c.may_overflow && (status.peer = overflowing_rank(block, w, seq, window, blocks)) >= 0) {
      status.code = Code::kCapacityOverflow;
      status.got = rows_for(w, window, blocks, status.peer);
      status.expected = room_for_rows(w, seq, status.peer);
    }
    if (!status.ok()) {
      if (block.rank() == 0) fail(w, c, status, m.link());
      return receive_nothing(a);
    }
    if (writes_index()) {
      write_index(block, w, w.op_number(seq), a.num_tokens, a.capacity, a.expert_rows, blocks, a.offs,
                  plan(a.recv_plan));
    }
    if (a.scaled.code_bytes) return take(a, seq, window, blocks, a.scaled);
    take(a, seq, window, blocks, dims.codec(Op::kDispatch));
  }

  // Gathers all rows sent to this rank, as rows(group, kind) deliver them.
  template <class Kind>
  MOE_RT_FN void take(const DispatchArgs& a, uint64_t seq, int window, const Blocks& blocks, const Kind& kind) const {
    const Received<Acc> out{static_cast<char*>(a.recv_x), static_cast<Acc*>(a.recv_weights), a.capacity,
                            plan(a.recv_plan)};
    with_rows(0, blocks.pull_start[w.shape.num_ranks], kind, [&](const auto& group, const auto& moved) {
      const int corrupt_source = gather(group, dims, w, window, blocks, out, moved, link(group, window));
      clear_padding(group, w, blocks.ends, a.capacity, out.recv_x, out.recv_weights, moved);
      if (corrupt_source < 0) return;
      const Status corrupt{
          .code = Code::kCorruptPeer, .op = Op::kDispatch, .phase = Phase::kGather, .peer = corrupt_source, .seq = seq};
      fail(w, c, corrupt, m.link());
    });
  }

  MOE_RT_FN void combine_send(const CombineArgs& a) const {
    const RecvPlan p = plan(a.recv_plan);
    const auto send = [&](int window) {
      if (followed(p, a)) send_partials(a, p, window);
    };
    begin(m, w, c, call_of(a, c.tag, p), send, [&](Header& header, int64_t) { refuse(header, p, a); });
  }
  MOE_RT_FN void send_partials(const CombineArgs& a, const RecvPlan& p, int window) const {
    const Returned<Acc> in{p, static_cast<const char*>(a.y), static_cast<const Acc*>(a.recv_weights),
                           static_cast<const Acc*>(a.grad_recv_weights)};
    with_groups(m, 0, p.head->num_pulled, [&](const auto& group) {
      const auto peers = link(group, window);
      const auto moved = rows(group, combine_codec(a.op));
      if (dims.sums() == Sums::kInvariant) {
        push_entries<LocalPushed>(group, w, window, in, moved, peers);
      } else {
        push<LocalPushed>(group, dims, w, window, in, moved, peers);
      }
      peers.flush();
    });
  }

  MOE_RT_FN void combine_receive(const CombineArgs& a) const {
    const auto receive = [&](uint64_t, int window) { add_partials(a, a.send_plan, window); };
    finish(m, w, c, call_of(a, c.tag, plan(a.recv_plan)), receive, [] {});
  }
  MOE_RT_FN void add_partials(const CombineArgs& a, const int32_t* send_plan, int window) const {
    auto* const out = static_cast<char*>(a.out);
    auto* const grads = static_cast<Acc*>(a.grad_topk_weights);
    if (dims.sums() == Sums::kInvariant) {
      with_groups(m, 0, a.num_tokens, [&](const auto& group) {
        reduce_entries(group, dims, w, window, send_plan, a.num_tokens, out, static_cast<const Acc*>(a.topk_weights),
                       grads, rows(group, combine_codec(a.op)), LocalPushed{});
      });
      return;
    }
    if constexpr (Machine::kTwoLevel) {
      const auto group = m.warps(0);
      const auto own_rows = rows(group, combine_codec(a.op));
      reduce_nodes(group, dims, w, window, send_plan, a.num_tokens, out, grads, own_rows, own_rows,
                   m.links.memory.scratch_of(group.index), LocalPushed{});
    } else {
      with_groups(m, 0, a.num_tokens, [&](const auto& group) {
        reduce(group, dims, w, window, send_plan, a.num_tokens, out, grads, rows(group, combine_codec(a.op)),
               LocalPushed{});
      });
    }
  }

  MOE_RT_FN void combine_backward_send(const CombineBackwardArgs& a) const {
    const RecvPlan p = plan(a.recv_plan);
    const auto send = [&](int window) {
      if (followed(p, a)) publish(0, window, a.grad_out, a.num_tokens, dims.codec(Op::kCombineBackward));
    };
    begin(m, w, c, call_of(a, c.tag, p), send, [&](Header& header, int64_t) { refuse(header, p, a); });
  }

  MOE_RT_FN void combine_backward_receive(const CombineBackwardArgs& a) const {
    const RecvPlan p = plan(a.recv_plan);
    const auto receive = [&](uint64_t, int window) {
      const auto group = m.warps(0);
      const auto grads = rows(group, dims.codec(Op::kCombineBackward));
      gather_grad<Dims>(group, w, window, p, static_cast<const char*>(a.y), static_cast<const Acc*>(a.recv_weights),
                        static_cast<char*>(a.grad_y), static_cast<Acc*>(a.grad_recv_weights), grads,
                        link(group, window));
      clear_padding(group, w, p.ends, p.head->num_rows, static_cast<char*>(a.grad_y),
                    static_cast<Acc*>(a.grad_recv_weights), grads);
    };
    finish(m, w, c, call_of(a, c.tag, p), receive, [] {});
  }

  // Ends every peer's waits, because this rank's host knows that it cannot continue.
  MOE_RT_FN void abort_group(const EndArgs& a) const {
    if (m.block_index() != 0 || m.block().rank() != 0 || !replace_acq_rel(c.state->failed, 0u, 1u)) return;
    const auto link = m.link();
    for (int r = 0; r < w.shape.num_ranks; ++r) link.poison(w, r, poison_word(Code(a.code), w.rank, -1));
  }

  // Announces to every peer that this rank has closed.
  MOE_RT_FN void leave(const EndArgs&) const {
    const Range peers = strided(m.block(), m.block_index() == 0 ? w.shape.num_ranks : 0);
    const auto link = m.link();
    for (int64_t r = peers.begin; r < peers.end; r += peers.step) {
      link.close(w, int(r));
    }
  }
};

}  // namespace moe_rt
