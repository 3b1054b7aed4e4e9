// Compares the checks of messages over UCX with definitions, for values at, below and above every bound, and of UCX's
// answers. Exits with 1 and a message on the first error.
#include <string>
#include <vector>

#include "../../cuda/net/ucx_api.h"
#include "../../cuda/net/ucx_messages.h"
#include "../protocol/expect.h"

using namespace moe_rt;

namespace {

// True if the bytes [offset, offset + bytes) are in [0, size), in numbers that do not overflow.
bool inside(int64_t offset, int64_t bytes, int64_t size) {
  return bytes >= 0 && offset >= 0 && __int128{offset} + bytes <= size;
}

void check_messages(const Layout& layout) {
  const int64_t end = layout.bytes, most = tuning::kMessageBytes, small = sizeof(SmallPut), header = sizeof(Header);
  const std::vector<int64_t> offsets = {INT64_MIN, -1,       0,       1,   end - most, end - most + 1,
                                        end - 16,  end - 15, end - 1, end, end + 1,    INT64_MAX};
  const std::vector<int64_t> sizes = {INT64_MIN, -16,       -1,           0,          1,       small - 1,
                                      small,     small + 1, 2 * small,    header - 1, header,  most - 1,
                                      most,      most + 1,  most + small, end,        end + 1, INT64_MAX};
  for (const int64_t offset : offsets) {
    for (const int64_t bytes : sizes) {
      expect(lies_within(offset, bytes, end) == inside(offset, bytes, end), "what lies within a segment");
      for (const int64_t data : sizes) {
        const auto meant = [&](Ask ask) {
          return can_be_meant({.ask = ask, .offset = offset, .bytes = bytes}, uint64_t(data), layout);
        };
        const bool same = bytes == data;
        expect(meant(Ask::kGet) == (data == 0 && bytes <= most && inside(offset, bytes, end)), "a get");
        expect(meant(Ask::kPut) == (same && inside(offset, bytes, end)), "a put");
        expect(meant(Ask::kPutAll) == (same && bytes <= most && data % small == 0 && uint64_t(data) % small == 0),
               "small puts");
        expect(meant(Ask::kGot) == same, "the answer to a get");
        expect(meant(Ask::kFlush) == (data == 0) && meant(Ask::kFlushed) == (data == 0), "a flush");
        expect(meant(Ask::kPost) == (data == header && is_mailbox(offset, layout)), "a post");
        expect(!meant(Ask(0)) && !meant(Ask(8)), "what no rank asks");
      }
    }
  }
  const int64_t box = sizeof(Mailbox);
  for (int64_t offset = layout.mailboxes - 3 * box; offset < layout.members + 3 * box; offset += 8) {
    bool expected = false;
    for (int64_t at = layout.mailboxes; at < layout.members; at += box) expected |= offset == at;
    expect(is_mailbox(offset, layout) == expected, "the place of a mailbox");
  }
}

// UCX answers nullptr, a negative status, or a request.
void check_answers() {
  const auto answer = [](intptr_t word) { return reinterpret_cast<const void*>(word); };
  static const char request = 0;
  expect(!ucx::is_request(answer(0)) && ucx::status_of(answer(0)) == ucx::kOk, "what is complete is no request");
  for (intptr_t error = -100; error < 0; ++error) {
    expect(!ucx::is_request(answer(error)) && ucx::status_of(answer(error)) == error, "an error is no request");
  }
  for (const void* const some :
       {static_cast<const void*>(&request), answer(1), answer(16), answer(-101), answer(-128)}) {
    expect(ucx::is_request(some) && ucx::status_of(some) == ucx::kInProgress, "an address is a request");
  }
}

}  // namespace

int main() {
  Shape shape{.num_ranks = 3,
              .num_experts = 4,
              .num_max_tokens = 64,
              .hidden = 4096,
              .num_topk = 2,
              .elem_bytes = 4,
              .acc_bytes = 4};
  check_messages(Layout::make(shape));
  shape.depth = 2;
  check_messages(Layout::make(shape));
  check_answers();
  return 0;
}
