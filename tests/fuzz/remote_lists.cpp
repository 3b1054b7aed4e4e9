// Tests what a CPU rank does with the lists of peers that it reaches over a network: what it requests of them, and whom
// it blames if they cannot be true.
//
// It exits with 0 if every case is right; otherwise it names the cases that are not.
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "../../cuda/cpu/proxy.h"
#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/net/remote_peers.h"
#include "../../cuda/protocol/flat/routing.h"

using namespace moe_rt;

namespace {

constexpr int kMe = 0, kRanks = 3, kTokens = 4, kTopk = 2, kWindow = 0;
constexpr int64_t kIdx[kTokens * kTopk] = {0, 1, 1, 0, 0, 2, 2, 0};

// Copies from the peers' segments immediately, and records which of them rows were requested of.
struct Copying final : Network {
  std::vector<std::unique_ptr<char[]>>& segments;
  const Layout::Window& at;
  int64_t most_pulls;
  std::set<int> asked;
  Background* kept = nullptr;
  std::set<int> left;  // peers of which more was requested than the list at the request's begin can hold
  Copying(std::vector<std::unique_ptr<char[]>>& all, const Layout& layout, int64_t pulls)
      : segments(all), at(layout.window[kWindow]), most_pulls(pulls) {}
  void get(int peer, int64_t offset, void* to, int64_t bytes) override {
    if (offset >= at.tokens) asked.insert(peer);
    const bool leaves = offset + bytes > end_of(offset);
    if (leaves) left.insert(peer);
    if (!leaves) std::memcpy(to, segments[peer].get() + offset, bytes);
  }
  // Returns the end of what a request begins in: rows, a list, or the counts, after which all lists may come.
  int64_t end_of(int64_t offset) const {
    if (offset >= at.tokens) return at.partials;
    if (offset >= at.weights) return at.weights + kTokens * kTopk * int64_t{sizeof(float)};
    if (offset >= at.copies) return at.copies + kTokens * kTopk * int64_t{sizeof(Copy)};
    if (offset >= at.pulls) return at.pulls + most_pulls * int64_t{sizeof(Pull)};
    return at.tokens;
  }
  void put(int, int64_t, const void*, int64_t) override {}
  void put_last(int, int64_t, uint64_t) override {}
  void post(int, int64_t, const Header&) override {}
  void flush(int) override {}
  bool flushed(int) const override { return true; }
  bool lost(int) const override { return false; }
  void drive() override { kept->go_on(); }
  void begin_driving() override {}
  void end_driving() override {}
  void wake() override {}
  void keep(std::shared_ptr<Background>, const char*) override {}
  void leave(const std::vector<uint64_t>&) override {}
};

// Ranks 1 and 2, which rank 0 reaches over the network, have announced a dispatch; rank 0 has no tokens.
struct Group {
  Shape shape;
  Layout layout;
  PlacementTables tables;
  std::vector<NodeTables> nodes;
  std::vector<std::unique_ptr<char[]>> segments;
  std::vector<char*> base;

  explicit Group(const std::vector<int32_t>& node_of)
      : shape(NodeTables::sized({kRanks, kRanks, kTokens, 1, kTopk, 4, 4}, node_of)),
        layout(Layout::make(shape)),
        tables(PlacementTables::make({0, 1, 2}, kRanks)) {
    for (int r = 0; r < kRanks; ++r) {
      nodes.emplace_back(node_of, r);
      base.push_back(segments.emplace_back(new char[layout.bytes]()).get());
    }
    const RuntimeDims dims{shape.hidden, shape.num_topk};
    const std::vector<float> weights(kTokens * kTopk, 1.0f);
    for (int source = 0; source < kRanks; ++source) {
      const int64_t num_tokens = source == kMe ? 0 : kTokens;
      const World w = world(source);
      std::vector<int32_t> ints(LaneCounters::num_ints(shape, 1)), plan(kTokens * kTopk);
      const LaneCounters counters{ints.data(), shape.num_experts, shape.num_ranks};
      int64_t bad;
      count_visits(Solo{}, dims, w, kIdx, num_tokens, counters, plan.data(), &bad);
      const auto lists = RouteLists<float>::view(w, source, kWindow);
      place_lanes(w, counters, 1, lists);
      write_lists(Solo{}, dims, w, kIdx, weights.data(), num_tokens, counters, lists, plan.data());
    }
  }
  World world(int rank) {
    const Nodes seen = shape.num_nodes > 1 ? nodes[rank].view() : Nodes{};
    return World{shape, layout, tables.view(), base.data(), nullptr, rank, 1, 1, seen};
  }
  int32_t* pull_offs(int source) { return RouteLists<float>::view(world(source), source, kWindow).pull_offs.start; }
  int32_t* copy_offs(int source) { return RouteLists<float>::view(world(source), source, kWindow).copy_offs.start; }
  int64_t most_pulls() const { return int64_t{shape.num_max_tokens} * shape.num_visits(); }
};

const uint64_t kNoSeq[2] = {0, 0};

// Rank 0 in a dispatch that ranks 1 and 2 may have announced.
struct Fetching {
  Copying network;
  std::vector<char*> mapped;
  RemotePeers peers;
  World w;
  Header header;

  explicit Fetching(Group& group)
      : network{group.segments, group.layout, group.most_pulls()},
        mapped{group.base[kMe], nullptr, nullptr},
        peers{group.shape, group.layout, mapped, network},
        w{group.world(kMe)} {
    w.base = mapped.data(), w.mirror = peers.mirrors();
    header = w.header(1, {.op = Op::kDispatch, .tag = 1});
    network.kept = &peers;
    for (const int peer : {1, 2}) w.mailbox(kMe, Kind::kDispatch, peer).signal = 0;
    peers.begin(w, {.window = kWindow, .header = header, .row_bytes = 4});
  }
  void announce(int peer, const Header& theirs) {
    post(w.mailbox(kMe, Kind::kDispatch, peer), theirs);
    network.drive();
  }
};

std::set<int> left_a_list;  // in the last call of asked_for_rows

// Returns the peers that rows are requested of.
std::set<int> asked_for_rows(Group& group) {
  Fetching f{group};
  for (const int peer : {1, 2}) f.announce(peer, f.header);
  HostIdle idle{f.w, Op::kDispatch, 0, kNoSeq, 10.0, true, nullptr, &f.network};
  const bool right = f.peers.end(idle).ok();
  left_a_list = f.network.left;
  return right ? f.network.asked : std::set<int>{-1};
}

int wrong = 0;

void expect(bool right, const char* what, int peer) {
  if (right) return;
  std::printf("%s, rank %d\n", what, peer);
  ++wrong;
}

void far_lists() {
  for (const int peer : {1, 2}) {
    const int other = 3 - peer;
    Group group{{}};
    expect(asked_for_rows(group) == std::set<int>{1, 2}, "lists as they were written: rows are missing", peer);
    int32_t* const offs = group.pull_offs(peer);
    const int32_t first = offs[kMe], end = offs[kMe + 1], most = int32_t(group.most_pulls());
    offs[kMe] = most, offs[kMe + 1] = most + 1;
    expect(asked_for_rows(group) == std::set<int>{other}, "an end after the list: rows were requested", peer);
    offs[kMe] = -1, offs[kMe + 1] = 1;
    expect(asked_for_rows(group) == std::set<int>{other}, "a begin before the list: rows were requested", peer);
    offs[kMe] = end, offs[kMe + 1] = first;
    expect(asked_for_rows(group) == std::set<int>{other}, "an end before the begin: rows were requested", peer);
    offs[kMe] = most - 1, offs[kMe + 1] = most;
    expect(asked_for_rows(group).count(peer) == 1, "the last entry of the list: no row was requested", peer);
  }
}

// Rows are requested of each peer when it announces, before rank 0 waits; of no other peer, and not once the op is over.
void before_the_wait() {
  for (const int peer : {1, 2}) {
    Group group{{}};
    Fetching f{group};
    f.network.drive();
    expect(f.network.asked.empty(), "nobody has announced: rows were requested", peer);
    f.announce(peer, f.header);
    expect(f.network.asked == std::set<int>{peer}, "its rows are not requested when it announces", peer);
    Header refusal = f.header;
    refusal.refuse(Code::kInvalidInput, 0, 0);
    f.announce(3 - peer, refusal);
    expect(f.network.asked == std::set<int>{peer}, "rows of a peer that refuses were requested", 3 - peer);
    Fetching stopped{group};
    stopped.peers.stop();
    stopped.announce(peer, f.header);
    expect(stopped.network.asked.empty(), "the op is over: rows were requested", peer);
  }
}

// Ranges of each list, as a peer could claim them: nothing is requested next to a list.
void far_ranges() {
  const int32_t copies = kTokens * kTopk;
  for (const int peer : {1, 2}) {
    for (const bool is_pulls : {true, false}) {
      Group group{{}};
      int32_t* const offs = is_pulls ? group.pull_offs(peer) : group.copy_offs(peer);
      const int32_t most = is_pulls ? int32_t(group.most_pulls()) : copies;
      const int32_t ranges[][2] = {{0, most}, {0, most + 1},    {most, most + 1},       {-1, 1},
                                   {1, 0},    {most - 1, most}, {INT32_MIN, INT32_MAX}, {INT32_MAX - 1, INT32_MAX}};
      for (const auto& [first, end] : ranges) {
        offs[kMe] = first, offs[kMe + 1] = end;
        asked_for_rows(group);
        expect(left_a_list.empty(), is_pulls ? "pulls: a list was left" : "copies: a list was left", peer);
      }
    }
  }
}

// Tokens that there are not: no row is requested of them.
void far_tokens() {
  for (const int peer : {1, 2}) {
    for (const int32_t token : {-1, kTokens, kTokens + 1, INT32_MAX, INT32_MIN}) {
      Group group{{}};
      const auto lists = RouteLists<float>::view(group.world(peer), peer, kWindow);
      const int32_t first = lists.pull_offs[kMe];
      lists.pull_offs.start[kMe + 1] = first + 1;
      lists.pulls.start[first].token = token;
      expect(asked_for_rows(group) == std::set<int>{3 - peer}, "a token out of range: a row was requested", peer);
      expect(left_a_list.empty(), "a token out of range: a list was left", peer);
    }
  }
}

// Rank 0 is the only rank of its node and passes on what ranks 1 and 2 send to it.
void clients() {
  for (const int peer : {1, 2, 0}) {
    Group group{{0, 1, 1}};
    if (peer != kMe) group.pull_offs(peer)[kMe + 1] = int32_t(group.most_pulls()) + 1;
    Copying network{group.segments, group.layout, group.most_pulls()};
    std::vector<char*> mapped = group.base;
    mapped[1] = mapped[2] = nullptr;
    World w = group.world(kMe);
    w.base = mapped.data();
    Proxy proxy{w, group.nodes[kMe], network};
    w.mirror = proxy.lists();
    HostIdle idle{w, Op::kDispatch, 0, kNoSeq, 10.0, true, nullptr};
    std::vector<int32_t> forwards(2 * kTokens);
    const Duty duty{.window = kWindow, .forwards = forwards.data(), .row_bytes = 4, .lists = true};
    const Status status = proxy.serve(Solo{}, duty, nullptr, idle);
    if (peer == kMe) {
      expect(status.ok(), "lists as they were written are refused", peer);
    } else {
      expect(status.code == Code::kCorruptPeer && status.peer == peer, "a client is not named", peer);
      expect(network.asked.empty(), "rows of a client were requested", peer);
    }
  }
}

}  // namespace

int main() {
  far_lists();
  before_the_wait();
  far_ranges();
  far_tokens();
  clients();
  return wrong != 0;
}
