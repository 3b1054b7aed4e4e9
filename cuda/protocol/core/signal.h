// Announcement of an op to a peer, and the wait for a peer's announcement: mailboxes, headers and the bounded wait.
// Each op announces after its first role has written and waits before its second role reads.
#pragma once

#include "atomics.h"
#include "status.h"

namespace moe_rt {

// Description of a source's op n. A reader compares it with its own header before it trusts any other data of the
// source.
struct Header {
  uint64_t seq;                  // sequence number of the op within its kind
  uint64_t config;               // World::config
  uint64_t call;                 // call_word(): op, layer tag, and row format or handle
  Code status;                   // kOk, or why the source refuses this op
  int32_t num_tokens;            // tokens of the source in this op
  int64_t got, expected;         // details of the refusal, see Status
  int32_t max_tokens, capacity;  // dispatch only: bound on each rank's tokens; rows of recv_x

  MOE_RT_FN void refuse(Code why, int64_t got_, int64_t expected_) { status = why, got = got_, expected = expected_; }
};

// Mailbox for one (owner, kind, source); only the source writes it. It has two headers because a source may already
// announce n + 1 while the owner still reads the header of n; the source cannot be further ahead (docs/protocol.md,
// "Why windows need no acknowledgement").
struct alignas(128) Mailbox {
  uint64_t signal;  // last sequence number announced; monotonic, never reset
  Header header[2];
  uint64_t closed;  // not zero once the source has closed its buffer and will announce nothing more
};
static_assert(sizeof(Mailbox) == 128, "a mailbox is one pair of cache lines");

inline constexpr int kTagBits = 28;

// An op as this rank issues it.
struct Call {
  Op op;
  uint32_t tag;             // number of the layer
  uint64_t handle_seq = 0;  // seq of the dispatch whose handle is reused; 0 for dispatch itself
  int32_t num_tokens = 0;
  int32_t max_tokens = 0, capacity = 0;  // dispatch only
  uint32_t row_format = 0;               // dispatch only: format of rows with scales, else 0
};

// Packs op | layer tag | rest. The rest distinguishes ranks that combine different handles (low bits of the handle's
// dispatch number) or dispatch different rows (the row format).
MOE_RT_FN constexpr uint64_t call_word(const Call& call) {
  const uint64_t rest = call.op == Op::kDispatch ? call.row_format : call.handle_seq & 0xffffffffu;
  return uint64_t(call.op) << 60 | uint64_t(call.tag & ((1u << kTagBits) - 1)) << 32 | rest;
}

MOE_RT_FN constexpr Op op_of(const Header& header) { return Op(header.call >> 60); }

// A poison word names what went wrong, the rank that found it and, if a peer is to blame, that peer: three 16-bit
// fields, with 1 added to each rank. Zero means healthy.
MOE_RT_FN constexpr uint64_t poison_word(Code code, int origin, int peer) {
  return uint64_t(peer + 1) << 32 | uint64_t(origin + 1) << 16 | uint64_t(code);
}
MOE_RT_FN constexpr Code poison_code(uint64_t word) { return Code(word & 0xffff); }
MOE_RT_FN constexpr int poison_origin(uint64_t word) { return int(word >> 16 & 0xffff) - 1; }
MOE_RT_FN constexpr int poison_peer(uint64_t word) { return int(word >> 32 & 0xffff) - 1; }

// True if the word blames `rank` for a timeout, but that rank has itself waited for most of `timeout`. Then the peer
// that it waits for is to blame. If a rank stops half-way through announcing an op, some ranks wait in that op and
// others in the next one for them. Both timeouts expire almost together, and which one is noticed first means nothing.
template <class Time>
MOE_RT_FN constexpr bool blames_who_waits(uint64_t word, int rank, Time waited, Time timeout) {
  return poison_code(word) == Code::kPeerTimeout && poison_peer(word) == rank && waited > timeout / 4 * 3;
}

// Status of a rank that finds the word: `peer` is the rank that wrote it, `got` and `expected` the code and the peer
// that it blames.
MOE_RT_FN Status poisoned(uint64_t word, Status where = {}) {
  where.code = Code::kPoisoned;
  where.peer = poison_origin(word);
  where.got = int64_t(poison_code(word));
  where.expected = poison_peer(word);
  return where;
}

#if defined(MOE_RT_WEAKENABLE)  // set by a test: chains across the wrap must then fail
inline bool compares_plainly = false;
#endif

// The signed distance makes the comparison survive wrap-around.
MOE_RT_FN bool reached(uint64_t signal, uint64_t seq) {
#if defined(MOE_RT_WEAKENABLE)
  if (compares_plainly) return signal >= seq;
#endif
  return int64_t(signal - seq) >= 0;
}

// SYNC POINT closed, writer side. Pairs with closed_before. Without the release a reader could see the flag but not the
// last signal before it, and abandon an op that is complete.
MOE_RT_FN void post_closed(Mailbox& mailbox) { store_release(mailbox.closed, uint64_t{1}); }

// SYNC POINT signal, writer side. Every write to this op's window happens before it, on every lane: callers sync first.
// Pairs with wait_signal. Without the release: 1. source writes rows, 2. signal becomes visible, 3. reader pulls the
// old rows. The signal also publishes that this rank's *reads* of the previous op, of either kind, are over, because
// peers reuse windows.
MOE_RT_FN void post(Mailbox& mailbox, const Header& header) {
  mailbox.header[header.seq & 1] = header;
  store_release(mailbox.signal, header.seq);
}

// SYNC POINT closed, reader side. Pairs with post_closed. True if the rank that should announce `seq` in this mailbox
// has closed, according to its own mailbox, without announcing it.
MOE_RT_FN bool closed_before(const Mailbox& announcers, const Mailbox& mailbox, uint64_t seq) {
  return load_acquire(announcers.closed) != 0 && !reached(load_acquire(mailbox.signal), seq);
}

// True if the peer's mailbox of the other kind shows that it has moved past the awaited op without issuing it. This
// rank has issued `other_seq` ops of the other kind. All ranks issue the same ops in the same order, so a peer that is
// ahead there must have announced the awaited op first, and its release makes that announcement visible here.
MOE_RT_FN bool out_of_order(const Mailbox& mailbox, uint64_t seq, const Mailbox& other, uint64_t other_seq) {
  return !reached(other_seq, load_acquire(other.signal)) && !reached(load_acquire(mailbox.signal), seq);
}

// SYNC POINT signal, reader side. Pairs with post. Returns kOk once the source has announced `seq`, or the code that
// `idle` found. idle.pause(mailbox, seq) is called between reads; it yields, and ends the wait on timeout, poison or
// death.
template <class Idle>
MOE_RT_FN Code wait_signal(const Mailbox& mailbox, uint64_t seq, Idle& idle) {
  while (!reached(load_acquire(mailbox.signal), seq)) {
    const Code code = idle.pause(mailbox, seq);
    if (code != Code::kOk) return code;
  }
  return Code::kOk;
}

// Compares a peer's header with this rank's (`ours`). A refusal takes precedence over the call: a rank that refuses an
// op may not know the handle that it was given.
MOE_RT_FN Status check_header(const Header& announced, const Header& ours, int peer) {
  const Header theirs = read_once(announced);
  Status s{.op = op_of(ours), .phase = Phase::kWait, .peer = peer, .seq = ours.seq};
  if (theirs.config != ours.config) {
    s.code = Code::kConfigMismatch, s.got = int64_t(theirs.config), s.expected = int64_t(ours.config);
  } else if (theirs.seq != ours.seq) {
    s.code = Code::kCorruptPeer, s.got = int64_t(theirs.seq), s.expected = int64_t(ours.seq);
  } else if (theirs.status != Code::kOk) {
    s.code = is_refusal(theirs.status) ? theirs.status : Code::kCorruptPeer;
    s.got = theirs.got, s.expected = theirs.expected;
  } else if (theirs.call != ours.call && ours.status == Code::kOk) {
    const bool same_call = op_of(ours) == Op::kDispatch && theirs.call >> 32 == ours.call >> 32;
    s.code = same_call ? Code::kRowFormatMismatch : Code::kCallOrderMismatch;
    s.got = int64_t(theirs.call), s.expected = int64_t(ours.call);
  } else if (theirs.max_tokens != ours.max_tokens && ours.status == Code::kOk) {
    s.code = Code::kBoundMismatch, s.got = theirs.max_tokens, s.expected = ours.max_tokens;
  }
  return s;
}

}  // namespace moe_rt
