// Network over mapped memory: ranks of one host that treat each other as ranks of several nodes.
//
// It allows two levels to be tried, and tested, on a single host. Requests complete immediately here, where a network
// of hosts completes them late; tests/protocol has a network that completes each as late as allowed.
#pragma once

#include <cstring>
#include <vector>

#include "../protocol/core/layout.h"
#include "network.h"

namespace moe_rt {

class MappedNetwork : public Network {
 public:
  // [R] address of each rank's segment; `rank` is this one.
  MappedNetwork(const std::vector<uint64_t>& segments, const Shape& shape, int rank)
      : mailboxes_(Layout::make(shape).mailboxes), num_kinds_(shape.depth * kNumKinds), rank_(rank) {
    for (const uint64_t s : segments) segments_.push_back(reinterpret_cast<char*>(s));
  }

  void get(int peer, int64_t offset, void* to, int64_t bytes) override {
    std::memcpy(to, segments_[peer] + offset, bytes);
  }
  void put(int peer, int64_t offset, const void* from, int64_t bytes) override {
    std::memcpy(segments_[peer] + offset, from, bytes);
  }
  void post(int peer, int64_t mailbox, const Header& header) override {
    moe_rt::post(*reinterpret_cast<Mailbox*>(segments_[peer] + mailbox), header);
  }
  // Puts a poison word: the first one stays.
  void put_last(int peer, int64_t offset, uint64_t word) override {
    replace_acq_rel(*reinterpret_cast<uint64_t*>(segments_[peer] + offset), uint64_t{0}, word);
  }
  void flush(int) override {}
  bool flushed(int) const override { return true; }
  bool lost(int) const override { return false; }
  void drive() override {}
  void begin_driving() override {}
  void end_driving() override {}
  void wake() override {}
  void keep(std::shared_ptr<Background>, const char*) override {}
  void leave(const std::vector<uint64_t>&) override {
    const auto num_ranks = static_cast<int>(segments_.size());
    for (char* const segment : segments_) {
      auto* const mailboxes = reinterpret_cast<Mailbox*>(segment + mailboxes_);
      for (int kind = 0; kind < num_kinds_; ++kind) post_closed(mailboxes[kind * num_ranks + rank_]);
    }
  }

 private:
  std::vector<char*> segments_;
  int64_t mailboxes_;
  int num_kinds_, rank_;  // kinds of all channels
};

}  // namespace moe_rt
