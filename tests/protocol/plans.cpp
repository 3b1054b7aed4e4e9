// Checks the bounds on what a handle's plans hold: each number of a plan may have its least and its largest value, and
// none past these. Exits with 1 and a message on the first error.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/protocol/core/plan.h"

using namespace moe_rt;

namespace {

bool right = true;

// Sets `number` to values at both bounds and past them; it is accepted if it is in [least, most].
template <class T>
void at_its_bounds(const std::string& name, T& number, int64_t least, int64_t most,
                   const std::function<bool()>& accepted) {
  const T before = number;
  for (const int64_t value : {least - 1, least, most, most + 1}) {
    number = static_cast<T>(value);
    const bool expected = value >= least && value <= most;
    if (accepted() == expected) continue;
    std::printf("%s = %lld was %s\n", name.c_str(), static_cast<long long>(value), expected ? "refused" : "accepted");
    right = false;
  }
  number = before;
}

// Checks the lists of a plan with three pulled tokens, four copies and five rows.
void lists(const RecvPlan& plan, const World& w) {
  const auto inside = [&] { return plan.leads_inside(w); };
  for (const int i : {0, 2}) {
    Pulled& p = plan.pulled[i];
    at_its_bounds("token", p.token, 0, w.shape.num_max_tokens - 1, inside);
    at_its_bounds("source", p.source, 0, w.shape.num_ranks - 1, inside);
    at_its_bounds("slot", p.slot, 0, w.shape.num_node_slots() - 1, inside);
    at_its_bounds("copies", p.copies, 1, w.shape.num_topk, inside);
    at_its_bounds("first", p.first, 0, 3, inside);
  }
  for (const int c : {0, 3}) {
    at_its_bounds("row", plan.rows[c], kDropped, 4, inside);
    at_its_bounds("k", plan.ks[c], 0, w.shape.num_topk - 1, inside);
    const auto as_it_is = [&] { return plan.row(c) == plan.rows[c] && plan.k(w.shape, c) == plan.ks[c]; };
    at_its_bounds("followed row", plan.rows[c], kDropped, 4, as_it_is);
    at_its_bounds("followed k", plan.ks[c], 0, w.shape.num_topk - 1, as_it_is);
  }
  if (w.shape.alignment > 1) {
    for (const int e : {0, 2}) at_its_bounds("end", plan.ends[e], 0, 5, inside);
  }
  if (w.shape.two_level() && !w.shape.returns_entries()) {
    const int last = w.nodes.num_clients * w.shape.num_max_tokens - 1;
    for (const int i : {0, last}) at_its_bounds("forwards", plan.forwards[i], 0, w.shape.num_node_slots(), inside);
  }
}

void receive_plan(Shape shape, const std::vector<int32_t>& node_of) {
  constexpr int kRank = 0, kTokens = 2, kCapacity = 7;
  const bool two_level = !node_of.empty();
  shape = NodeTables::sized(shape, node_of);
  const NodeTables nodes(node_of, kRank);
  const PlacementTables placement = PlacementTables::make({0, 0, 0, 1, 2, 3}, shape.num_ranks);
  const World w{.shape = shape,
                .layout = Layout::make(shape),
                .placement = placement.view(),
                .base = nullptr,
                .mirror = nullptr,
                .rank = kRank,
                .config = 1,
                .plan_mark = 5,
                .nodes = two_level ? nodes.view() : Nodes{}};
  std::vector<int32_t> ints(RecvPlan::num_ints(shape, w.num_local_experts()));
  RecvPlan plan = RecvPlan::view(ints.data(), shape, w.num_local_experts());
  RecvPlan::Head& h = *plan.head;
  h = {.mark = 5,
       .seq = 1,
       .num_tokens = kTokens,
       .num_pulled = 3,
       .num_copies = 4,
       .num_dropped = 0,
       .capacity = kCapacity,
       .first_own = 1,
       .num_own = 1,
       .num_rows = 5};
  for (int i = 0; i < 3; ++i) plan.pulled[i] = {0, 0, 0, 0, 1};
  const auto fits = [&] { return plan.fits(w, kTokens, kCapacity); };
  at_its_bounds("mark", h.mark, 5, 5, fits);
  at_its_bounds("num_tokens", h.num_tokens, kTokens, kTokens, fits);
  at_its_bounds("capacity", h.capacity, kCapacity, kCapacity, fits);
  at_its_bounds("any capacity", h.capacity, 5, INT32_MAX, [&] { return plan.fits(w, kTokens, kAnyCapacity); });
  at_its_bounds("num_pulled", h.num_pulled, 2, shape.num_ranks * shape.num_max_tokens, fits);
  at_its_bounds("num_copies", h.num_copies, 0, RecvPlan::max_copies(shape, 3), fits);
  at_its_bounds("num_rows", h.num_rows, 0, kCapacity, fits);
  at_its_bounds("num_own", h.num_own, 0, 2, fits);
  at_its_bounds("first_own", h.first_own, 0, 2, fits);
  lists(plan, w);
}

void send_plan(const Shape& shape) {
  const int slots = shape.num_slots(), num_topk = shape.num_topk;
  int32_t entries[4] = {kNowhere, kNowhere, kNowhere, kNowhere};
  const auto inside = [&] { return send_plan_leads_inside(entries, 2, shape); };
  for (const int i : {0, 3}) {
    at_its_bounds("entry", entries[i], kNowhere, slots - 1, inside);
    at_its_bounds("entry of the last k", entries[i], send_entry(0, num_topk - 1), send_entry(slots - 1, num_topk - 1),
                  [&] { return inside() && send_first_k(entries[i]) == num_topk - 1; });
  }
}

}  // namespace

int main() {
  const Shape flat{4, 6, 3, 1, 2, 4, 4};
  const std::vector<int32_t> in_pairs{0, 0, 1, 1};
  Shape aligned = flat, entries = flat;
  aligned.alignment = 8;
  entries.sums = Sums::kInvariant;
  for (const Shape& shape : {flat, aligned, entries}) {
    receive_plan(shape, {});
    receive_plan(shape, in_pairs);
    send_plan(shape);
    send_plan(NodeTables::sized(shape, in_pairs));
  }
  return right ? 0 : 1;
}
