// What the CPU engine asks of a network where a peer's segment is not mapped: gets and puts that somebody drives.
//
// The engine's other half of it, memory and protocol, is far_peers.h; UCX is behind it in ucx_network.h, a test's own
// network in tests/protocol. Offsets are those of the peer's segment.
#pragma once

#include <cstdint>
#include <memory>

#include "../protocol/core/signal.h"

namespace moe_rt {

// Any thread may call it. What is given to `get` and `put` must stay as it is until a flush of that peer has ended.
// Nothing here waits: whoever needs an end looks for it between calls of `drive` (HostIdle in waiting.h).
class Network {
 public:
  virtual ~Network() = default;

  virtual void get(int peer, int64_t offset, void* to, int64_t bytes) = 0;
  virtual void put(int peer, int64_t offset, const void* from, int64_t bytes) = 0;
  // The same of a word that is kept here; another one for the same peer is left out.
  virtual void put_last(int peer, int64_t offset, uint64_t word) = 0;

  // Announces an op in the peer's mailbox at this offset, as `post` in protocol/core/signal.h does in one that is mapped.
  // What was put for it must have been flushed before. The header is copied.
  virtual void post(int peer, int64_t mailbox, const Header& header) = 0;

  // Starts to await the end of all that was asked of the peer so far: what was put or posted is in its memory then,
  // and what was got is here. Of no order but that of flushes may anything be concluded.
  virtual void flush(int peer) = 0;
  // True once all flushes of the peer have ended, which they also do where it is lost.
  virtual bool flushed(int peer) const = 0;
  // Its process has ended, or the link to it is down, as far as the network tells; for good.
  virtual bool lost(int peer) const = 0;

  // Moves on what is under way, for this rank and for peers that read its segment.
  virtual void drive() = 0;
  // Between the two the caller drives; at any other time the network does so by itself, and sleeps in between.
  virtual void begin_driving() = 0;
  virtual void end_driving() = 0;

  // What `get` writes to and `put` reads from is a part of `memory`, or of this rank's segment, which the caller has at
  // `segment`: either lasts here for as long as something may be under way, whatever the caller unmaps.
  virtual void keep(std::shared_ptr<const void> memory, const char* segment) = 0;
  // This rank will ask for nothing more. Peers that have not heard of `last_seq` everywhere may still read its segment.
  virtual void leave(const uint64_t (&last_seq)[2]) = 0;
};

}  // namespace moe_rt
