// One peer of a UCX worker: its endpoints, what was asked of it and has not ended, and what it has sent. All under the
// worker's lock.
//
// Data has a connection of its own. On one with it, what this rank asks for would wait behind all that it has to answer,
// and two ranks that get from each other would take turns instead of using both directions of their link.
// Words that waits look at without the lock are of atomics.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "../protocol/core/atomics.h"
#include "ucx_api.h"
#include "ucx_messages.h"

namespace moe_rt {

class UcxPeer {
 public:
  // `for_data` and `for_the_rest` are endpoints; `self` is this rank, and `secret` what the peer has told.
  void connect(const ucx::Api& api, ucx::Handle for_data, ucx::Handle for_the_rest, int self, uint64_t secret) {
    api_ = &api, for_data_ = for_data, for_the_rest_ = for_the_rest;
    self_ = static_cast<uint32_t>(self), secret_ = secret;
  }
  bool is_connected() const { return for_data_ != nullptr; }
  bool can_be_asked() const { return is_connected() && !load_relaxed(lost_); }

  // SYNC POINT flush, reader side: pairs with look_for_end. Without it a lane could read a row as it was before.
  bool flushed() const { return load_acquire(flushing_) == 0; }
  bool lost() const { return load_acquire(lost_) != 0; }
  const char* words_of(ucx::Status status) const { return api_->status_string(status); }
  const char* problem() const { return load_relaxed(lost_) ? problem_ : ""; }

  // What a network is asked (network.h); of a peer that can be asked.
  void get(int64_t offset, void* to, int64_t bytes) {
    int64_t i = 0;
    do {  // also of nothing: the answer says that the peer is there
      const int64_t part = std::min(kMostBytes, bytes - i);
      getting_.emplace_hint(getting_.end(), ++gets_, Getting{static_cast<char*>(to) + i, part});
      send({.ask = Ask::kGet, .offset = offset + i, .bytes = part, .number = gets_});
      i += kMostBytes;
    } while (i < bytes && can_be_asked());
  }
  void put(int64_t offset, const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes && can_be_asked(); i += kMostBytes) {
      const int64_t part = std::min(kMostBytes, bytes - i);
      ++puts_;
      send({.ask = Ask::kPut, .offset = offset + i, .bytes = part}, static_cast<const char*>(from) + i);
    }
  }
  void put_last(int64_t offset, uint64_t word) {
    if (last_ != 0) return;
    last_ = word;
    put(offset, &last_, sizeof(last_));
  }
  void post(int64_t mailbox, const Header& header) {
    ++puts_;
    send({.ask = Ask::kPost, .offset = mailbox, .bytes = sizeof(Header)}, nullptr, &header);
  }
  void flush() {
    gets_to_end_ = gets_, puts_to_end_ = puts_;
    store_relaxed(flushing_, 1u);
    if (asked_of_ != puts_) send({.ask = Ask::kFlush, .number = asked_of_ = puts_});
    look_for_end();
  }

  // What it has sent, and may have meant. False where that does not go with what was asked of it.
  bool has_got(const Message& m, const void* data) {
    const auto found = getting_.find(m.number);
    if (found == getting_.end() || found->second.bytes != m.bytes) return false;
    if (m.bytes > 0) std::memcpy(found->second.to, data, m.bytes);
    getting_.erase(found);
    look_for_end();
    return true;
  }
  bool has_flushed(const Message& m) {
    if (m.number > puts_) return false;
    puts_ended_ = std::max(puts_ended_, m.number);
    look_for_end();
    return true;
  }
  // A get, with what it asks for. Who asks before this rank knows where it is has to wait for its answer.
  void answer(const Message& m, const char* segment) {
    send({.ask = Ask::kGot, .offset = m.offset, .bytes = m.bytes, .number = m.number}, segment + m.offset);
  }
  // A flush; and that a put or a post of its was taken in. In whichever order they come, an answer says how many were.
  void answer_flush(const Message& m) {
    flush_of_ = std::max(flush_of_, m.number);
    if (m.number <= taken_) send({.ask = Ask::kFlushed, .number = taken_});
  }
  void count_taken() {
    if (++taken_ <= flush_of_) send({.ask = Ask::kFlushed, .number = taken_});
  }

  // Nothing more is asked of it, and nothing that it sends is looked at: what was under way has ended.
  void lose(const char* problem) {
    if (load_relaxed(lost_)) return;
    problem_ = problem;
    getting_.clear();
    store_release(lost_, 1u);
    store_release(flushing_, 0u);
  }
  // Whatever is under way is cancelled. What is to be progressed until it has ended goes to `closing`.
  void close(std::vector<void*>& closing) {
    if (!is_connected()) return;
    lose("closed");
    ucx::RequestParams given{};
    given.mask = given.kFlags, given.flags = given.kForceClose;
    for (ucx::Handle* const endpoint : {&for_data_, &for_the_rest_}) {
      void* const answer = api_->ep_close_nbx(std::exchange(*endpoint, nullptr), &given);
      if (ucx::is_request(answer)) closing.push_back(answer);
    }
  }

 private:
  struct Getting {
    char* to;
    int64_t bytes;
  };
  // A message that UCX may still read.
  struct Sending {
    UcxPeer* peer;
    Message head;
    Header header;  // of an op, which is the data then
  };

  void send(Message head, const void* data = nullptr, const Header* header = nullptr) {
    if (!can_be_asked()) return;
    head.secret = secret_, head.source = self_;
    auto* const sending = new Sending{this, head, header ? *header : Header{}};
    const int64_t bytes = data || header ? head.bytes : 0;
    ucx::RequestParams given{};
    given.mask = given.kCallback | given.kUserData | given.kFlags;
    given.flags = given.kEager;  // UCX asks for data that it sends on request with messages of its own
    given.on_end = end;
    given.user_data = sending;
    const ucx::Handle endpoint = carries_data(head.ask) ? for_data_ : for_the_rest_;
    const void* const answer = api_->am_send_nbx(endpoint, ucx::kMessageId, &sending->head, sizeof(Message),
                                                 header ? &sending->header : data, bytes, &given);
    if (!ucx::is_request(answer)) sent(sending, ucx::status_of(answer));
  }
  static void end(void* request, ucx::Status status, void* sending) {
    auto* const s = static_cast<Sending*>(sending);
    s->peer->api_->request_free(request);
    sent(s, status);
  }
  static void sent(Sending* sending, ucx::Status status) {
    if (status != ucx::kOk) sending->peer->lose(sending->peer->words_of(status));
    delete sending;
  }

  // SYNC POINT flush, writer side: pairs with flushed. Release: what was got comes before the word.
  void look_for_end() {
    const bool got = getting_.empty() || getting_.begin()->first > gets_to_end_;
    if (got && puts_ended_ >= puts_to_end_) store_release(flushing_, 0u);
  }

  const ucx::Api* api_ = nullptr;
  ucx::Handle for_data_ = nullptr, for_the_rest_ = nullptr;
  uint32_t self_ = 0, flushing_ = 0, lost_ = 0;
  uint64_t secret_ = 0, last_ = 0;
  const char* problem_ = "";
  std::map<uint64_t, Getting> getting_;         // by number
  uint64_t gets_ = 0, puts_ = 0;                // asked so far, posts among the latter
  uint64_t gets_to_end_ = 0, puts_to_end_ = 0;  // before the last flush ends
  uint64_t puts_ended_ = 0, asked_of_ = 0;      // as the peer says; as it was asked to say
  uint64_t taken_ = 0, flush_of_ = 0;           // of the peer's puts, those that are done, and that it flushes
};

}  // namespace moe_rt
