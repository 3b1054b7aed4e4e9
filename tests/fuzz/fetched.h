// Counts the bytes of a peer's lists and rows that a launch and a CPU rank request over a network.
#pragma once

#include <vector>

#include "../../cuda/gpu/rdma.h"
#include "../../cuda/net/remote_network.h"

namespace moe_rt {

// Records what a launch fetches of a list on an unmapped peer; fetched() returns the count for [first, end) of `size`
// entries.
struct Fetched {
  struct Net {
    int64_t* bytes;
    void get(const Solo&, void*, const char*, int64_t n, int) const { *bytes += n; }
  };
  struct {
    Net net;
  } links;
  Solo block() const { return {}; }
};

inline int64_t fetched(int64_t first, int64_t end, int64_t size) {
  int64_t bytes = 0;
  const Fetched machine{{{&bytes}}};
  static Pull list[16];
  fetch_entries(machine, list + 4, nullptr, first, end, size, 0);
  return bytes / int64_t{sizeof(Pull)};
}

// Records what a CPU rank requests of such a list; asked() returns the count.
struct Asked {
  int64_t bytes = 0;
  void get(int, int64_t, void*, int64_t n) { bytes += n; }
};

inline int64_t asked(int64_t first, int64_t end, int64_t size) {
  Asked network;
  static Pull list[16];
  get_entries(network, 0, 0, list + 4, first, end, size);
  return network.bytes / int64_t{sizeof(Pull)};
}

// True if the row of a token is requested.
inline bool asks_for(int32_t token, int32_t num_tokens) {
  World w{};
  w.shape = {3, 5, num_tokens, 1, 2, 4, 4}, w.layout = Layout::make(w.shape);
  constexpr int64_t kRowBytes = 3;
  Asked network;
  std::vector<char> rows(num_tokens * w.shape.row_bytes());
  {
    RowGetter getter(w, network, 0, kRowBytes, [&](int) { return rows.data(); });
    getter.get(0, token);
  }
  return network.bytes == kRowBytes;
}

}  // namespace moe_rt
