// Network of CPU ranks on several hosts over UCX: one worker, an endpoint for each peer, and a thread that serves them.
//
// Unmapped peers read and write this rank's segment by messages only, which are handled when this rank progresses its
// worker (ucx_inbox.h). A waiting op does so itself; at any other time the thread does, which sleeps in poll() until a
// message arrives. The thread and the segment outlive the buffer for as long as a peer may still read there.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "../protocol/core/layout.h"
#include "network.h"

namespace moe_rt {

class UcxWorker;

class UcxNetwork final : public Network {
 public:
  // `library` is as in ucx::Api::open; `descriptor` is the file of this rank's segment and stays the caller's. Throws
  // std::runtime_error if UCX refuses, std::system_error if the system does.
  UcxNetwork(const char* library, int descriptor, const Shape& shape, int rank);
  ~UcxNetwork() override;
  UcxNetwork(const UcxNetwork&) = delete;
  UcxNetwork& operator=(const UcxNetwork&) = delete;

  // Values that peers need to reach this rank: its address, and a secret without which it accepts no message.
  const std::string& address() const;
  uint64_t secret() const;
  // Starts to connect to a peer by its address and secret; it is reached once `flushed`, and not `lost`. Throws
  // std::runtime_error if they are invalid.
  void connect(int peer, const std::string& address, uint64_t secret);
  // Reason why the peer is lost, in UCX's words if it has any; empty if it is not lost.
  std::string problem(int peer) const;

  void get(int peer, int64_t offset, void* to, int64_t bytes) override;
  void put(int peer, int64_t offset, const void* from, int64_t bytes) override;
  void put_last(int peer, int64_t offset, uint64_t word) override;
  void post(int peer, int64_t mailbox, const Header& header) override;
  void flush(int peer) override;
  bool flushed(int peer) const override;
  bool lost(int peer) const override;
  void drive() override;
  void begin_driving() override;
  void end_driving() override;
  void wake() override;
  void keep(std::shared_ptr<Background> memory, const char* segment) override;
  void leave(const std::vector<uint64_t>& last_seqs) override;

  // Version of a library, "1.22.0". Throws like Api::open.
  static std::string version(const char* library);
  // Returns once no network that this process has left serves a peer any more, or after `seconds`, and then ends the
  // remaining ones. For the end of the program.
  static void await_all(double seconds);

 private:
  std::shared_ptr<UcxWorker> worker_;  // shared with the thread
  pid_t pid_;                          // a forked child is not this rank
};

}  // namespace moe_rt
