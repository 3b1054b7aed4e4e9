// Compares a GPU's row primitives with loops over elements, for groups of lanes that run one after the other: any
// number of rows, rows that are missing or dropped, sizes known at compile time or not. Exits with 1 and a message on
// the first error.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../cuda/gpu/rows.h"
#include "../../cuda/gpu/scaled_rows.h"
#include "../protocol/expect.h"
#include "../protocol/lanes.h"

using namespace moe_rt;

namespace {

std::mt19937 draw(1);
constexpr char kUntouched = 0x5a;

// Lanes of some warps that share a row; kWarp lanes of a warp exchange words.
template <int kWarp>
struct Group {
  static constexpr int kTeamLanes = kWarp;
  Lanes::Coop coop;
  double* words;  // of all lanes
  int lane() const { return coop.rank(); }
  int lanes() const { return coop.size(); }
  int team_lane() const { return lane() % kWarp; }
  int team() const { return lane() / kWarp; }
  int teams() const { return lanes() / kWarp; }
  bool leader() const { return lane() == 0; }
  void sync() const { coop.sync(); }
  template <class T>
  T exchange(T x, int with) const {
    words[lane()] = double(x);
    sync();
    const T other = T(words[lane() ^ with]);
    sync();
    return other;
  }
  template <int kNeighbours>
  uint32_t team_max(uint32_t x) const {
    for (int with = kNeighbours / 2; with > 0; with /= 2) x = std::max(x, exchange(x, with));
    return x;
  }
  template <class T>
  T sum(T x) const {
    for (int with = kWarp / 2; with > 0; with /= 2) x += exchange(x, with);
    return x;
  }
};

// Runs act(group) on all lanes of `warps` warps.
template <int kWarp, class Act>
void with_group(int warps, Act&& act) {
  std::vector<double> words(kWarp * warps);
  const bool together =
      Lanes::run(kWarp * warps, draw() % 2, [&](const Lanes::Coop& coop) { act(Group<kWarp>{coop, words.data()}); });
  expect(together || warps > 1, "lanes of a warp part");
}

// Rows in memory that is followed by bytes which must stay as they are.
struct Rows {
  static constexpr int64_t kMargin = 64;
  std::vector<uint64_t> memory;
  int64_t bytes;
  explicit Rows(int64_t bytes_) : memory((bytes_ + 2 * kMargin) / 8 + 4), bytes(bytes_) {
    std::memset(memory.data(), kUntouched, memory.size() * 8);
  }
  char* at() {
    char* const start = reinterpret_cast<char*>(memory.data());
    return start + kMargin - reinterpret_cast<uintptr_t>(start) % 16;
  }
  void check(const std::string& what) {
    for (const char* p = reinterpret_cast<char*>(memory.data()); p != reinterpret_cast<char*>(&*memory.end()); ++p) {
      expect((p >= at() && p < at() + bytes) || *p == kUntouched, what + ": a byte next to it");
    }
  }
};

template <class Elem, class Dims, int kWarp>
struct Case {
  using Acc = typename Elem::Acc;
  Dims dims;
  Codec codec;
  int warps;
  int hidden = dims.hidden();
  int64_t row_bytes = hidden * int64_t{sizeof(Elem)};
  int64_t travels = codec_row_bytes(codec, hidden, sizeof(Elem));

  auto rows(const Group<kWarp>& group) const { return DeviceRows<Elem, Dims, Group<kWarp>>{dims, group, codec}; }
  template <class Act>
  void run(Act&& act) const {
    with_group<kWarp>(warps, [&](const Group<kWarp>& group) { act(rows(group)); });
  }

  Rows drawn(int n) const {
    Rows made(n * row_bytes);
    for (int64_t i = 0; i < n * hidden; ++i) {
      reinterpret_cast<Elem*>(made.at())[i] = Elem::round(Acc(int(draw() % 255) - 127) / 8);
    }
    return made;
  }
  static Acc element(const char* row, int i) { return reinterpret_cast<const Elem*>(row)[i].wide(); }
  // A row as it travels, of these numbers, and what its reader makes of element i.
  std::vector<char> encoded(const std::vector<Acc>& x) const {
    std::vector<char> row(travels, 0);
    const int64_t scales_at = codec_parts(hidden).scales_at();
    for (int first = 0; first < hidden && codec != Codec::kRaw; first += kCodecBlock) {
      uint32_t largest = 0;
      const int end = std::min(first + kCodecBlock, hidden);
      for (int i = first; i < end; ++i) largest = std::max(largest, magnitude_bits(float(x[i])));
      const CodecScale scale = codec_scale(codec, largest);
      for (int i = first; i < end; ++i) row[i] = char(moe_rt::encode(codec, float(x[i]), scale.inverse));
      std::memcpy(&row[scales_at + first / kCodecBlock * 4], &scale.scale, 4);
    }
    for (int i = 0; i < hidden && codec == Codec::kRaw; ++i) reinterpret_cast<Elem*>(row.data())[i] = Elem::round(x[i]);
    return row;
  }
  Acc decoded(const char* row, int i) const {
    if (codec == Codec::kRaw) return element(row, i);
    float scale;
    std::memcpy(&scale, row + codec_parts(hidden).scales_at() + i / kCodecBlock * 4, 4);
    return Acc(moe_rt::decode(codec, uint8_t(row[i]), scale));
  }
  // Codes and scales are equal; bytes between them have no meaning.
  bool same(const char* got, const std::vector<char>& wanted) const {
    if (codec == Codec::kRaw) return !std::memcmp(got, wanted.data(), travels);
    const RowParts parts = codec_parts(hidden);
    return !std::memcmp(got, wanted.data(), hidden) &&
           !std::memcmp(got + parts.scales_at(), wanted.data() + parts.scales_at(), parts.scale_bytes);
  }
  void expect_row(const char* got, const std::vector<Acc>& wanted, const std::string& what) const {
    for (int i = 0; i < hidden; ++i) {
      const Elem x = Elem::round(wanted[i]);
      expect(!std::memcmp(got + i * int64_t{sizeof(Elem)}, &x, sizeof(x)), what);
    }
  }

  void check_moves() const {
    Rows x = drawn(3), published(travels);
    run([&](const auto& rows) { rows.publish(published.at(), x.at(), 2); });
    std::vector<Acc> numbers;
    for (int i = 0; i < hidden; ++i) numbers.push_back(element(x.at() + 2 * row_bytes, i));
    published.check("a published row");
    const std::vector<char> row = encoded(numbers);
    expect(same(published.at(), row), "a published row");
    const int32_t to[] = {3, -1, 0};
    Rows out(4 * row_bytes), again(travels);
    run([&](const auto& rows) {
      rows.encode(again.at(), x.at() + 2 * row_bytes);
      rows.meet();  // lanes read what others have written
      rows.spread(out.at(), to, 3, again.at());
      rows.clear(out.at(), 2);
    });
    out.check("a spread row"), again.check("an encoded row");
    expect(same(again.at(), row), "an encoded row");
    std::vector<Acc> read;
    for (int i = 0; i < hidden; ++i) read.push_back(decoded(row.data(), i));
    const std::vector<char> nothing(row_bytes, kUntouched), zeros(row_bytes);
    for (const int there : {0, 3}) expect_row(out.at() + there * row_bytes, read, "a spread row");
    expect(!std::memcmp(out.at() + row_bytes, nothing.data(), row_bytes), "a row that was not written");
    expect(!std::memcmp(out.at() + 2 * row_bytes, zeros.data(), row_bytes), "a cleared row");
  }

  void check_sums(int n) const {
    Rows x = drawn(n);
    std::vector<std::vector<char>> coded;
    std::vector<const char*> srcs, there, all;
    std::vector<Acc> weights;
    for (int j = 0; j < n; ++j) {
      const char* const row = x.at() + j * row_bytes;
      std::vector<Acc> numbers;
      for (int i = 0; i < hidden; ++i) numbers.push_back(element(row, i));
      coded.push_back(encoded(numbers));
      const bool missing = draw() % 4 == 0;
      srcs.push_back(missing ? nullptr : row);
      weights.push_back(missing ? std::numeric_limits<Acc>::quiet_NaN() : Acc(int(draw() % 99) - 49) / 7);
    }
    for (int j = 0; j < n; ++j) {
      all.push_back(coded[j].data());
      there.push_back(srcs[j] ? coded[j].data() : nullptr);
    }
    std::vector<Acc> sums(hidden), reduced(hidden), weighted(hidden);
    for (int i = 0; i < hidden; ++i) {
      for (int j = 0; j < n; ++j) {
        if (srcs[j]) sums[i] += weights[j] * element(srcs[j], i), weighted[i] += weights[j] * decoded(all[j], i);
        reduced[i] += decoded(all[j], i);
      }
    }
    Rows sum(travels), plain(row_bytes), scaled(row_bytes);
    run([&](const auto& rows) {
      rows.encode_sum(sum.at(), srcs.data(), weights.data(), n);
      rows.decode_sum(plain.at(), all.data(), n);
      rows.decode_weighted(scaled.at(), there.data(), weights.data(), n);
    });
    const std::string of = " of " + std::to_string(n) + " rows";
    sum.check("a sum"), plain.check("a sum"), scaled.check("a sum");
    expect(same(sum.at(), encoded(sums)), "a sum" + of);
    expect_row(plain.at(), reduced, "a sum" + of + " as they travel");
    expect_row(scaled.at(), weighted, "a weighted sum" + of + " as they travel");
  }

  // Numbers are small, so that dot products are exact in any order.
  void check_dots(int n) const {
    Rows g = drawn(1), y = drawn(n + 2), out((n + 2) * row_bytes);
    std::vector<int32_t> at;
    std::vector<Acc> weights;
    for (int c = 0; c < n; ++c) at.push_back(draw() % 4 == 0 ? -1 : n - 1 - c), weights.push_back(Acc(c - 2));
    std::vector<std::vector<Acc>> dots(kWarp, std::vector<Acc>(n));
    run([&](const auto& rows) {
      rows.scale_dots(out.at(), y.at(), at.data(), weights.data(), g.at(), dots[rows.group.lane()].data(), n);
    });
    out.check("a scaled row");
    std::vector<bool> written(n + 2);
    for (int c = 0; c < n; ++c) {
      if (at[c] < 0) continue;
      written[at[c]] = true;
      Acc dot = 0;
      std::vector<Acc> scaled;
      for (int i = 0; i < hidden; ++i) {
        dot += element(g.at(), i) * element(y.at() + at[c] * row_bytes, i);
        scaled.push_back(weights[c] * element(g.at(), i));
      }
      for (const std::vector<Acc>& of_lane : dots) expect(of_lane[c] == dot, "a dot product on each lane");
      expect_row(out.at() + at[c] * row_bytes, scaled, "a scaled row");
    }
    const std::vector<char> nothing(row_bytes, kUntouched);
    for (int row = 0; row < n + 2; ++row) {
      expect(written[row] || !std::memcmp(out.at() + row * row_bytes, nothing.data(), row_bytes), "another row");
    }
  }

  void check(int most) const {
    run([&](const auto& rows) {
      expect(rows.tensor_row_bytes() == row_bytes && rows.encoded_row_bytes() == travels, "the bytes of a row");
      expect(rows.coded() == (codec != Codec::kRaw), "whether rows are coded");
    });
    check_moves();
    for (int n = 0; n <= most; ++n) check_sums(n);
    for (int n = 1; n <= most && codec == Codec::kRaw && warps == 1; ++n) check_dots(n);
  }
};

template <class Elem, int kWarp, class Dims>
void check(const Dims& dims, int most) {
  for (const int warps : {1, 2}) {
    for (const Codec codec : {Codec::kRaw, Codec::kFp8, Codec::kInt8}) {
      if (sizeof(Elem) < 8 || codec == Codec::kRaw) Case<Elem, Dims, kWarp>{dims, codec, warps}.check(most);
    }
  }
}

// Rows of codes and scales of the caller, which move as bytes, for sizes that the widest vectors divide and others.
void check_scaled_rows(int64_t code_bytes, int64_t scale_bytes, int warps) {
  const RowParts parts{code_bytes, scale_bytes};
  Rows codes(3 * code_bytes), scales(3 * scale_bytes), travels(parts.bytes()), recv(4 * code_bytes);
  Rows recv_scales(4 * scale_bytes);
  for (int64_t i = 0; i < 3 * code_bytes; ++i) codes.at()[i] = char(draw());
  for (int64_t i = 0; i < 3 * scale_bytes; ++i) scales.at()[i] = char(draw());
  const int32_t to[] = {3, -1, 0};
  with_group<8>(warps, [&](const Group<8>& group) {
    const DeviceScaledRows<RuntimeDims, Group<8>> rows{group, parts, scales.at(), recv_scales.at()};
    expect(rows.tensor_row_bytes() == code_bytes && rows.encoded_row_bytes() == parts.bytes(), "sizes of parts");
    rows.publish(travels.at(), codes.at(), 1);
    group.sync();
    rows.spread(recv.at(), to, 3, travels.at());
    rows.clear(recv.at(), 2);
  });
  travels.check("a row with scales"), recv.check("codes"), recv_scales.check("scales");
  const std::vector<char> nothing(std::max(code_bytes, scale_bytes), kUntouched), zeros(nothing.size());
  const auto is = [&](char* got, int64_t bytes, int row, const char* wanted) {
    return !std::memcmp(got + row * bytes, row == 1 ? nothing.data() : row == 2 ? zeros.data() : wanted, bytes);
  };
  for (int row = 0; row < 4; ++row) {
    expect(is(recv.at(), code_bytes, row, codes.at() + code_bytes), "codes of row " + std::to_string(row));
    expect(is(recv_scales.at(), scale_bytes, row, scales.at() + scale_bytes), "scales of row " + std::to_string(row));
  }
}

}  // namespace

int main() {
  check<Bf16, 8>(FixedDims<48, 3>{}, 3);
  check<Bf16, 8>(FixedDims<272, 11>{}, 11);
  check<F16, 1>(FixedDims<6, 4>{}, 4);
  check<F32, 8>(RuntimeDims{144, 20}, 20);
  check<F32, 4>(RuntimeDims{131, 5}, 5);
  check<F64, 8>(FixedDims<20, 6>{}, 6);
  for (const int warps : {1, 3}) {
    for (const auto& [codes, scales] : {std::pair{48, 16}, {256, 8}, {20, 4}, {7, 3}, {18, 32}, {130, 12}}) {
      check_scaled_rows(codes, scales, warps);
    }
  }
  return 0;
}
