// Fuzz target: for any topk_idx, both routings make the lists that a loop over tokens makes, or name the lowest bad
// entry.
//
// All arrays are heap allocations of exactly the protocol's size, so that a sanitizer reports the first byte out of
// bounds. With few lanes (routing.h) a bad entry refuses the op before lists are written; with many (routing_tiles.h)
// it counts as no expert, and the lists are written anyway.
#include "../../cuda/protocol/flat/routing.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/gpu/sizes.h"
#include "../device/emulation.h"
#include "bytes.h"

using namespace moe_rt;
using fuzz::expect;

namespace {

struct Input {
  Shape shape;
  PlacementTables placement;
  int64_t num_tokens;
  std::vector<int64_t> idx;
  std::vector<int32_t> narrow;  // topk_idx in 32 bits, if every id fits
  std::vector<float> weights;
  int lanes;
  bool use_narrow = false;
  ExpertIds ids() const { return use_narrow ? ExpertIds{narrow.data(), true} : ExpertIds{idx.data(), false}; }
};

Input read_input(fuzz::Bytes& in) {
  Input input;
  const int num_ranks = in.between(1, 5), num_experts = in.between(num_ranks, num_ranks + 9);
  input.shape = {num_ranks, num_experts, in.between(1, 24), 1, in.between(1, std::min(6, num_experts)), 4, 4};
  input.num_tokens = in.between(0, input.shape.num_max_tokens);
  input.lanes = in.between(1, 3);
  std::vector<int32_t> expert_rank;
  for (int e = 0; e < num_experts; ++e) expert_rank.push_back(e < num_ranks ? e : in.between(0, num_ranks - 1));
  input.placement = PlacementTables::make(expert_rank, num_ranks);
  constexpr uint8_t kAnyInteger = 250;
  for (int64_t i = 0; i < input.num_tokens * input.shape.num_topk; ++i) {
    const auto byte = in.take<uint8_t>();
    input.idx.push_back(byte >= kAnyInteger ? in.take<int64_t>() : byte % (num_experts + 1) - 1);
    input.weights.push_back(float(i % 16 + 1));
    if (const auto id = int32_t(input.idx.back()); id == input.idx.back()) input.narrow.push_back(id);
  }
  return input;
}

struct Lists {
  std::vector<int32_t> counts, pull_offs, copy_offs, send_plan;
  std::vector<Pull> pulls;
  std::vector<Copy> copies;
  std::vector<float> weights;

  explicit Lists(const Input& in)
      : counts(in.shape.num_experts, -7),
        pull_offs(in.shape.num_ranks + 1, -7),
        copy_offs(in.shape.num_ranks + 1, -7),
        send_plan(in.num_tokens * in.shape.num_topk, -7),
        pulls(in.shape.num_max_tokens * in.shape.num_visits()),
        copies(in.shape.num_max_tokens * in.shape.num_topk),
        weights(in.shape.num_max_tokens * in.shape.num_topk) {}
  RouteLists<float> view() {
    return {{counts.data()}, {pull_offs.data()}, {copy_offs.data()}, {pulls.data()}, {copies.data()}, {weights.data()}};
  }
};

// Route token by token and rank by rank, by definition. Bad ids count as no expert.
Lists reference(const Input& in) {
  const int num_topk = in.shape.num_topk;
  Lists out(in);
  std::fill(out.counts.begin(), out.counts.end(), 0);
  std::fill(out.send_plan.begin(), out.send_plan.end(), kNowhere);
  std::vector<int> slots(in.num_tokens, 0);
  int32_t pulls = 0, copies = 0;
  for (int r = 0; r < in.shape.num_ranks; ++r) {
    out.pull_offs[r] = pulls, out.copy_offs[r] = copies;
    for (int32_t t = 0; t < in.num_tokens; ++t) {
      const int32_t first = copies;
      for (int place = in.placement.rank_first[r]; place < in.placement.rank_first[r + 1]; ++place) {
        int first_k = -1;
        for (int k = 0; k < num_topk; ++k) {
          const int64_t expert = in.idx[t * num_topk + k];
          if (expert < 0 || expert >= in.shape.num_experts || in.placement.position[expert] != place) continue;
          if (first_k < 0) {
            first_k = k;
            out.copies[copies] = {place - in.placement.rank_first[r], out.counts[place]++, k, 0};
            out.weights[copies++] = 0;
          }
          out.weights[copies - 1] += in.weights[t * num_topk + k];
          out.send_plan[t * num_topk + k] = send_entry(slots[t], first_k);
        }
      }
      if (copies > first) out.pulls[pulls++] = {t, slots[t]++, first, copies - first};
    }
  }
  out.pull_offs.back() = pulls, out.copy_offs.back() = copies;
  return out;
}

void compare(const Lists& got, const Lists& expected) {
  expect(got.counts == expected.counts, "counts differ");
  expect(got.pull_offs == expected.pull_offs, "pull_offs differ");
  expect(got.copy_offs == expected.copy_offs, "copy_offs differ");
  expect(got.send_plan == expected.send_plan, "send plans differ");
  const auto same_bytes = [](const auto& a, const auto& b, int n) {
    return n == 0 || std::memcmp(a.data(), b.data(), n * sizeof(a[0])) == 0;
  };
  expect(same_bytes(got.pulls, expected.pulls, expected.pull_offs.back()), "pulls differ");
  expect(same_bytes(got.copies, expected.copies, expected.copy_offs.back()), "copies differ");
  expect(same_bytes(got.weights, expected.weights, expected.copy_offs.back()), "weights differ");
}

// A lane of a team that is called phase by phase instead of concurrently with the others.
struct Lane {
  int rank_, size_;
  int rank() const { return rank_; }
  Range chunk(int64_t n) const { return contiguous_chunk(n, rank_, size_); }
};

// Return the id of the lowest bad entry, or -1; lists are written only in the latter case. Between the passes a peer
// overwrites what the first one has published, which must have no effect.
int64_t route_few_lanes(const Input& in, const World& w, Lists& out) {
  const RuntimeDims dims{in.shape.hidden, in.shape.num_topk};
  std::vector<int32_t> ints(LaneCounters::num_ints(in.shape, in.lanes), -7);
  const LaneCounters counters{ints.data(), in.shape.num_experts, in.shape.num_ranks};
  for (int lane = 0; lane < in.lanes; ++lane) {
    int64_t bad;
    if (!count_visits(Lane{lane, in.lanes}, dims, w, in.ids(), in.num_tokens, counters, out.send_plan.data(), &bad)) {
      return bad;
    }
  }
  place_lanes(w, counters, in.lanes, out.view());
  const Lists published = out;
  for (std::vector<int32_t>* const list : {&out.counts, &out.pull_offs, &out.copy_offs}) {
    std::fill(list->begin(), list->end(), 0x10000000);
  }
  for (int lane = 0; lane < in.lanes; ++lane) {
    write_lists(Lane{lane, in.lanes}, dims, w, in.ids(), in.weights.data(), in.num_tokens, counters, out.view(),
                out.send_plan.data());
  }
  out.counts = published.counts, out.pull_offs = published.pull_offs, out.copy_offs = published.copy_offs;
  return -1;
}

// All lists in one place, for every reader.
struct InOnePlace {
  RouteLists<float> lists;
  RouteLists<float> operator()(int32_t) const { return lists; }
  int32_t count() const { return 1; }
};

// Route with blocks of lanes, each with its share of small tiles.
int64_t route_many_lanes(const Input& in, const World& w, int tile, int most_blocks, Lists& out) {
  const RuntimeDims dims{in.shape.hidden, in.shape.num_topk};
  int64_t bad_entry = kNoBadEntry;
  const auto num_ints = Tiles::num_ints(in.shape, tile);
  const int64_t num_tiles = Tiles::count(in.num_tokens, tile);
  const int blocks = int(std::min<int64_t>(most_blocks, num_tiles));
  for (int block = 0; block < blocks; ++block) {
    std::vector<int32_t> ints(num_ints, -7);
    Barrier barrier(in.lanes);
    const auto work = [&](int lane) {
      uint32_t noise = lane;
      const emulation::Block coop{lane, in.lanes, &barrier, &noise};
      const ExpertIds ids = in.ids();
      const RoutingTables tables = RoutingTables::of(w);
      const TileRouter router{coop,
                              dims,
                              w,
                              tables,
                              ids,
                              in.weights.data(),
                              in.num_tokens,
                              Tiles::view(ints.data(), in.shape, tile),
                              InOnePlace{out.view()},
                              out.send_plan.data(),
                              SlotRule<false>{w},
                              bad_entry};
      router.route(block, blocks);
    };
    std::vector<std::thread> others;
    for (int lane = 1; lane < in.lanes; ++lane) others.emplace_back(work, lane);
    work(0);
    for (std::thread& t : others) t.join();
  }
  return bad_entry == kNoBadEntry ? -1 : in.idx[bad_entry];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  Input in = read_input(bytes);
  World w{};
  w.shape = in.shape, w.placement = in.placement.view();
  int64_t lowest_bad = -1;
  for (const int64_t id : in.idx) {
    if (lowest_bad == -1 && (id < -1 || id >= in.shape.num_experts)) lowest_bad = id;
  }
  const Lists expected = reference(in);
  for (const bool narrow : {false, true}) {
    if (narrow && in.narrow.size() != in.idx.size()) continue;
    in.use_narrow = narrow;
    Lists few(in);
    expect(route_few_lanes(in, w, few) == lowest_bad, "few lanes named another bad entry");
    if (lowest_bad == -1) compare(few, expected);
    constexpr int kTilings[][2] = {{1, 1}, {1, 3}, {2, 2}, {5, 2}, {24, 1}};  // tokens of a tile, blocks
    for (const auto& [tile, blocks] : kTilings) {
      Lists many(in);
      expect(route_many_lanes(in, w, tile, blocks, many) == lowest_bad, "many lanes named another bad entry");
      compare(many, expected);
    }
  }
  return 0;
}
