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
#include "../protocol/two_level/announcers.h"

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
// wait as many timeouts as a lane has silent peers. Where what a peer announces is passed on, it looks at whoever does
// that, and waits a quarter longer, so that whoever knows better speaks first.
template <class Machine>
class DeviceIdle {
 public:
  MOE_RT_FN DeviceIdle(const Machine& m, const World& w, const Control& c, Kind kind)
      : machine_(m), world_(w), control_(c), kind_(kind), deadline_(m.clock_ns() + c.timeout_ns) {}

  MOE_RT_FN void watch(int peer) { peer_ = peer; }
  MOE_RT_FN int announcer() const {
    if constexpr (Machine::kTwoLevel) return announcer_of(world_, kind_, peer_);
    return peer_;
  }

  MOE_RT_FN Code pause(const Mailbox& mailbox, uint64_t seq) {
    if (const uint64_t word = load_relaxed(world_.poison(world_.rank)); word != 0) {
      const int64_t waited = machine_.clock_ns() - deadline_ + control_.timeout_ns;
      return blames_who_waits(word, world_.rank, waited, control_.timeout_ns) ? Code::kPeerTimeout : Code::kPoisoned;
    }
    if (++looks_ % kLookEvery == 0) {
      const Kind other = kind_ == Kind::kDispatch ? Kind::kCombine : Kind::kDispatch;
      const Mailbox& others = world_.mailbox(world_.rank, other, peer_);
      const Mailbox& announcers = world_.mailbox(world_.rank, kind_, announcer());
      if (closed_before(announcers, mailbox, seq) && !on_its_way(mailbox, seq)) return Code::kPeerClosed;
      if (in_order() && out_of_order(mailbox, seq, others, control_.state->seq[int(other)]) &&
          !on_its_way(mailbox, seq)) {
        return Code::kCallOrderMismatch;
      }
      if (machine_.clock_ns() > deadline()) return Code::kPeerTimeout;
    }
    machine_.nap();
    return Code::kOk;
  }

 private:
  static constexpr uint32_t kLookEvery = 16;
  // Of what is passed on, one kind may be told ahead of the other.
  MOE_RT_FN bool in_order() const { return !Machine::kTwoLevel || announces_itself(world_, peer_); }
  // Where signals have no order among themselves (gin_net.h), one may be seen after what its sender has signalled since,
  // but its header is not: whoever has looked at the later one, by an acquire, finds that.
  MOE_RT_FN static bool on_its_way(const Mailbox& mailbox, uint64_t seq) {
    return !Machine::kOrderedSignals && load_relaxed(mailbox.header[seq & 1].seq) == seq;
  }
  MOE_RT_FN int64_t deadline() const {
    if constexpr (!Machine::kTwoLevel) return deadline_;
    return announces_first(world_, kind_, peer_) ? deadline_ : deadline_ + control_.timeout_ns / 4;
  }
  const Machine& machine_;
  const World& world_;
  const Control& control_;
  Kind kind_;
  int peer_ = -1;
  int64_t deadline_;
  uint32_t looks_ = 0;
};

// Ends the group: the first failure of this rank is reported to the host and to all peers, also what another has found,
// who may not have lived to tell everyone.
template <class Link>
MOE_RT_FN void fail(const World& w, const Control& c, Status status, const Link& link) {
  if (!replace_acq_rel(c.state->failed, 0u, 1u)) return;
  uint64_t word = poison_word(status.code, w.rank, status.peer);
  if (status.code == Code::kPoisoned) {
    word = load_relaxed(w.poison(w.rank));
    status = poisoned(word, status);
  }
  for (int r = 0; r < w.shape.num_ranks; ++r) link.poison(w, r, word);
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

// Whether this block is the last of its launch to come here, and so has behind it what all blocks have written; the same
// on every lane.
template <class Machine>
MOE_RT_FN bool comes_last(const Machine& m, const Control& c) {
  const auto block = m.block();
  streaming_store_fence();
  block.sync();
  if (block.rank() == 0) m.shared().flag = fetch_add_device(c.state->done, 1u) + 1 == uint32_t(m.num_blocks());
  block.sync();
  return m.shared().flag != 0;
}

// Runs send(window) on every block; the last block announces.
template <class Machine, class Send, class Refuse>
MOE_RT_FN void begin(const Machine& m, const World& w, const Control& c, const Call& call, Send&& send,
                     Refuse&& refuse) {
  const Turn turn = next_turn(c, kind_of(call.op));  // at once with what healthy loads: one trip to memory
  if (!healthy(m, c)) return;
  send(turn.window);
  m.let_next_begin();
  if (!comes_last(m, c)) return;
  announce_to_all(m, w, c, call, turn, load_relaxed(c.state->bad_entry), refuse);
}

// Orders failures: the highest code, then the lowest peer, is the smallest key.
MOE_RT_FN uint64_t severity(const Status& s) {
  return s.ok() ? ~uint64_t{0} : uint64_t(0xffff - int(s.code)) << 32 | uint32_t(s.peer);
}

MOE_RT_FN Code code_of(uint64_t severity) { return Code(0xffff - int(severity >> 32)); }

template <class Machine>
MOE_RT_FN Status wait_for(DeviceIdle<Machine>& idle, const World& w, Kind kind, const Header& ours, int peer) {
  idle.watch(peer);
  const Mailbox& mailbox = w.mailbox(w.rank, kind, peer);
  const Code code = wait_signal(mailbox, ours.seq, idle);
  if (code == Code::kOk) return check_header(mailbox.header[ours.seq & 1], ours, peer);
  return {.code = code,
          .op = op_of(ours),
          .phase = Phase::kWait,
          .peer = idle.announcer(),
          .seq = ours.seq,
          .got = int64_t(load_relaxed(mailbox.signal)),
          .expected = int64_t(ours.seq)};
}

inline constexpr uint64_t kAllWell = ~uint64_t{0};

// Waits for every peer that `heeds(peer)` names and judges what it says. `mine` is the worst that this lane has found;
// returns that of all lanes by severity, or kAllWell, the same on every lane.
template <class Machine, class Heeds>
MOE_RT_FN uint64_t listen(const Machine& m, const World& w, const Control& c, Kind kind, const Header& ours,
                          Status& mine, Heeds&& heeds) {
  const auto block = m.block();
  if (block.rank() == 0) m.shared().worst = kAllWell;
  block.sync();
  DeviceIdle<Machine> idle(m, w, c, kind);
  const Range peers = strided(block, w.shape.num_ranks);
  for (int64_t peer = peers.begin; peer < peers.end; peer += peers.step) {
    if (!heeds(int(peer))) continue;
    const Status s = wait_for(idle, w, kind, ours, int(peer));
    if (severity(s) < severity(mine)) mine = s;
  }
  if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine));
  block.sync();
  return load_relaxed(m.shared().worst);
}

// Waits for every peer and judges all headers, then runs receive(seq, window); otherwise() where the op must be given up,
// so that whoever reads its outputs finds them empty.
template <class Machine, class Receive, class Otherwise>
MOE_RT_FN void wait_for_all(const Machine& m, const World& w, const Control& c, const Call& call, const Turn& turn,
                            Receive&& receive, Otherwise&& otherwise) {
  Status mine;
  const uint64_t worst = listen(m, w, c, kind_of(call.op), w.header(turn.seq, call), mine, [](int) { return true; });
  if (worst == kAllWell) {
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
