// Prints what ranks of two builds must agree on, and what readers of a segment must know: structs, codes and layouts.
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "../../cuda/net/ucx_messages.h"
#include "../../cuda/protocol/core/codec.h"
#include "../../cuda/protocol/core/window_selector.h"

using namespace moe_rt;

namespace {

void print(int64_t value) { std::printf(" %" PRId64, value); }

#define FIELD(struct_, field) print(offsetof(struct_, field)), print(sizeof(struct_::field))

// Bytes that readers of a segment know by the version of its header.
void print_segment() {
  std::printf("segment");
  FIELD(SegmentHeader, magic), FIELD(SegmentHeader, version), FIELD(SegmentHeader, rank), FIELD(SegmentHeader, pid);
  FIELD(SegmentHeader, num_ranks), FIELD(SegmentHeader, num_experts), FIELD(SegmentHeader, num_max_tokens);
  FIELD(SegmentHeader, hidden), FIELD(SegmentHeader, num_topk), FIELD(SegmentHeader, elem_bytes);
  FIELD(SegmentHeader, acc_bytes), FIELD(SegmentHeader, config), FIELD(SegmentHeader, poison);
  FIELD(SegmentHeader, mailboxes), FIELD(SegmentHeader, members), FIELD(SegmentHeader, op_records);
  FIELD(SegmentHeader, bytes), FIELD(SegmentHeader, last_words), FIELD(SegmentHeader, num_nodes);
  FIELD(Member, pid), FIELD(Member, node), FIELD(Member, inode);
  FIELD(OpRecord, number), FIELD(OpRecord, seq), FIELD(OpRecord, op), FIELD(OpRecord, code), FIELD(OpRecord, tag);
  FIELD(OpRecord, num_tokens), FIELD(OpRecord, start_ns), FIELD(OpRecord, announced_ns);
  FIELD(OpRecord, arrived_ns), FIELD(OpRecord, end_ns), FIELD(OpRecord, longest_ns), FIELD(OpRecord, longest_peer);
  FIELD(OpRecord, handle_seq), FIELD(OpRecordSlot, stamp), FIELD(OpRecordSlot, words);
  FIELD(LastWords, num_bytes), FIELD(LastWords, text), FIELD(Mailbox, signal), FIELD(Mailbox, closed);
  print(kSegmentHeaderMagic), print(kNumOpRecords), print(kNumKinds);
  print(poison_word(Code::kPeerDead, 3, 5));
  std::printf("\n");
}

void print_structs() {
  FIELD(Header, seq), FIELD(Header, config), FIELD(Header, call), FIELD(Header, status), FIELD(Header, num_tokens);
  FIELD(Header, got), FIELD(Header, expected), FIELD(Header, max_tokens), FIELD(Header, capacity);
  FIELD(Mailbox, signal), FIELD(Mailbox, header), FIELD(Mailbox, closed);
  FIELD(Pull, token), FIELD(Pull, slot), FIELD(Pull, first), FIELD(Pull, copies);
  FIELD(Copy, expert), FIELD(Copy, index), FIELD(Copy, k);
  FIELD(Message, secret), FIELD(Message, source), FIELD(Message, ask), FIELD(Message, offset);
  FIELD(Message, bytes), FIELD(Message, number), FIELD(SmallPut, offset), FIELD(SmallPut, value);
}

void print_codes() {
  for (const Code code : {Code::kInvalidInput, Code::kInvalidRouting, Code::kTooManyTokens, Code::kCapacityOverflow,
                          Code::kConfigMismatch, Code::kCallOrderMismatch, Code::kCorruptPeer, Code::kPeerTimeout,
                          Code::kPeerDead, Code::kPeerClosed, Code::kPoisoned, Code::kFaultInjected, Code::kInterrupted,
                          Code::kBoundMismatch, Code::kRowFormatMismatch}) {
    print(static_cast<int>(code));
  }
  for (const Ask ask : {Ask::kGet, Ask::kGot, Ask::kPut, Ask::kPutAll, Ask::kPost, Ask::kFlush, Ask::kFlushed}) {
    print(static_cast<int>(ask));
  }
  for (const Op op : {Op::kDispatch, Op::kCombine, Op::kDispatchBackward, Op::kCombineBackward}) {
    print(static_cast<int>(op)), print(static_cast<int>(kind_of(op)));
    print(call_word({.op = op, .tag = 0xfffffff1, .handle_seq = 0xabcdef0123, .row_format = 77}));
  }
  print(poison_word(Code::kPeerTimeout, 1, -1));
  WindowSelector selector{};
  for (const Kind kind : {Kind::kDispatch, Kind::kDispatch, Kind::kCombine, Kind::kCombine, Kind::kDispatch}) {
    print(selector.take(kind));
  }
}

void print_rows() {
  for (const int64_t hidden : {1, 128, 129, 7168}) {
    print(codec_parts(hidden).scales_at()), print(codec_row_bytes(Codec::kFp8, hidden, 2));
  }
  for (int code = 0; code < 256; ++code) {
    print(float_bits(decode_fp8(uint8_t(code)))), print(float_bits(decode_int8(uint8_t(code))));
  }
  for (const Codec codec : {Codec::kFp8, Codec::kInt8}) {
    const CodecScale scale = codec_scale(codec, float_bits(3.0f));
    print(float_bits(scale.scale)), print(float_bits(scale.inverse));
  }
}

void print_layout(const Shape& shape) {
  int64_t words[sizeof(Layout) / sizeof(int64_t)];
  const Layout second = Layout::make(shape).of_channel(shape, shape.depth - 1);
  std::memcpy(words, &second, sizeof(words));
  for (const int64_t word : words) print(word);
}

}  // namespace

int main() {
  print_segment();
  std::printf("protocol");
  print(tuning::kMessageBytes), print_structs(), print_codes(), print_rows();
  print_layout({4, 9, 100, 72, 3, 2, 4});
  print_layout({4, 9, 100, 72, 3, 8, 8, RecvLayout::kTokens, 1, 100, 64, 1, 0, 0, Sums::kRanked, 3});
  print_layout({6, 9, 100, 72, 3, 4, 4, RecvLayout::kExperts, 8, 0, 0, 2, 4, 2, Sums::kRanked, 2});
  print_layout({6, 9, 100, 72, 3, 4, 4, RecvLayout::kExperts, 1, 0, 0, 2, 4, 2, Sums::kInvariant, 1});
  std::printf("\n");
  return 0;
}
