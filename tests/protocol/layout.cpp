// Prints a segment's layout for every shape on standard input: offsets, size, and the last row of each kind.
#include "../../cuda/protocol/core/layout.h"

#include <cinttypes>
#include <cstdio>

using namespace moe_rt;

int main() {
  Shape s;
  while (std::scanf("%" SCNd32 "%" SCNd32 "%" SCNd32 "%" SCNd32 "%" SCNd32 "%" SCNd32 "%" SCNd32, &s.num_ranks,
                    &s.num_experts, &s.num_max_tokens, &s.hidden, &s.num_topk, &s.elem_bytes, &s.acc_bytes) == 7) {
    World w{};
    w.shape = s, w.layout = Layout::make(s);
    const auto print = [](int64_t offset) { std::printf("%" PRId64 " ", offset); };
    print(w.layout.poison), print(w.layout.mailboxes), print(w.layout.members), print(w.layout.op_records),
        print(w.layout.last_words);
    for (const Layout::Window& o : w.layout.window) {
      for (const int64_t at :
           {o.counts, o.pull_offs, o.copy_offs, o.pulls, o.copies, o.weights, o.tokens, o.partials, o.scalars}) {
        print(at);
      }
    }
    print(w.layout.bytes);
    const int64_t last = s.num_max_tokens - 1;
    print(w.token_row(1, last)), print(w.partial_row(1, last, s.num_slots() - 1)),
        print(w.scalar(1, last, s.num_topk - 1));
    std::printf("\n");
  }
  return 0;
}
