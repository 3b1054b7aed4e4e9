// Frame of every op on a GPU, in two launches: one begins the op (writes and announces), one finishes it (waits and
// reads). The halves are those of the CPU engine (cpu/exchange.h).
//
// No block waits for another block of its own launch. The sending launch never waits: its last block announces. Every
// block of the receiving launch waits by itself for every peer; the peers' sending launches do not need the
// multiprocessors that it occupies. A launch of one block may wait first, so that a late peer keeps only one block
// busy. An op of very few tokens may do both halves in one launch of one block (whole_ops.h). With programmatic
// dependent launch, a launch may begin while the previous launch of its op still runs, once all blocks of that one have
// sent their share. Until it has waited for that launch's end, it reads only state left by earlier ops. Sequence
// numbers and windows are in device memory and the kernels advance them, so a captured graph can be replayed.
#pragma once

#include "../protocol/core/coop.h"
#include "../protocol/core/link.h"
#include "../protocol/core/tuning.h"
#include "../protocol/core/window_selector.h"
#include "../protocol/two_level/link.h"

namespace moe_rt {

inline constexpr int64_t kNoBadEntry = 0x7fffffffffffffff;

// One rank's private device memory: zero, except bad_entry, when the buffer is created.
struct DeviceState {
  uint64_t seq[kNumKinds];  // last op announced of each kind
  int64_t bad_entry;        // lowest index into topk_idx with an expert id out of range, or kNoBadEntry; see begin
  uint32_t done;            // blocks of the running launch that have finished their share
  uint32_t failed;          // not zero once this rank has failed: later launches do nothing
  WindowSelector windows;   // state after the last op announced
};

// Page-locked host memory, accessible to both sides: the error that ended the group, written once, `reported` last.
struct HostRecord {
  uint32_t reported, unused;
  Status status;
};

// Arguments of every launch, in addition to the World and the tensors.
#define MOE_RT_CONTROL(FIELD) \
  FIELD(DeviceState*, state)  \
  FIELD(HostRecord*, record)  \
  FIELD(int64_t, timeout_ns)  \
  FIELD(uint32_t, tag)        \
  FIELD(uint32_t, may_overflow) /* capacity is below the worst case, and overflow ends the group */
struct Control {
  MOE_RT_CONTROL(MOE_RT_MEMBER)
};

static_assert(sizeof(Control) == 32 && sizeof(HostRecord) == 48 && sizeof(DeviceState) == 48, "the host's layout");

// Shared memory through which the lanes of a block communicate.
struct BlockShared {
  uint64_t worst;
  int64_t bad_entry;  // DeviceState::bad_entry of an op whose lists are built by one block
  uint32_t flag, unused;
};

// An op's sequence number and window.
struct OpSlot {
  uint64_t seq;
  int window;
};
MOE_RT_FN OpSlot next_slot(const Control& c, Kind kind) {
  return {c.state->seq[int(kind)] + 1, c.state->windows.next(kind)};
}

// Wait of a lane for its peers, one after the other, with one deadline for all: with one deadline per peer, a launch
// could wait for as many timeouts as a lane has silent peers. If a proxy passes on a peer's announcements, the lane
// watches the proxy and waits a quarter longer, so that a rank closer to the cause reports first.
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
    if (const Code code = read_poison(); code != Code::kOk) return code;
    if (++looks_ % tuning::kDeviceLookEvery == 0) {
      const Kind other = kind_ == Kind::kDispatch ? Kind::kCombine : Kind::kDispatch;
      const Mailbox& others = world_.mailbox(world_.rank, other, peer_);
      const Mailbox& announcers = world_.mailbox(world_.rank, kind_, announcer());
      if (closed_before(announcers, mailbox, seq) && !on_its_way(mailbox, seq)) {
        // Prefer the poison word, which names the cause: 1. this rank reads no poison, 2. its peer fails, poisons it and
        // closes, 3. this rank reads that the peer has closed.
        const Code code = read_poison();
        return code != Code::kOk ? code : Code::kPeerClosed;
      }
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
  MOE_RT_FN Code read_poison() const {
    const uint64_t word = load_relaxed(world_.poison(world_.rank));
    if (word == 0) return Code::kOk;
    const int64_t waited = machine_.clock_ns() - deadline_ + control_.timeout_ns;
    return blames_who_waits(word, world_.rank, waited, control_.timeout_ns) ? Code::kPeerTimeout : Code::kPoisoned;
  }
  // Passed-on announcements of the two kinds may arrive out of order.
  MOE_RT_FN bool in_order() const { return !Machine::kTwoLevel || announces_itself(world_, peer_); }
  // If the network does not order signals (gin_net.h), a later signal of a sender may be seen before an earlier one.
  // The earlier one's header is there by then: a reader that has acquired the later signal finds it.
  MOE_RT_FN static bool on_its_way(const Mailbox& mailbox, uint64_t seq) {
    return !Machine::kOrderedSignals && load_relaxed(mailbox.header[seq & 1].seq) == seq;
  }
  MOE_RT_FN int64_t deadline() const {
    if constexpr (!Machine::kTwoLevel) return deadline_;
    return announces_directly(world_, kind_, peer_) ? deadline_ : deadline_ + control_.timeout_ns / 4;
  }
  const Machine& machine_;
  const World& world_;
  const Control& control_;
  Kind kind_;
  int peer_ = -1;
  int64_t deadline_;
  uint32_t looks_ = 0;
};

// Ends the group: reports this rank's first failure to the host and to all peers. A poison word found here is passed on
// as well, since its author may have died before it reached everyone.
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

// True if this rank has not failed; identical on every lane of the block, although another block may fail meanwhile.
template <class Machine>
MOE_RT_FN bool healthy(const Machine& m, const Control& c) {
  if (m.block().rank() == 0) m.shared().flag = load_relaxed(c.state->failed) == 0;
  m.block().sync();
  const bool answer = m.shared().flag != 0;
  m.block().sync();  // the flag is reused after this sync
  return answer;
}

// Announces an op that all blocks have sent, to every peer, and advances the rank's state. All lanes of one block call
// it, after a sync. If a bad entry was found, refuse(header, entry) turns the header into a refusal.
template <class Machine, class Refuse>
MOE_RT_FN void announce_to_all(const Machine& m, const World& w, const Control& c, const Call& call, const OpSlot& slot,
                               int64_t bad, Refuse&& refuse) {
  const auto block = m.block();
  const Kind kind = kind_of(call.op);
  Header header = w.header(slot.seq, call);
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
  c.state->seq[int(kind)] = slot.seq;
  c.state->windows.take(kind);
}

// True if this block is the last of its launch to call this function, and therefore sees the writes of all blocks;
// identical on every lane.
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
  const OpSlot slot = next_slot(c, kind_of(call.op));  // loads together with those of healthy: one round trip to memory
  if (!healthy(m, c)) return;
  send(slot.window);
  m.let_next_begin();
  if (!comes_last(m, c)) return;
  announce_to_all(m, w, c, call, slot, load_relaxed(c.state->bad_entry), refuse);
}

// Orders failures: the smallest key has the highest code, then the lowest peer.
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

inline constexpr uint64_t kNoFailure = ~uint64_t{0};

// Waits for every peer for which includes(peer) is true and checks its header. `mine` is the worst status that this lane
// has found. Returns the severity of the worst status of all lanes, or kNoFailure, identical on every lane.
template <class Machine, class Includes>
MOE_RT_FN uint64_t wait_for_peers(const Machine& m, const World& w, const Control& c, Kind kind, const Header& ours,
                                  Status& mine, Includes&& includes) {
  const auto block = m.block();
  if (block.rank() == 0) m.shared().worst = kNoFailure;
  block.sync();
  DeviceIdle<Machine> idle(m, w, c, kind);
  const Range peers = strided(block, w.shape.num_ranks);
  for (int64_t peer = peers.begin; peer < peers.end; peer += peers.step) {
    if (!includes(int(peer))) continue;
    const Status s = wait_for(idle, w, kind, ours, int(peer));
    if (severity(s) < severity(mine)) mine = s;
  }
  if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine));
  block.sync();
  return load_relaxed(m.shared().worst);
}

// Waits for every peer and checks all headers, then runs receive(seq, window). If the op fails it runs on_failure(), so
// that later readers of its outputs find them empty.
template <class Machine, class Receive, class OnFailure>
MOE_RT_FN void wait_for_all(const Machine& m, const World& w, const Control& c, const Call& call, const OpSlot& slot,
                            Receive&& receive, OnFailure&& on_failure) {
  Status mine;
  const uint64_t worst =
      wait_for_peers(m, w, c, kind_of(call.op), w.header(slot.seq, call), mine, [](int) { return true; });
  if (worst == kNoFailure) {
    receive(slot.seq, slot.window);
    return;
  }
  if (!mine.ok() && severity(mine) == worst) fail(w, c, mine, m.link());
  on_failure();
}

// Runs wait_for_all on every block, for the op that was announced last.
template <class Machine, class Receive, class OnFailure>
MOE_RT_FN void finish(const Machine& m, const World& w, const Control& c, const Call& call, Receive&& receive,
                      OnFailure&& on_failure) {
  const Kind kind = kind_of(call.op);
  m.await_launch_before();  // the launch before has advanced the state
  const OpSlot slot{c.state->seq[int(kind)], c.state->windows.taken(kind)};
  if (!healthy(m, c)) return on_failure();
  wait_for_all(m, w, c, call, slot, receive, on_failure);
}

}  // namespace moe_rt
