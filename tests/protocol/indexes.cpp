// Compares the receiver's index (flat/index.h) with a list of all rows: where each block, expert and source begins, what
// is dropped, which rank overflows, and which source is refused. Lists are random, or one number past a bound. Exits
// with 1 and a message on the first error.
#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/protocol/flat/index.h"
#include "expect.h"
#include "lanes.h"

using namespace moe_rt;

namespace {

std::mt19937 draw(1);
constexpr uint64_t kSeq = 6, kMark = 77;

// A group with random lists in every window. Rank `me` has `num_local` experts, each other rank two.
struct Group {
  Shape s;
  int me, window, num_local;
  bool pushed;
  PlacementTables placement;
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<char*> base;
  World w{};
  // Counts that each source sends for each of my experts, and numbers of its pulls and copies for each rank.
  std::vector<std::vector<int32_t>> counts, pulls, copies;

  Group(int num_ranks, int num_local_, int tokens, int topk, RecvLayout by, int alignment, bool pushed_)
      : me(num_ranks / 2), window(int(draw() % 2)), num_local(num_local_), pushed(pushed_) {
    const int num_experts = num_local + 2 * (num_ranks - 1);
    s = {num_ranks, num_experts, tokens, 4, topk, 4, 4, by, alignment};
    if (pushed) s.num_pushed_tokens = tokens, s.num_max_tokens = tokens + 3;
    std::vector<int32_t> expert_rank;
    for (int r = 0; r < num_ranks; ++r) expert_rank.insert(expert_rank.end(), r == me ? num_local : 2, r);
    placement = PlacementTables::make(expert_rank, num_ranks);
    w.shape = s, w.layout = Layout::make(s), w.placement = placement.view(), w.rank = me, w.plan_mark = kMark;
    for (int r = 0; r < num_ranks; ++r) {
      base.push_back(memory.emplace_back(new char[w.layout.bytes + kPage]()).get());
      base.back() += kPage - reinterpret_cast<uintptr_t>(base.back()) % kPage;
    }
    w.base = base.data();
    for (int r = 0; r < num_ranks; ++r) fill(r);
  }
  RouteLists<float> lists(int source) const { return RouteLists<float>::received(w, source, window, pushed); }
  int tokens() const { return pushed ? s.num_pushed_tokens : s.num_max_tokens; }

  void fill(int source) {
    counts.emplace_back(), pulls.emplace_back(), copies.emplace_back();
    int left = tokens() * s.num_topk;  // of all copies
    int left_pulls = tokens() * s.num_visits();
    const auto take = [&](int most) {
      const int n = draw() % 5 == 0 ? most : int(draw() % (most + 1));
      left -= n;
      return n;
    };
    int sum = 0, most = 0;
    for (int e = 0; e < num_local; ++e) {
      counts[source].push_back(take(std::min(tokens(), left / 2)));
      sum += counts[source].back(), most = std::max(most, counts[source].back());
    }
    int at = 0, at_pull = 0;
    for (int r = 0; r < s.num_ranks; ++r) {
      const int n = r == me ? sum : take(left / 2);
      const int least = r == me ? std::max(most, (sum + s.num_topk - 1) / s.num_topk) : 0;
      const int visits = std::max(least, std::min({n, tokens(), left_pulls / 2}));
      left_pulls -= visits;
      lists(source).pull_offs.put(r, at_pull), lists(source).copy_offs.put(r, at);
      pulls[source].push_back(visits), copies[source].push_back(n);
      at_pull += visits, at += n;
    }
    lists(source).pull_offs.put(s.num_ranks, at_pull), lists(source).copy_offs.put(s.num_ranks, at);
    for (int e = 0; e < num_local; ++e) lists(source).counts.put(placement.rank_first[me] + e, counts[source][e]);
  }
};

// Index of one rank, made by some lanes.
struct Index {
  std::vector<int32_t> ints, offs, plan_ints;
  Blocks blocks{};
  int bad = -2;
  std::vector<int> full;

  // Indexes only the blocks if capacity < 0.
  Index(const Group& g, int lanes, int64_t expert_rows, int64_t capacity)
      : ints(Blocks::num_ints(g.s, g.num_local) + 8, -7),
        offs(std::max(g.s.num_ranks, g.num_local) + 1, -7),
        plan_ints(RecvPlan::num_ints(g.s, g.num_local) + 8, -7),
        full(lanes, -2) {
    std::vector<int> bads(lanes);
    const RecvPlan plan = RecvPlan::view(plan_ints.data(), g.s, g.num_local);
    const bool together = Lanes::run(lanes, draw() % 2, [&](const auto& coop) {
      Blocks b = Blocks::view(ints.data(), g.s, g.num_local);
      b.pushed = g.pushed;
      const int found = bads[coop.rank()] = index_blocks<float>(coop, g.w, g.window, expert_rows, b);
      if (coop.rank() == 0) blocks = b;
      if (found >= 0 || capacity < 0) return;
      full[coop.rank()] = overflowing_rank(coop, g.w, kSeq, g.window, b);
      write_index(coop, g.w, kSeq, 3, capacity, expert_rows, b, offs.data(), plan);
    });
    expect(together, "a lane waits for one that has ended");
    bad = bads[0];
    expect(std::count(bads.begin(), bads.end(), bad) == lanes, "lanes disagree about lists");
    expect(std::count(ints.end() - 8, ints.end(), -7) == 8, "scratch is exceeded");
    expect(std::count(plan_ints.end() - 8, plan_ints.end(), -7) == 8, "the plan is exceeded");
  }
};

// All rows of a rank, one by one: experts in order, each from a multiple of the alignment or of expert_rows on.
struct Model {
  std::vector<std::vector<int64_t>> starts;  // of each expert's blocks
  std::vector<int64_t> rows, ends, parts;    // places of rows; ends of experts, and of the parts of recv_x
  int64_t num_pulled = 0, num_copies = 0, own_pulls = 0, num_rows = 0;

  Model(const Group& g, int64_t expert_rows) : starts(g.num_local) {
    int64_t next = 0;
    const auto align = [&] {
      while (next % g.s.alignment != 0) ++next;
    };
    for (int e = 0; e < g.num_local; ++e) {
      if (expert_rows) next = e * expert_rows;
      for (int r = 0; r < g.s.num_ranks; ++r) {
        starts[e].push_back(next);
        for (int i = 0; i < g.counts[r][e]; ++i) rows.push_back(next++);
      }
      ends.push_back(next);
      align();
      if (!g.s.by_token()) parts.push_back(next);
    }
    for (int r = 0; r < g.s.num_ranks; ++r) {
      if (r == g.me) own_pulls = num_pulled;
      num_pulled += g.pulls[r][g.me], num_copies += g.copies[r][g.me];
      if (g.s.by_token()) parts.push_back(num_pulled);
    }
    num_rows = parts.back();
  }
};

// Announces what space each rank has: just what it needs or, for one or more, a row less. Returns the lowest of these.
int announce_capacities(const Group& g) {
  const int num_ranks = g.s.num_ranks, short_of = int(draw() % (num_ranks + 1)) - 1;
  for (int r = 0; r < num_ranks; ++r) {
    int64_t room = g.w.num_local_experts_of(r) * (g.s.alignment - 1);
    for (int source = 0; source < num_ranks; ++source) room += (g.s.by_token() ? g.pulls : g.copies)[source][r];
    if (short_of >= 0 && (r == short_of || (r > short_of && draw() % 3 == 0))) --room;
    Mailbox& mailbox = g.w.mailbox(g.me, Kind::kDispatch, r);
    mailbox.header[kSeq % 2].capacity = int32_t(room), mailbox.header[1 - kSeq % 2].capacity = -1;
    expect(announced_capacity(g.w, kSeq, r) == room, "the capacity of a rank");
    expect(room_for_rows(g.w, kSeq, r) == room - g.w.num_local_experts_of(r) * (g.s.alignment - 1), "room for rows");
  }
  return short_of;
}

void check_blocks(const Group& g, const Model& model, const Blocks& b, const std::string& what) {
  const int num_ranks = g.s.num_ranks;
  for (int e = 0; e < g.num_local; ++e) {
    expect(b.ends[e] == model.ends[e], what + ": the end of an expert");
    for (int r = 0; r < num_ranks; ++r) {
      expect(b.start[e * num_ranks + r] == model.starts[e][r], what + ": the start of a block");
      const int64_t end = r + 1 < num_ranks ? model.starts[e][r + 1] : model.ends[e];
      expect(b.end(e, r, num_ranks) == end, what + ": the end of a block");
    }
  }
  int64_t pulled = 0, copied = 0;
  for (int r = 0; r < num_ranks; ++r) {
    expect(b.pull_start[r] == pulled && b.copy_start[r] == copied, what + ": the start of a source");
    expect(b.first_pull[r] == g.lists(r).pull_offs[g.me], what + ": the first pull");
    expect(b.first_copy[r] == g.lists(r).copy_offs[g.me], what + ": the first copy");
    pulled += g.pulls[r][g.me], copied += g.copies[r][g.me];
  }
  expect(b.pull_start[num_ranks] == pulled && b.copy_start[num_ranks] == copied, what + ": the last end");
}

void check_plan(const Group& g, const Model& model, Index& found, int64_t capacity, int64_t expert_rows,
                const std::string& what) {
  for (size_t part = 0; part < model.parts.size(); ++part) {
    const int64_t end = model.parts[part];
    expect(found.blocks.part_end(g.w, int64_t(part)) == end, what + ": the end of a part");
    expect(found.offs[part] == std::min(end, capacity) - int64_t(part) * expert_rows, what + ": offs");
  }
  expect(found.offs[model.parts.size()] == -7, what + ": one more of offs");
  const auto past = [capacity](int64_t row) { return row >= capacity; };
  const int64_t dropped = g.s.by_token() ? std::max<int64_t>(0, model.num_pulled - capacity)
                                         : std::count_if(model.rows.begin(), model.rows.end(), past);
  const RecvPlan plan = RecvPlan::view(found.plan_ints.data(), g.s, g.num_local);
  const RecvPlan::Head& h = *plan.head;
  expect(h.mark == kMark && h.seq == kSeq && h.num_tokens == 3 && h.capacity == capacity, what + ": whose plan");
  expect(h.num_pulled == model.num_pulled && h.num_copies == model.num_copies, what + ": the sizes of the plan");
  expect(h.first_own == model.own_pulls && h.num_own == g.pulls[g.me][g.me], what + ": own tokens in the plan");
  expect(h.num_rows == std::min(model.num_rows, capacity), what + ": rows in the plan");
  if (!expert_rows) expect(h.num_dropped == dropped, what + ": rows that are dropped");
  for (int e = 0; g.s.alignment > 1 && e < g.num_local; ++e) {
    expect(plan.ends[e] == std::min(model.ends[e], capacity), what + ": the end of an expert in the plan");
  }
}

void check_index(const Group& g, int lanes, int64_t expert_rows, const std::string& what) {
  const Model model(g, expert_rows);
  const int64_t n = model.num_rows;
  for (const int64_t capacity : {n + 5, n, n - 1, n / 2, int64_t{1}}) {
    if (capacity < 1) continue;
    const int full = announce_capacities(g);
    Index found(g, lanes, expert_rows, capacity);
    expect(found.bad == -1, what + ": lists are refused");
    for (const int of_lane : found.full) expect(of_lane == full, what + ": the rank that overflows");
    check_blocks(g, model, found.blocks, what);
    check_plan(g, model, found, capacity, expert_rows, what);
  }
}

// Lists of some sources are wrong in one number: the lowest of these sources is refused, whatever the number of lanes.
void check_refusals(Group& g, int lanes, const std::string& what) {
  const int num_ranks = g.s.num_ranks, first = g.placement.rank_first[g.me], topk = g.s.num_topk;
  const std::vector<std::function<void(int)>> bends = {
      [&](int r) { g.lists(r).counts.put(first, -1); },
      [&](int r) { g.lists(r).counts.put(first + g.num_local - 1, g.tokens() + 1); },
      [&](int r) { g.lists(r).counts.put(first, g.lists(r).counts[first] + 1); },
      [&](int r) { g.lists(r).copy_offs.put(g.me + 1, g.lists(r).copy_offs[g.me + 1] + 1); },
      [&](int r) { g.lists(r).pull_offs.put(g.me, -1); },
      [&](int r) { g.lists(r).pull_offs.put(g.me + 1, g.tokens() * g.s.num_visits() + 1); },
      [&](int r) { g.lists(r).copy_offs.put(g.me + 1, g.tokens() * topk + 1); },
      [&](int r) { g.lists(r).copy_offs.put(g.me, INT32_MIN); },
      [&](int r) { g.lists(r).pull_offs.put(g.me, g.lists(r).pull_offs[g.me + 1] + 1); },
  };
  for (const auto& bend : bends) {
    for (const bool two : {false, true}) {
      const int lowest = int(draw() % num_ranks), other = lowest + int(draw() % (num_ranks - lowest));
      std::vector<std::vector<char>> kept;
      for (char* const segment : g.base) kept.emplace_back(segment, segment + g.w.layout.bytes);
      bend(lowest);
      if (two && other != lowest) bend(other);
      expect(Index(g, lanes, 0, -1).bad == lowest, what + ": another source is refused");
      for (int r = 0; r < num_ranks; ++r) std::copy(kept[r].begin(), kept[r].end(), g.base[r]);
      expect(Index(g, lanes, 0, -1).bad == -1, what + ": right lists are refused");
    }
  }
}

// Every token visits every expert of the rank: the most that lists may hold.
void check_most(int lanes) {
  Group g(2, 40, 9, 40, RecvLayout::kExperts, 1, false);
  for (int r = 0; r < 2; ++r) {
    const auto lists = g.lists(r);
    for (int e = 0; e < 40; ++e) lists.counts.put(g.placement.rank_first[g.me] + e, 9), g.counts[r][e] = 9;
    lists.pull_offs.put(0, 0), lists.pull_offs.put(1, 0), lists.pull_offs.put(2, 9);
    lists.copy_offs.put(0, 0), lists.copy_offs.put(1, 0), lists.copy_offs.put(2, 360);
    g.pulls[r] = {0, 9}, g.copies[r] = {0, 360};
  }
  check_index(g, lanes, 0, "every token at every expert, " + std::to_string(lanes) + " lanes");
}

// Every token visits the first expert and one that the same lane counts, if several lanes check a source together.
void check_one_lanes_experts(int lanes) {
  constexpr int kLast = tuning::kLanesOfSource;
  Group g(2, kLast + 1, 9, 2, RecvLayout::kExperts, 1, false);
  for (int r = 0; r < 2; ++r) {
    const auto lists = g.lists(r);
    for (int e = 0; e <= kLast; ++e) {
      g.counts[r][e] = e % kLast == 0 ? 9 : 0;
      lists.counts.put(g.placement.rank_first[g.me] + e, g.counts[r][e]);
    }
    lists.pull_offs.put(0, 0), lists.pull_offs.put(1, 0), lists.pull_offs.put(2, 9);
    lists.copy_offs.put(0, 0), lists.copy_offs.put(1, 0), lists.copy_offs.put(2, 18);
    g.pulls[r] = {0, 9}, g.copies[r] = {0, 18};
  }
  check_index(g, lanes, 0, "two experts of one lane, " + std::to_string(lanes) + " lanes");
}

}  // namespace

int main() {
  for (const int lanes : {1, 3}) {
    for (int round = 0; round < 12; ++round) {
      const int num_ranks = 1 + round % 4, num_local = 1 + int(draw() % 5), tokens = 1 + int(draw() % 9);
      const int topk = 1 + int(draw() % 4);
      for (const bool pushed : {false, true}) {
        for (const int alignment : {1, 8}) {
          Group g(num_ranks, num_local, tokens, topk, RecvLayout::kExperts, alignment, pushed);
          const std::string what = std::to_string(num_ranks) + " ranks, alignment " + std::to_string(alignment) + ", " +
                                   std::to_string(lanes) + " lanes";
          check_index(g, lanes, 0, what);
          check_refusals(g, lanes, what);
          if (alignment == 1) check_index(g, lanes, num_ranks * (tokens + 3), what + ", rows of each expert apart");
        }
        check_index(Group(num_ranks, num_local, tokens, topk, RecvLayout::kTokens, 1, pushed), lanes, 0, "by token");
      }
    }
    check_most(lanes);
  }
  // Lets several lanes check one source together.
  constexpr int kLanes = 2 * tuning::kLanesOfSource;
  check_most(kLanes), check_most(kLanes + 3), check_one_lanes_experts(kLanes);
  Group many(2, 70, 5, 80, RecvLayout::kExperts, 1, false);
  check_index(many, kLanes, 0, "many lanes");
  check_refusals(many, kLanes, "many lanes");
  return 0;
}
