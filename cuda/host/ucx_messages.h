// What CPU ranks send each other over UCX: a head, and data behind it; and which of it may be obeyed.
//
// Whoever is asked does the work itself, and looks first: a peer reaches nothing but this rank's segment.
#pragma once

#include "../protocol/core/layout.h"

namespace moe_rt {

enum class Ask : uint32_t {
  kGet = 1,  // send me `bytes` of your segment
  kGot,      // there they are: what get `number` has asked for
  kPut,      // what follows belongs there
  kPost,     // what follows is the header of an op: announce it in that mailbox
  kFlush,    // tell me once you have taken in `number` puts and posts of mine, all in all
  kFlushed,  // so many are; also said unasked
};

struct Message {
  uint64_t secret =
      0;  // what the rank that it is for has told its group: it was not meant for an earlier process there
  uint32_t source = 0;  // rank
  Ask ask{};
  int64_t offset = 0, bytes = 0;  // in the segment of whoever is asked; of the data that follows, or is asked for
  uint64_t number = 0;
};
static_assert(sizeof(Message) == 40 && sizeof(Message) + sizeof(Header) < 128, "UCX takes it all as one short message");

// Of one message; more goes in several. A message of this size takes one step of UCX over TCP: neither side copies it
// together.
inline constexpr int64_t kMostBytes = 60 << 10;

// What may be under way at once of all that a rank gets from another, and of all that it puts there; and after how much
// of the latter it is told how much has arrived. A link that carries more than this in the time of a message there and
// back is not filled by one pair of ranks.
inline constexpr int64_t kMostUnderWay = 192 << 10, kTellAfter = kMostBytes;
static_assert(kTellAfter + kMostBytes <= kMostUnderWay, "or the next put may wait for a word that is not due yet");

constexpr bool lies_within(int64_t offset, int64_t bytes, int64_t size) {
  return offset >= 0 && bytes >= 0 && bytes <= size && offset <= size - bytes;
}

constexpr bool is_mailbox(int64_t offset, const Layout& layout, int num_ranks) {
  const int64_t from_first = offset - layout.mailboxes, size = sizeof(Mailbox);
  return from_first >= 0 && from_first % size == 0 && from_first / size < int64_t{kNumKinds} * num_ranks;
}

// Whether a rank with segments like this one's may have sent the message, behind which so much data came. Answers are
// compared with what was asked by whoever has asked (ucx_peer.h).
constexpr bool can_be_meant(const Message& m, uint64_t data_bytes, const Layout& layout, int num_ranks) {
  switch (m.ask) {
    case Ask::kGet:
      return data_bytes == 0 && m.bytes <= kMostBytes && lies_within(m.offset, m.bytes, layout.bytes);
    case Ask::kPut:
      return uint64_t(m.bytes) == data_bytes && lies_within(m.offset, m.bytes, layout.bytes);
    case Ask::kPost:
      return data_bytes == sizeof(Header) && is_mailbox(m.offset, layout, num_ranks);
    case Ask::kGot:
      return uint64_t(m.bytes) == data_bytes;
    case Ask::kFlush:
    case Ask::kFlushed:
      return data_bytes == 0;
  }
  return false;
}

}  // namespace moe_rt
