// One peer of a UCX worker: its endpoint, pending requests to it, and its messages. The worker's lock protects all of
// it.
//
// The bytes of rows in flight are bounded in either direction. Without the bound rows would fill every queue between
// the two ranks, and a rank's requests would wait for all its replies: ranks that get from each other would take turns
// instead of using both directions of their link. Words that waits read without the lock are accessed through
// atomics.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "../protocol/core/atomics.h"
#include "ucx_api.h"
#include "ucx_messages.h"

namespace moe_rt {

class UcxPeer {
 public:
  // `self` is this rank; `secret` was given by the peer.
  void connect(const ucx::Api& api, ucx::Handle endpoint, int self, uint64_t secret) {
    api_ = &api, endpoint_ = endpoint, self_ = static_cast<uint32_t>(self), secret_ = secret;
  }
  bool is_connected() const { return endpoint_ != nullptr; }
  bool can_be_asked() const { return endpoint_ && !load_relaxed(lost_); }

  // SYNC POINT flush, reader side. Pairs with look_for_end. Without it a lane could read a row as it was before.
  bool flushed() const { return load_acquire(flushing_) == 0; }
  bool lost() const { return load_acquire(lost_) != 0; }
  const char* words_of(ucx::Status status) const { return api_->status_string(status); }
  const char* problem() const { return load_relaxed(lost_) ? problem_ : ""; }

  // Requests of a network (network.h), to a peer that can be asked.
  void get(int64_t offset, void* to, int64_t bytes) {
    int64_t i = 0;
    do {  // also for 0 bytes: the reply shows that the peer is alive
      const int64_t part = std::min(tuning::kMessageBytes, bytes - i);
      getting_.emplace_hint(getting_.end(), ++gets_, Getting{offset + i, static_cast<char*>(to) + i, part});
      i += tuning::kMessageBytes;
    } while (i < bytes);
    go_on();
  }
  void put(int64_t offset, const void* from, int64_t bytes) {
    if (bytes == sizeof(SmallPut::value)) return put_small(offset, from);
    if (extends_last(offset, from, bytes)) return;
    for (int64_t i = 0; i < bytes; i += tuning::kMessageBytes) {
      ++puts_;
      const int64_t part = std::min(tuning::kMessageBytes, bytes - i);
      putting_.push_back({offset + i, static_cast<const char*>(from) + i, part, {}});
    }
    go_on();
  }
  // Does not wait for puts that are not sent yet, and drops posts: its word ends the group.
  void put_last(int64_t offset, uint64_t word) {
    if (last_ != 0) return;
    puts_ -= posting_.size(), posting_.clear();
    last_ = word, ++puts_;
    send_put({.ask = Ask::kPut, .offset = offset, .bytes = sizeof(last_)}, &last_);
  }
  // Neighbouring posts do not wait for each other.
  void post(int64_t mailbox, const Header& header) {
    put_collected();
    const bool next = !posting_.empty() && puts_ == posted_;
    if (posting_.empty()) ask_for_end_of(puts_);
    posting_.push_back({mailbox, header, next ? posting_.back().after : puts_});
    posted_ = ++puts_;
    go_on();
  }
  void flush() {
    store_relaxed(flushing_, 1u);  // before anything is sent: a peer that is then lost ends the flush
    put_collected();
    gets_to_end_ = gets_, puts_to_end_ = puts_;
    if (posting_.empty()) ask_for_end_of(puts_);
    look_for_end();
  }

  // Handlers of the peer's replies. False if a reply does not match a request.
  bool has_got(const Message& m, const void* data) {
    const auto found = getting_.find(m.number);
    if (found == getting_.end() || m.number > gets_asked_ || found->second.bytes != m.bytes) return false;
    if (m.bytes > 0) std::memcpy(found->second.to, data, m.bytes);
    coming_bytes_ -= m.bytes;
    getting_.erase(found);
    go_on();
    look_for_end();
    return true;
  }
  bool has_flushed(const Message& m) {
    if (m.number > puts_ended_ + going_.size()) return false;
    for (; puts_ended_ < m.number; ++puts_ended_) going_bytes_ -= going_.front(), going_.pop_front();
    go_on();
    look_for_end();
    return true;
  }
  // Answers a get with its bytes. If a peer asks before this rank knows its address, the answer waits.
  void answer(const Message& m, const char* segment) {
    send({.ask = Ask::kGot, .offset = m.offset, .bytes = m.bytes, .number = m.number}, segment + m.offset);
  }
  // Answer a flush, and count a put or post that was done. Messages may arrive in any order: an answer reports the
  // count.
  void answer_flush(const Message& m) {
    flush_of_ = std::max(flush_of_, m.number);
    if (m.number <= taken_) tell_taken();
  }
  void count_taken(int64_t bytes) {
    ++taken_, untold_bytes_ += bytes;
    if (taken_ == flush_of_ || untold_bytes_ >= tuning::kReportAfter) tell_taken();
  }

  // Marks the peer as lost: no more requests are sent, its messages are ignored, and pending requests end.
  void lose(const char* problem) {
    if (load_relaxed(lost_)) return;
    problem_ = problem;
    getting_.clear();
    store_release(lost_, 1u);
    store_release(flushing_, 0u);
  }
  // Cancels pending requests. Returns the request to be progressed until it has ended, or nullptr.
  void* close() {
    if (!endpoint_) return nullptr;
    lose("closed");
    ucx::RequestParams given{};
    given.mask = given.kFlags, given.flags = given.kForceClose;
    void* const answer = api_->ep_close_nbx(endpoint_, &given);
    endpoint_ = nullptr;
    return ucx::is_request(answer) ? answer : nullptr;
  }

 private:
  struct Getting {
    int64_t offset;
    char* to;
    int64_t bytes;
  };
  struct Putting {
    int64_t offset;
    const char* from;
    int64_t bytes;
    std::vector<SmallPut> all;  // instead, if there are any
  };
  struct Posting {
    int64_t mailbox;
    Header header;
    uint64_t after;  // number of the last put that must have ended
  };
  // A message that UCX may still read.
  struct Sending {
    UcxPeer* peer;
    Message head;
    Header header;              // data of a post
    std::vector<SmallPut> all;  // data of small puts
  };

  // Makes a put part of the one before, if their data is adjacent and that one is not sent yet: rows of neighbouring
  // tokens then take one message.
  bool extends_last(int64_t offset, const void* from, int64_t bytes) {
    if (putting_.empty()) return false;
    Putting& last = putting_.back();
    const bool adjacent = last.from && last.offset + last.bytes == offset && last.from + last.bytes == from;
    if (!adjacent || last.bytes + bytes > tuning::kMessageBytes) return false;
    last.bytes += bytes;
    return true;
  }
  // Small puts are collected until a message is full, or something must come after them.
  void put_small(int64_t offset, const void* from) {
    SmallPut& put = collected_.emplace_back(SmallPut{.offset = offset});
    std::memcpy(&put.value, from, sizeof(put.value));
    if (int64_t(collected_.size()) == tuning::kMessageBytes / int64_t{sizeof(SmallPut)}) put_collected();
  }
  void put_collected() {
    if (collected_.empty()) return;
    ++puts_;
    const int64_t bytes = int64_t(collected_.size()) * int64_t{sizeof(SmallPut)};
    putting_.push_back({0, nullptr, bytes, std::exchange(collected_, {})});
    go_on();
  }

  // Sends requests up to the bounds on bytes in flight.
  void go_on() {
    while (gets_asked_ < gets_ && can_be_asked()) {
      const Getting get = getting_.at(gets_asked_ + 1);
      if (coming_bytes_ + get.bytes > tuning::kBytesInFlight) break;
      coming_bytes_ += get.bytes, ++gets_asked_;
      send({.ask = Ask::kGet, .offset = get.offset, .bytes = get.bytes, .number = gets_asked_});
    }
    while (!putting_.empty() && can_be_asked()) {
      if (going_bytes_ + putting_.front().bytes > tuning::kBytesInFlight) break;
      Putting put = std::move(putting_.front());
      putting_.pop_front();
      const Ask ask = put.all.empty() ? Ask::kPut : Ask::kPutAll;
      send_put({.ask = ask, .offset = put.offset, .bytes = put.bytes}, put.from, nullptr, std::move(put.all));
    }
    while (!posting_.empty() && can_be_asked() && puts_ended_ >= posting_.front().after) {
      const Posting post = posting_.front();
      posting_.pop_front();
      send_put({.ask = Ask::kPost, .offset = post.mailbox, .bytes = sizeof(Header)}, nullptr, &post.header);
      ask_for_end_of(posting_.empty() ? puts_to_end_ : posting_.front().after);
    }
  }
  // Asks the peer to report when it has done the puts and posts up to this number, all of which are sent or may be sent.
  void ask_for_end_of(uint64_t number) {
    if (asked_of_ < number) send({.ask = Ask::kFlush, .number = asked_of_ = number});
  }
  void send_put(const Message& head, const void* data, const Header* header = nullptr, std::vector<SmallPut> all = {}) {
    going_.push_back(head.bytes), going_bytes_ += head.bytes;
    send(head, data, header, std::move(all));
  }
  void tell_taken() {
    untold_bytes_ = 0;
    send({.ask = Ask::kFlushed, .number = taken_});
  }

  void send(Message head, const void* data = nullptr, const Header* header = nullptr, std::vector<SmallPut> all = {}) {
    if (!can_be_asked()) return;
    head.secret = secret_, head.source = self_;
    auto* const sending = new Sending{this, head, header ? *header : Header{}, std::move(all)};
    if (header) data = &sending->header;
    if (!sending->all.empty()) data = sending->all.data();
    const int64_t bytes = data ? head.bytes : 0;
    ucx::RequestParams given{};
    given.mask = given.kCallback | given.kUserData | given.kFlags;
    given.flags = given.kEager;  // otherwise UCX fetches the data with messages of its protocol
    given.on_end = end;
    given.user_data = sending;
    const void* const answer =
        api_->am_send_nbx(endpoint_, ucx::kMessageId, &sending->head, sizeof(Message), data, bytes, &given);
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

  // SYNC POINT flush, writer side. Pairs with flushed. Release: received data comes before the word.
  void look_for_end() {
    const bool got = getting_.empty() || getting_.begin()->first > gets_to_end_;
    if (got && puts_ended_ >= puts_to_end_) store_release(flushing_, 0u);
  }

  const ucx::Api* api_ = nullptr;
  ucx::Handle endpoint_ = nullptr;
  uint32_t self_ = 0, flushing_ = 0, lost_ = 0;
  uint64_t secret_ = 0, last_ = 0;
  const char* problem_ = "";
  std::map<uint64_t, Getting> getting_;  // keyed by number; gets up to gets_asked_ have been sent
  int64_t coming_bytes_ = 0;             // bytes of gets that have been sent
  std::deque<Putting> putting_;          // not sent yet
  std::deque<Posting> posting_;          // not sent yet
  std::vector<SmallPut> collected_;      // not in putting_ yet
  std::deque<int64_t> going_;            // bytes of puts and posts that are sent; the first is number puts_ended_ + 1
  int64_t going_bytes_ = 0;
  uint64_t gets_ = 0, gets_asked_ = 0, puts_ = 0;  // totals; puts_ includes posts
  uint64_t posted_ = 0;                            // number of the last post
  uint64_t gets_to_end_ = 0, puts_to_end_ = 0;     // numbers that must end before the last flush ends
  uint64_t puts_ended_ = 0, asked_of_ = 0;         // ended according to the peer; number of the last flush request
  uint64_t taken_ = 0, flush_of_ = 0;              // the peer's puts: number done, and number that it flushes
  int64_t untold_bytes_ = 0;                       // bytes done since the last report
};

}  // namespace moe_rt
