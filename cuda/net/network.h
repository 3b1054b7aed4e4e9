// Network interface of the CPU engine for peers whose segments are not mapped: asynchronous gets and puts.
//
// remote_peers.h and proxy.h use it for memory and protocol; ucx_network.h implements it over UCX, mapped_network.h
// over mapped memory, and tests/protocol has another. Offsets are in the peer's segment.
#pragma once

#include <climits>
#include <cstdint>
#include <memory>
#include <vector>

#include "../protocol/core/signal.h"

namespace moe_rt {

// Work that goes on while the network is driven, such as asking for rows once lists are here. Any thread may call it.
class Background {
 public:
  virtual ~Background() = default;
  // Returns after how many ms it wants to go on at the latest, if no event of the network comes first.
  virtual int go_on() = 0;
  static constexpr int kNever = INT_MAX;
};

// Any thread may call it. Memory passed to `get` and `put` must stay unchanged until a flush of that peer has ended. No
// call waits: callers poll for completion between calls of `drive` (HostIdle in waiting.h).
class Network {
 public:
  virtual ~Network() = default;

  virtual void get(int peer, int64_t offset, void* to, int64_t bytes) = 0;
  virtual void put(int peer, int64_t offset, const void* from, int64_t bytes) = 0;
  // Puts a word that is stored here; a second word for the same peer is ignored.
  virtual void put_last(int peer, int64_t offset, uint64_t word) = 0;

  // Announces an op in the peer's mailbox at this offset, like `post` in protocol/core/signal.h for a mapped peer, as
  // soon as all earlier puts are in the peer's memory. The header is copied.
  virtual void post(int peer, int64_t mailbox, const Header& header) = 0;

  // Starts to wait for the completion of all earlier requests to the peer: then puts and posts are in its memory, and
  // gets are here. Only flushes and posts order requests.
  virtual void flush(int peer) = 0;
  // True once all flushes of the peer have ended, which they also do if it is lost.
  virtual bool flushed(int peer) const = 0;
  // True if the peer's process has ended, or the link to it is down, as far as the network reports. Permanent.
  virtual bool lost(int peer) const = 0;

  // Makes progress on pending requests, for this rank and for peers that read its segment; then `background` goes on.
  virtual void drive() = 0;
  // The caller drives between the two calls; at any other time the network does so by itself, in a thread that sleeps
  // in between.
  virtual void begin_driving() = 0;
  virtual void end_driving() = 0;
  // The background has something new to do: the thread goes on with it, although it sleeps.
  virtual void wake() = 0;

  // Memory that `get` writes and `put` reads is part of `background`, or of this rank's segment, which the caller has
  // mapped at `segment`. The network keeps either alive while requests may be pending, whatever the caller unmaps.
  virtual void keep(std::shared_ptr<Background> background, const char* segment) = 0;
  // This rank makes no more requests. Peers that have not received `last_seqs`, a sequence number for each channel and
  // kind, from every rank may still read its segment.
  virtual void leave(const std::vector<uint64_t>& last_seqs) = 0;
};

}  // namespace moe_rt
