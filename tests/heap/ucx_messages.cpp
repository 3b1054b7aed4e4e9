// Two ranks over this test's UCX, whose messages arrive in any order: the guarantees of gets, puts, posts and flushes.
// Then UCX fails, and one rank sends invalid messages. Prints the failures, and exits with 1.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../cuda/net/ucx_inbox.h"
#include "../protocol/expect.h"

using namespace moe_rt;

namespace {

const Shape kShape{.num_ranks = 2,
                   .num_experts = 2,
                   .num_max_tokens = 64,
                   .hidden = 4096,
                   .num_topk = 1,
                   .elem_bytes = 4,
                   .acc_bytes = 4};
const Layout kLayout = Layout::make(kShape);
const uint64_t kCause = poison_word(Code::kPeerDead, 0, 1), kConsequence = poison_word(Code::kPeerTimeout, 0, 1);

// A rank with a separately allocated segment: AddressSanitizer reports accesses next to it.
struct Rank {
  std::vector<UcxPeer> peers{2};
  UcxInbox inbox{kLayout, peers};
  char* segment = static_cast<char*>(std::aligned_alloc(kPage, kLayout.bytes));
  struct Coming {
    Message head;
    std::function<void()> arrive;
  };
  std::vector<Coming> coming;
  Rank() {
    std::memset(segment, 0, kLayout.bytes);
    inbox.open(segment);
  }
  ~Rank() { std::free(segment); }
  Mailbox& mailbox(Kind kind, int source) {
    return reinterpret_cast<Mailbox*>(segment + kLayout.mailboxes)[int(kind) * 2 + source];
  }
};

// An endpoint is the rank at its other end. Sent data is read when it arrives, as UCX may.
void* send(ucx::Handle endpoint, unsigned id, const void* head, size_t head_bytes, const void* data, size_t bytes,
           const ucx::RequestParams* given) {
  auto& to = *static_cast<Rank*>(endpoint);
  expect(id == ucx::kMessageId && head_bytes == sizeof(Message), "UCX is given another message");
  expect(given->mask == (given->kCallback | given->kUserData | given->kFlags) && given->flags == given->kEager,
         "UCX is given other options");
  auto* const request = new char;
  Message copy;
  std::memcpy(&copy, head, sizeof(copy));
  to.coming.push_back({copy, [=, &to, on_end = given->on_end, sending = given->user_data] {
                         to.inbox.take(head, head_bytes, data, bytes, true);
                         on_end(request, ucx::kOk, sending);
                       }});
  return request;
}
ucx::Api make_api() {
  ucx::Api api{};
  api.am_send_nbx = send;
  api.request_free = [](void* request) { delete static_cast<char*>(request); };
  api.status_string = [](ucx::Status) { return ""; };
  return api;
}
const ucx::Api kApi = make_api();

bool arrives(Rank& at, std::mt19937& random) {
  if (at.coming.empty()) return false;
  std::swap(at.coming[random() % at.coming.size()], at.coming.back());
  const auto message = std::move(at.coming.back());
  at.coming.pop_back();
  message.arrive();
  return true;
}

int64_t bytes_coming(const Rank& at, Ask ask) {
  int64_t bytes = 0;
  for (const Rank::Coming& c : at.coming) bytes += c.head.ask == ask ? c.head.bytes : 0;
  return bytes;
}

// Put two poison words, and lose the peer.
void keep_the_first_poison(Rank& a, Rank& b, std::mt19937& random) {
  UcxPeer& peer = a.peers[1];
  peer.put(kLayout.poison, &kCause, sizeof(kCause));
  while (arrives(b, random)) {
  }
  peer.put(kLayout.poison, &kConsequence, sizeof(kConsequence));
  while (arrives(a, random) || arrives(b, random)) {
  }
  uint64_t poison;
  std::memcpy(&poison, b.segment + kLayout.poison, sizeof(poison));
  expect(poison == kCause, "a later poison took the place of the first");
  peer.lose("test");
}

bool has_small(const Rank& at, int64_t place, int64_t count, uint32_t first) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t value;
    std::memcpy(&value, at.segment + place + 8 * i, sizeof(value));
    if (value != first + uint32_t(i)) return false;
  }
  return true;
}

// Run rounds of puts, gets and a post, with sizes from nothing to several messages; check them when the flush has
// ended.
void keep_promises(unsigned seed) {
  std::mt19937 random(seed);
  Rank a, b;
  UcxPeer& peer = a.peers[1];
  peer.connect(kApi, &b, 0, b.inbox.secret());
  peer.get(0, nullptr, 0);
  peer.flush();
  arrives(b, random);
  expect(!peer.flushed(), "connected before it was answered");
  b.peers[0].connect(kApi, &a, 1, a.inbox.secret());
  b.inbox.connected(0);
  arrives(a, random);
  expect(peer.flushed(), "not connected");
  const int64_t rows = kLayout.window[0].tokens, half = int64_t{32} * kShape.row_bytes();
  std::vector<char> here(half), there(half);
  for (uint64_t round = 1; round < 60; ++round) {
    const int64_t bytes = random() % 8 == 0 ? int64_t(random() % 20) : int64_t(random() % half);
    for (char& c : there) c = char(random());
    std::memcpy(b.segment + rows + half, there.data(), half);
    std::vector<char> rows_here(there.rbegin(), there.rend());
    std::fill(here.begin(), here.end(), char{0});
    peer.put(rows, rows_here.data(), bytes);
    peer.get(rows + half, here.data(), bytes);
    if (random() % 2) peer.flush();  // an earlier flush does not end this one
    peer.put(rows + bytes, &round, sizeof(round));
    const auto small = uint32_t(random());
    const int64_t place = kLayout.window[1].tokens, few = round % 7 == 0 ? 5000 : 3;  // more than one message has
    for (int64_t i = 0; i < few; ++i) {
      const uint32_t value = small + uint32_t(i);
      peer.put(place + 8 * i, &value, sizeof(value));  // it is copied
    }
    const Mailbox& mailbox = b.mailbox(Kind::kCombine, 0);
    Header header{};
    header.seq = round, header.config = random();
    peer.post(kLayout.mailboxes + int64_t{sizeof(Mailbox)} * 2, header);
    const uint64_t config = std::exchange(header.config, 0);  // it was copied
    peer.flush();
    while (!peer.flushed()) {
      const bool moved =
          random() % 2 ? arrives(a, random) || arrives(b, random) : arrives(b, random) || arrives(a, random);
      expect(moved, "a flush does not end");
      expect(bytes_coming(b, Ask::kGet) + bytes_coming(a, Ask::kGot) <= tuning::kBytesInFlight,
             "too much is got at once");
      expect(mailbox.signal != round || !std::memcmp(b.segment + rows, rows_here.data(), bytes),
             "a post was there before the puts");
      expect(mailbox.signal != round || has_small(b, place, few, small), "a post was there before small puts");
    }
    expect(mailbox.signal == round && mailbox.header[round & 1].config == config, "a post was not there when flushed");
    expect(!std::memcmp(b.segment + rows, rows_here.data(), bytes), "what was put was not there when flushed");
    expect(!std::memcmp(b.segment + rows + bytes, &round, sizeof(round)), "a word was not there when flushed");
    expect(!std::memcmp(here.data(), there.data(), bytes), "what was got was not here when flushed");
  }
  keep_the_first_poison(a, b, random);
}

// Connects ranks 0 and 1. Returns rank 1 as rank 0 has it.
UcxPeer& connected(Rank& a, Rank& b) {
  a.peers[1].connect(kApi, &b, 0, b.inbox.secret());
  b.peers[0].connect(kApi, &a, 1, a.inbox.secret());
  return a.peers[1];
}

// Put a few words that no post follows: a flush sends them.
void flush_small_puts() {
  std::mt19937 random(1);
  Rank a, b;
  UcxPeer& peer = connected(a, b);
  for (uint32_t i = 0; i < 3; ++i) peer.put(kLayout.window[0].tokens + 8 * i, &i, sizeof(i));
  peer.flush();
  while (arrives(b, random) || arrives(a, random)) {
  }
  expect(peer.flushed() && has_small(b, kLayout.window[0].tokens, 3, 0), "small puts were not there when flushed");
}

// Send rows of which not all may be in flight; check the reports on them, and that a last word does not wait for them.
void send_many_rows() {
  std::mt19937 random(1);
  Rank a, b;
  UcxPeer& peer = connected(a, b);
  const std::vector<char> row(1000);
  int64_t answers = 0, most = 0, num_rows = 1000;
  for (int64_t i = 0; i < num_rows; ++i) peer.put(kLayout.window[0].tokens, row.data(), int64_t(row.size()));
  peer.flush();
  while (!b.coming.empty()) {
    most = std::max(most, bytes_coming(b, Ask::kPut));
    while (arrives(b, random)) {
    }
    answers += int64_t(a.coming.size());
    while (arrives(a, random)) {
    }
  }
  expect(peer.flushed(), "rows are left");
  expect(most > tuning::kBytesInFlight - tuning::kMessageBytes, "little is put at once");
  expect(most <= tuning::kBytesInFlight, "too much is put at once");
  expect(answers <= num_rows * int64_t(row.size()) / tuning::kReportAfter + 1,
         "it is told again and again how much has come");

  const std::vector<char> rows(num_rows * row.size(), char{1});
  for (int64_t i = 0; i < num_rows; ++i) {
    const auto at = i * int64_t(row.size());
    peer.put(kLayout.window[0].tokens + at, rows.data() + at, int64_t(row.size()));
  }
  peer.flush();
  int64_t messages = 0;
  while (!b.coming.empty()) {
    for (const Rank::Coming& c : b.coming) {
      messages += c.head.ask == Ask::kPut;
      expect(c.head.bytes <= tuning::kMessageBytes, "rows that were joined are more than a message");
    }
    while (arrives(b, random)) {
    }
    while (arrives(a, random)) {
    }
  }
  expect(!std::memcmp(b.segment + kLayout.window[0].tokens, rows.data(), rows.size()), "a row is not where it was put");
  expect(messages < num_rows / 2, "rows that wait next to each other take a message each");

  for (int64_t i = 0; i < num_rows; ++i) peer.put(kLayout.window[0].tokens, row.data(), int64_t(row.size()));
  peer.put_last(kLayout.poison, kCause);
  const auto is_poison = [](const Rank::Coming& c) { return c.head.offset == kLayout.poison; };
  expect(std::any_of(b.coming.begin(), b.coming.end(), is_poison), "the cause of a failure waits for rows");
  peer.lose("test");
  while (arrives(b, random) || arrives(a, random)) {
  }
}

Header numbered(uint64_t seq) {
  Header header{};
  header.seq = seq;
  return header;
}

// Put a row and post, put another and post twice more, before anything arrives: posts follow all rows before them, and
// neighbouring ones not each other.
void post_after_rows() {
  for (unsigned seed = 0; seed < 5; ++seed) {
    std::mt19937 random(seed);
    Rank a, b;
    UcxPeer& peer = connected(a, b);
    const auto place = [](Kind kind) { return kLayout.mailboxes + int64_t{sizeof(Mailbox)} * 2 * int(kind); };
    const std::vector<char> row(1000, char{1});
    const int64_t rows = kLayout.window[0].tokens;
    peer.put(kLayout.window[1].tokens, row.data(), int64_t(row.size()));
    peer.post(place(Kind::kDispatch), numbered(1));
    peer.put(rows, row.data(), int64_t(row.size()));
    peer.post(place(Kind::kCombine), numbered(1));
    peer.post(place(Kind::kDispatch), numbered(2));
    peer.flush();
    bool together = false;
    while (arrives(b, random) || arrives(a, random)) {
      const bool later = b.mailbox(Kind::kCombine, 0).signal == 1 || b.mailbox(Kind::kDispatch, 0).signal == 2;
      expect(!later || !std::memcmp(b.segment + rows, row.data(), row.size()), "a later post was there before its row");
      const auto is_post = [](const Rank::Coming& c) { return c.head.ask == Ask::kPost; };
      together |= std::count_if(b.coming.begin(), b.coming.end(), is_post) == 2;
    }
    expect(peer.flushed() && b.mailbox(Kind::kDispatch, 0).signal == 2, "a post is left");
    expect(together, "neighbouring posts wait for each other");
  }
}

// End the group while posts wait: the cause arrives, the posts do not, and the flush ends.
void end_a_group() {
  std::mt19937 random(1);
  Rank a, b;
  UcxPeer& peer = connected(a, b);
  const std::vector<char> row(1000);
  peer.put(kLayout.window[0].tokens, row.data(), int64_t(row.size()));
  for (uint64_t seq = 1; seq < 3; ++seq) peer.post(kLayout.mailboxes, numbered(seq));
  peer.put_last(kLayout.poison, kCause);
  peer.put_last(kLayout.poison, kConsequence);  // a second one is ignored
  peer.flush();
  while (arrives(b, random) || arrives(a, random)) {
  }
  uint64_t poison;
  std::memcpy(&poison, b.segment + kLayout.poison, sizeof(poison));
  expect(poison == kCause, "another word than the first is the last");
  expect(peer.flushed(), "the flush of a rank that ends its group does not end");
  expect(b.mailbox(Kind::kDispatch, 0).signal == 0, "a rank announces an op after it has ended its group");
}

// Close a connection once, by force; UCX's request is the caller's.
void close_once() {
  static char request;
  static int closed = 0;
  ucx::Api api = kApi;
  api.ep_close_nbx = [](ucx::Handle, const ucx::RequestParams* given) -> void* {
    expect(given->mask == given->kFlags && given->flags == given->kForceClose, "a connection is closed politely");
    return ++closed == 1 ? &request : nullptr;
  };
  for (const void* expected : {static_cast<const void*>(&request), static_cast<const void*>(nullptr)}) {
    UcxPeer peer;
    expect(!peer.is_connected() && !peer.close(), "what was never connected is closed");
    peer.connect(api, &peer, 0, 1);
    peer.lose("first");
    peer.lose("second");
    expect(peer.close() == expected, "the request of closing is another");
    expect(!peer.is_connected() && !peer.can_be_asked() && !peer.close(), "a connection is closed twice");
    expect(peer.problem() == std::string("first"), "the first problem is not the one");
  }
}

// Let UCX refuse to send, immediately or later: the peer is lost, in UCX's words, and a flush ends.
void lose_who_cannot_be_sent_to() {
  static std::vector<ucx::RequestParams> asked;
  static char request;
  ucx::Api at_once = kApi, later = kApi;
  at_once.am_send_nbx = [](ucx::Handle, unsigned, const void*, size_t, const void*, size_t, const ucx::RequestParams*) {
    return reinterpret_cast<void*>(intptr_t{-25});
  };
  later.am_send_nbx = [](ucx::Handle, unsigned, const void*, size_t, const void*, size_t,
                         const ucx::RequestParams* given) -> void* {
    asked.push_back(*given);
    return &request;
  };
  later.request_free = [](void* freed) { expect(freed == &request, "another request is freed"); };
  at_once.status_string = later.status_string = [](ucx::Status status) { return status == -25 ? "reset" : "other"; };
  for (const ucx::Api* api : {&at_once, &later}) {
    UcxPeer peer;
    peer.connect(*api, &peer, 0, 1);
    const uint32_t value = 1;
    peer.put(kLayout.window[0].tokens, &value, sizeof(value));  // collected: the flush sends it
    peer.flush();
    if (api == &later) {
      expect(!peer.lost() && !peer.flushed(), "a flush ends before UCX has sent");
      for (const ucx::RequestParams& each : asked) each.on_end(&request, -25, each.user_data);
    }
    expect(peer.lost() && peer.problem() == std::string("reset"), "who cannot be sent to is not lost");
    expect(peer.flushed(), "a flush of who is lost does not end");
  }
}

// Let rank 1 send an invalid message to rank 0: rank 0 marks it as lost, and neither memory nor segment is touched.
void refuse(const std::string& what, Message m, uint64_t bytes, bool loses = true, bool is_here = true) {
  Rank a, b;
  a.peers[1].connect(kApi, &b, 0, 7);
  static char asked[8];
  a.peers[1].get(0, asked, sizeof(asked));
  static char more[tuning::kBytesInFlight];
  a.peers[1].get(0, more, tuning::kBytesInFlight);  // its last part is not requested yet
  a.peers[1].put(0, asked, sizeof(asked));
  a.peers[1].flush();
  const std::vector<char> before(a.segment, a.segment + kLayout.bytes);
  const size_t sent = b.coming.size();
  m.secret ^= a.inbox.secret();
  const std::vector<char> data(bytes, char{1});  // as places of small puts these are outside
  a.inbox.take(&m, sizeof(m), data.data(), bytes, is_here);
  expect(a.peers[1].lost() == loses, what + (loses ? ": its sender is not lost" : ": its sender is lost"));
  expect(a.peers[1].flushed() == loses, what + ": a flush of who is lost goes on, or another one ended");
  expect(b.coming.size() == sent, what + ": it was answered");
  expect(std::equal(before.begin(), before.end(), a.segment), what + ": it was written");
  const Message put{.secret = a.inbox.secret(), .source = 1, .ask = Ask::kPut, .offset = 64, .bytes = 1};
  a.inbox.take(&put, sizeof(put), "\1", 1, true);
  expect(a.segment[64] == (loses ? before[64] : 1), what + ": its sender writes once it is lost, or no more");
  std::mt19937 random(1);
  while (arrives(b, random)) {
  }
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 20; ++seed) keep_promises(seed);
  flush_small_puts();
  send_many_rows();
  post_after_rows();
  end_a_group();
  close_once();
  lose_who_cannot_be_sent_to();
  const int64_t end = kLayout.bytes, most = tuning::kMessageBytes, boxes = kLayout.mailboxes;
  const auto from1 = [](Ask ask, int64_t offset, int64_t bytes, uint64_t number = 0) {
    return Message{.source = 1, .ask = ask, .offset = offset, .bytes = bytes, .number = number};
  };
  for (const Ask ask : {Ask::kGet, Ask::kPut}) {
    const std::string name = ask == Ask::kGet ? "get " : "put ";
    const auto data = [ask](int64_t bytes) { return ask == Ask::kGet ? 0 : uint64_t(bytes); };
    refuse(name + "past the end", from1(ask, end - 8, 16), data(16));
    refuse(name + "behind the end", from1(ask, end, 8), data(8));
    refuse(name + "before the start", from1(ask, -8, 16), data(16));
    refuse(name + "remote before the start", from1(ask, INT64_MIN, 8), data(8));
    refuse(name + "whose end wraps", from1(ask, INT64_MAX - 4, 8), data(8));
    refuse(name + "of a negative length", from1(ask, 64, -8), 0);
    refuse(name + "of the least length", from1(ask, 64, INT64_MIN), 0);
    refuse(name + "of another length", from1(ask, 64, 16), 8);
  }
  refuse("half a small put", from1(Ask::kPutAll, 0, 8), 8);
  refuse("small puts of another length", from1(Ask::kPutAll, 0, 32), 16);
  refuse("small puts past the end", from1(Ask::kPutAll, 0, 32), 32);
  refuse("too many small puts", from1(Ask::kPutAll, 0, most + 16), uint64_t(most + 16));
  refuse("get of too much at once", from1(Ask::kGet, 0, most + 1), 0);
  refuse("get with data", from1(Ask::kGet, 0, 8), 8);
  refuse("post before the mailboxes", from1(Ask::kPost, boxes - 128, sizeof(Header)), sizeof(Header));
  refuse("post behind the mailboxes", from1(Ask::kPost, boxes + 4 * 128, sizeof(Header)), sizeof(Header));
  refuse("post between mailboxes", from1(Ask::kPost, boxes + 64, sizeof(Header)), sizeof(Header));
  refuse("post of half a header", from1(Ask::kPost, boxes, 8), 8);
  refuse("answer to no get", from1(Ask::kGot, 0, 8, 9), 8);
  const int64_t parts = (tuning::kBytesInFlight + most - 1) / most, last = tuning::kBytesInFlight - (parts - 1) * most;
  refuse("answer to a get that is still to be asked", from1(Ask::kGot, 0, last, uint64_t(1 + parts)), uint64_t(last));
  refuse("answer of another length", from1(Ask::kGot, 0, 16, 1), 16);
  refuse("answer without its data", from1(Ask::kGot, 0, 8, 1), 0);
  refuse("flush of more than was put", from1(Ask::kFlushed, 0, 0, 2), 0);
  refuse("flush with data", from1(Ask::kFlush, 0, 0, 0), 8);
  refuse("nothing that there is", from1(Ask(8), 0, 0), 0);
  refuse("data that is kept back", from1(Ask::kPut, 0, 8), 8, true, false);
  Message other = from1(Ask::kPut, 0, 8);
  other.secret = 1;
  refuse("message of another group", other, 8, false);
  other = from1(Ask::kPut, 0, 8);
  other.source = 2;
  refuse("message of no rank", other, 8, false);
  std::printf("every promise kept, every message refused\n");
}
