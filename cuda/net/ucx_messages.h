// Messages between CPU ranks over UCX: a head followed by data, and the checks that a message must pass.
//
// The receiver of a request does the work itself, and validates first: a peer can access only this rank's segment.
#pragma once

#include "../protocol/core/layout.h"
#include "../protocol/core/tuning.h"

namespace moe_rt {

enum class Ask : uint32_t {
  kGet = 1,  // send `bytes` of your segment
  kGot,      // reply with the bytes of get `number`
  kPut,      // write the data at `offset`
  kPutAll,   // write every SmallPut of the data
  kPost,     // announce the op whose header follows in the mailbox at `offset`
  kFlush,    // reply once `number` puts and posts of the sender in all are done
  kFlushed,  // `number` puts and posts are done; also sent unasked
};

struct Message {
  uint64_t secret = 0;  // secret that the receiver gave to its group: excludes messages for an earlier process
  uint32_t source = 0;  // rank
  Ask ask{};
  int64_t offset = 0, bytes = 0;  // place in the receiver's segment; bytes of the data that follows, or is requested
  uint64_t number = 0;
};
static_assert(sizeof(Message) == 40 && sizeof(Message) + sizeof(Header) < 128, "UCX takes it all as one short message");

// A put of four bytes, such as the gradient of a routing weight. A message has many: each costs as much as a row.
struct SmallPut {
  int64_t offset = 0;
  uint32_t value = 0, unused = 0;
};

constexpr bool lies_within(int64_t offset, int64_t bytes, int64_t size) {
  return offset >= 0 && bytes >= 0 && bytes <= size && offset <= size - bytes;
}

constexpr bool is_mailbox(int64_t offset, const Layout& layout) {
  return offset >= layout.mailboxes && offset < layout.members &&
         (offset - layout.mailboxes) % int64_t{sizeof(Mailbox)} == 0;
}

// True if a rank with a segment like this one's may have sent the message, followed by data_bytes bytes. Replies are
// compared with the request by its sender (ucx_peer.h).
constexpr bool can_be_meant(const Message& m, uint64_t data_bytes, const Layout& layout) {
  switch (m.ask) {
    case Ask::kGet:
      return data_bytes == 0 && m.bytes <= tuning::kMessageBytes && lies_within(m.offset, m.bytes, layout.bytes);
    case Ask::kPut:
      return uint64_t(m.bytes) == data_bytes && lies_within(m.offset, m.bytes, layout.bytes);
    case Ask::kPutAll:  // each place is checked before any is written
      return uint64_t(m.bytes) == data_bytes && m.bytes <= tuning::kMessageBytes && data_bytes % sizeof(SmallPut) == 0;
    case Ask::kPost:
      return data_bytes == sizeof(Header) && is_mailbox(m.offset, layout);
    case Ask::kGot:
      return uint64_t(m.bytes) == data_bytes;
    case Ask::kFlush:
    case Ask::kFlushed:
      return data_bytes == 0;
  }
  return false;
}

}  // namespace moe_rt
