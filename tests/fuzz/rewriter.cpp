// Rewrites words of segments while ranks use them, as a peer that maps them could, and reports the offsets of lists.
//
// A word is checked and used within nanoseconds, so a burst of writes alternates it between its right value and
// another. Words of short lists, which lead to all others, are chosen as often as words of long ones.
#include <cstdint>
#include <iterator>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/protocol/core/atomics.h"
#include "../../cuda/protocol/core/layout.h"

using namespace moe_rt;

namespace {

struct Part {
  int64_t begin, end;  // offsets in a segment, in bytes
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t below(uint64_t end) {  // xorshift64*
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return uint32_t((state_ * 0x2545F4914F6CDD1D >> 32) % end);
  }

 private:
  uint64_t state_;
};

// Return the lists of both windows, pushed lists, and lists staged from other nodes. With `control`, also mailboxes and
// everything else before the lists.
std::vector<Part> parts_of(const Shape& shape, bool control) {
  const Layout l = Layout::make(shape);
  std::vector<Part> parts;
  const auto add_lists = [&](const auto& lists, int64_t at, int64_t end) {
    const int64_t begins[] = {lists.counts, lists.pull_offs, lists.copy_offs, lists.pulls, lists.copies, lists.weights};
    for (size_t i = 0; i < std::size(begins); ++i) {
      parts.push_back({at + begins[i], i + 1 < std::size(begins) ? at + begins[i + 1] : end});
    }
  };
  for (const Layout::Window& w : l.window) {
    add_lists(w, 0, w.tokens);
    for (int r = 0; l.pushed.bytes > 0 && r < shape.num_ranks; ++r) {
      const int64_t at = w.pushed + r * l.pushed.bytes;
      add_lists(l.pushed, at, at + l.pushed.bytes);
    }
  }
  const int64_t first = l.window[0].counts;
  for (int i = 0; i < shape.num_clients; ++i) {
    const int64_t at = l.staged.lists + i * l.staged.bytes;
    add_lists(l.window[0], at - first, at + l.window[0].tokens - first);
  }
  if (control) parts.push_back({0, first});
  return parts;
}

int32_t wrong(Random& random, int32_t right) {
  constexpr int32_t kEdges[] = {0, -1, 1, INT32_MAX, INT32_MIN, 0x10000000, -0x10000000, 64};
  switch (random.below(5)) {
    case 0:
      return kEdges[random.below(std::size(kEdges))];
    case 1:
      return int32_t(random.below(32));
    case 2:
      return int32_t(uint32_t(right) + random.below(9) - 4);
    case 3:
      return int32_t(uint32_t(right) ^ 1u << random.below(32));
    default:
      return int32_t(random.below(uint64_t{1} << 32));
  }
}

void pause(uint32_t steps) {
  for (volatile uint32_t left = steps; left > 0;) left = left - 1;
}

}  // namespace

extern "C" {

// `sizes` are the fields of Shape that a buffer chooses, in their order; node_of [R], or nullptr.
void* make_shape(const int32_t* sizes, const int32_t* node_of) {
  const int32_t elem_bytes = sizes[5];
  Shape shape{sizes[0],
              sizes[1],
              sizes[2],
              sizes[3],
              sizes[4],
              elem_bytes,
              elem_bytes == 8 ? 8 : 4,
              sizes[6] ? RecvLayout::kTokens : RecvLayout::kExperts,
              sizes[7],
              sizes[8],
              sizes[9]};
  shape.sums = sizes[10] ? Sums::kInvariant : Sums::kRanked;
  const std::vector<int32_t> nodes =
      node_of ? std::vector<int32_t>(node_of, node_of + sizes[0]) : std::vector<int32_t>{};
  return new Shape(NodeTables::sized(shape, nodes));
}

int64_t segment_bytes(const void* shape) { return Layout::make(*static_cast<const Shape*>(shape)).bytes; }

// Write to `found` the offsets of a window's counts, pull_offs, copy_offs, pulls and copies.
void lists_at(const void* shape, int window, int64_t* found) {
  const Layout::Window& w = Layout::make(*static_cast<const Shape*>(shape)).window[window];
  found[0] = w.counts, found[1] = w.pull_offs, found[2] = w.copy_offs, found[3] = w.pulls, found[4] = w.copies;
}

// Rewrite words until *stop is not zero. Return their number.
int64_t rewrite(const void* shape, char* const* segments, int num_segments, uint64_t seed, int control,
                const int32_t* stop) {
  Random random(seed);
  const std::vector<Part> parts = parts_of(*static_cast<const Shape*>(shape), control != 0);
  int64_t written = 0;
  for (; load_relaxed(*stop) == 0; ++written) {
    const Part part = parts[random.below(parts.size())];
    char* const at = segments[random.below(num_segments)] + part.begin + random.below((part.end - part.begin) / 4) * 4;
    int32_t& word = *reinterpret_cast<int32_t*>(at);
    const int32_t right = load_relaxed(word), other = wrong(random, right);
    const uint32_t long_right = 1 + random.below(1000);
    for (uint32_t burst = 1 + random.below(300); burst > 0; --burst) {
      store_relaxed(word, other);
      pause(random.below(100));
      store_relaxed(word, right);
      pause(random.below(long_right));
    }
    if (random.below(64) == 0) store_relaxed(word, other);
  }
  return written;
}
}
