// Checks every request that a rank makes of a network, in order, with its place and its length: announcements, waits,
// poison, last words, and what a flat op fetches from its peers and puts there. Exits with 1 and a message on the first
// error.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/net/remote_peers.h"
#include "expect.h"

using namespace moe_rt;

namespace {

constexpr int kRanks = 4, kMe = 1, kTokens = 6, kTopk = 2, kHidden = 5, kWindow = 1;
constexpr int64_t kRowBytes = 20, kStride = 64;

// Writes down what it is asked for. Gets copy from segments.
struct Recording final : Network {
  std::vector<char*> segments;
  Log log;
  bool is_flushed[kRanks] = {true, true, true, true}, is_lost[kRanks] = {};
  bool late = false;                          // a flush ends when the test says so
  const void *to = nullptr, *from = nullptr;  // of the last get and put
  std::function<void()> on_drive = [] {};

  void get(int peer, int64_t offset, void* here, int64_t bytes) override {
    log.push_back(text("get", {peer, offset, bytes}));
    std::memcpy(here, segments[peer] + offset, bytes);
    to = here;
  }
  void put(int peer, int64_t offset, const void* source, int64_t bytes) override {
    log.push_back(text("put", {peer, offset, bytes}));
    std::memcpy(segments[peer] + offset, source, bytes);
    from = source;
  }
  void put_last(int peer, int64_t offset, uint64_t word) override {
    log.push_back(text("put_last", {peer, offset, int64_t(word)}));
  }
  void post(int peer, int64_t mailbox, const Header& header) override {
    log.push_back(text("post", {peer, mailbox, int64_t(header.seq)}));
  }
  void flush(int peer) override {
    log.push_back(text("flush", {peer}));
    if (late) is_flushed[peer] = false;
  }
  bool flushed(int peer) const override { return is_flushed[peer]; }
  bool lost(int peer) const override { return is_lost[peer]; }
  void drive() override { on_drive(); }
  void begin_driving() override {}
  void end_driving() override {}
  void wake() override {}
  void keep(std::shared_ptr<Background>, const char*) override {}
  void leave(const std::vector<uint64_t>&) override {}
  Log taken() { return std::exchange(log, {}); }
};

bool interrupted() { return true; }

// Rank 1 of four, which maps itself and rank 3.
struct Rank {
  Shape s{.num_ranks = kRanks,
          .num_experts = 8,
          .num_max_tokens = kTokens,
          .hidden = kHidden,
          .num_topk = kTopk,
          .elem_bytes = 4,
          .acc_bytes = 4};
  Layout layout = Layout::make(s);
  PlacementTables placement = PlacementTables::make({0, 0, 1, 1, 2, 2, 3, 3}, kRanks);
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<char*> base;
  Recording network;
  std::unique_ptr<RemotePeers> peers;
  World w{};
  uint64_t seq[kNumKinds] = {1, 1};

  Rank() {
    for (int r = 0; r < kRanks; ++r) {
      char* const start = memory.emplace_back(new char[layout.bytes + kPage]()).get();
      network.segments.push_back(start + kPage - reinterpret_cast<uintptr_t>(start) % kPage);
      base.push_back(r == kMe || r == 3 ? network.segments.back() : nullptr);
    }
    peers = std::make_unique<RemotePeers>(s, layout, base, network);
    w.shape = s, w.layout = layout, w.placement = placement.view(), w.base = base.data(), w.rank = kMe;
    w.mirror = peers->mirrors();
  }
  HostIdle idle(double timeout_s, bool (*signal)() = nullptr) {
    return HostIdle(w, Op::kDispatch, 1, seq, timeout_s, true, signal, &network);
  }
  Header header(Op op, uint64_t number = 1) const { return w.header(number, {.op = op, .tag = 3}); }
  // Lets a peer announce its part of the op.
  void announce(int peer, const Header& header) { post(w.mailbox(kMe, kind_of(op_of(header)), peer), header); }
  // Lists in a peer's window.
  RouteLists<float> lists(int peer) {
    World theirs = w;
    theirs.base = network.segments.data(), theirs.mirror = nullptr;
    return RouteLists<float>::view(theirs, peer, kWindow);
  }
};

void check_announcements() {
  Rank r;
  expect(r.peers->ranks() == std::vector<int>{0, 2}, "the ranks that are not mapped");
  for (const Op op : {Op::kDispatch, Op::kCombine, Op::kDispatchBackward, Op::kCombineBackward}) {
    Header header = r.header(op);
    header.seq = 9;
    r.peers->announce(r.w, {{0, kMe, header}, {2, 3, header}});
    const int64_t kind = op == Op::kDispatch || op == Op::kCombineBackward ? 0 : 1;
    const auto box = [&](int source) { return r.layout.mailboxes + 128 * (kind * kRanks + source); };
    expect(r.network.taken(), {text("post", {0, box(kMe), 9}), "flush 0", text("post", {2, box(3), 9}), "flush 2"},
           "announcements");
  }
  r.peers->poison(r.w, 55);
  expect(r.network.taken(),
         {text("put_last", {0, r.layout.poison, 55}), "flush 0", text("put_last", {2, r.layout.poison, 55}), "flush 2"},
         "poison");
  expect(r.peers->go_on() == Background::kNever && r.network.taken().empty(), "without an op nothing goes on");
}

void check_settling() {
  for (const int lost : {-1, 0, 2}) {
    Rank r;
    HostIdle idle = r.idle(60);
    int drives = 0;
    r.network.is_flushed[0] = r.network.is_flushed[2] = false;
    r.network.on_drive = [&] {
      if (++drives == 3) r.network.is_flushed[2] = true;
      if (drives == 5) r.network.is_flushed[0] = true;
    };
    if (lost >= 0) r.network.is_lost[lost] = true;
    const Status s = r.peers->settle(r.peers->ranks(), Phase::kReduce, idle);
    expect(r.network.taken(), {"flush 0", "flush 2"}, "all flushes come first");
    expect(drives == 5, "a wait goes on until all flushes have ended");
    expect(lost < 0 ? s.ok() : s.code == Code::kPeerDead && s.phase == Phase::kReduce && s.peer == lost, "who is lost");
  }
  Rank r;
  r.network.is_flushed[2] = false;
  HostIdle hasty = r.idle(0), disturbed = r.idle(60, interrupted);
  const Status late = r.peers->settle({0, 2}, Phase::kPush, hasty);
  expect(late.code == Code::kPeerTimeout && late.phase == Phase::kPush && late.peer == 2, "who is late");
  const Status ended = r.peers->settle({0, 2}, Phase::kPush, disturbed);
  expect(ended.code == Code::kInterrupted && ended.phase == Phase::kPush && ended.peer == -1, "nobody is to blame");
}

void check_last_words() {
  Rank r;
  write_last_words(*reinterpret_cast<LastWords*>(r.network.segments[2] + r.layout.last_words), "no memory");
  int drives = 0;
  r.network.is_flushed[2] = false;
  r.network.on_drive = [&] { r.network.is_flushed[2] = ++drives == 2; };
  expect(r.peers->last_words(r.w, 2) == "no memory" && drives == 2, "last words are read once they are here");
  const int64_t bytes = sizeof(LastWords);
  expect(r.network.taken(), {text("get", {2, r.layout.last_words, bytes}), "flush 2"}, "last words");
  r.network.is_lost[2] = true;
  expect(r.peers->last_words(r.w, 2).empty(), "whoever is lost has no words");
}

void check_entries() {
  Rank r;
  int64_t here[10];
  for (int64_t first = -1; first < 8; ++first) {
    for (int64_t end = -1; end < 8; ++end) {
      get_entries(r.network, 2, 800, here, first, end, 6);
      const bool range = 0 <= first && first < end && end <= 6;
      expect(r.network.taken(), range ? Log{text("get", {2, 800 + 8 * first, 8 * (end - first)})} : Log{}, "entries");
      expect(!range || r.network.to == here + first, "entries are here where they are there");
    }
  }
}

// Tokens of peers one after the other: neighbours of one peer are one request.
void check_rows() {
  const std::vector<std::pair<int, int32_t>> all = {{0, 0},       {0, 1}, {0, 3}, {2, 4}, {2, -1}, {2, 5},
                                                    {2, kTokens}, {0, 5}, {0, 4}, {0, 4}, {2, 5}};
  const std::vector<std::array<int64_t, 3>> runs = {{0, 0, 2}, {0, 3, 1}, {2, 4, 2}, {0, 5, 1},
                                                    {0, 4, 1}, {0, 4, 1}, {2, 5, 1}};
  Rank r;
  std::vector<char> memory(kRanks * 1000);
  Log wanted;
  for (const auto& [peer, first, count] : runs) {
    const int64_t offset = r.layout.window[kWindow].tokens + first * kStride;
    wanted.push_back(text("get", {peer, offset, (count - 1) * kStride + kRowBytes}));
  }
  {
    RowGetter rows(r.w, r.network, kWindow, kRowBytes, [&](int peer) { return memory.data() + 1000 * peer; });
    for (const auto& [peer, token] : all) rows.get(peer, token);
    expect(r.network.log.size() + 1 == runs.size(), "the last rows are still collected");
    rows.end();
    expect(r.network.to == memory.data() + 2000 + 5 * kStride, "a row is here by its token");
    rows.end();
  }
  expect(r.network.taken(), wanted, "rows");
  {
    RowGetter rows(r.w, r.network, kWindow, kRowBytes, [&](int) { return memory.data(); });
  }
  expect(r.network.taken().empty(), "no rows");
}

// A dispatch: counts, lists and rows of each peer, each once what came before is here.
void check_fetch() {
  Rank r;
  const Layout::Window& o = r.layout.window[kWindow];
  for (const int peer : {0, 2}) {
    const auto lists = r.lists(peer);
    const int32_t pulls[] = {0, 1, 4, 5, 5}, copies[] = {0, 2, 7, 9, 9};
    for (int to = 0; to <= kRanks; ++to) lists.pull_offs.put(to, pulls[to]), lists.copy_offs.put(to, copies[to]);
    for (int i = 0; i < 3; ++i) lists.pulls.put(1 + i, {i == 2 ? 5 : i, 0, 0, 1});
  }
  const Header header = r.header(Op::kDispatch);
  r.peers->begin(r.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes});
  r.peers->go_on();
  expect(r.network.taken().empty(), "nothing is fetched before a peer has announced");
  r.announce(2, header);
  r.peers->go_on();
  const Log counts = {text("get", {2, o.counts, o.pulls - o.counts}), "flush 2"};
  const Log lists = {text("get", {2, o.pulls + 16, 48}), text("get", {2, o.copies + 2 * 16, 5 * 16}),
                     text("get", {2, o.weights + 8, 20}), "flush 2"};
  const Log rows = {text("get", {2, o.tokens, kStride + kRowBytes}),
                    text("get", {2, o.tokens + 5 * kStride, kRowBytes}), "flush 2", "flush 2"};
  Log all = counts;
  all.insert(all.end(), lists.begin(), lists.end()), all.insert(all.end(), rows.begin(), rows.end());
  expect(r.network.taken(), all, "what is fetched of a peer, if everything is here at once");
  Header other = header;
  other.call ^= 1;
  r.announce(0, other);
  r.peers->go_on();
  expect(r.network.taken(), {"flush 0"}, "nothing is fetched of a peer with another header");
  HostIdle idle = r.idle(60);
  expect(r.peers->end(idle).ok(), "a fetch ends");
  r.peers->go_on();
  expect(r.network.taken().empty(), "a fetch has ended");

  r.peers->begin(r.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes});
  r.network.late = true;
  r.network.is_flushed[0] = true;
  for (const Log& step : {counts, lists, Log(rows.begin(), rows.end() - 1), Log{"flush 2"}}) {
    r.peers->go_on();
    Log seen = r.network.taken();
    if (!seen.empty() && seen.front() == "flush 0") seen.erase(seen.begin());  // nothing is fetched there
    expect(seen, step, "a step of a fetch");
    r.network.is_flushed[0] = false;
    r.peers->go_on();
    expect(step.size() == 1 || r.network.taken().empty(), "a step waits for the one before");
    r.network.is_flushed[2] = true;
  }
  HostIdle again = r.idle(60);
  r.network.is_lost[2] = true;
  const Status s = r.peers->end(again);
  expect(s.code == Code::kPeerDead && s.phase == Phase::kGather && s.peer == 2, "a peer that is lost meanwhile");
}

// A peer that is lost while its rows are on the way: they are not those of this op.
void check_loss_during_a_fetch() {
  for (const int lost : {-1, 0, 2}) {
    Rank r;
    const Header header = r.header(Op::kDispatch);
    r.announce(0, header), r.announce(2, header);
    r.network.late = true;
    r.peers->begin(r.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes});
    r.peers->go_on();
    r.network.late = false;
    int drives = 0;
    r.network.on_drive = [&] {
      if (++drives < 3) return;
      if (lost >= 0) r.network.is_lost[lost] = true;
      r.network.is_flushed[0] = r.network.is_flushed[2] = true;  // requests of a lost peer end unanswered
      r.peers->go_on();
    };
    HostIdle idle = r.idle(60);
    const Status s = r.peers->end(idle);
    expect(lost < 0 ? s.ok() : s.code == Code::kPeerDead && s.phase == Phase::kGather && s.peer == lost,
           "a peer that is lost during the wait");
    expect(drives == 3, "a wait for rows goes on until they are here");
  }
}

// A rank that waited before for a peer whose process has ended by now waits for requests to others only.
void check_whom_a_wait_watches() {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const std::string stat = "/proc/" + std::to_string(child) + "/stat";
  const int ended = open(stat.c_str(), O_RDONLY);
  waitpid(child, nullptr, 0);
  for (const bool settles : {false, true}) {
    const auto until_looked = HostIdle::Clock::now() + 20 * std::chrono::microseconds(tuning::kLookAtProcessUs);
    Rank r;
    const Header header = r.header(Op::kDispatch);
    r.announce(0, header), r.announce(2, header);
    r.peers->begin(r.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes});
    r.network.is_flushed[0] = r.network.is_flushed[2] = false;
    r.network.on_drive = [&] {
      if (HostIdle::Clock::now() < until_looked) return;
      r.network.is_flushed[0] = r.network.is_flushed[2] = true;
      r.peers->go_on();
    };
    HostIdle idle = r.idle(60);
    idle.watch({.peer = 3, .announcer = 3, .process = ended});
    const Status s = settles ? r.peers->settle(r.peers->ranks(), Phase::kReduce, idle) : r.peers->end(idle);
    expect(s.ok(), "a wait for requests watches the peers that they were sent to");
  }
  close(ended);
}

// Lists that lead out of bounds: nothing that they name is fetched.
void check_implausible_lists() {
  const int64_t most = kTokens * kTopk;
  for (const auto& [first, end, expected] : {std::tuple{int64_t{-1}, int64_t{1}, 0},
                                             {int64_t{0}, int64_t{1}, 1},
                                             {most - 1, most, 1},
                                             {most - 1, most + 1, 0},
                                             {most, most, 0},
                                             {int64_t{3}, int64_t{2}, 0}}) {
    Rank r;
    r.lists(2).pull_offs.put(kMe, int32_t(first)), r.lists(2).pull_offs.put(kMe + 1, int32_t(end));
    const Header header = r.header(Op::kDispatch);
    r.announce(2, header);
    r.peers->begin(r.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes});
    r.peers->go_on();
    const Log all = r.network.taken();
    const int64_t tokens = r.layout.window[kWindow].tokens;
    const auto rows = std::count(all.begin(), all.end(), text("get", {2, tokens, kRowBytes}));
    const auto gets = std::count_if(all.begin(), all.end(), [](const std::string& line) { return line[0] == 'g'; });
    expect(rows == expected && gets == 1 + 2 * expected, "what implausible lists name");
    r.peers->stop();
    r.peers->go_on();
    expect(r.network.taken().empty(), "nothing goes on once a fetch was stopped");
    HostIdle idle = r.idle(0);
    expect(r.peers->end(idle).ok(), "what was stopped has ended");
  }
}

// The backward of a combine: rows of the plan, which is in the order of sources.
void check_fetch_of_a_plan() {
  Rank r;
  std::vector<int32_t> ints(RecvPlan::num_ints(r.s, 2));
  const RecvPlan plan = RecvPlan::view(ints.data(), r.s, 2);
  const Pulled all[] = {{1, 0, 0, 0, 1}, {2, 0, 0, 1, 1}, {0, 1, 0, 2, 1},
                        {3, 2, 0, 3, 1}, {5, 2, 0, 4, 1}, {4, 3, 0, 5, 1}};
  std::copy(std::begin(all), std::end(all), plan.pulled);
  plan.head->num_pulled = 6;
  const Header header = r.header(Op::kCombineBackward, 2);
  r.announce(0, header), r.announce(2, header);
  r.peers->begin(r.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes, .plan = plan});
  r.peers->go_on();
  const int64_t tokens = r.layout.window[kWindow].tokens;
  expect(r.network.taken(),
         {text("get", {0, tokens + kStride, kStride + kRowBytes}), "flush 0", "flush 0",
          text("get", {2, tokens + 3 * kStride, kRowBytes}), text("get", {2, tokens + 5 * kStride, kRowBytes}),
          "flush 2", "flush 2"},
         "the rows of a plan");
  HostIdle idle = r.idle(60);
  expect(r.peers->end(idle).ok(), "the rows of a plan are here");
  HostIdle hasty = r.idle(0);
  Rank other;
  other.peers->begin(other.w, {.window = kWindow, .header = header, .row_bytes = kRowBytes, .plan = plan});
  const Status late = other.peers->end(hasty);
  expect(late.code == Code::kPeerTimeout && late.phase == Phase::kGather && late.peer == 0, "who does not announce");
}

// Rows and scalars of mapped peers are in place; those of others are here, and put when they are complete.
void check_link() {
  Rank r;
  const RemoteLink link{*r.peers, kWindow};
  const int64_t row = r.w.token_row(kWindow, 4), home = r.w.partial_row(kWindow, 2, 1),
                scalar = r.w.scalar(kWindow, 3, 1);
  expect(link.source_row(r.w, 3, row, kRowBytes) == r.base[3] + row, "a row of a mapped peer");
  expect(link.target_row(r.w, 3, home) == r.base[3] + home, "the place of a row of a mapped peer");
  link.deliver(r.w, 3, home, kRowBytes), link.put(r.w, 3, scalar, 1.5f);
  expect(*reinterpret_cast<float*>(r.base[3] + scalar) == 1.5f, "a scalar of a mapped peer");
  expect(r.network.taken().empty(), "what is mapped needs no network");
  char* const here = link.target_row(r.w, 2, home);
  expect(link.source_row(r.w, 2, row, kRowBytes) - link.source_row(r.w, 2, r.w.token_row(kWindow, 0), kRowBytes) ==
             4 * kStride,
         "fetched rows are stored by token");
  expect(here == link.target_row(r.w, 2, r.w.partial_row(kWindow, 2, 0)), "a token has one row at a time");
  std::strcpy(here, "a partial row");
  link.deliver(r.w, 2, home, kRowBytes), link.put(r.w, 2, scalar, 2.5f);
  expect(r.network.taken(), {text("put", {2, home, kRowBytes}), text("put", {2, scalar, 4})}, "puts");
  const char* const of_scalar = static_cast<const char*>(r.network.from);
  link.put(r.w, 2, r.w.scalar(kWindow, 0, 0), 0.5f);
  expect(of_scalar - static_cast<const char*>(r.network.from) == 4 * (3 * kTopk + 1), "scalars are stored in order");
  expect(here - link.target_row(r.w, 2, r.w.partial_row(kWindow, 0, 0)) == 2 * kStride, "partial rows are, too");
  expect(std::string(r.network.segments[2] + home) == "a partial row", "a row was put");
  expect(*reinterpret_cast<float*>(r.network.segments[2] + scalar) == 2.5f, "a scalar was put");
}

}  // namespace

int main() {
  check_announcements(), check_settling(), check_last_words(), check_entries(), check_rows(), check_fetch();
  check_loss_during_a_fetch(), check_whom_a_wait_watches();
  check_implausible_lists(), check_fetch_of_a_plan(), check_link();
  return 0;
}
