// Links to peers whose segments are not mapped: rows are fetched and delivered by a network's gets and puts.
//
// The protocol is unchanged: a needed row is pulled into a staging row of the warp that needs it, a partial row is
// summed there and put, and a signal comes last, after everything before it has arrived. Route lists, which many warps
// read, are copied once by dispatch_fetch. forwarding.h has the launches for two levels.
//
// `Net` is NVSHMEM's device interface, NCCL's (gin_net.h), copies (mapped_net.h), or a test's. Every call names remote
// memory by this rank's symmetric address of the same place. A network guarantees:
//   get              all lanes of a group call it and sync around it; the data is here when it returns
//   put              called like get; its source may be overwritten when it returns
//   put_value        one lane puts a word of 4 or 8 bytes
//   before_signals   puts that this lane knows of arrive before later signals of this lane and of lanes synced after it
//   put_signal       puts a header, then changes the signal from seq - 1 to seq
//   mark             makes a word of one writer, which was zero, non-zero
//   fence, quiet     signals arrive before what is put after a fence, and before marks that are put after a quiet. If
//                    kOrderedSignals is false, only their headers do, and readers check those (DeviceIdle)
//   quiet            also: the network no longer reads this rank's memory for earlier requests
//   poison           makes a word non-zero and keeps it so: the value is this word, or another rank's
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
    group_.sync();  // lanes may still read the previous row
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
  // Makes everything that the whole group has put arrive before the op's signals: once the other lanes have handed over
  // theirs, one lane orders all that its rank has handed to the network so far.
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

// Link of one lane that announces, poisons or closes.
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
    net_.fence();  // after the last signal: of two unordered signals the older may arrive last and stay
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
      net_.quiet();  // the last signals arrive first
      net_.mark(&mailbox(w, Kind::kDispatch).closed, peer);
      net_.mark(&mailbox(w, Kind::kCombine).closed, peer);
      net_.quiet();  // the segment may be unmapped afterwards
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

// Fetches the entries [first, end) of a list, if that is a range of a list of `size`. Other contents of the destination
// are validated by the launch that reads it.
template <class Machine, class T>
MOE_RT_FN void fetch_entries(const Machine& m, const T* list, const char* there, int64_t first, int64_t end,
                             int64_t size, int source) {
  if (first < 0 || end > size || first >= end) return;
  T* const here = const_cast<T*>(list) + first;
  m.links.net.get(m.block(), here, there + first * int64_t{sizeof(T)}, (end - first) * int64_t{sizeof(T)}, source);
}

// Copies the lists of unmapped sources for this rank, one source per block. It precedes dispatch_receive, which reads
// the signals again and judges the headers.
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
      // The next launch judges refusals of all peers together. Any other error ends the group here: if a peer's signal
      // arrived after this wait, that launch would take lists that were never fetched.
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
