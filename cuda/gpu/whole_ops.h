// A dispatch or a combine of very few tokens in one launch of one block, which sends, announces, waits and receives.
//
// Two launches serve rows on all multiprocessors. With one or two tokens, the time goes to the gap between launches and
// to dependent memory accesses. So one block does both halves (ops.h), and loads at the start what they would read one
// after another. It waits for no other block of its launch, and its peers' sending launches do not need its
// multiprocessor.
#pragma once

#include "ops.h"

namespace moe_rt {

// Copies what a dispatch looks up while it routes; all lanes call it and sync before they read the copies. Every load
// of a lane is issued before the first is needed. An invalid id stays invalid, whatever its bits.
template <class Weight, class Coop>
MOE_RT_FN void copy_inputs(const Coop& coop, const World& w, const DispatchArgs& a, const WholeScratch<Weight>& to) {
  const Shape& s = w.shape;
  const ExpertIds ids = ids_of(a);
  const auto* const weights = static_cast<const Weight*>(a.topk_weights);
  const int64_t entries = a.num_tokens * s.num_topk, tables = max_of(s.num_experts, s.num_ranks + 1);
  const Range all = strided(coop, max_of(entries, tables));
  for (int64_t i = all.begin; i < all.end; i += all.step) {
    const int64_t id = i < entries ? ids[i] : -1;
    const Weight weight = i < entries ? weights[i] : Weight(0);
    const int32_t entry = i < s.num_experts ? w.placement.entries[i] : 0;
    const int32_t first = i <= s.num_ranks ? w.placement.rank_first[i] : 0;
    char* const base = i < s.num_ranks ? w.base[i] : nullptr;
    if (i < entries) to.ids[i] = id < -1 || id >= s.num_experts ? s.num_experts : int32_t(id), to.weights[i] = weight;
    if (i < s.num_experts) to.entries[i] = entry;
    if (i <= s.num_ranks) to.rank_first[i] = first;
    if (i < s.num_ranks) to.base[i] = base;
  }
}

// Requires a buffer for at most whole_tokens (sizes.h).
template <class Dims, class Elem, class Machine>
MOE_RT_FN void dispatch_whole(const Launch<Dims, Elem, Machine>& launch, const DispatchArgs& a) {
  using Acc = typename Elem::Acc;
  const Machine& m = launch.m;
  const World& w = launch.w;
  const Control& c = launch.c;
  const Call call = call_of(a, c.tag);
  const OpSlot slot = next_slot(c, Kind::kDispatch);
  const auto copied = WholeScratch<Acc>::view(m.scratch(), w.shape);
  copy_inputs(m.block(), w, a, copied);
  if (m.block().rank() == 0) m.shared().bad_entry = kNoBadEntry;
  if (!healthy(m, c)) return launch.receive_nothing(a);  // lanes have synchronised: the copies are there
  const RoutingTables tables{copied.entries, copied.rank_first, copied.base, w.shape.num_experts};
  const ExpertIds ids{copied.ids, true};
  if (a.scaled.row_format) {
    launch.push_tokens(0, slot.window, tables, ids, a, a.scaled);
  } else {
    launch.push_tokens(0, slot.window, tables, ids, a, launch.dims.codec(Op::kDispatch));
  }
  const ListsFor<Acc> lists{w, copied.base, slot.window, true};
  const TileRouter router{m.block(),
                          launch.dims,
                          w,
                          tables,
                          ids,
                          static_cast<const Acc*>(copied.weights),
                          a.num_tokens,
                          Tiles::view(m.scratch(), w.shape, kWholeTokens),
                          lists,
                          a.send_plan,
                          SlotRule<false>{w},
                          m.shared().bad_entry};
  router.route(0, 1);
  streaming_store_fence();
  m.block().sync();  // every lane's rows and entries come before the signal
  announce_to_all(m, w, c, call, slot, load_relaxed(m.shared().bad_entry),
                  [&](Header& header, int64_t bad) { launch.refuse(header, bad, a); });
  const auto receive = [&](uint64_t seq, int window) { launch.receive_tokens(a, seq, window, true, true); };
  wait_for_all(m, w, c, call, slot, receive, [&] { launch.receive_nothing(a); });
}

template <class Dims, class Elem, class Machine>
MOE_RT_FN void combine_whole(const Launch<Dims, Elem, Machine>& launch, const CombineArgs& a) {
  const Machine& m = launch.m;
  const World& w = launch.w;
  const Control& c = launch.c;
  const RecvPlan p = launch.plan(a.recv_plan);
  const Call call = call_of(a, c.tag, p);
  const OpSlot slot = next_slot(c, kind_of(a.op));
  const bool follows = launch.can_follow(p, a);
  int32_t* const send_plan = WholeScratch<typename Elem::Acc>::view(m.scratch(), w.shape).ids;
  const Range entries = strided(m.block(), a.num_tokens * w.shape.num_topk);
  for (int64_t i = entries.begin; i < entries.end; i += entries.step) send_plan[i] = a.send_plan[i];
  if (!healthy(m, c)) return;  // lanes have synchronised: the copy is there
  if (follows) launch.send_partials(a, p, slot.window);
  streaming_store_fence();
  m.block().sync();  // every lane's partials come before the signal
  announce_to_all(m, w, c, call, slot, follows ? kNoBadEntry : int64_t{0},
                  [&](Header& header, int64_t) { launch.refuse(header, p, a); });
  wait_for_all(m, w, c, call, slot, [&](uint64_t, int window) { launch.add_partials(a, send_plan, window); }, [] {});
}

}  // namespace moe_rt
