// A network of CPU ranks on several hosts over UCX: one worker, an endpoint for each peer, and a thread that serves them.
//
// Far peers read and write this rank's segment by messages alone, which it takes only when it progresses its worker
// (ucx_inbox.h). While an op waits, it does so itself; at any other time the thread does, which sleeps in poll() as long
// as nothing comes. It stays after the buffer is closed, with the segment, for as long as a peer may still read there.
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
  // `library` as ucx::Api::open takes it; `descriptor` is of the file of this rank's segment, and stays the caller's.
  // Throws std::runtime_error where UCX refuses, std::system_error where the system does.
  UcxNetwork(const char* library, int descriptor, const Shape& shape, int rank);
  ~UcxNetwork() override;
  UcxNetwork(const UcxNetwork&) = delete;
  UcxNetwork& operator=(const UcxNetwork&) = delete;

  // What peers need to reach this rank: where it is, and a word without which it takes no message.
  const std::string& address() const;
  uint64_t secret() const;
  // Starts to connect to a peer, of which it has said these two; it is reached once `flushed`, and not `lost`. Throws
  // std::runtime_error where what it has said is no such thing.
  void connect(int peer, const std::string& address, uint64_t secret);
  // Why the peer is lost, in UCX's words where it knows; empty where it is not.
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
  void keep(std::shared_ptr<const void> memory, const char* segment) override;
  void leave(const uint64_t (&last_seq)[2]) override;

  // The version of a library, "1.22.0". Throws as Api::open.
  static std::string version(const char* library);
  // Returns once no network that this process has left serves a peer any more, or so much later; those that still did
  // have ended then, too. For the end of the program.
  static void await_all(double seconds);

 private:
  std::shared_ptr<UcxWorker> worker_;  // which the thread shares
  pid_t pid_;                          // a forked child is not this rank
};

}  // namespace moe_rt
