// Compares the row primitives of the instruction set that this file is compiled for with loops over elements: bits of
// sums, dot products and coded rows, and every byte next to a row. Exits with 1 and a message on the first error.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

#include "../../cuda/cpu/rows_body.h"
#include "expect.h"

using namespace moe_rt;
using namespace moe_rt::rows;

namespace {

const Table kTable = make_table("tested");
constexpr int64_t kLengths[] = {1, 2, 7, 15, 16, 17, 33, 64, 65, 128, 129, 300};
constexpr char kUntouched = 0x5a;
std::mt19937_64 draw(1);

// A row in memory that starts a number of bytes after a line, between bytes that must stay as they are. Reading those
// after it is an error for AddressSanitizer.
struct Row {
  std::vector<char> memory;
  int64_t start, bytes;
  Row(int64_t bytes_, int64_t past_line) : memory(bytes_ + 512, kUntouched), bytes(bytes_) {
    start = 128 - reinterpret_cast<uintptr_t>(memory.data()) % 64 + past_line;
    ASAN_POISON_MEMORY_REGION(memory.data() + start + bytes, memory.size() - start - bytes);
  }
  Row(Row&& other) = default;  // the memory stays in its place
  ~Row() { ASAN_UNPOISON_MEMORY_REGION(memory.data(), memory.size()); }
  char* at() { return memory.data() + start; }
  void check_margins(const std::string& what) const {
    ASAN_UNPOISON_MEMORY_REGION(memory.data(), memory.size());
    for (int64_t i = 0; i < int64_t(memory.size()); ++i) {
      expect((i >= start && i < start + bytes) || memory[i] == kUntouched, what + ": a byte next to the row");
    }
  }
};

template <class T>
T read(const char* row, int64_t i) {
  T x;
  std::memcpy(&x, row + i * int64_t{sizeof(T)}, sizeof(T));
  return x;
}

// Each element type by definition: the number that its bits mean, and the bits of the nearest number, ties to even.
struct OfFloat32 {
  using Acc = float;
  static constexpr Elem kElem = Elem::kFloat32;
  static constexpr int kBytes = 4;
  static float wide(const char* row, int64_t i) { return read<float>(row, i); }
  static bool is(const char* row, int64_t i, float x) { return float_bits(read<float>(row, i)) == float_bits(x); }
};
struct OfBfloat16 {
  using Acc = float;
  static constexpr Elem kElem = Elem::kBfloat16;
  static constexpr int kBytes = 2;
  static float wide(const char* row, int64_t i) { return bits_float(uint32_t{read<uint16_t>(row, i)} << 16); }
  static bool is(const char* row, int64_t i, float x) {
    const uint32_t low = float_bits(x) >> 16, sign = low & 0x8000;
    const auto number = [](uint32_t bits) {  // the step past the largest number counts as 2^128
      return (bits & 0x7fff) == 0x7f80 ? 0x1p128 : double(bits_float((bits & 0x7fff) << 16));
    };
    const double magnitude = std::fabs(double(x)), below = magnitude - number(low), above = number(low + 1) - magnitude;
    const bool up = std::isfinite(x) && (above < below || (above == below && low % 2 == 1));
    return read<uint16_t>(row, i) == ((low + up) | sign);
  }
};
struct OfFloat16 {
  using Acc = float;
  static constexpr Elem kElem = Elem::kFloat16;
  static constexpr int kBytes = 2;
  static float wide(const char* row, int64_t i) { return float(read<_Float16>(row, i)); }
  static bool is(const char* row, int64_t i, float x) {
    const auto rounded = static_cast<_Float16>(x);
    return std::memcmp(row + 2 * i, &rounded, 2) == 0;
  }
};
struct OfFloat64 {
  using Acc = double;
  static constexpr Elem kElem = Elem::kFloat64;
  static constexpr int kBytes = 8;
  static double wide(const char* row, int64_t i) { return read<double>(row, i); }
  static bool is(const char* row, int64_t i, double x) { return std::memcmp(row + 8 * i, &x, 8) == 0; }
};

template <class E>
bool holds(const char* row, int64_t i, typename E::Acc x) {
  return std::isnan(x) ? std::isnan(E::wide(row, i)) : E::is(row, i, x);
}

// A row of numbers of like size or, with `any`, of any bits.
template <class E>
Row drawn_row(int64_t length, int64_t past_line, bool any) {
  Row row(length * E::kBytes, past_line);
  for (int64_t i = 0; i < row.bytes; ++i) row.at()[i] = char(draw());
  for (int64_t i = 0; !any && i < length; ++i) {  // an exponent near that of 1
    char& high = row.at()[(i + 1) * E::kBytes - 1];
    char& next = row.at()[(i + 1) * E::kBytes - 2];
    const int near = int(draw() % 4);
    if constexpr (E::kElem == Elem::kFloat16) {
      high = char((high & 0x83) | (13 + near) << 2);
    } else if constexpr (E::kBytes == 8) {
      high = char((high & 0x80) | 0x3f), next = char((next & 0x0f) | (12 + near) << 4);
    } else {
      high = char((high & 0x80) | 0x3f), next = char((next & 0x7f) | (near & 1) << 7);
    }
  }
  return row;
}

template <class Acc>
Acc drawn_weight(bool any) {
  if (any && draw() % 4 == 0) return draw() % 2 ? std::numeric_limits<Acc>::quiet_NaN() : Acc(0);
  return Acc(int(draw() % 2001) - 1000) / 256;
}

template <class E>
struct Sources {
  std::vector<Row> rows;
  std::vector<const char*> srcs;
  std::vector<typename E::Acc> weights;
  Sources(int n, int64_t length, bool any) {
    for (int j = 0; j < n; ++j) rows.push_back(drawn_row<E>(length, int64_t(draw() % 8) * E::kBytes, any));
    for (Row& row : rows) srcs.push_back(row.at()), weights.push_back(drawn_weight<typename E::Acc>(any));
  }
  // Sum of the weighted elements in the order of the rows; none have the weight at `without`.
  typename E::Acc sum(int64_t i) const {
    typename E::Acc sum = 0;
    for (size_t j = 0; j < srcs.size(); ++j) sum += weights[j] * E::wide(srcs[j], i);
    return sum;
  }
};

template <class E>
void check_sums() {
  const auto& fn = kTable.functions<typename E::Acc>(E::kElem);
  for (const int64_t length : kLengths) {
    for (int n = 0; n <= 6; ++n) {
      for (const bool stream : {false, true}) {
        for (const int64_t past_line : {int64_t{0}, int64_t{E::kBytes}, int64_t{32}}) {
          for (const bool any : {false, true}) {
            const Sources<E> sources(n, length, any);
            Row out(length * E::kBytes, past_line);
            fn.weighted_sum(out.at(), sources.srcs.data(), sources.weights.data(), n, length, stream);
            out.check_margins("a sum");
            for (int64_t i = 0; i < length; ++i) expect(holds<E>(out.at(), i, sources.sum(i)), "an element of a sum");
          }
        }
      }
    }
  }
}

template <class E>
void check_scaled() {
  using Acc = typename E::Acc;
  constexpr int kLanesOfBlock = sizeof(Acc) == 8 ? 8 : 16;
  for (const int64_t length : kLengths) {
    for (const bool stream : {false, true}) {
      for (const int64_t past_line : {int64_t{0}, int64_t{E::kBytes}, int64_t{32}}) {
        Row g = drawn_row<E>(length, 2 * E::kBytes, false), y = drawn_row<E>(length, 0, false);
        Row out(length * E::kBytes, past_line);
        const Acc weight = drawn_weight<Acc>(false);
        const Acc dot = kTable.functions<Acc>(E::kElem).scale_dot(out.at(), weight, g.at(), y.at(), length, stream);
        out.check_margins("a scaled row");
        Acc lanes[kLanesOfBlock] = {}, expected = 0;
        for (int64_t i = 0; i < length; ++i) {
          lanes[i % kLanesOfBlock] += E::wide(g.at(), i) * E::wide(y.at(), i);
          expect(holds<E>(out.at(), i, weight * E::wide(g.at(), i)), "an element of a scaled row");
        }
        for (const Acc lane : lanes) expected += lane;
        expect(dot == expected, "a dot product");
      }
    }
  }
}

// A row of codes and scales by definition: the codes of each block's numbers, then the scales.
std::vector<char> encoded(Codec codec, const std::vector<float>& numbers) {
  const auto length = int64_t(numbers.size());
  std::vector<char> row(codec_parts(length).bytes(), kUntouched);
  for (int64_t first = 0; first < length; first += 128) {
    const int64_t end = std::min<int64_t>(first + 128, length);
    uint32_t largest = 0;
    for (int64_t i = first; i < end; ++i) largest = std::max(largest, magnitude_bits(numbers[i]));
    const CodecScale scale = codec_scale(codec, largest);
    for (int64_t i = first; i < end; ++i) row[i] = char(encode(codec, numbers[i], scale.inverse));
    std::memcpy(&row[codec_parts(length).scales_at() + first / 128 * 4], &scale.scale, 4);
  }
  return row;
}

template <class E>
void check_coded() {
  const auto& fn = kTable.functions<float>(E::kElem);
  for (const Codec codec : {Codec::kFp8, Codec::kInt8}) {
    for (const int64_t length : kLengths) {
      const RowParts parts = codec_parts(length);
      for (int n = 0; n <= 4; ++n) {
        const Sources<E> sources(n, length, draw() % 4 == 0);
        std::vector<float> sums;
        for (int64_t i = 0; i < length; ++i) sums.push_back(sources.sum(i));
        Row coded(parts.bytes(), 0);
        fn.encode_sum(codec, coded.at(), sources.srcs.data(), sources.weights.data(), n, length);
        coded.check_margins("a coded row");
        expect(!std::memcmp(coded.at(), encoded(codec, sums).data(), parts.bytes()), "the bytes of a coded row");

        std::vector<std::vector<char>> rows;
        std::vector<const char*> srcs;
        for (int j = 0; j < n; ++j) {
          std::vector<float> numbers;
          for (int64_t i = 0; i < length; ++i) numbers.push_back(E::wide(sources.srcs[j], i));
          rows.push_back(encoded(codec, numbers));
        }
        for (const std::vector<char>& row : rows) srcs.push_back(row.data());
        Row out(length * E::kBytes, 0);
        fn.decode_sum(codec, out.at(), srcs.data(), sources.weights.data(), n, length);
        out.check_margins("a decoded row");
        for (int64_t i = 0; i < length; ++i) {
          float sum = 0;
          for (int j = 0; j < n; ++j) {
            const auto scale = read<float>(srcs[j] + parts.scales_at(), i / 128);
            sum += sources.weights[j] * decode(codec, uint8_t(srcs[j][i]), scale);
          }
          expect(holds<E>(out.at(), i, sum), "an element of a sum of coded rows");
        }
      }
    }
  }
}

void check_copies() {
  for (const int64_t bytes : {1, 63, 64, 65, 128, 200, 1023, 1024, 1025, 2048, 2500}) {
    for (const bool stream : {false, true}) {
      for (const int64_t past_line : {0, 1, 63}) {
        Row src = drawn_row<OfBfloat16>(bytes / 2 + 1, 3, true);
        Row to[3] = {Row(bytes, past_line), Row(bytes, 0), Row(bytes, 32)};
        char* const dsts[] = {to[0].at(), nullptr, to[1].at(), to[2].at()};
        kTable.copy(dsts, 3, src.at(), bytes, stream);
        for (Row& row : to) row.check_margins("a copy");
        expect(!std::memcmp(to[0].at(), src.at(), bytes) && !std::memcmp(to[1].at(), src.at(), bytes), "a copy");
        const std::vector<char> nothing(bytes, kUntouched);
        expect(!std::memcmp(to[2].at(), nothing.data(), bytes), "a copy to one more place");
      }
    }
  }
}

// The primitives as roles call them: rows of tensors by number, sources that are missing, rows that were dropped.
template <class E>
struct Roles {
  using Acc = typename E::Acc;
  static constexpr int64_t kHidden = 150, kRow = kHidden * E::kBytes;
  static constexpr int32_t kRows[] = {2, -1, 0};
  const Functions<Acc>& fn;
  HostRows<Acc> rows;
  int64_t bytes = rows.encoded_row_bytes();
  Row x = drawn_row<E>(3 * kHidden, 0, false), y = drawn_row<E>(3 * kHidden, 0, false);
  const std::vector<char> nothing = std::vector<char>(kRow, kUntouched), zeros = std::vector<char>(kRow);

  // Makes a row as it travels, of a sum.
  void leaves(const char* const* srcs, const Acc* weights, int n, char* dst) const {
    if (!rows.coded()) return fn.weighted_sum(dst, srcs, weights, n, kHidden, false);
    if constexpr (sizeof(Acc) == 4) fn.encode_sum(rows.codec, dst, srcs, weights, n, kHidden);
  }
  // Adds up rows as they travel.
  void arrives(const char* const* srcs, const Acc* weights, int n, char* dst) const {
    if (!rows.coded()) return fn.weighted_sum(dst, srcs, weights, n, kHidden, false);
    if constexpr (sizeof(Acc) == 4) fn.decode_sum(rows.codec, dst, srcs, weights, n, kHidden);
  }

  void check_moves() {
    expect(rows.tensor_row_bytes() == kRow, "a row of a tensor");
    expect(bytes == (rows.coded() ? codec_parts(kHidden).bytes() : kRow), "a row as it travels");
    const Acc one = 1;
    Row published(bytes, 0), expected(bytes, 0), to(3 * kRow, 0), spread(kRow, 0);
    rows.publish(published.at(), x.at(), 2);
    const char *const last = x.at() + 2 * kRow, *const src = published.at();
    leaves(&last, &one, 1, expected.at());
    published.check_margins("a published row");
    expect(!std::memcmp(published.at(), expected.at(), bytes), "a published row");
    rows.spread(to.at(), kRows, 3, src);
    arrives(&src, &one, 1, spread.at());
    const auto check = [&](const std::vector<char>& second, const std::string& what) {
      to.check_margins(what);
      for (const int row : {0, 1, 2}) {
        const char* const wanted = row == 1 ? second.data() : spread.at();
        expect(!std::memcmp(to.at() + row * kRow, wanted, kRow), what + ": row " + std::to_string(row));
      }
    };
    check(nothing, "a spread row");
    rows.clear(to.at(), 1);
    check(zeros, "a cleared row");
  }

  // Sources that are missing take their weights along.
  void check_sums() {
    const char* given[] = {nullptr, x.at(), nullptr, x.at() + kRow, y.at()};
    const char* const kept[] = {x.at(), x.at() + kRow, y.at()};
    Acc weights[] = {Acc(7), Acc(2), Acc(5), Acc(-3), Acc(0.5)};
    const Acc kept_weights[] = {Acc(2), Acc(-3), Acc(0.5)}, ones[] = {1, 1, 1};
    Row sum(bytes, 0), right(bytes, 0);
    rows.encode_sum(sum.at(), given, weights, 5);
    leaves(kept, kept_weights, 3, right.at());
    expect(!std::memcmp(sum.at(), right.at(), bytes), "a sum without missing rows");

    Row first(bytes, 0), second(bytes, 0);
    leaves(&kept[0], ones, 1, first.at()), leaves(&kept[2], ones, 1, second.at());
    const char* there[] = {first.at(), nullptr, second.at(), first.at()};
    const char* const present[] = {first.at(), second.at(), first.at()};
    Acc of_there[] = {Acc(2), Acc(9), Acc(-3), Acc(0.5)};
    Row reduced(kRow, 0), wanted(kRow, 0);
    rows.decode_sum(reduced.at(), present, 3);
    arrives(present, ones, 3, wanted.at());
    expect(!std::memcmp(reduced.at(), wanted.at(), kRow), "a sum of rows as they travel");
    rows.decode_weighted(reduced.at(), there, of_there, 4);
    arrives(present, kept_weights, 3, wanted.at());
    expect(!std::memcmp(reduced.at(), wanted.at(), kRow), "a weighted sum of rows as they travel");
  }

  void check_gradients() {
    Row grads(3 * kRow, 0), scaled(kRow, 0);
    const Acc factors[] = {Acc(2), Acc(9), Acc(-3)};
    Acc dots[] = {77, 77, 77};
    rows.scale_dots(grads.at(), y.at(), kRows, factors, x.at(), dots, 3);
    grads.check_margins("a row's gradient");
    for (const int c : {0, 2}) {
      const Acc dot = fn.scale_dot(scaled.at(), factors[c], x.at(), y.at() + kRows[c] * kRow, kHidden, false);
      expect(dots[c] == dot && !std::memcmp(grads.at() + kRows[c] * kRow, scaled.at(), kRow), "a row's gradient");
    }
    expect(dots[1] == 77 && !std::memcmp(grads.at() + kRow, nothing.data(), kRow), "the gradient of a dropped row");
  }
};

template <class E>
void check_roles(Codec codec) {
  const auto& fn = kTable.functions<typename E::Acc>(E::kElem);
  for (const bool stream : {false, true}) {
    Roles<E> roles{fn, {&kTable, &fn, Roles<E>::kHidden, E::kBytes, stream, codec}};
    expect(roles.rows.coded() == (codec != Codec::kRaw), "whether rows are coded");
    roles.check_moves(), roles.check_sums(), roles.check_gradients();
  }
}

// Rows of codes and scales of the caller, which move as bytes.
void check_scaled_rows() {
  constexpr int64_t kCodes = 70, kScales = 12, kPlace = 80;
  constexpr int32_t kRows[] = {2, -1, 0};
  for (const bool stream : {false, true}) {
    Row codes = drawn_row<OfBfloat16>(3 * kCodes / 2, 0, true),
        scales = drawn_row<OfBfloat16>(3 * kScales / 2, 0, true);
    Row travels(kPlace + kScales, 0), recv(3 * kCodes, 0), recv_scales(3 * kScales, 0);
    const HostScaledRows rows{&kTable, {kCodes, kScales}, scales.at(), recv_scales.at(), stream};
    expect(rows.encoded_row_bytes() == kPlace + kScales, "a row with scales as it travels");
    rows.publish(travels.at(), codes.at(), 1);
    travels.check_margins("a row with scales");
    expect(!std::memcmp(travels.at(), codes.at() + kCodes, kCodes), "codes that are published");
    expect(!std::memcmp(travels.at() + kPlace, scales.at() + kScales, kScales), "scales that are published");
    rows.spread(recv.at(), kRows, 3, travels.at());
    const std::vector<char> nothing(kCodes, kUntouched), zeros(kCodes);
    for (const int row : {0, 1, 2}) {
      expect(!std::memcmp(recv.at() + row * kCodes, row == 1 ? nothing.data() : travels.at(), kCodes), "codes");
      const char* const wanted = row == 1 ? nothing.data() : travels.at() + kPlace;
      expect(!std::memcmp(recv_scales.at() + row * kScales, wanted, kScales), "scales");
    }
    rows.clear(recv.at(), 2);
    recv.check_margins("codes"), recv_scales.check_margins("scales");
    expect(!std::memcmp(recv.at() + 2 * kCodes, zeros.data(), kCodes), "codes that are cleared");
    expect(!std::memcmp(recv_scales.at() + 2 * kScales, zeros.data(), kScales), "scales that are cleared");
    expect(!std::memcmp(recv.at() + kCodes, nothing.data(), kCodes), "codes before those cleared");
    expect(!std::memcmp(recv_scales.at() + kScales, nothing.data(), kScales), "scales before those cleared");
  }
}

template <class E>
void check_all() {
  check_sums<E>(), check_scaled<E>(), check_roles<E>(Codec::kRaw);
  if constexpr (E::kBytes < 8) {
    check_coded<E>();
    for (const Codec codec : {Codec::kFp8, Codec::kInt8}) check_roles<E>(codec);
  }
}

}  // namespace

int main() {
  for (int elem = 0; elem < kNumElems; ++elem) {
    const bool wide = Elem(elem) == Elem::kFloat64;
    expect((kTable.in_doubles[elem].weighted_sum != nullptr) == wide, "an element sums in doubles");
    expect((kTable.in_floats[elem].weighted_sum != nullptr) != wide, "an element sums in floats");
  }
  check_all<OfFloat32>(), check_all<OfBfloat16>(), check_all<OfFloat16>(), check_all<OfFloat64>();
  check_copies(), check_scaled_rows();
  return 0;
}
