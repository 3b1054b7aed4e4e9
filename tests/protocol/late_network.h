// A network between ranks that are threads. It completes requests as late, and in as unusual an order, as allowed.
//
// A request is executed only once a flush asks for it, in random order, a piece at a time whenever its rank drives. A
// word of eight bytes arrives whole, longer data byte by byte. A posted header arrives in several pieces, and its
// signal last. A thread drives now and then while no caller does.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../cuda/net/network.h"
#include "../../cuda/protocol/core/atomics.h"

namespace moe_rt {

class LateNetwork final : public Network {
 public:
  // `segments`[r] is rank r's segment, as the network addresses it.
  LateNetwork(const std::vector<uint64_t>& segments, unsigned seed) : peers_(segments.size()), random_(seed) {
    for (size_t r = 0; r < segments.size(); ++r) peers_[r].segment = reinterpret_cast<char*>(segments[r]);
  }
  ~LateNetwork() override {
    store_release(ends_, 1u);
    if (thread_.joinable()) thread_.join();
  }

  void get(int peer, int64_t offset, void* to, int64_t bytes) override {
    ask(peer, [=, from = peers_[peer].segment + offset] { std::memcpy(to, from, bytes); });
  }
  void put(int peer, int64_t offset, const void* from, int64_t bytes) override {
    char* const to = peers_[peer].segment + offset;
    if (bytes != sizeof(uint64_t) || offset % sizeof(uint64_t) != 0) {
      ask(peer, [=] { std::memcpy(to, from, bytes); });
    } else {
      ask(peer, [=] { store_release(*reinterpret_cast<uint64_t*>(to), *static_cast<const uint64_t*>(from)); });
    }
  }
  void put_last(int peer, int64_t offset, uint64_t word) override {
    ask(peer, [=, to = peers_[peer].segment + offset] { store_release(*reinterpret_cast<uint64_t*>(to), word); });
  }
  void post(int peer, int64_t mailbox, const Header& header) override {
    auto* const to = reinterpret_cast<Mailbox*>(peers_[peer].segment + mailbox);
    flush(peer);
    const std::lock_guard lock(mutex_);
    peers_[peer].posting.push_back([=, this] { post_from(peer, to, header, 0); });
  }
  void flush(int peer) override {
    const std::lock_guard lock(mutex_);
    Peer& p = peers_[peer];
    p.due.insert(p.due.end(), p.asked.begin(), p.asked.end());
    p.asked.clear();
  }
  bool flushed(int peer) const override {
    const std::lock_guard lock(mutex_);
    return peers_[peer].due.empty() && peers_[peer].posting.empty();
  }
  bool lost(int) const override { return false; }
  void drive() override {
    move();
    kept_->go_on();
  }
  void begin_driving() override { store_release(driven_, 1u); }
  void end_driving() override { store_release(driven_, 0u); }
  void wake() override {}
  void keep(std::shared_ptr<Background> background, const char*) override {
    kept_ = std::move(background);
    thread_ = std::thread([this] {
      for (; !load_acquire(ends_); std::this_thread::sleep_for(std::chrono::microseconds(100))) {
        if (!load_acquire(driven_)) drive();
      }
    });
  }
  void leave(const std::vector<uint64_t>&) override {}
  // Takes the steps that are possible now. Returns after how many ms the background wants to go on.
  int go_on() { return kept_->go_on(); }

 private:
  void move() {
    const std::lock_guard lock(mutex_);
    for (Peer& p : peers_) {
      for (unsigned n = random_() % 8; n > 0 && !p.due.empty(); --n) {
        const auto any = p.due.begin() + random_() % p.due.size();  // flushes do not wait for each other
        const auto work = std::move(*any);
        p.due.erase(any);
        work();  // may queue more work
      }
      if (p.due.empty()) std::swap(p.due, p.posting);
    }
  }
  struct Peer {
    char* segment;
    std::vector<std::function<void()>> asked, due;  // asked: since the last flush; due: before it
    std::vector<std::function<void()>> posting;     // posts, once nothing is due
  };
  // Write the header's bytes from here on, one at a time or, so that signals overtake puts, all together; then the
  // signal.
  void post_from(int peer, Mailbox* to, const Header& header, size_t byte) {
    if (byte == sizeof(Header)) return store_release(to->signal, header.seq);
    const size_t end = random_() % 2 ? byte + 1 : sizeof(Header);
    auto* const there = reinterpret_cast<char*>(&to->header[header.seq & 1]);
    std::memcpy(there + byte, reinterpret_cast<const char*>(&header) + byte, end - byte);
    peers_[peer].due.push_back([=, this] { post_from(peer, to, header, end); });
  }
  void ask(int peer, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    peers_[peer].asked.push_back(std::move(work));
  }
  std::vector<Peer> peers_;
  std::mt19937 random_;
  std::shared_ptr<Background> kept_;
  mutable std::mutex mutex_;
  uint32_t driven_ = 0, ends_ = 0;
  std::thread thread_;
};

}  // namespace moe_rt
