// Compares the small functions of protocol/core with definitions: words and headers that ranks exchange, codes of rows,
// windows, shares of lanes and prefix sums. Exits with 1 and a message on the first error.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "../../cuda/protocol/core/layout.h"
#include "../../cuda/protocol/core/window_selector.h"
#include "expect.h"
#include "lanes.h"

using namespace moe_rt;

namespace {

// --- numbers and codes of status.h and platform.h ---

void check_numbers() {
  for (int64_t multiple : {1, 2, 7, 64}) {
    for (int64_t value = 0; value < 200; ++value) {
      int64_t expected = 0;
      while (expected < value) expected += multiple;
      expect(round_up(value, multiple) == expected, "round_up of " + std::to_string(value));
    }
  }
  for (int64_t end : {0, 1, 5}) {
    for (int64_t x = -2; x < 8; ++x) expect(below(x, end) == (0 <= x && x <= end - 1), "below " + std::to_string(end));
  }
  for (int a = -2; a < 3; ++a) {
    for (int b = -2; b < 3; ++b) {
      expect(min_of(a, b) == std::min(a, b) && max_of(a, b) == std::max(a, b), "the lesser or greater of two");
    }
  }
  for (uint32_t bits : {0u, 1u, 0x80000001u, 0xffffffffu, 0x12345678u}) {
    int expected = 0;
    for (int i = 0; i < 32; ++i) expected += bits >> i & 1;
    expect(popcount(bits) == expected, "the number of bits");
  }
  for (int code = -1; code < 40; ++code) {
    expect(is_refusal(Code(code)) == (code >= 1 && code <= 4), "which codes are refusals: " + std::to_string(code));
  }
  expect(Status{}.ok() && !Status{.code = Code::kPoisoned}.ok(), "a status is ok without a code");
  Header header{};
  header.refuse(Code::kInvalidInput, 3, 4);
  expect(header.status == Code::kInvalidInput && header.got == 3 && header.expected == 4, "a refusal in a header");
  for (const auto& [op, kind] : {std::pair{Op::kDispatch, Kind::kDispatch},
                                 {Op::kCombineBackward, Kind::kDispatch},
                                 {Op::kCombine, Kind::kCombine},
                                 {Op::kDispatchBackward, Kind::kCombine}}) {
    expect(kind_of(op) == kind, "the kind of op " + std::to_string(int(op)));
  }
}

// --- words and headers of signal.h ---

void check_words() {
  for (const uint32_t tag : {0u, 1u, (1u << 28) - 1, 1u << 28, ~0u}) {
    for (const Op op : {Op::kDispatch, Op::kCombine, Op::kDispatchBackward, Op::kCombineBackward}) {
      const uint64_t seq = 0xabcd'ffff'fff3u, format = 0x9876'5432u;
      const Call call{.op = op, .tag = tag, .handle_seq = seq, .row_format = uint32_t(format)};
      const uint64_t rest = op == Op::kDispatch ? format : seq % (uint64_t{1} << 32);
      const uint64_t word = uint64_t(op) * (uint64_t{1} << 60) + tag % (1u << 28) * (uint64_t{1} << 32) + rest;
      expect(call_word(call) == word, "the word of a call");
      Header header{};
      header.call = word;
      expect(op_of(header) == op, "the op of a header");
    }
  }
  for (const int rank : {-1, 0, 1, 65534}) {
    for (const int peer : {-1, 0, 7, 65534}) {
      const uint64_t word = poison_word(Code::kInterrupted, rank, peer);
      expect(poison_code(word) == Code::kInterrupted && poison_origin(word) == rank && poison_peer(word) == peer,
             "what a poison word says");
      expect(word == uint64_t(Code::kInterrupted) + uint64_t(rank + 1) * 65536 + uint64_t(peer + 1) * 65536 * 65536,
             "the fields of a poison word");
      const Status where{.code = Code::kPeerDead, .op = Op::kCombine, .phase = Phase::kWait, .peer = 3, .seq = 9};
      const Status s = poisoned(word, where);
      expect(s.code == Code::kPoisoned && s.op == Op::kCombine && s.phase == Phase::kWait && s.seq == 9,
             "where a rank was poisoned");
      expect(s.peer == rank && s.got == int64_t(Code::kInterrupted) && s.expected == peer, "who poisoned a rank");
    }
  }
  for (const Code code : {Code::kPeerTimeout, Code::kPeerDead}) {
    for (const int blamed : {-1, 1, 2}) {
      for (const int64_t waited : {0, 299, 300, 301, 400}) {
        const bool expected = code == Code::kPeerTimeout && blamed == 1 && waited > 300;
        expect(blames_who_waits(poison_word(code, 0, blamed), 1, waited, int64_t{400}) == expected,
               "whether the poison blames a rank that waits itself");
      }
    }
  }
}

// Words that the numbers of ops pass, in order; 64 bits wrap.
constexpr uint64_t kSeqs[] = {~uint64_t{0} - 2, ~uint64_t{0} - 1, ~uint64_t{0}, 0, 1, 2};

void check_mailboxes() {
  for (int signal = 0; signal < 6; ++signal) {
    for (int seq = 0; seq < 6; ++seq) {
      expect(reached(kSeqs[signal], kSeqs[seq]) == (signal >= seq), "whether a signal has reached an op");
      for (const uint64_t closed : {0, 1}) {
        Mailbox announcers{}, mailbox{};
        announcers.closed = closed, mailbox.signal = kSeqs[signal];
        expect(closed_before(announcers, mailbox, kSeqs[seq]) == (closed == 1 && signal < seq),
               "whether a rank has closed before it announced");
      }
      for (int others = 0; others < 6; ++others) {
        for (int issued = 0; issued < 6; ++issued) {
          Mailbox mailbox{}, other{};
          mailbox.signal = kSeqs[signal], other.signal = kSeqs[others];
          expect(out_of_order(mailbox, kSeqs[seq], other, kSeqs[issued]) == (others > issued && signal < seq),
                 "whether a peer has issued another op first");
        }
      }
    }
  }
  Mailbox mailbox{};
  for (const uint64_t seq : kSeqs) {
    const Mailbox before = mailbox;
    const Header header{.seq = seq,
                        .config = 5,
                        .call = 6,
                        .status = Code::kOk,
                        .num_tokens = 7,
                        .got = 8,
                        .expected = 9,
                        .max_tokens = 10,
                        .capacity = 11};
    post(mailbox, header);
    expect(mailbox.signal == seq && !std::memcmp(&mailbox.header[seq % 2], &header, sizeof(header)),
           "an announcement is in the header of its number");
    expect(!std::memcmp(&mailbox.header[1 - seq % 2], &before.header[1 - seq % 2], sizeof(header)) && !mailbox.closed,
           "an announcement leaves the other header and the mark of the end alone");
  }
  post_closed(mailbox);
  expect(mailbox.closed == 1 && mailbox.signal == 2, "a rank that closes announces nothing");
}

// Counts pauses, and ends the wait with a code or lets the signal arrive at the last one.
struct CountingIdle {
  Mailbox& mailbox;
  int pauses_left;
  Code code;
  int paused = 0;
  Code pause(const Mailbox& polled, uint64_t seq) {
    expect(&polled == &mailbox && seq == 5, "a wait polls its own mailbox");
    ++paused;
    if (--pauses_left > 0) return Code::kOk;
    if (code == Code::kOk) mailbox.signal = 5;
    return code;
  }
};

void check_waits() {
  for (const Code code : {Code::kOk, Code::kPeerDead}) {
    for (int pauses = 1; pauses < 4; ++pauses) {
      Mailbox mailbox{};
      mailbox.signal = 4;
      CountingIdle idle{mailbox, pauses, code};
      expect(wait_signal(mailbox, 5, idle) == code && idle.paused == pauses, "a wait ends with its signal or a code");
    }
  }
  Mailbox mailbox{};
  mailbox.signal = 6;
  CountingIdle idle{mailbox, 1, Code::kPeerDead};
  expect(wait_signal(mailbox, 5, idle) == Code::kOk && idle.paused == 0, "what has arrived is not waited for");
}

// A peer's header differs from this rank's in some fields: the status names the first of them, in the order of checks.
void check_headers() {
  constexpr uint64_t kConfig = 3, kSeq = 8;
  const Code codes[] = {Code::kOk, Code::kInvalidInput, Code::kCapacityOverflow, Code::kPoisoned, Code(-7)};
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    const auto word = [op](uint32_t tag, uint32_t rest) {
      return call_word({.op = op, .tag = tag, .handle_seq = rest, .row_format = rest});
    };
    for (const Code refused : {Code::kOk, Code::kTooManyTokens}) {
      const Header ours{.seq = kSeq,
                        .config = kConfig,
                        .call = word(4, 5),
                        .status = refused,
                        .num_tokens = 1,
                        .got = 0,
                        .expected = 0,
                        .max_tokens = 6,
                        .capacity = 7};
      for (const Code code : codes) {
        for (const uint64_t config : {kConfig, kConfig + 1}) {
          for (const uint64_t seq : {kSeq, kSeq + 2}) {
            for (const uint64_t call : {word(4, 5), word(4, 6), word(3, 5), word(3, 6)}) {
              for (const int32_t max_tokens : {6, 9}) {
                Header theirs = ours;
                theirs.config = config, theirs.seq = seq, theirs.status = code, theirs.call = call;
                theirs.max_tokens = max_tokens, theirs.got = 21, theirs.expected = 22, theirs.num_tokens = 30;
                Status expected{.op = op, .phase = Phase::kWait, .peer = 2, .seq = kSeq};
                const auto is = [&expected](Code why, uint64_t got, uint64_t wanted) {
                  expected.code = why, expected.got = int64_t(got), expected.expected = int64_t(wanted);
                };
                const bool accepts = refused == Code::kOk;
                if (accepts && max_tokens != 6) is(Code::kBoundMismatch, 9, 6);
                if (accepts && call != ours.call) is(Code::kCallOrderMismatch, call, ours.call);
                if (accepts && op == Op::kDispatch && call == word(4, 6)) expected.code = Code::kRowFormatMismatch;
                if (code != Code::kOk) is(is_refusal(code) ? code : Code::kCorruptPeer, 21, 22);
                if (seq != kSeq) is(Code::kCorruptPeer, seq, kSeq);
                if (config != kConfig) is(Code::kConfigMismatch, config, kConfig);
                const Status s = check_header(theirs, ours, 2);
                expect(s.code == expected.code && s.op == op && s.phase == Phase::kWait && s.peer == 2 &&
                           s.seq == kSeq && s.got == expected.got && s.expected == expected.expected,
                       "a header was judged as " + std::to_string(int(s.code)) + ", expected " +
                           std::to_string(int(expected.code)));
              }
            }
          }
        }
      }
    }
  }
}

// --- windows ---

// Every sequence of ten kinds: a kind that follows itself changes its window, any other keeps it.
void check_windows() {
  for (int sequence = 0; sequence < 1 << 10; ++sequence) {
    WindowSelector selector{};
    int windows[2] = {0, 0}, last = -1;
    for (int i = 0; i < 10; ++i) {
      const int kind = sequence >> i & 1;
      if (kind == last) windows[kind] = 1 - windows[kind];
      const int next = selector.next(Kind(kind)), again = selector.next(Kind(kind));
      expect(next == windows[kind] && again == next, "the next window");
      expect(selector.take(Kind(kind)) == next, "an op takes the next window");
      expect(selector.taken(Kind(0)) == windows[0] && selector.taken(Kind(1)) == windows[1], "the windows taken last");
      last = kind;
    }
  }
}

// --- rows with codes ---

void check_parts() {
  for (int64_t hidden = 1; hidden < 400; ++hidden) {
    int64_t codes = hidden, blocks = 0;
    while (codes % 16 != 0) ++codes;
    while (blocks * 128 < hidden) ++blocks;
    const RowParts parts = codec_parts(hidden);
    expect(parts.code_bytes == hidden && parts.scale_bytes == 4 * blocks, "the bytes of codes and scales");
    expect(parts.scales_at() == codes && parts.bytes() == codes + 4 * blocks, "the bytes of a coded row");
    expect(codec_row_bytes(Codec::kRaw, hidden, 2) == 2 * hidden, "the bytes of a raw row");
    for (const Codec codec : {Codec::kFp8, Codec::kInt8}) {
      expect(codec_row_bytes(codec, hidden, 2) == codes + 4 * blocks, "the bytes of a row with a codec");
    }
  }
}

// The number that an e4m3 code without sign means.
double fp8_number(int code) {
  const int exponent = code / 8, fraction = code % 8;
  return exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
}

// Numbers at, below and above the middle of two codes; ties go to the even code, and no zero has a sign.
void check_fp8() {
  for (int code = 0; code < 127; ++code) {
    expect(decode_fp8(uint8_t(code)) == fp8_number(code), "the number of code " + std::to_string(code));
    expect(decode_fp8(uint8_t(code + 128)) == -fp8_number(code), "the number of a negative code");
    expect(std::signbit(decode_fp8(uint8_t(code + 128))), "the sign of a negative code");
    const auto encodes = [](double x, int expected) {
      expect(encode_fp8(float(x)) == expected, "the code of " + std::to_string(x));
      expect(encode_fp8(float(-x)) == (expected ? expected + 128 : 0), "the code of -" + std::to_string(x));
    };
    encodes(fp8_number(code), code);
    if (code == 126) continue;
    const auto middle = float((fp8_number(code) + fp8_number(code + 1)) / 2);
    encodes(middle, code % 2 ? code + 1 : code);
    encodes(std::nextafter(middle, 0.0f), code);
    encodes(std::nextafter(middle, 1000.0f), code + 1);
  }
  for (const float x : {448.0001f, 463.0f, 464.0f, 479.0f, 480.0f, 600.0f}) {
    expect(encode_fp8(x) == 126 && encode_fp8(-x) == 254, "the code of a number past the largest");
  }
}

void check_codes() {
  for (int code = 0; code < 256; ++code) {
    const int number = code < 128 ? code : code - 256;
    expect(decode_int8(uint8_t(code)) == float(number), "the number of an int8 code");
    for (const float off : {-0.5f, -0.49f, 0.0f, 0.49f, 0.5f}) {
      const float x = float(number) + off;
      if (x >= -128 && x <= 127) expect(encode_int8(x) == uint8_t(int(std::nearbyint(x))), "an int8 code");
    }
  }
  for (int i = -100; i < 100; ++i) {
    const float x = float(i) / 4;
    expect(round_even(x) == std::nearbyint(x), "rounding to even");
  }
  for (const uint32_t bits : {0u, 1u, 0x7f800000u, 0x3f800000u, 0x7fc00000u}) {
    expect(magnitude_bits(bits_float(bits | 0x80000000u)) == bits && magnitude_bits(bits_float(bits)) == bits,
           "a magnitude has no sign");
  }
  for (const auto& [codec, most] : {std::pair{Codec::kFp8, 448.0f}, {Codec::kInt8, 127.0f}}) {
    for (const float largest : {std::ldexp(1.0f, -100), 1.0f, 3.0f, std::numeric_limits<float>::max()}) {
      const CodecScale scale = codec_scale(codec, float_bits(largest));
      expect(scale.scale == largest / most && scale.inverse == most / largest, "the scale of a block");
      expect(decode(codec, encode(codec, -largest, scale.inverse), scale.scale) == -largest / most * most ||
                 std::isinf(most / largest * largest),
             "the largest number of a block");
    }
    for (const float none : {0.0f, std::nextafter(std::ldexp(1.0f, -100), 0.0f)}) {
      const CodecScale scale = codec_scale(codec, float_bits(none));
      expect(scale.scale == 0 && scale.inverse == 0, "a block of almost nothing counts as zero");
      expect(encode(codec, none, scale.inverse) == 0, "the codes of a block of zeros");
    }
    for (const uint32_t bits : {0x7f800000u, 0x7fc00000u, 0x7f800001u}) {
      const CodecScale scale = codec_scale(codec, bits);
      expect(std::isnan(scale.scale) && scale.inverse == 0, "a block that is not finite");
      expect(encode(codec, bits_float(bits), 0) == 0 && std::isnan(decode(codec, 0, scale.scale)), "becomes NaN");
    }
    expect(encode(codec, 2.0f, 3.0f) == (codec == Codec::kFp8 ? encode_fp8(6) : 6), "a code is of the scaled number");
    expect(decode(codec, 9, 3.0f) == 3 * (codec == Codec::kFp8 ? decode_fp8(9) : 9.0f), "a code is scaled back");
  }
}

// --- dims.h ---

template <class Dims, int kStep>
void calls_each(int n, const std::string& what) {
  std::vector<int> called, expected;
  for_topk<Dims, kStep>(n, [&](int i) { called.push_back(i); });
  for (int i = 0; i < n; i += kStep) expected.push_back(i);
  expect(called == expected, what);
}

void check_dims() {
  for (int n = 0; n <= 8; ++n) {
    calls_each<RuntimeDims, 1>(n, "entries with sizes of run time");
    calls_each<RuntimeDims, 3>(n, "every third entry with sizes of run time");
    calls_each<FixedDims<4, 8>, 1>(n, "entries with fixed sizes");
    calls_each<FixedDims<4, 8>, 3>(n, "every third entry with fixed sizes");
    calls_each<FixedDims<4, 17>, 1>(n, "entries of many");
  }
  int calls = 0;
  unrolled<7, 2>([&calls](int i) { expect(i == 2 * calls++, "an unrolled loop takes steps"); });
  expect(calls == 4, "an unrolled loop ends before its bound");
  const RuntimeDims at_run_time{64, 8, Codec::kFp8, Codec::kInt8, Sums::kInvariant};
  const FixedDims<64, 8, Codec::kFp8, Codec::kInt8, Sums::kInvariant> fixed;
  for (const auto& [op, codec] : {std::pair{Op::kDispatch, Codec::kFp8},
                                  {Op::kCombine, Codec::kInt8},
                                  {Op::kDispatchBackward, Codec::kRaw},
                                  {Op::kCombineBackward, Codec::kRaw}}) {
    expect(at_run_time.codec(op) == codec && fixed.codec(op) == codec, "the codec of an op");
  }
  expect(at_run_time.hidden() == 64 && at_run_time.num_topk() == 8 && at_run_time.sums() == Sums::kInvariant, "sizes");
  expect(fixed.hidden() == 64 && fixed.num_topk() == 8 && fixed.sums() == Sums::kInvariant, "fixed sizes");
}

// --- lanes ---

void check_shares() {
  for (int64_t size = 1; size < 8; ++size) {
    for (int64_t n = 0; n < 30; ++n) {
      int64_t next = 0, last = n;
      for (int64_t rank = 0; rank < size; ++rank) {
        const Range share = contiguous_chunk(n, rank, size);
        const int64_t count = share.end - share.begin;
        expect(share.begin == next && share.step == 1, "chunks follow each other");
        expect(count <= last && count >= n / size && count <= (n + size - 1) / size, "chunks are of like sizes");
        next = share.end, last = count;
      }
      expect(next == n, "chunks are all");
      const Range all = Solo{}.chunk(n), same = Solo{}.share(n);
      expect(all.begin == 0 && all.end == n && all.step == 1, "one lane takes all");
      expect(same.begin == 0 && same.end == n && same.step == 1, "one lane shares nothing");
      const Range strides = strided(Lanes::Coop{int(size - 1), int(size), nullptr}, n);
      expect(strides.begin == size - 1 && strides.end == n && strides.step == size, "neighbours take neighbours");
    }
  }
  expect(Solo::rank() == 0 && Solo::size() == 1 && Solo::leader(), "one lane");
  int32_t values[4] = {-1, -1, -1, -1};
  collect<4>(Solo{}, 3, values, [](int i, bool writes) { return writes ? 10 + i : -2; });
  expect(values[0] == 10 && values[1] == 11 && values[2] == 12 && values[3] == -1, "what one lane collects");
}

void check_scan(int lanes, bool backwards, int32_t n) {
  // Fills the margins around the arrays: a sum that includes one is wrong.
  constexpr int32_t kBeyond = 1 << 20, kMargin = 64;
  std::vector<int32_t> data(n + 2 * kMargin, kBeyond), spare = data, expected;
  int32_t total = 0;
  for (int32_t i = 0; i < n; ++i) {
    expected.push_back(total);
    total += data[kMargin + i] = (i * 7 + 3) % 11;
  }
  std::vector<int> right(lanes);
  const bool together = Lanes::run(lanes, backwards, [&](const Lanes::Coop& coop) {
    const Scan scan = exclusive_scan(coop, &data[kMargin], &spare[kMargin], n);
    right[coop.rank()] = scan.total == total && std::equal(expected.begin(), expected.end(), scan.sums);
  });
  expect(together, "a lane waits for one that has ended");
  expect(std::count(right.begin(), right.end(), 1) == lanes, "sums of " + std::to_string(n) + " numbers");
  for (const std::vector<int32_t>* const array : {&data, &spare}) {
    const auto beyond = [](int32_t x) { return x == kBeyond; };
    expect(std::all_of(array->begin(), array->begin() + kMargin, beyond) &&
               std::all_of(array->end() - kMargin, array->end(), beyond),
           "sums are written next to their arrays");
  }
}

}  // namespace

int main() {
  check_numbers(), check_words(), check_mailboxes(), check_waits(), check_headers(), check_windows();
  check_parts(), check_fp8(), check_codes(), check_dims(), check_shares();
  for (const int lanes : {1, 2, 3, 5}) {
    for (const int32_t n : {0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33})
      check_scan(lanes, false, n), check_scan(lanes, true, n);
  }
  return 0;
}
