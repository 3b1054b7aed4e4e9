// Access of gather and push roles to a peer's segment: through its mapped address here, through device gets and puts in
// gpu/rdma.h.
#pragma once

#include "layout.h"

namespace moe_rt {

// Link of ranks whose segments are all mapped: rows are read and written in place, so `deliver` and `flush` do nothing.
struct MappedLink {
  // Address from which the row at `offset` of the peer's segment can be read; the last argument is its size in bytes.
  MOE_RT_FN const char* source_row(const World& w, int peer, int64_t offset, int64_t) const {
    return w.at<const char>(peer, offset);
  }
  // Address to write the row for `offset` of the peer's segment to; call `deliver` after writing it.
  MOE_RT_FN char* target_row(const World& w, int peer, int64_t offset) const { return w.at<char>(peer, offset); }
  MOE_RT_FN void deliver(const World&, int, int64_t, int64_t) const {}
  template <class T>
  MOE_RT_FN void put(const World& w, int peer, int64_t offset, T value) const {
    *w.at<T>(peer, offset) = value;
  }
  // Waits until everything that this lane has put has arrived; must precede the op's announcement.
  MOE_RT_FN void flush() const {}
  MOE_RT_FN void announce(const World& w, int peer, Kind kind, const Header& header) const {
    post(w.mailbox(peer, kind, w.rank), header);
  }
  // The first writer of a poison word wins: it names the cause.
  MOE_RT_FN void poison(const World& w, int peer, uint64_t word) const {
    replace_acq_rel(w.poison(peer), uint64_t{0}, word);
  }
  MOE_RT_FN void close(const World& w, int peer) const {
    post_closed(w.mailbox(peer, Kind::kDispatch, w.rank));
    post_closed(w.mailbox(peer, Kind::kCombine, w.rank));
  }
};

}  // namespace moe_rt
