// What row primitives read and what a flush asks of the network, counted: exits with 1 and says where it is too much.
#include <cstdio>
#include <thread>

#include "emulated_network.h"

using namespace moe_rt;

namespace {

constexpr int kHidden = 7, kCopies = 3, kLanes = 4;

// An element that knows when it is copied out of the row that is watched.
struct Watched {
  using Acc = float;
  static inline const char *begin = nullptr, *end = nullptr;
  static inline int reads = 0;
  float bits = 0;
  Watched() = default;
  explicit Watched(float x) : bits(x) {}
  Watched(const Watched& other) : bits(other.bits) {
    const char* at = reinterpret_cast<const char*>(&other);
    reads += at >= begin && at < end;
  }
  Watched& operator=(const Watched&) = default;
  float wide() const { return bits; }
  static Watched round(float x) { return Watched(x); }
};

// The row is of another rank: each of its elements crosses the link once, however many rows here copy it.
int reads_of_a_remote_row() {
  using Rows = DeviceRows<Watched, RuntimeDims, emulation::Warp<1>>;
  static Watched g[kHidden], y[kCopies][kHidden], out[kCopies][kHidden];
  const int32_t at[kCopies] = {2, 0, 1};
  const float weights[kCopies] = {1, 2, 3};
  float dots[kCopies];
  Watched::begin = reinterpret_cast<const char*>(g);
  Watched::end = reinterpret_cast<const char*>(g + kHidden);
  const Rows rows{RuntimeDims{kHidden, kCopies}, emulation::Warp<1>{0, 1}, Codec::kRaw};
  rows.scale_dots(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(y), at, weights, Watched::begin, dots,
                  kCopies);
  return Watched::reads;
}

// The lanes of one warp, side by side.
struct Lane {
  int64_t index;
  int lane;
  Barrier* barrier;
  bool leader() const { return lane == 0; }
  void sync() const { barrier->wait(); }
};

// Counts quiets, and those that came before all lanes had handed over what they put.
struct Counting {
  uint32_t *quiets, *early, *handed_over;
  void quiet() const {
    fetch_add_relaxed(*quiets, 1u);
    if (load_relaxed(*handed_over) < kLanes) fetch_add_relaxed(*early, 1u);
  }
};

bool flush_is_one_quiet() {
  uint32_t quiets = 0, early = 0, handed_over = 0;
  Barrier barrier(kLanes);
  const Counting net{&quiets, &early, &handed_over};
  const NetworkMemory memory{};
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([&, lane] {
      const RdmaLink<Counting, Lane> link(net, memory, Lane{0, lane, &barrier});
      std::this_thread::sleep_for(std::chrono::milliseconds(lane));
      fetch_add_relaxed(handed_over, 1u);
      link.flush();
    });
  }
  for (std::thread& t : lanes) t.join();
  std::printf("quiets of a warp: %u, too early: %u\n", quiets, early);
  return quiets == 1 && early == 0;
}

}  // namespace

int main() {
  const int reads = reads_of_a_remote_row();
  std::printf("reads of a row of %d elements for %d copies: %d\n", kHidden, kCopies, reads);
  const bool flushed = flush_is_one_quiet();
  return reads == kHidden && flushed ? 0 : 1;
}
