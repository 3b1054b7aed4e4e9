// Writers of a rank's op records, segment header and last words, and readers that tolerate concurrent changes.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "../protocol/core/layout.h"

namespace moe_rt {

using OpRecordWords = std::array<uint64_t, kOpRecordWords>;

// SYNC POINT op record, writer side. Pairs with read_op_record. The stamp is odd while the words change. Each word is
// stored with release, so that a reader that sees it also sees the odd stamp; the even stamp is stored with release, so
// that a reader that sees it sees all words. Without either: 1. reader loads the stamp, 2. half of the next op is
// written, 3. reader takes a mixture of two ops for one.
inline void write_op_record(OpRecordSlot& slot, const OpRecord& op_record) {
  const auto words = std::bit_cast<OpRecordWords>(op_record);
  const uint64_t stamp = load_relaxed(slot.stamp);
  store_relaxed(slot.stamp, stamp + 1);
  for (int i = 0; i < kOpRecordWords; ++i) store_release(slot.words[i], words[i]);
  store_release(slot.stamp, stamp + 2);
}

// SYNC POINT op record, reader side. The words are loaded with acquire, so that the second load of the stamp comes
// after them. False if the slot was changing, which is permanent if its owner was stopped or killed in the middle.
inline bool read_op_record(const OpRecordSlot& slot, OpRecord& op_record) {
  const uint64_t stamp = load_acquire(slot.stamp);
  OpRecordWords words;
  for (int i = 0; i < kOpRecordWords; ++i) words[i] = load_acquire(slot.words[i]);
  op_record = std::bit_cast<OpRecord>(words);
  return stamp % 2 == 0 && load_relaxed(slot.stamp) == stamp;
}

// SYNC POINT segment header, writer side. Pairs with read_segment. Without the release a reader could accept the magic
// and read offsets that are not written yet. `members` has an entry for each rank.
inline void write_segment_header(char* segment, const Shape& s, int rank, uint64_t config,
                                 const std::vector<Member>& members) {
  const Layout l = Layout::make(s);
  std::copy(members.begin(), members.end(), reinterpret_cast<Member*>(segment + l.members));
  auto& header = *reinterpret_cast<SegmentHeader*>(segment);
  header = {.magic = 0,
            .version = kSegmentHeaderVersion,
            .rank = rank,
            .pid = getpid(),
            .num_ranks = s.num_ranks,
            .num_experts = s.num_experts,
            .num_max_tokens = s.num_max_tokens,
            .hidden = s.hidden,
            .num_topk = s.num_topk,
            .elem_bytes = s.elem_bytes,
            .acc_bytes = s.acc_bytes,
            .config = config,
            .poison = l.poison,
            .mailboxes = l.mailboxes,
            .members = l.members,
            .op_records = l.op_records,
            .bytes = l.bytes,
            .last_words = l.last_words,
            .num_nodes = s.num_nodes};
  store_release(header.magic, kSegmentHeaderMagic);
}

// SYNC POINT last words, writer side. Pairs with read_last_words. Only the first words are kept, so that the text never
// changes under a reader; without the release a reader could see the length before the text.
inline void write_last_words(LastWords& words, std::string_view text) {
  if (load_relaxed(words.num_bytes) != 0) return;
  const size_t n = std::min(text.size(), sizeof(words.text));
  std::memcpy(words.text, text.data(), n);
  store_release(words.num_bytes, uint64_t{n});
}

// SYNC POINT last words, reader side. A peer may have written anything: the result may be any bytes, but never more
// than fit.
inline std::string read_last_words(const LastWords& words) {
  return {words.text, std::min<size_t>(load_acquire(words.num_bytes), sizeof(words.text))};
}

}  // namespace moe_rt
