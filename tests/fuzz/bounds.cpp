// Tests every bound on a peer's lists, one step inside and one outside: lists that are right but for one number. A
// value out of bounds must be refused, whatever else the peer has adjusted to match it.
//
// test_bounds.py disables each check of the protocol in turn: this program must then fail. It exits with 0 if every
// case is right; otherwise it names the cases that are not.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/protocol/flat/dispatch.h"
#include "../../cuda/protocol/flat/routing.h"
#include "../../cuda/protocol/two_level/forward.h"
#include "fetched.h"
#include "pushed.h"

using namespace moe_rt;

namespace {

// Rank 2 receives from rank 0 and checks its lists. The first of rank 2's experts gets no token, the second three of
// four, the third all; one token goes to rank 1, so that the lists for rank 2 follow others.
constexpr int kMe = 2, kPeer = 0, kTokens = 4, kTopk = 2, kWindow = 0;
constexpr int64_t kIdx[kTokens * kTopk] = {3, 4, 3, 4, 3, 4, 1, 4};

struct Lists {
  Pull* pulls;
  Copy* copies;
  int32_t* pull_offs;
  int32_t &first_pull, &end_pull, &first_copy, &end_copy;
  int32_t* counts_here;
  int32_t num_max_tokens;
  Lists(const RouteLists<float>& all, int first_expert, int32_t max_tokens)
      : pulls(all.pulls.start),
        copies(all.copies.start),
        pull_offs(all.pull_offs.start),
        first_pull(pull_offs[kMe]),
        end_pull(pull_offs[kMe + 1]),
        first_copy(all.copy_offs.start[kMe]),
        end_copy(all.copy_offs.start[kMe + 1]),
        counts_here(all.counts.start + first_expert),
        num_max_tokens(max_tokens) {}
  Pull& pull() const { return pulls[first_pull]; }
  Copy& copy() const { return copies[first_copy]; }
  // Move the lists by some entries; `others` are adjusted where they refer to entries of each other.
  void shift_pulls(int by) {
    std::vector<Pull> kept(pulls + first_pull, pulls + end_pull);
    first_pull += by, end_pull += by;
    std::copy(kept.begin(), kept.end(), pulls + first_pull);
  }
  void shift_copies(int by) {
    std::vector<Copy> kept(copies + first_copy, copies + end_copy);
    for (int i = first_pull; i < end_pull; ++i) pulls[i].first += by;
    first_copy += by, end_copy += by;
    std::copy(kept.begin(), kept.end(), copies + first_copy);
  }
  // Let every token share the first one's copy, with one token more than there are copies.
  void share_copies() {
    end_copy = first_copy + (end_pull - first_pull) - 1;
    counts_here[0] = counts_here[1] = 0, counts_here[2] = end_copy - first_copy;
    copy() = {2, 0, 0, 0};
    for (int i = first_pull; i < end_pull; ++i) pulls[i].first = first_copy, pulls[i].copies = 1;
  }
  // Repeat the first token `times` times, with shared copies.
  void repeat_pull(int times) {
    for (int i = 0; i < times; ++i) pulls[end_pull++] = pull();
  }
};

// Rewrites a word of the lists, as a peer could, after a row's entry was checked and before the row is moved.
struct NoRows {
  int32_t* rewritten;  // nullptr if none
  int* most_places;
  int64_t tensor_row_bytes() const { return 4; }
  int64_t encoded_row_bytes() const {
    if (rewritten) *rewritten = 1000;
    return 4;
  }
  void spread(char*, const int32_t*, int n, const char*) const { *most_places = std::max(*most_places, n); }
};

// Location of the lists and rows that rank 2 reads: its peers' segments, or its own, which has capacity for the lists,
// or rows, of fewer tokens than a rank may have.
enum class Pushed { kNothing, kLists, kRows };

// Return true if rank 2 believes the lists after `bend` has changed them. With `whole` it acts as a CPU rank, which
// follows every entry of its plan. With ranks on several nodes, it is rank 1 that checks, as the proxy of rank 2.
bool believed(const std::function<void(Lists&)>& bend, Pushed what, const std::vector<int32_t>& node_of = {},
              bool whole = false, Sums sums = Sums::kRanked) {
  const bool pushed = what != Pushed::kNothing;
  Shape shape = NodeTables::sized({3, 5, kTokens, 1, kTopk, 4, 4}, node_of);
  if (pushed) shape.num_max_tokens = 2 * kTokens, shape.num_pushed_tokens = kTokens;
  if (what == Pushed::kRows) shape.num_pushed_rows = kTokens;
  shape.sums = sums;
  const Layout layout = Layout::make(shape);
  const PlacementTables tables = PlacementTables::make({0, 1, 2, 2, 2}, shape.num_ranks);
  std::vector<std::unique_ptr<char[]>> segments;
  std::vector<char*> base;
  for (int r = 0; r < shape.num_ranks; ++r) {
    base.push_back(segments.emplace_back(new char[layout.bytes + kPage]()).get());
    base.back() += kPage - reinterpret_cast<uintptr_t>(base.back()) % kPage;
  }
  std::vector<NodeTables> nodes;
  for (int r = 0; r < shape.num_ranks; ++r) nodes.emplace_back(node_of, r);
  const auto world = [&](int rank) {
    const Nodes seen = node_of.empty() ? Nodes{} : nodes[rank].view();
    return World{shape, layout, tables.view(), base.data(), nullptr, rank, 1, 1, seen};
  };
  const RuntimeDims dims{shape.hidden, shape.num_topk};
  for (int source = 0; source < shape.num_ranks; ++source) {  // only the peer has tokens
    const int64_t num_tokens = source == kPeer ? kTokens : 0;
    const World w = world(source);
    std::vector<int32_t> ints(LaneCounters::num_ints(shape, 1)), plan(kTokens * kTopk);
    const LaneCounters counters{ints.data(), shape.num_experts, shape.num_ranks};
    const std::vector<float> weights(kTokens * kTopk, 1.0f);
    int64_t bad;
    count_visits(Solo{}, dims, w, kIdx, num_tokens, counters, plan.data(), &bad);
    place_lanes(w, counters, 1, RouteLists<float>::view(w, source, kWindow));
    write_lists(Solo{}, dims, w, kIdx, weights.data(), num_tokens, counters,
                RouteLists<float>::view(w, source, kWindow), plan.data());
    if (pushed) push_lists<float>(w, kWindow);
  }
  const World w = world(kMe);
  Lists lists(RouteLists<float>::received(w, kPeer, kWindow, pushed), w.placement.rank_first[kMe],
              what == Pushed::kRows ? shape.num_pushed_rows : shape.num_max_tokens);
  bend(lists);
  if (!node_of.empty()) {
    std::vector<int32_t> forwards(kTokens + 2);  // with a guard entry at each end
    return mark_tokens<float>(Solo{}, world(1), kPeer, kWindow, forwards.data() + 1);
  }
  const int num_local = w.num_local_experts();
  std::vector<int32_t> blocks_ints(Blocks::num_ints(shape, num_local) + num_local), plan_ints(1 << 12);
  // Values after a list would be believed: they grow, so that every difference is large enough for many entries.
  for (size_t i = 0; i < blocks_ints.size(); ++i) blocks_ints[i] = static_cast<int32_t>(1000 * i);
  std::vector<float> recv_x(1000), recv_weights(1000);
  Blocks blocks = Blocks::view(blocks_ints.data(), shape, num_local);
  blocks.pushed = pushed, blocks.pushed_rows = what == Pushed::kRows;
  if (index_blocks<float>(Solo{}, w, kWindow, 0, blocks) >= 0) return false;
  if (blocks.pull_start[shape.num_ranks] < 0) return true;  // a negative count was believed
  const Received<float> out{reinterpret_cast<char*>(recv_x.data()), recv_weights.data(), 100,
                            RecvPlan::view(plan_ints.data(), shape, num_local)};
  int most_places = 0;
  const NoRows rows{whole ? &lists.pull().copies : nullptr, &most_places};
  const bool inside = gather(Solo{}, dims, w, kWindow, blocks, out, rows, MappedLink{}) < 0;
  if (most_places > kTopk) return !whole;  // no case with `whole` expects that
  return inside && (!whole || unshared_copies(w, blocks, out.plan) < 0);
}

constexpr std::pair<Pushed, const char*> kPlaces[] = {
    {Pushed::kNothing, "pulled"}, {Pushed::kLists, "pushed"}, {Pushed::kRows, "pushed with rows"}};

struct Case {
  const char* name;
  bool expected;
  std::function<void(Lists&)> bend;
};

const Case kCases[] = {
    {"nothing", true, [](Lists&) {}},
    {"token: the last", true, [](Lists& l) { l.pull().token = l.num_max_tokens - 1; }},
    {"token: T", false, [](Lists& l) { l.pull().token = l.num_max_tokens; }},
    {"token: -1", false, [](Lists& l) { l.pull().token = -1; }},
    {"slot: the last", true, [](Lists& l) { l.pull().slot = kTopk - 1; }},
    {"slot: as many as there are", false, [](Lists& l) { l.pull().slot = kTopk; }},
    {"slot: -1", false, [](Lists& l) { l.pull().slot = -1; }},
    {"copies: none", false, [](Lists& l) { l.pull().copies = 0; }},
    {"copies: K + 1", false, [](Lists& l) { l.pull().copies = kTopk + 1; }},
    {"first: the one before ours", false,
     [](Lists& l) {
       l.copies[l.first_copy - 1] = l.copy();
       l.pull().first = l.first_copy - 1;
     }},
    {"first: the last two of ours", true, [](Lists& l) { l.pull().first = l.end_copy - 2; }},
    {"first: the last of ours and one after", false,
     [](Lists& l) {
       l.copies[l.end_copy] = l.copy();
       l.pull().first = l.end_copy - 1;
     }},
    {"expert: L", false, [](Lists& l) { l.copy().expert = 3; }},
    {"expert: -1", false, [](Lists& l) { l.copy().expert = -1; }},
    {"k: K", false, [](Lists& l) { l.copy().k = kTopk; }},
    {"k: -1", false, [](Lists& l) { l.copy().k = -1; }},
    {"index: the last of its block", true, [](Lists& l) { l.copy().index = 2; }},
    {"index: as many as the block has", false, [](Lists& l) { l.copy().index = 3; }},
    {"index: -1", false, [](Lists& l) { l.copy().index = -1; }},
    {"count: T + 1", false,
     [](Lists& l) {
       l.counts_here[2] = kTokens + 1, l.counts_here[1] = 2;
       for (int i = l.first_copy; i < l.end_copy; ++i) l.copies[i].index = 0;
     }},
    {"count: -1", false, [](Lists& l) { l.counts_here[0] = -1, l.counts_here[1] = kTokens; }},
    {"counts: one more than copies", false, [](Lists& l) { l.counts_here[0] = 1; }},
    {"pulls: shifted", true, [](Lists& l) { l.shift_pulls(-1); }},
    {"pulls: begin before the list", false, [](Lists& l) { l.shift_pulls(-l.first_pull - 1); }},
    {"pulls: end after the list", false, [](Lists& l) { l.shift_pulls(kTokens * kTopk + 1 - l.end_pull); }},
    {"pulls: fewer than none", false, [](Lists& l) { l.end_pull = l.first_pull - 1; }},
    {"pulls: T + 1", false, [](Lists& l) { l.shift_pulls(-l.first_pull), l.repeat_pull(1); }},
    {"pulls: more than copies", false, [](Lists& l) { l.share_copies(); }},
    {"copies: shifted", true, [](Lists& l) { l.shift_copies(-1); }},
    {"copies: begin before the list", false, [](Lists& l) { l.shift_copies(-l.first_copy - 1); }},
    {"copies: end after the list", false, [](Lists& l) { l.shift_copies(kTokens * kTopk + 1 - l.end_copy); }},
};

// Entries that are in range but do not partition the copies.
const Case kShared[] = {
    {"nothing", true, [](Lists&) {}},
    {"copies: shifted", true, [](Lists& l) { l.shift_copies(-1); }},
    {"first: another token's", false, [](Lists& l) { l.pulls[l.first_pull + 1].first = l.first_copy; }},
    {"first: the first copy is nobody's", false, [](Lists& l) { l.pull().first += 1, l.pull().copies -= 1; }},
    {"first: a copy in between is nobody's", false, [](Lists& l) { l.pull().copies -= 1; }},
    {"first: the last copy is nobody's", false, [](Lists& l) { l.pulls[l.end_pull - 1].copies -= 1; }},
    {"first: tokens in another order", false, [](Lists& l) { std::swap(l.pull(), l.pulls[l.first_pull + 1]); }},
    {"copies without tokens", false, [](Lists& l) { l.end_pull = l.first_pull; }},
};

// Lists of rank 0 for rank 1 and rank 2, which share a node, as rank 1 checks them.
const Case kForwarded[] = {
    {"nothing", true, [](Lists&) {}},
    {"token: T", false, [](Lists& l) { l.pull() = {kTokens, 0, l.pull().first, 1}; }},
    {"token: -1", false, [](Lists& l) { l.pull() = {-1, 0, l.pull().first, 1}; }},
    {"slot: not the next one", false, [](Lists& l) { l.pull().slot = 1; }},
    {"slot: -1", false, [](Lists& l) { l.pull().slot = -1; }},
    {"slot: as many as a node has ranks", false,
     [](Lists& l) {
       l.repeat_pull(2);
       l.pulls[l.end_pull - 2].slot = 1, l.pulls[l.end_pull - 1].slot = 2;
     }},
    {"slot: of a token that comes twice", true, [](Lists& l) { l.repeat_pull(1), l.pulls[l.end_pull - 1].slot = 1; }},
    {"pulls: begin before the list", false,
     [](Lists& l) {
       l.shift_pulls(-l.first_pull - 1);  // leaves rank 1 without pulls
       l.pulls[l.end_pull - 1].slot = 0;
     }},
    {"pulls: end after the list", false,
     [](Lists& l) {
       l.shift_pulls(kTokens * kTopk + 1 - l.end_pull);
       l.pull_offs[1] = l.first_pull, l.pulls[l.end_pull - 1].slot = 0;  // rank 1 has none
     }},
};

// Lists of rank 0 for the same ranks, if rows return by entry.
const Case kForwardedEntries[] = {
    {"nothing", true, [](Lists&) {}},
    {"token: T", false, [](Lists& l) { l.pull().token = kTokens; }},
    {"token: -1", false, [](Lists& l) { l.pull().token = -1; }},
    {"copies: none", false, [](Lists& l) { l.pull().copies = 0; }},
    {"copies: K + 1", false, [](Lists& l) { l.pull().copies = kTopk + 1; }},
    {"first: -1", false, [](Lists& l) { l.pull().first = -1, l.pull().copies = 1; }},
    {"first: as many as there are", false, [](Lists& l) { l.pull().first = kTokens * kTopk, l.pull().copies = 1; }},
    {"k: K", false, [](Lists& l) { l.copy().k = kTopk; }},
    {"k: -1", false, [](Lists& l) { l.copy().k = -1; }},
    {"k: twice", false, [](Lists& l) { l.copies[l.first_copy + 1].k = l.copy().k; }},
};

}  // namespace

int main() {
  int wrong = 0;
  for (const auto& [token, expected] : {std::pair{0, true}, {kTokens - 1, true}, {kTokens, false}, {-1, false}}) {
    if (asks_for(token, kTokens) == expected) continue;
    std::printf("the row of token %d was %sasked for\n", token, expected ? "not " : "");
    ++wrong;
  }
  constexpr int64_t kFetches[][4] = {{0, 8, 8, 8}, {7, 8, 8, 1}, {-1, 8, 8, 0},
                                     {0, 9, 8, 0}, {3, 3, 8, 0}, {4, 3, 8, 0}};
  for (const auto& [first, end, size, expected] : kFetches) {
    for (const bool on_gpu : {true, false}) {
      if ((on_gpu ? fetched : asked)(first, end, size) == expected) continue;
      std::printf("entries %ld to %ld of %ld were fetched\n", long(first), long(end), long(size));
      ++wrong;
    }
  }
  for (const Case& c : kCases) {
    for (const auto& [what, name] : kPlaces) {
      if (believed(c.bend, what) == c.expected) continue;
      std::printf("%s, %s: got %s\n", c.name, name, c.expected ? "refused" : "believed");
      ++wrong;
    }
  }
  for (const Case& c : kShared) {
    if (believed(c.bend, Pushed::kNothing, {}, true) == c.expected) continue;
    std::printf("%s, all copies: got %s\n", c.name, c.expected ? "refused" : "believed");
    ++wrong;
  }
  for (const Case& c : kForwarded) {
    if (believed(c.bend, Pushed::kNothing, {0, 1, 1}) == c.expected) continue;
    std::printf("%s, forwarded: got %s\n", c.name, c.expected ? "refused" : "believed");
    ++wrong;
  }
  for (const Case& c : kForwardedEntries) {
    if (believed(c.bend, Pushed::kNothing, {0, 1, 1}, false, Sums::kInvariant) == c.expected) continue;
    std::printf("%s, forwarded by entry: got %s\n", c.name, c.expected ? "refused" : "believed");
    ++wrong;
  }
  std::printf("%d cases were wrong\n", wrong);
  return wrong != 0;
}
