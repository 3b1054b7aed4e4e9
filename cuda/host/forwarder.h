// What a CPU rank does for ranks of other nodes, where rows go in two levels (protocol/two_level/).
//
// For the far ranks that it serves it stages what they send to this node, each row once, and sends home what this node
// makes of their tokens, one row for each. In between it hands on what they announce: no rank completes an op before it
// has heard of all, so windows need no other acknowledgement than where all reach all (docs/two_level.md).
#pragma once

#include <vector>

#include "../protocol/two_level/forward.h"
#include "../protocol/two_level/link.h"
#include "far_network.h"
#include "lazy_memory.h"
#include "node_tables.h"

namespace moe_rt {

class Forwarder : public FarNetwork {
 public:
  // Throws std::system_error where there is no address space for the sums.
  Forwarder(const World& w, const NodeTables& tables, Network& network)
      : FarNetwork({w.base, w.base + w.shape.num_ranks}, network),
        tables_(tables),
        lists_(w.shape.num_ranks),
        sums_(int64_t(tables.served().size()) * w.shape.num_max_tokens * w.shape.row_bytes()) {
    for (int r = 0; r < w.shape.num_ranks; ++r) {
      const int by = tables.view().forwarder[r];
      if (by != r) lists_[r] = w.at<char>(by, staged(w, r));
    }
  }

  char* const* lists() const { return lists_.data(); }  // World::mirror

  // Those whom this rank tells itself what it announces: of other nodes its forwarders, in a dispatch-type op.
  std::vector<Posting> own_postings(const Header& header, int rank) const {
    std::vector<Posting> postings;
    for (int node = 0; node < tables_.num_nodes() && kind_of(op_of(header)) == Kind::kDispatch; ++node) {
      if (node != tables_.own()) postings.push_back({tables_.forwarder(node, rank), rank, header});
    }
    return postings;
  }

  // Passes on what is announced: of a dispatch-type op what served ranks have, to the neighbours, and of a combine-type
  // op what this node's have, to served ranks. Headers go as they came: a refusal is for all to hear.
  Status pass_on(const World& w, const Header& own, HostIdle& idle) {
    const Kind kind = kind_of(op_of(own));
    const auto header_of = [&](int source) {
      return source == w.rank ? own : read_once(w.mailbox(w.rank, kind, source).header[own.seq & 1]);
    };
    if (kind == Kind::kDispatch) {
      // SYNC POINT signal, passed on: post releases what was staged, and pairs with wait_signal. That this rank has heard
      // of the source comes before, so that the source's reads of the op before are over for whoever hears of it here.
      for (const int source : tables_.served()) {
        for (const int to : tables_.neighbours()) {
          if (to != w.rank) post(w.mailbox(to, kind, source), header_of(source));
        }
      }
      return {};
    }
    std::vector<Posting> postings;
    for (const int to : tables_.served()) {
      for (const int source : tables_.neighbours()) postings.push_back({to, source, header_of(source)});
    }
    return announce(w, postings, idle);
  }

  // Brings what served sources list for this node, and each row that it wants, once. Fills `forwards` as mark_tokens.
  template <class Weight>
  Status stage(const World& w, int window, int32_t* forwards, int64_t row_bytes, HostIdle& idle) {
    const std::vector<int32_t>& served = tables_.served();
    const Layout::Window& o = w.layout.window[window];
    const bool few = lists_in_one_trip(w);
    for (const int s : served) network().get(s, o.counts, lists_[s], (few ? o.tokens : o.pulls) - o.counts);
    if (const Status status = settle(served, Phase::kGather, idle); !status.ok()) return status;
    for (const int s : served) {
      const auto lists = RouteLists<Weight>::view(w, s, window);
      for (const int r : tables_.neighbours()) {
        if (!few) get_lists(w, window, s, lists, r);
      }
    }
    if (const Status status = few ? Status{} : settle(served, Phase::kGather, idle); !status.ok()) return status;
    for (size_t i = 0; i < served.size(); ++i) {
      int32_t* const marks = forwards + int64_t(i) * w.shape.num_max_tokens;
      if (!mark_tokens<Weight>(Solo{}, w, served[i], window, marks))
        return failed(Code::kCorruptPeer, Phase::kGather, served[i]);
    }
    return stage_rows(w, window, forwards, row_bytes, idle);
  }

  // The rows alone, of an op that reuses a plan.
  Status stage_rows(const World& w, int window, const int32_t* forwards, int64_t row_bytes, HostIdle& idle) {
    const auto to = [&](int s) { return w.at<char>(w.rank, staged(w, s) + w.layout.staged.rows); };
    RowGetter rows(w, network(), window, row_bytes, to);
    for_wanted(Solo{}, w, forwards, [&](int64_t, int source, int32_t token) { rows.get(source, token); });
    rows.end();
    return settle(tables_.served(), Phase::kGather, idle);
  }

  // Adds up this node's partials of served ranks' tokens and sends the sums home, with scalars where there are any.
  // Every lane calls it; `sum` is a row of scratch of this lane.
  template <class Coop, class Rows>
  void send_sums(const Coop& coop, const World& w, int window, const int32_t* forwards, const Rows& rows, bool scalars,
                 char* sum) {
    const auto coded = [&](int64_t i) { return sums_.start() + i * w.shape.row_bytes(); };
    moe_rt::send_sums<RuntimeDims>(
        coop, w, window, forwards, rows, scalars, sum, coded,
        [&](int to, int64_t offset, const char* row, int64_t bytes) { network().put(to, offset, row, bytes); });
  }

 private:
  static int64_t staged(const World& w, int source) {
    return w.layout.staged.lists + w.nodes.served_at[source] * w.layout.staged.bytes;
  }

  const NodeTables& tables_;
  std::vector<char*> lists_;  // [R]; nullptr of this node's
  LazyMemory sums_;           // [served][T] rows
};

}  // namespace moe_rt
