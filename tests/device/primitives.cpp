// Checks what row primitives read and when, which group takes which row, and which network calls a flush makes. Exits
// with 1 and a message on the first error.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "emulated_network.h"

using namespace moe_rt;

namespace {

constexpr int kHidden = 7, kCopies = 3, kLanes = 4;

// An element that counts its copies out of the watched rows, and how many of these precede the first use.
struct Watched {
  using Acc = float;
  static inline const char *begin = nullptr, *end = nullptr;
  static inline int reads = 0, reads_before_use = 0;
  static void watch(const void* from, size_t bytes) {
    begin = static_cast<const char*>(from);
    end = begin + bytes;
    reads = reads_before_use = 0;
  }
  float bits = 0;
  Watched() = default;
  explicit Watched(float x) : bits(x) {}
  Watched(const Watched& other) : bits(other.bits) { count(other); }
  Watched& operator=(const Watched& other) {
    bits = other.bits;
    count(other);
    return *this;
  }
  float wide() const {
    if (reads_before_use == 0) reads_before_use = reads;
    return bits;
  }
  static Watched round(float x) { return Watched(x); }

 private:
  static void count(const Watched& other) {
    const char* at = reinterpret_cast<const char*>(&other);
    reads += at >= begin && at < end;
  }
};
using Rows = DeviceRows<Watched, RuntimeDims, emulation::Warp<1>>;

// A row of another rank crosses the link once per element, however many rows here copy it.
int reads_of_a_remote_row() {
  static Watched g[kHidden], y[kCopies][kHidden], out[kCopies][kHidden];
  const int32_t at[kCopies] = {2, 0, 1};
  const float weights[kCopies] = {1, 2, 3};
  float dots[kCopies];
  Watched::watch(g, sizeof(g));
  const Rows rows{RuntimeDims{kHidden, kCopies}, emulation::Warp<1>{0, 1}, Codec::kRaw};
  rows.scale_dots(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(y), at, weights, Watched::begin, dots,
                  kCopies);
  return Watched::reads;
}

// Sum some of n rows: a lane loads everything it has in flight before it uses the first element; absent rows are not
// read, and their weights have no effect.
bool sum_is_in_order(int n) {
  constexpr int kRows = 20, kLength = 16;
  static Watched rows[kRows][kLength], out[kLength];
  const char* srcs[kRows];
  float weights[kRows], expected[kLength] = {};
  int there = 0;
  for (int i = 0; i < n; ++i) {
    const bool kept = i % 5 != 3;
    srcs[i] = kept ? reinterpret_cast<const char*>(rows[i]) : nullptr;
    weights[i] = kept ? 1.0f / float(i + 3) : std::numeric_limits<float>::quiet_NaN();
    there += kept;
    for (int k = 0; kept && k < kLength; ++k) {
      rows[i][k].bits = std::ldexp(float(k * 7 + i - 9), (i * 5 + k) % 23);
      expected[k] += weights[i] * rows[i][k].bits;
    }
  }
  Watched::watch(rows, sizeof(rows));
  const Rows primitive{RuntimeDims{kLength, kRows}, emulation::Warp<1>{0, 1}, Codec::kRaw};
  primitive.encode_sum(reinterpret_cast<char*>(out), srcs, weights, n);
  const int together = n <= 1 ? 8 : n <= 2 ? 4 : n <= 4 ? 2 : 1;  // per row
  const int loads = together * there - std::max(0, there - (n > 8 ? 7 : there));
  bool right = Watched::reads == there * kLength && Watched::reads_before_use == loads;
  for (int k = 0; k < kLength; ++k) right = right && out[k].bits == expected[k];
  if (!right) std::printf("sum of %d rows: %d reads, %d before use\n", n, Watched::reads, Watched::reads_before_use);
  return right;
}

// Codes in groups of four, as GPUs use them, equal the codec's: all codes, and numbers of every magnitude.
bool codes_are_equal() {
  int wrong = 0;
  for (const Codec codec : {Codec::kFp8, Codec::kInt8}) {
    for (const float scale : {1.0f, 0.3f, 0.0f, 7.5e35f, 0x1p-109f, std::numeric_limits<float>::quiet_NaN()}) {
      for (uint32_t code = 0; code < 256; ++code) {
        float x[4];
        decode_four(codec, code * 0x01000001u | (code ^ 0xffu) << 8 | 0x250000u, scale, x);
        const uint32_t codes[] = {code, code ^ 0xffu, 0x25u, code};
        for (int i = 0; i < 4; ++i) {
          const float one = decode(codec, uint8_t(codes[i]), scale);
          wrong += std::isnan(one) ? !std::isnan(x[i]) : float_bits(x[i]) != float_bits(one);
        }
      }
    }
    const float most = codec == Codec::kFp8 ? 448.0f : 127.0f;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 40961) {  // numbers in blocks whose maximum is `most`
      float x[4];
      for (int i = 0; i < 4; ++i) x[i] = bits_float(uint32_t(bits + i * 0x3fffff));
      const bool small = std::all_of(x, x + 4, [&](float v) { return std::fabs(v) <= most; });
      const float inverse = small ? 1.0f : 0.0f;
      const uint32_t four = encode_four(codec, x, inverse);
      for (int i = 0; i < 4; ++i) wrong += uint8_t(four >> 8 * i) != encode(codec, x[i], inverse);
    }
  }
  std::printf("codes that differ: %d\n", wrong);
  return wrong == 0;
}

// Each row has one group, a group's lanes belong to adjacent warps, and a few rows spread over all blocks.
bool rows_have_groups(int num_blocks, int warps, int first_block, int num_rows) {
  constexpr int kWarp = 4;
  const int together = warps_together(num_rows, num_blocks - first_block, warps);
  std::vector<int> lanes(num_rows), blocks(num_rows, -1), rows_of(num_blocks);
  bool right = true;
  for (int block = first_block; block < num_blocks; ++block) {
    for (int rank = 0; rank < warps * kWarp; ++rank) {
      const emulation::MappedLinks links{};
      BlockShared shared{};
      const emulation::Machine<emulation::MappedLinks, kWarp> m{
          links, {rank, warps * kWarp, nullptr, nullptr}, nullptr, block, num_blocks, shared, nullptr};
      const auto group = m.warps(first_block, together);
      const Range share = group.share(num_rows);
      for (int64_t row = share.begin; row < share.end; row += share.step) {
        right = right && group.lane() == lanes[row]++ && (blocks[row] == -1 || blocks[row] == block);
        blocks[row] = block;
        rows_of[block] += group.leader();
      }
    }
  }
  for (int row = 0; row < num_rows; ++row) right = right && lanes[row] == together * kWarp;
  const auto [least, most] = std::minmax_element(rows_of.begin() + first_block, rows_of.end());
  right = right && *most - *least <= 1;
  if (!right) std::printf("%d rows on %d blocks of %d warps, %d together\n", num_rows, num_blocks, warps, together);
  return right;
}

bool rows_fill_the_blocks() {
  bool right = true;
  for (const int rows : {1, 3, 4, 5, 8, 9, 16, 17, 64, 65, 200}) {
    for (const int warps : {16, 8, 6, 3, 1}) right = rows_have_groups(5, warps, rows % 3, rows) && right;
  }
  // 132 blocks of 16 warps: one row more than there are blocks halves the warps per row, and all rows run concurrently.
  const int rows[] = {0, 1, 132, 133, 264, 265, 528, 529, 1056, 1057, 2112, 2113, 65536};
  const int expected[] = {16, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1};
  for (size_t i = 0; i < std::size(rows); ++i) right = right && warps_together(rows[i], 132, 16) == expected[i];
  return right;
}

// Rows that count how often each is written to each rank.
struct CountedRows {
  char* const* base;
  int (*written)[3];  // [token][rank]
  int64_t tensor_row_bytes() const { return 4; }
  template <class EachPlace>
  void publish_to(const char*, int64_t token, EachPlace&& each_place) const {
    each_place([&](char* place) {
      for (int r = 0; r < 3; ++r) written[token][r] += place >= base[r] && place < base[r] + kSegment;
    });
  }
  static constexpr int kSegment = 1 << 16;
};

// A row is pushed once to every rank that its token visits, however many of its experts are there.
template <class Dims>
bool rows_are_pushed_once(const Dims& dims) {
  constexpr int kTokens = 5, kTopk = 4;
  static const int64_t ids[kTokens][kTopk] = {
      {0, 1, 2, 3}, {5, 5, 4, 5}, {-1, 2, -1, 3}, {3, 0, 2, 1}, {-1, -1, -1, -1}};
  const int expected[kTokens][3] = {{1, 1, 0}, {0, 0, 1}, {0, 1, 0}, {1, 1, 0}, {0, 0, 0}};
  static char memory[3][CountedRows::kSegment];
  char* const base[] = {memory[0], memory[1], memory[2]};
  Shape shape{3, 6, kTokens, 1, kTopk, 4, 4};
  shape.num_pushed_tokens = shape.num_pushed_rows = kTokens;
  const PlacementTables placement = PlacementTables::make({0, 0, 1, 1, 2, 2}, 3);
  const World w{shape, Layout::make(shape), placement.view(), base, nullptr, 0, 1, 1};
  int written[kTokens][3] = {};
  const char x[kTokens * 4] = {};
  push_rows(Solo{}, dims, w, RoutingTables::of(w), ExpertIds{ids, false}, 0, x, kTokens, CountedRows{base, written});
  const bool right = w.layout.bytes <= CountedRows::kSegment && std::memcmp(written, expected, sizeof(written)) == 0;
  if (!right) std::printf("a row was not pushed once to every rank of its token\n");
  return right;
}

// A part of a row moves in the widest vector that divides it.
bool parts_have_wide_vectors() {
  bool right = true;
  for (const int64_t bytes : {0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 48, 56, 64, 130}) {
    const size_t expected = bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 1;
    with_vectors(bytes, [&](auto vector, int n) {
      right = right && sizeof(vector) == expected && n * int64_t{sizeof(vector)} == bytes;
    });
  }
  if (!right) std::printf("a part of a row moves in another vector\n");
  return right;
}

// A lane of one warp, executed in parallel with the others.
struct Lane {
  int64_t index;
  int lane;
  Barrier* barrier;
  bool leader() const { return lane == 0; }
  void sync() const { barrier->wait(); }
};

// Counts calls of quiet, and the calls made before all lanes had handed over their puts.
struct Counting {
  uint32_t *quiets, *early, *handed_over;
  void before_signals() const {
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
  bool right = reads == kHidden;
  for (int n = 0; n <= 20; ++n) right = sum_is_in_order(n) && right;
  right = codes_are_equal() && right;
  right = rows_fill_the_blocks() && right;
  right = rows_are_pushed_once(RuntimeDims{1, 4}) && right;
  right = rows_are_pushed_once(FixedDims<1, 4>{}) && right;
  right = parts_have_wide_vectors() && right;
  return flush_is_one_quiet() && right ? 0 : 1;
}
