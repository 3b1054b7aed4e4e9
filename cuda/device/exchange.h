// The frame around every op on a GPU, in two launches: one begins it, which writes and announces, and one finishes it,
// which waits and reads. The halves are those of the CPU engine (host/exchange.h).
//
// No block waits for another block of its own launch. The sending launch never waits: its last block announces. Every
// block of the receiving launch waits by itself for every peer, and the peers' sending launches need none of its room.
// A launch of one block may have waited before, so that a late peer holds no more than that. The halves of an op of very
// few tokens may follow each other in one launch of one block (whole_ops.h).
// A launch may begin while the one before it in its op still runs: once all blocks of that have sent their share. Until it
// has awaited that one's end it touches nothing that an op before this one has not left there.
// Sequence numbers and turns live in device memory and the kernels advance them, so a captured graph can be replayed.
#pragma once

#include "../protocol/core/coop.h"
#include "../protocol/core/link.h"
#include "../protocol/core/window_selector.h"

namespace moe_rt {

inline constexpr int64_t kNoBadEntry = 0x7fffffffffffffff;

// One rank's private device memory; zero, except bad_entry, when the buffer is made.
struct DeviceState {
  uint64_t seq[kNumKinds];  // last op announced, of either kind
  int64_t bad_entry;        // lowest index into topk_idx with an expert id out of range, or kNoBadEntry; see begin
  uint32_t done;            // blocks of the running launch that have finished their share
  uint32_t failed;          // not zero once this rank has given up: later launches do nothing
  WindowSelector windows;   // of the last op announced
};

// Page-locked host memory that both sides see: what ended the group, written once, `reported` last.
struct HostRecord {
  uint32_t reported, unused;
  Status status;
};

// What every launch is given besides the World and the tensors.
struct Control {
  DeviceState* state;
  HostRecord* record;
  int64_t timeout_ns;
  uint32_t tag;
  uint32_t may_overflow;  // capacity is below the worst case, and overflow ends the group
};

static_assert(sizeof(Control) == 32 && sizeof(HostRecord) == 48 && sizeof(DeviceState) == 48, "the host's layout");

// What the lanes of a block tell each other.
struct BlockShared {
  uint64_t worst;
  int64_t bad_entry;  // as DeviceState's, where one block makes all lists
  uint32_t flag, unused;
};

// An op's number among those of its kind, and its window.
struct Turn {
  uint64_t seq;
  int window;
};
MOE_RT_FN Turn next_turn(const Control& c, Kind kind) {
  return {c.state->seq[int(kind)] + 1, c.state->windows.next(kind)};
}

// How a lane waits for its peers, one after the other, with one deadline for all: each with its own would make a launch
// wait as many timeouts as a lane has silent peers.
template <class Machine>
class DeviceIdle {
 public:
  MOE_RT_FN DeviceIdle(const Machine& m, const World& w, const Control& c, Kind kind)
      : machine_(m), world_(w), control_(c), kind_(kind), deadline_(m.clock_ns() + c.timeout_ns) {}

  MOE_RT_FN void watch(int peer) { peer_ = peer; }

  MOE_RT_FN Code pause(const Mailbox& mailbox, uint64_t seq) {
    if (load_relaxed(world_.poison(world_.rank)) != 0) return Code::kPoisoned;
    if (++looks_ % kLookEvery == 0) {
      const Kind other = kind_ == Kind::kDispatch ? Kind::kCombine : Kind::kDispatch;
      const Mailbox& others = world_.mailbox(world_.rank, other, peer_);
      if (closed_before(mailbox, mailbox, seq)) return Code::kPeerClosed;
      if (out_of_order(mailbox, seq, others, control_.state->seq[int(other)])) return Code::kCallOrderMismatch;
      if (machine_.clock_ns() > deadline_) return Code::kPeerTimeout;
    }
    machine_.nap();
    return Code::kOk;
  }

 private:
  static constexpr uint32_t kLookEvery = 16;
  const Machine& machine_;
  const World& world_;
  const Control& control_;
  Kind kind_;
  int peer_ = -1;
  int64_t deadline_;
  uint32_t looks_ = 0;
};

// Ends the group: the first failure of this rank is reported to the host and, unless it came from there, to all peers.
template <class Link>
MOE_RT_FN void fail(const World& w, const Control& c, Status status, const Link& link) {
  if (!replace_acq_rel(c.state->failed, 0u, 1u)) return;
  if (status.code == Code::kPoisoned) {
    status = poisoned(load_relaxed(w.poison(w.rank)), status);
  } else {
    for (int r = 0; r < w.shape.num_ranks; ++r) link.poison(w, r, poison_word(status.code, w.rank, status.peer));
  }
  c.record->status = status;
  store_release(c.record->reported, 1u);
}

// The same answer on every lane of the block, though another block may fail meanwhile.
template <class Machine>
MOE_RT_FN bool healthy(const Machine& m, const Control& c) {
  if (m.block().rank() == 0) m.shared().flag = load_relaxed(c.state->failed) == 0;
  m.block().sync();
  const bool answer = m.shared().flag != 0;
  m.block().sync();  // before the flag says something else
  return answer;
}

// Announces an op that all blocks have sent, to every peer, and takes its turn: all lanes of one block, which have met
// since. Where an entry was found bad, it announces what refuse(header, entry) makes of the header.
template <class Machine, class Refuse>
MOE_RT_FN void announce_to_all(const Machine& m, const World& w, const Control& c, const Call& call, const Turn& turn,
                               int64_t bad, Refuse&& refuse) {
  const auto block = m.block();
  const Kind kind = kind_of(call.op);
  Header header = w.header(turn.seq, call);
  if (bad != kNoBadEntry) refuse(header, bad);
  const auto link = m.link();
  const Range peers = strided(block, w.shape.num_ranks);
  for (int64_t i = peers.begin; i < peers.end; i += peers.step) {
    link.announce(w, int((w.rank + i) % w.shape.num_ranks), kind, header);
  }
  block.sync();
  if (block.rank() != 0) return;
  c.state->done = 0;
  c.state->bad_entry = kNoBadEntry;
  c.state->seq[int(kind)] = turn.seq;
  c.state->windows.take(kind);
}

// Runs send(window) on every block; the last block announces.
template <class Machine, class Send, class Refuse>
MOE_RT_FN void begin(const Machine& m, const World& w, const Control& c, const Call& call, Send&& send,
                     Refuse&& refuse) {
  const auto block = m.block();
  const Turn turn = next_turn(c, kind_of(call.op));  // at once with what healthy loads: one trip to memory
  if (!healthy(m, c)) return;
  send(turn.window);
  m.let_next_begin();
  streaming_store_fence();
  block.sync();
  if (block.rank() == 0) m.shared().flag = fetch_add_device(c.state->done, 1u) + 1 == uint32_t(m.num_blocks());
  block.sync();
  if (!m.shared().flag) return;
  announce_to_all(m, w, c, call, turn, load_relaxed(c.state->bad_entry), refuse);
}

// Orders failures: the highest code, then the lowest peer, is the smallest key.
MOE_RT_FN uint64_t severity(const Status& s) {
  return s.ok() ? ~uint64_t{0} : uint64_t(0xffff - int(s.code)) << 32 | uint32_t(s.peer);
}

template <class Machine>
MOE_RT_FN Status wait_for(DeviceIdle<Machine>& idle, const World& w, Kind kind, const Header& ours, int peer) {
  idle.watch(peer);
  const Mailbox& mailbox = w.mailbox(w.rank, kind, peer);
  const Code code = wait_signal(mailbox, ours.seq, idle);
  if (code == Code::kOk) return check_header(mailbox.header[ours.seq & 1], ours, peer);
  return {.code = code,
          .op = op_of(ours),
          .phase = Phase::kWait,
          .peer = peer,
          .seq = ours.seq,
          .got = int64_t(load_relaxed(mailbox.signal)),
          .expected = int64_t(ours.seq)};
}

// Waits for every peer and judges all headers, then runs receive(seq, window); otherwise() where the op must be given up,
// so that whoever reads its outputs finds them empty.
template <class Machine, class Receive, class Otherwise>
MOE_RT_FN void wait_for_all(const Machine& m, const World& w, const Control& c, const Call& call, const Turn& turn,
                            Receive&& receive, Otherwise&& otherwise) {
  const auto block = m.block();
  const Kind kind = kind_of(call.op);
  const Header ours = w.header(turn.seq, call);
  if (block.rank() == 0) m.shared().worst = ~uint64_t{0};
  block.sync();
  Status mine;
  DeviceIdle<Machine> idle(m, w, c, kind);
  const Range peers = strided(block, w.shape.num_ranks);
  for (int64_t peer = peers.begin; peer < peers.end; peer += peers.step) {
    const Status s = wait_for(idle, w, kind, ours, int(peer));
    if (severity(s) < severity(mine)) mine = s;
  }
  if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine));
  block.sync();
  const uint64_t worst = load_relaxed(m.shared().worst);
  if (worst == ~uint64_t{0}) {
    receive(turn.seq, turn.window);
    return;
  }
  if (!mine.ok() && severity(mine) == worst) fail(w, c, mine, m.link());
  otherwise();
}

// As wait_for_all, on every block, for the op that was announced last.
template <class Machine, class Receive, class Otherwise>
MOE_RT_FN void finish(const Machine& m, const World& w, const Control& c, const Call& call, Receive&& receive,
                      Otherwise&& otherwise) {
  const Kind kind = kind_of(call.op);
  m.await_launch_before();  // which has advanced the state
  const Turn turn{c.state->seq[int(kind)], c.state->windows.taken(kind)};
  if (!healthy(m, c)) return otherwise();
  wait_for_all(m, w, c, call, turn, receive, otherwise);
}

}  // namespace moe_rt
