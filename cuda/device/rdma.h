// How a rank reaches peers whose segments are not mapped: rows are fetched and delivered by gets and puts of a network.
//
// The protocol stays: a row that is needed is pulled into a staging row of the warp that wants it, a partial row is
// summed there and put, and a signal comes last, after everything before it has arrived. Route lists, which many warps
// read, are copied once by dispatch_fetch. forwarding.h has what goes in two levels.
//
// `Net` is NVSHMEM's device interface, NCCL's (gin_net.h), copies (mapped_net.h), or a test's. Every call names remote
// memory by the own symmetric address of the same place. A network promises:
//   get              by all lanes of a group, which meet around it: what is there is here when it returns
//   put              as get: its source may be written again when it returns
//   put_value        a word of 4 or 8 bytes, by one lane
//   before_signals   what this lane knows to have been put arrives before any signal that it, or whom it tells, puts later
//   put_signal       a header, and then the signal, which becomes seq from seq - 1
//   mark             a word of one writer, which was zero, is not any more
//   fence, quiet     so do signals before what is put behind a fence, and before marks that are put behind a quiet; unless
//                    kOrderedSignals is false: then so do their headers, and readers look there (DeviceIdle)
//   quiet            besides, what was handed over needs the rank's own memory no more
//   poison           a word that was zero is not from now on: it is this one, or another rank's
#pragma once

#include "ops.h"

namespace moe_rt {

template <class Net, class Group>
class RdmaLink {
 public:
  MOE_RT_FN RdmaLink(const Net& net, const NetworkMemory& memory, const Group& group)
      : net_(net), memory_(memory), group_(group), row_(memory.scratch_of(group.index)) {}

  MOE_RT_FN const char* source_row(const World& w, int peer, int64_t offset, int64_t bytes) const {
    if (w.base[peer]) return w.at<const char>(peer, offset);
    group_.sync();  // lanes may still read the row before
    net_.get(group_, row_, memory_.segment + offset, bytes, peer);
    network_fence();
    group_.sync();
    return row_;
  }
  MOE_RT_FN char* target_row(const World& w, int peer, int64_t offset) const {
    return w.base[peer] ? w.at<char>(peer, offset) : row_;
  }
  MOE_RT_FN void deliver(const World& w, int peer, int64_t offset, int64_t bytes) const {
    if (w.base[peer]) return;
    group_.sync();
    network_fence();
    net_.put(group_, memory_.segment + offset, row_, bytes, peer);
    group_.sync();
  }
  template <class T>
  MOE_RT_FN void put(const World& w, int peer, int64_t offset, T value) const {
    if (w.base[peer]) {
      *w.at<T>(peer, offset) = value;
    } else {
      net_.put_value(reinterpret_cast<T*>(memory_.segment + offset), value, peer);
    }
  }
  // What the whole group has put comes before the op's signals: one lane sees to it for all that its rank has handed to
  // the network so far, once the others have handed over theirs.
  MOE_RT_FN void flush() const {
    group_.sync();
    if (group_.leader()) net_.before_signals();
  }

 private:
  const Net& net_;
  const NetworkMemory& memory_;
  Group group_;
  char* row_;
};

// The same for one lane that announces, poisons or leaves.
template <class Net>
class RdmaSignals {
 public:
  MOE_RT_FN RdmaSignals(const Net& net, const NetworkMemory& memory) : net_(net), memory_(memory) {}

  MOE_RT_FN void announce(const World& w, int peer, Kind kind, const Header& header) const {
    if (w.base[peer]) {
      mapped_.announce(w, peer, kind, header);
      return;
    }
    Header& out = memory_.outbox[(int(kind) * w.shape.num_ranks + peer) * 2 + int(header.seq & 1)];
    out = header;
    network_fence();
    Mailbox& there = mailbox(w, kind);
    net_.fence();  // after the last signal: of two that nothing orders, the older one may arrive last and stay
    net_.put_signal(&there.header[header.seq & 1], &out, &there.signal, header.seq, peer);
  }
  MOE_RT_FN void poison(const World& w, int peer, uint64_t word) const {
    if (w.base[peer]) {
      mapped_.poison(w, peer, word);
    } else {
      net_.poison(reinterpret_cast<uint64_t*>(memory_.segment + w.layout.poison), word, peer);
    }
  }
  MOE_RT_FN void close(const World& w, int peer) const {
    if (w.base[peer]) {
      mapped_.close(w, peer);
    } else {
      net_.quiet();  // the last signals first
      net_.mark(&mailbox(w, Kind::kDispatch).closed, peer);
      net_.mark(&mailbox(w, Kind::kCombine).closed, peer);
      net_.quiet();  // before the segment may go
    }
  }

 private:
  MOE_RT_FN Mailbox& mailbox(const World& w, Kind kind) const {
    return reinterpret_cast<Mailbox*>(memory_.segment + w.layout.mailboxes)[int(kind) * w.shape.num_ranks + w.rank];
  }
  const Net& net_;
  const NetworkMemory& memory_;
  MappedLink mapped_;
};

template <class Net>
struct RdmaLinks {
  static constexpr bool kWarpsOnly = true, kTwoLevel = false, kOrderedSignals = Net::kOrderedSignals;
  NetworkMemory memory;
  Net net;
  MOE_RT_FN RdmaSignals<Net> link() const { return {net, memory}; }
  template <class Group>
  MOE_RT_FN RdmaLink<Net, Group> link(const Group& group) const {
    return {net, memory, group};
  }
};

// The entries [first, end) of a list, if that is a range of a list of `size`: what else may stand there is judged by
// the launch that reads it.
template <class Machine, class T>
MOE_RT_FN void fetch_entries(const Machine& m, const T* list, const char* there, int64_t first, int64_t end,
                             int64_t size, int source) {
  if (first < 0 || end > size || first >= end) return;
  T* const here = const_cast<T*>(list) + first;
  m.links.net.get(m.block(), here, there + first * int64_t{sizeof(T)}, (end - first) * int64_t{sizeof(T)}, source);
}

// Copies what unmapped sources list for this rank, a block for each source: before dispatch_receive, which looks at the
// signals again and judges.
template <class Dims, class Elem, class Machine>
MOE_RT_FN void fetch_lists(const Launch<Dims, Elem, Machine>& launch, const DispatchArgs& a) {
  using Acc = typename Elem::Acc;
  const auto& [m, dims, w, c] = launch;
  m.await_launch_before();
  if (!healthy(m, c)) return;
  const auto block = m.block();
  const uint64_t seq = c.state->seq[int(Kind::kDispatch)];
  const Header ours = w.header(seq, call_of(a, c.tag));
  const int window = c.state->windows.taken(Kind::kDispatch);
  const Layout::Window& o = w.layout.window[window];
  const char* const there = m.links.memory.segment;
  DeviceIdle<Machine> idle(m, w, c, Kind::kDispatch);
  for (int source = m.block_index(); source < w.shape.num_ranks; source += m.num_blocks()) {
    if (w.base[source]) continue;
    if (block.rank() == 0) {
      const Status s = wait_for(idle, w, Kind::kDispatch, ours, source);
      // The next launch judges refusals, of all peers at once. Anything else ends the group here: of a peer whose signal
      // comes after this wait, that launch would take lists that nobody fetched.
      if (!s.ok() && !is_refusal(s.code)) fail(w, c, s, m.link());
      m.shared().flag = s.ok();
    }
    block.sync();
    const bool announced = m.shared().flag != 0;
    block.sync();
    if (!announced) continue;
    const auto lists = RouteLists<Acc>::view(w, source, window);
    m.links.net.get(block, lists.counts.start, there + o.counts, o.pulls - o.counts, source);
    network_fence();
    block.sync();
    const int64_t pull = lists.pull_offs[w.rank], pulls_end = lists.pull_offs[w.rank + 1];
    const int64_t copy = lists.copy_offs[w.rank], copies_end = lists.copy_offs[w.rank + 1];
    const int64_t tokens = w.shape.num_max_tokens, most_copies = tokens * w.shape.num_topk;
    fetch_entries(m, lists.pulls.start, there + o.pulls, pull, pulls_end, tokens * w.shape.num_visits(), source);
    fetch_entries(m, lists.copies.start, there + o.copies, copy, copies_end, most_copies, source);
    fetch_entries(m, lists.weights.start, there + o.weights, copy, copies_end, most_copies, source);
  }
  network_fence();
}

}  // namespace moe_rt
