// A ring moves rows with counted copies: how many are in flight, how often rows are read, and which slots are free.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "../../cuda/gpu/moving.h"

using namespace moe_rt;

namespace {

struct Warp {
  int team_lane() const { return 0; }
  int team() const { return 0; }
  int teams() const { return 1; }
};

void require(bool right, const char* what) {
  if (right) return;
  std::printf("%s\n", what);
  std::exit(1);
}

// Counts over all copies: loads not yet awaited, groups whose slots may still be read, and bytes.
struct Counts {
  int loads = 0, most_loads = 0;
  int64_t read = 0, written = 0;
  std::vector<std::set<const char*>> groups{1};
} counts;

struct CountedCopies {
  void open(char*, int) {}
  void load(uint64_t*, char* to, const char* from, int bytes) {
    for (const auto& group : counts.groups) require(!group.count(to), "a slot is filled that may still be read");
    counts.most_loads = max_of(counts.most_loads, ++counts.loads);
    counts.read += bytes;
    std::memcpy(to, from, bytes);
  }
  void await_load(uint64_t*, uint32_t) { --counts.loads; }
  void store(char* to, const char* from, int bytes) {
    counts.groups.back().insert(from);
    counts.written += bytes;
    std::memcpy(to, from, bytes);
  }
  void commit() { counts.groups.emplace_back(); }
  template <int kGroups>
  void await_reads() {
    while (counts.groups.size() > kGroups + 1) counts.groups.erase(counts.groups.begin());
  }
  void await_stores() { await_reads<0>(); }
};

}  // namespace

int main() {
  // The list of eight destinations reaches the first piece if its own slot is not counted.
  constexpr int kRows = 20, kBytes = 1000 * 16, kCopies = 8;
  const RingMemory memory = RingMemory::make(100, 227 << 10, 16, kCopies);
  require(memory.at % kRingAlign == 0 && memory.piece % kRingAlign == 0, "pieces are not aligned");
  require(memory.at + 16 * memory.bytes <= (227 << 10) - kRingFrame, "rings are larger than the block's memory");
  std::vector<char> rows(kRows * kBytes), out(kCopies * rows.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = char(i * 2654435761u >> 24);
  std::vector<uint64_t> scratch((memory.at + 16 * memory.bytes) / 8);
  Ring<CountedCopies> ring(memory, kCopies, reinterpret_cast<char*>(scratch.data()), 15);
  ring.open(Warp{});
  for (int row = 0; row < kRows; ++row) {
    ring.move(Warp{}, rows.data() + row * kBytes, kBytes, [&](auto&& put) {
      for (int copy = 0; copy < kCopies; ++copy) put(out.data() + (copy * kRows + row) * int64_t{kBytes});
    });
  }
  ring.finish(Warp{});
  for (int copy = 0; copy < kCopies; ++copy) {
    require(!std::memcmp(out.data() + copy * rows.size(), rows.data(), rows.size()), "other bytes");
  }
  require(counts.loads == 0, "a load was never awaited");
  std::printf("%d %d %lld %lld\n", counts.most_loads, memory.piece, static_cast<long long>(counts.read),
              static_cast<long long>(counts.written));
}
