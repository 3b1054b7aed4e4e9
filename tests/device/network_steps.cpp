// Checks what a GPU's launches ask of a network, call by call, with lanes that run one after the other: rows and scalars
// of unmapped peers, signals, and route lists. Exits with 1 and a message on the first error.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/gpu/rdma.h"
#include "../protocol/expect.h"
#include "../protocol/lanes.h"

using namespace moe_rt;

namespace {

constexpr int kRanks = 5, kMe = 1, kTokens = 6, kTopk = 2, kWindow = 0;
constexpr int64_t kSecond = 1'000'000'000;

// Writes down each call, with offsets in the segment of `segments[peer]`.
struct Recording {
  static constexpr bool kOrderedSignals = true;
  Log* log;
  char* const* segments;
  const char* mine;
  int64_t at(const void* place) const { return static_cast<const char*>(place) - mine; }
  template <class Group>
  void get(const Group& group, void* here, const char* place, int64_t bytes, int peer) const {
    log->push_back(text("get", {group.rank(), peer, at(place), bytes}));
    if (group.rank() == 0) std::memcpy(here, segments[peer] + at(place), bytes);
  }
  template <class Group>
  void put(const Group& group, char* place, const char* here, int64_t bytes, int peer) const {
    log->push_back(text("put", {group.rank(), peer, at(place), bytes, here[0]}));
  }
  template <class T>
  void put_value(T* place, T value, int peer) const {
    log->push_back(text("value", {peer, at(place), int64_t(value)}));
  }
  void put_signal(Header* place, const Header* here, uint64_t* signal, uint64_t seq, int peer) const {
    log->push_back(
        text("signal", {peer, at(place), int64_t(here->seq), int64_t(here->call), at(signal), int64_t(seq)}));
  }
  void poison(uint64_t* place, uint64_t word, int peer) const {
    log->push_back(text("poison", {peer, at(place), int64_t(word)}));
  }
  void mark(uint64_t* place, int peer) const { log->push_back(text("mark", {peer, at(place)})); }
  void before_signals() const { log->push_back("before signals"); }
  void quiet() const { log->push_back("quiet"); }
  void fence() const { log->push_back("fence"); }
};

// A group of lanes whose syncs are written down as well.
struct Group : Lanes::Coop {
  int64_t index;
  Log* log;
  bool leader() const { return rank() == 0; }
  void sync() const {
    log->push_back(text("sync", {rank()}));
    Lanes::Coop::sync();
  }
};

// Rank 1 of five, which maps itself and rank 4.
struct Rank {
  Shape s{.num_ranks = kRanks,
          .num_experts = 5,
          .num_max_tokens = kTokens,
          .hidden = 5,
          .num_topk = kTopk,
          .elem_bytes = 4,
          .acc_bytes = 4};
  Layout layout = Layout::make(s);
  PlacementTables placement = PlacementTables::make({0, 1, 2, 3, 4}, kRanks);
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<char*> segments, base, mirror;
  std::vector<Header> outbox = std::vector<Header>(kNumKinds * kRanks * 2);
  char rows[4][128] = {};
  Log log;
  World w{};
  NetworkMemory symmetric{};
  Recording net{};

  Rank() {
    for (int r = 0; r < kRanks; ++r) {
      const auto allocated = [&] {
        char* const start = memory.emplace_back(new char[layout.bytes + kPage]()).get();
        return start + kPage - reinterpret_cast<uintptr_t>(start) % kPage;
      };
      segments.push_back(allocated());
      const bool mapped = r == kMe || r == 4;
      base.push_back(mapped ? segments.back() : nullptr);
      mirror.push_back(mapped ? nullptr : allocated());
    }
    base.push_back(nullptr), mirror.push_back(nullptr), segments.push_back(nullptr);  // of no rank
    w.shape = s, w.layout = layout, w.placement = placement.view(), w.base = base.data(), w.mirror = mirror.data();
    w.rank = kMe;
    symmetric = {segments[kMe], outbox.data(), rows[0], sizeof(rows[0])};
    net = {&log, segments.data(), segments[kMe]};
  }
  Log taken() { return std::exchange(log, {}); }
};

void check_rows() {
  for (const bool backwards : {false, true}) {
    Rank r;
    const int64_t row = r.w.token_row(kWindow, 3), home = r.w.partial_row(kWindow, 2, 1);
    std::strcpy(r.segments[2] + row, "row");
    const auto with_link = [&](auto&& act) {
      const bool together = Lanes::run(2, backwards, [&](const Lanes::Coop& lane) {
        const Group group{lane, 2, &r.log};
        act(RdmaLink<Recording, Group>(r.net, r.symmetric, group), lane.rank());
      });
      expect(together, "lanes of a group part");
    };
    const int first = backwards ? 1 : 0, second = 1 - first;
    const auto of_lanes = [&](auto&& line) { return Log{line(first), line(second)}; };
    const auto syncs = of_lanes([](int lane) { return text("sync", {lane}); });
    const auto around = [&](const Log& calls) {  // each lane's call between its syncs
      return Log{syncs[0], syncs[1], calls[0], syncs[0], calls[1], syncs[1]};
    };
    with_link([&](const auto& link, int) {
      expect(link.source_row(r.w, 4, row, 20) == r.base[4] + row, "a row of a mapped peer");
      expect(link.target_row(r.w, 4, home) == r.base[4] + home, "the place of a row of a mapped peer");
      link.deliver(r.w, 4, home, 20);
      link.put(r.w, 4, r.w.scalar(kWindow, 1, 1), 2.5f);
      expect(link.target_row(r.w, 2, home) == r.rows[2], "a row is made in the group's own place");
    });
    expect(r.taken().empty(), "what is mapped needs no network");
    expect(*reinterpret_cast<float*>(r.base[4] + r.w.scalar(kWindow, 1, 1)) == 2.5f, "a scalar of a mapped peer");
    with_link([&](const auto& link, int) {
      const char* const got = link.source_row(r.w, 2, row, 20);
      expect(got == r.rows[2] && std::string(got) == "row", "a row that was fetched");
    });
    const Log gets = of_lanes([&](int lane) { return text("get", {lane, 2, row, 20}); });
    expect(r.taken(), around(gets),
           "all lanes fetch a row once none reads the one before, and read it once it is here");
    with_link([&](const auto& link, int lane) {
      if (lane == 0) std::strcpy(r.rows[2], "sum");
      link.deliver(r.w, 2, home, 20);
    });
    const Log puts = of_lanes([&](int lane) { return text("put", {lane, 2, home, 20, 's'}); });
    expect(r.taken(), around(puts), "all lanes put a row once it is whole, and write none before that");
    with_link([&](const auto& link, int lane) { link.put(r.w, 2, r.w.scalar(kWindow, lane, 1), int64_t{7} + lane); });
    const auto value = [&](int lane) { return text("value", {2, r.w.scalar(kWindow, lane, 1), 7 + lane}); };
    expect(r.taken(), of_lanes(value), "scalars are put one by one");
    Lanes::run(3, backwards, [&](const Lanes::Coop& lane) {
      RdmaLink<Recording, Group>(r.net, r.symmetric, Group{lane, 2, &r.log}).flush();
    });
    Log three = {"sync 0", "sync 1", "sync 2", "before signals"};
    if (backwards) std::swap(three[0], three[2]);
    expect(r.taken(), three, "one lane orders what all have put");
  }
}

void check_signals() {
  Rank r;
  const RdmaSignals<Recording> signals(r.net, r.symmetric);
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    const Kind kind = kind_of(op);
    const int64_t box = r.layout.mailboxes + 128 * (int(kind) * kRanks + kMe);
    for (const uint64_t seq : {4, 5}) {
      const Header header = r.w.header(seq, {.op = op, .tag = 3});
      const int64_t place = box + 8 + 56 * int64_t(seq % 2);
      signals.announce(r.w, 3, kind, header);
      expect(r.taken(), {"fence", text("signal", {3, place, int64_t(seq), int64_t(header.call), box, int64_t(seq)})},
             "an announcement comes after the last one");
      const Header& out = r.outbox[(int(kind) * kRanks + 3) * 2 + seq % 2];
      expect(!std::memcmp(&out, &header, sizeof(header)), "each peer's header is sent from its own place");
      expect(std::count_if(r.outbox.begin(), r.outbox.end(), [&](const Header& h) { return h.call == header.call; }) ==
                 (seq == 4 ? 1 : 2),
             "a header is in one place");
      signals.announce(r.w, 4, kind, header);
      const Mailbox& there = r.w.mailbox(4, kind, kMe);
      expect(there.signal == seq && !std::memcmp(&there.header[seq % 2], &header, sizeof(header)), "a mapped peer");
    }
  }
  signals.poison(r.w, 2, 99), signals.poison(r.w, 4, 98), signals.poison(r.w, 4, 97);
  expect(r.taken(), {text("poison", {2, r.layout.poison, 99})}, "a poison word");
  expect(r.w.poison(4) == 98, "the first poison word of a mapped peer stays");
  signals.close(r.w, 4);
  expect(r.taken().empty() && r.w.mailbox(4, Kind::kDispatch, kMe).closed && r.w.mailbox(4, Kind::kCombine, kMe).closed,
         "a mapped peer sees that this rank has closed");
  signals.close(r.w, 0);
  const auto closed = [&](int kind) {
    return text("mark", {0, r.layout.mailboxes + 128 * (kind * kRanks + kMe) + 120});
  };
  expect(r.taken(), {"quiet", closed(0), closed(1), "quiet"}, "marks of the end follow all signals, and arrive");
}

using Links = RdmaLinks<Recording>;

// A block whose clock moves with every look at it.
struct Machine {
  static constexpr bool kWarpsOnly = true, kTwoLevel = false, kOrderedSignals = true;
  const Links& links;
  Lanes::Coop block_;
  BlockShared& shared_;
  int index, count;
  int64_t& now;
  DeviceState& state;
  Lanes::Coop block() const { return block_; }
  BlockShared& shared() const { return shared_; }
  int num_blocks() const { return count; }
  int block_index() const { return index; }
  int64_t clock_ns() const { return now += kSecond / 100; }
  void nap() const {}
  void await_launch_before() const { state.seq[0] = 8; }  // that launch has announced the op
  RdmaSignals<Recording> link() const { return links.link(); }
};

constexpr int kFirst = kTokens * kTopk - 3;  // the last three entries of the lists

// Peers' lists name their last three entries; the copies of rank 3 end past the list.
void fill_lists(Rank& r) {
  for (const int peer : {0, 2, 3}) {
    World theirs = r.w;
    theirs.base = r.segments.data(), theirs.mirror = nullptr;
    const auto lists = RouteLists<float>::view(theirs, peer, kWindow);
    lists.pull_offs.put(kMe, kFirst), lists.pull_offs.put(kMe + 1, kFirst + 3), lists.pull_offs.put(kMe + 2, 99);
    lists.copy_offs.put(kMe, kFirst), lists.copy_offs.put(kMe + 1, kFirst + 3), lists.copy_offs.put(kMe + 2, 99);
    for (int i = 0; i < 3; ++i) lists.pulls.put(kFirst + i, {7, 8, 9, 10 + i}), lists.weights.put(kFirst + i, 0.5f + i);
    if (peer == 3) lists.copy_offs.put(kMe + 1, kTokens * kTopk + 1);
  }
}

// Each lane's gets of a peer's lists.
Log gets_of(const Rank& r, int lanes, int peer) {
  const Layout::Window& o = r.layout.window[kWindow];
  Log all;
  const auto gets = [&](int64_t offset, int64_t bytes) {
    for (int lane = 0; lane < lanes; ++lane) all.push_back(text("get", {lane, peer, offset, bytes}));
  };
  gets(o.counts, o.pulls - o.counts);
  gets(o.pulls + kFirst * 16, 3 * 16);
  if (peer != 3) gets(o.copies + kFirst * 16, 3 * 16), gets(o.weights + kFirst * 4, 3 * 4);
  return all;
}

// Ranks 0 and 3 have announced, rank 0 a refusal; rank 2 announces nothing if `late`, else as rank 3 does.
void check_lists(int lanes, int blocks, bool backwards, bool late, bool failed) {
  Rank r;
  DeviceState state{};
  HostRecord record{};
  state.failed = failed;
  const Control control{&state, &record, kSecond, 5, 0};
  const DispatchArgs args{};
  Header header = r.w.header(8, call_of(args, control.tag));
  const auto announce = [&](int peer) { post(r.w.mailbox(kMe, Kind::kDispatch, peer), header); };
  announce(3);
  if (!late) announce(2);
  header.refuse(Code::kInvalidInput, 1, 2);
  announce(0);
  fill_lists(r);
  Log wanted;
  for (const int peer : {2, 3}) {
    const Log gets = failed || (late && peer == 2) ? Log{} : gets_of(r, lanes, peer);
    wanted.insert(wanted.end(), gets.begin(), gets.end());
  }
  const Links links{r.symmetric, r.net};
  int64_t now = 0;
  for (int index = 0; index < blocks; ++index) {
    BlockShared shared{};
    state.failed = failed, state.seq[0] = 7;  // blocks look at the same time
    const bool together = Lanes::run(lanes, backwards, [&](const Lanes::Coop& lane) {
      const Machine machine{links, lane, shared, index, blocks, now, state};
      const RuntimeDims dims{5, kTopk};
      fetch_lists(Launch<RuntimeDims, F32, Machine>{machine, dims, r.w, control}, args);
    });
    expect(together, "lanes of a block part");
  }
  Log gets, poisons;
  for (const std::string& line : r.taken()) (line[0] == 'g' ? gets : poisons).push_back(line);
  std::sort(gets.begin(), gets.end()), std::sort(wanted.begin(), wanted.end());
  expect(gets, wanted, "the lists of sources that have announced");
  if (!late && !failed) {
    const auto lists = RouteLists<float>::view(r.w, 2, kWindow);
    for (int i = 0; i < 3; ++i) {
      const int at = kFirst + i;
      expect(lists.pulls[at].copies == 10 + i && lists.weights[at] == 0.5f + i,
             "entries are here where they are there");
    }
  }
  if (!late || failed) {
    expect(poisons.empty() && !record.reported, "a refusal does not end the group here");
    return;
  }
  expect(record.reported == 1 && record.status.code == Code::kPeerTimeout && record.status.peer == 2, "who is late");
  const int64_t word = int64_t(poison_word(Code::kPeerTimeout, kMe, 2));
  Log expected;
  for (const int peer : {0, 2, 3}) expected.push_back(text("poison", {peer, r.layout.poison, word}));
  expect(poisons, expected, "all peers learn who is late");
  expect((state.failed == 1 || blocks > 1) && r.w.poison(4) == uint64_t(word), "the group has ended");
}

}  // namespace

int main() {
  check_rows(), check_signals();
  for (const int lanes : {1, 2, 3}) {
    for (const int blocks : {1, 2, 7}) {
      for (const bool backwards : {false, true}) {
        for (const bool late : {false, true}) check_lists(lanes, blocks, backwards, late, false);
        check_lists(lanes, blocks, backwards, true, true);
      }
    }
  }
  return 0;
}
