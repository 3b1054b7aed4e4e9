// UcxNetwork: the engine's requests as calls of UCX, and the end of the program.
#include "ucx_network.h"

#include <unistd.h>

#include <algorithm>

#include "ucx_worker.h"

namespace moe_rt {

UcxNetwork::UcxNetwork(const char* library, int descriptor, const Shape& shape, int rank)
    : worker_(std::make_shared<UcxWorker>(library, descriptor, shape, rank)), pid_(getpid()) {
  worker_->start(worker_);
}

// A network that was left continues in its thread, which ends by itself. A forked child has no such thread, and its
// locks may stay locked.
UcxNetwork::~UcxNetwork() {
  if (pid_ != getpid()) {
    new std::shared_ptr<UcxWorker>(std::move(worker_));
  } else if (!worker_->leaving()) {
    worker_->stop();
  }
}

const std::string& UcxNetwork::address() const { return worker_->address(); }
uint64_t UcxNetwork::secret() const { return worker_->secret(); }
void UcxNetwork::connect(int peer, const std::string& address, uint64_t secret) {
  worker_->connect(peer, address, secret);
}
std::string UcxNetwork::problem(int peer) const { return worker_->problem(peer); }

void UcxNetwork::get(int peer, int64_t offset, void* to, int64_t bytes) {
  worker_->ask(peer, [=, this](UcxPeer& p) { p.get(offset, worker_->lasting(to), bytes); });
}
void UcxNetwork::put(int peer, int64_t offset, const void* from, int64_t bytes) {
  worker_->ask(peer, [=, this](UcxPeer& p) { p.put(offset, worker_->lasting(from), bytes); });
}
void UcxNetwork::put_last(int peer, int64_t offset, uint64_t word) {
  worker_->ask(peer, [=](UcxPeer& p) { p.put_last(offset, word); });
}
void UcxNetwork::post(int peer, int64_t mailbox, const Header& header) {
  worker_->ask(peer, [=](UcxPeer& p) { p.post(mailbox, header); });
}
void UcxNetwork::flush(int peer) {
  worker_->ask(peer, [](UcxPeer& p) { p.flush(); });
}
bool UcxNetwork::flushed(int peer) const { return worker_->peer(peer).flushed(); }
bool UcxNetwork::lost(int peer) const { return worker_->peer(peer).lost(); }
void UcxNetwork::drive() { worker_->drive(); }
void UcxNetwork::begin_driving() { worker_->set_driven(true); }
void UcxNetwork::end_driving() { worker_->set_driven(false); }
void UcxNetwork::wake() { worker_->wake(); }
void UcxNetwork::keep(std::shared_ptr<Background> background, const char* segment) {
  worker_->keep(std::move(background), segment);
}
void UcxNetwork::leave(const std::vector<uint64_t>& last_seqs) { worker_->leave(last_seqs); }

std::string UcxNetwork::version(const char* library) {
  unsigned parts[3];
  ucx::Api::open(library).get_version(&parts[0], &parts[1], &parts[2]);
  return std::to_string(parts[0]) + "." + std::to_string(parts[1]) + "." + std::to_string(parts[2]);
}

void UcxNetwork::await_all(double seconds) { UcxWorker::await_all(std::min(seconds, 1e9)); }

}  // namespace moe_rt
