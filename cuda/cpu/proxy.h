// Proxy duties of a CPU rank for its clients, ranks of other nodes, if rows go in two levels (protocol/two_level/).
//
// It stages what its clients send to this node, each row once, and sends home the sum of this node's rows for their
// tokens, one row each. In between it passes on their announcements: no rank completes an op before all signals have
// reached it, so windows need no other acknowledgement than in flat mode (docs/two_level.md).
#pragma once

#include <vector>

#include "../net/remote_network.h"
#include "../protocol/two_level/forward.h"
#include "../protocol/two_level/link.h"
#include "lazy_memory.h"
#include "world_tables.h"

namespace moe_rt {

class Proxy : public RemoteNetwork {
 public:
  // Throws std::system_error if the address space for the sums cannot be reserved.
  Proxy(const World& w, const NodeTables& tables, Network& network)
      : RemoteNetwork({w.base, w.base + w.shape.num_ranks}, network),
        tables_(tables),
        lists_(w.shape.num_ranks),
        sums_(int64_t(tables.clients().size()) * w.shape.num_max_tokens * w.shape.row_bytes()) {
    for (int r = 0; r < w.shape.num_ranks; ++r) {
      const int by = tables.view().proxy_of[r];
      if (by != r) lists_[r] = w.at<char>(by, staged(w, r));
    }
  }

  char* const* lists() const { return lists_.data(); }  // World::mirror

  // Returns this rank's announcements to other nodes: to its proxies there, in a dispatch-type op.
  std::vector<Posting> own_postings(const Header& header, int rank) const {
    std::vector<Posting> postings;
    for (int node = 0; node < tables_.num_nodes() && kind_of(op_of(header)) == Kind::kDispatch; ++node) {
      if (node != tables_.own()) postings.push_back({tables_.proxy_of(node, rank), rank, header});
    }
    return postings;
  }

  // Passes on announcements: clients' to this node's ranks in a dispatch-type op, this node's ranks' to clients in a
  // combine-type op. Headers are copied unchanged: a refusal must reach all ranks.
  void pass_on(const World& w, const Header& own) {
    const Kind kind = kind_of(op_of(own));
    const auto header_of = [&](int source) {
      return source == w.rank ? own : read_once(w.mailbox(w.rank, kind, source).header[own.seq & 1]);
    };
    if (kind == Kind::kDispatch) {
      // SYNC POINT signal, passed on: post releases what was staged, and pairs with wait_signal. This rank has received
      // the source's signal before, so a rank that receives it from here knows that the source's reads of the previous
      // op are over.
      for (const int source : tables_.clients()) {
        for (const int to : tables_.neighbours()) {
          if (to != w.rank) post(w.mailbox(to, kind, source), header_of(source));
        }
      }
      return;
    }
    std::vector<Posting> postings;
    for (const int to : tables_.clients()) {
      for (const int source : tables_.neighbours()) postings.push_back({to, source, header_of(source)});
    }
    announce(w, postings);
  }

  // Gets the clients' lists for this node, and each row that it needs, once. Fills `forwards` like mark_tokens.
  template <class Weight>
  Status stage(const World& w, int window, int32_t* forwards, int64_t row_bytes, HostIdle& idle) {
    const std::vector<int32_t>& clients = tables_.clients();
    const Layout::Window& o = w.layout.window[window];
    const bool few = lists_in_one_trip(w);
    for (const int s : clients) network().get(s, o.counts, lists_[s], (few ? o.tokens : o.pulls) - o.counts);
    if (const Status status = settle(clients, Phase::kGather, idle); !status.ok()) return status;
    for (const int s : clients) {
      const auto lists = RouteLists<Weight>::view(w, s, window);
      for (const int r : tables_.neighbours()) {
        if (!few) get_lists(w, window, s, lists, r);
      }
    }
    if (const Status status = few ? Status{} : settle(clients, Phase::kGather, idle); !status.ok()) return status;
    for (size_t i = 0; i < clients.size(); ++i) {
      int32_t* const marks = forwards + int64_t(i) * w.shape.num_max_tokens * w.shape.forward_ints();
      if (!mark_tokens<Weight>(Solo{}, w, clients[i], window, marks))
        return failed(Code::kCorruptPeer, Phase::kGather, clients[i]);
    }
    return stage_rows(w, window, forwards, row_bytes, idle);
  }

  // Gets only the rows, for an op that reuses a plan.
  Status stage_rows(const World& w, int window, const int32_t* forwards, int64_t row_bytes, HostIdle& idle) {
    const auto to = [&](int s) { return w.at<char>(w.rank, staged(w, s) + w.layout.staged.rows); };
    RowGetter rows(w, network(), window, row_bytes, to);
    for_wanted(Solo{}, w, forwards, [&](int64_t, int source, int32_t token) { rows.get(source, token); });
    rows.end();
    return settle(tables_.clients(), Phase::kGather, idle);
  }

  // Adds up this node's partials of clients' tokens and sends the sums home, with scalars if `scalars`. Every lane
  // calls it; `sum` is this lane's scratch row.
  template <class Coop, class Rows>
  void send_sums(const Coop& coop, const World& w, int window, const int32_t* forwards, const Rows& rows, bool scalars,
                 char* sum) {
    const auto coded = [&](int64_t i) { return sums_.start() + i * w.shape.row_bytes(); };
    moe_rt::send_sums<RuntimeDims>(
        coop, w, window, forwards, rows, scalars, sum, coded,
        [&](int to, int64_t offset, const char* row, int64_t bytes) { network().put(to, offset, row, bytes); });
  }
  // Sends home each of this node's rows for clients' tokens, if rows return by entry. Every lane calls it.
  template <class Coop>
  void send_entries(const Coop& coop, const World& w, int window, const int32_t* forwards, int64_t bytes) {
    moe_rt::send_entries(coop, w, window, forwards, bytes, [&](int to, int64_t offset, const char* row, int64_t size) {
      network().put(to, offset, row, size);
    });
  }

 private:
  static int64_t staged(const World& w, int source) {
    return w.layout.staged.lists + w.nodes.client_index[source] * w.layout.staged.bytes;
  }

  const NodeTables& tables_;
  std::vector<char*> lists_;  // [R]; nullptr for ranks of this node
  LazyMemory sums_;           // [clients][T] rows
};

}  // namespace moe_rt
