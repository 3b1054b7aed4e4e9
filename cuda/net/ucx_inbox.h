// Handler of messages from peers over UCX: the only place where unmapped peers access this rank's segment.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "ucx_messages.h"
#include "ucx_peer.h"

namespace moe_rt {

class UcxInbox {
 public:
  // `peers` are the worker's, indexed by rank.
  UcxInbox(const Layout& layout, std::vector<UcxPeer>& peers) : layout_(layout), peers_(peers), early_(peers.size()) {
    std::random_device random;
    secret_ = uint64_t{random()} << 32 | random();
  }
  void open(char* segment) { segment_ = segment; }
  uint64_t secret() const { return secret_; }

  // Handles one message. Messages from outside the group are ignored. A rank that sends a malformed message is lost, as
  // if its process had ended. `is_here`: the data has arrived with the message.
  void take(const void* head, size_t head_bytes, const void* data, uint64_t bytes, bool is_here) {
    Message m;
    if (head_bytes != sizeof(m)) return;
    std::memcpy(&m, head, sizeof(m));
    if (m.secret != secret_ || m.source >= peers_.size() || peers_[m.source].lost()) return;
    if (!is_here || !can_be_meant(m, bytes, layout_) || !obey(m, data)) {
      peers_[m.source].lose("it sent a malformed message");
    }
  }
  // Answers the get of a peer that has just been connected.
  void connected(int peer) {
    if (early_[peer].ask == Ask::kGet) peers_[peer].answer(early_[peer], segment_);
  }

 private:
  bool obey(const Message& m, const void* data) {
    UcxPeer& p = peers_[m.source];
    switch (m.ask) {
      case Ask::kGet:
        if (p.is_connected()) {
          p.answer(m, segment_);
        } else {
          early_[m.source] = m;
        }
        return true;
      case Ask::kPut:
        write(m, data);
        p.count_taken(m.bytes);
        return true;
      case Ask::kPutAll:
        if (!write_all(static_cast<const char*>(data), m.bytes)) return false;
        p.count_taken(m.bytes);
        return true;
      case Ask::kPost:
        announce(m, data);
        p.count_taken(m.bytes);
        return true;
      case Ask::kFlush:
        p.answer_flush(m);
        return true;
      case Ask::kGot:
        return p.has_got(m, data);
      case Ask::kFlushed:
        return p.has_flushed(m);
    }
    return false;
  }
  // SYNC POINT word over a network, writer side. `closed` pairs with closed_before, a poison word with Engine::fail.
  // Without the release a reader could see the word, but not the announcement or last words before it. Of two poison
  // words the first stays, as with mapped ranks: it is the cause, not a consequence.
  void write(const Message& m, const void* data) {
    char* const to = segment_ + m.offset;
    uint64_t word;
    if (m.bytes != sizeof(word) || m.offset % int64_t{sizeof(word)} != 0) {
      if (m.bytes > 0) std::memcpy(to, data, m.bytes);
      return;
    }
    std::memcpy(&word, data, sizeof(word));
    uint64_t& target = *reinterpret_cast<uint64_t*>(to);
    if (m.offset == layout_.poison) {
      replace_acq_rel(target, uint64_t{0}, word);
    } else {
      store_release(target, word);
    }
  }
  // False, and nothing is written, if a place is not in the segment.
  bool write_all(const char* data, int64_t bytes) {
    const auto each = [&](auto&& act) {
      for (int64_t i = 0; i < bytes; i += sizeof(SmallPut)) {
        SmallPut put;
        std::memcpy(&put, data + i, sizeof(put));
        if (!act(put)) return false;
      }
      return true;
    };
    return each([&](const SmallPut& put) { return lies_within(put.offset, sizeof(put.value), layout_.bytes); }) &&
           each([&](const SmallPut& put) {
             std::memcpy(segment_ + put.offset, &put.value, sizeof(put.value));
             return true;
           });
  }
  // SYNC POINT signal over a network, writer side. Pairs with wait_signal, like `post` of a mapped peer. The rows of
  // the op were written before, under the worker's lock: the peer has flushed them, or it would not announce.
  void announce(const Message& m, const void* data) {
    Header header;
    std::memcpy(&header, data, sizeof(header));
    post(*reinterpret_cast<Mailbox*>(segment_ + m.offset), header);
  }

  const Layout& layout_;
  std::vector<UcxPeer>& peers_;
  std::vector<Message> early_;  // [R] get of a peer that was not connected yet
  char* segment_ = nullptr;
  uint64_t secret_;
};

}  // namespace moe_rt
