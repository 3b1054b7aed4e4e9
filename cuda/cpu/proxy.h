// Proxy duties of a CPU rank for its clients, ranks of other nodes, if rows go in two levels (protocol/two_level/).
//
// It stages what its clients send to this node, each row once, and sends home the sum of this node's rows for their
// tokens, one row each. In between it passes on their announcements: no rank completes an op before all signals have
// reached it, so windows need no other acknowledgement than in flat mode (docs/two_level.md).
//
// The lanes of an op do so, or, between its halves, any thread that drives the network. Such a thread uses no tensor of
// the caller, who may lose the op: only segments, until `stop`, and memory of the Proxy.
#pragma once

#include <algorithm>
#include <cfenv>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "../net/remote_network.h"
#include "../protocol/two_level/forward.h"
#include "../protocol/two_level/link.h"
#include "lazy_memory.h"
#include "world_tables.h"

namespace moe_rt {

// A given part of the clients' tokens, for one lane.
struct Part : Solo {
  Range range;
  explicit Part(const Range& r) : range(r) {}
  Range share(int64_t) const { return range; }
};

// Work of a proxy in one op.
struct Duty {
  int window = 0;
  int32_t* forwards = nullptr;       // in the plan: what is needed of each of the clients' tokens
  int64_t row_bytes = 0;             // dispatch-type ops: bytes of a row as it travels
  bool lists = false, wide = false;  // clients' lists are fetched, to write forwards; weights in them are doubles
  // Combine-type ops: sends home what this node has for a part of the clients' tokens; `sum` is a scratch row.
  std::function<void(const Part&, const int32_t* forwards, char* sum)> send{};
};

class Proxy : public RemoteNetwork {
 public:
  // Throws std::system_error if the address space for sums and marks cannot be reserved. `w` outlives the object.
  Proxy(const World& w, const NodeTables& tables, Network& network)
      : RemoteNetwork({w.base, w.base + w.shape.num_ranks}, network),
        world_(w),
        tables_(tables),
        lists_(w.shape.num_ranks),
        sums_((num_tokens() + 1) * w.shape.row_bytes()),
        marks_(num_tokens() * w.shape.forward_ints() * int64_t{sizeof(int32_t)}) {
    for (int r = 0; r < w.shape.num_ranks; ++r) {
      const int by = tables.view().proxy_of[r];
      if (by != r) lists_[r] = w.at<char>(by, staged(r));
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

  // True if this rank and all ranks that announce directly to it take part in the same op: its duty moves rows then.
  bool all_agree(const Header& own) const {
    const World& w = world_;
    const Kind kind = kind_of(op_of(own));
    for (int r = 0; r < w.shape.num_ranks; ++r) {
      if (announces_directly(w, kind, r) && !check_header(w.mailbox(w.rank, kind, r).header[own.seq & 1], own, r).ok())
        return false;
    }
    return own.status == Code::kOk;
  }

  // Passes on announcements: clients' to this node's ranks in a dispatch-type op, this node's ranks' to clients in a
  // combine-type op. Headers are copied unchanged: a refusal must reach all ranks.
  void pass_on(const Header& own) {
    const World& w = world_;
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

  // Does the duty of an op whose announcements are here, but passes nothing on. Every lane calls it; `sum` is this
  // lane's scratch row.
  template <class Coop>
  Status serve(const Coop& coop, const Duty& duty, char* sum, HostIdle& idle) {
    if (duty.send) duty.send(Part(coop.share(num_tokens())), duty.forwards, sum);
    if (duty.send || coop.rank() != 0) return {};
    {
      const std::lock_guard lock(mutex_);
      duty_ = duty, in_background_ = false, status_ = {};
      step_ = ask_first();
    }
    return end(idle);
  }

  // Takes on the duty of an op between its halves, and then passes on, whatever this rank does meanwhile.
  void take_on(Duty&& duty, const Header& own) {
    const std::lock_guard lock(mutex_);
    duty_ = std::move(duty), own_ = own, in_background_ = true, sent_ = 0, status_ = {};
    if (!duty_.lists) std::copy_n(duty_.forwards, num_marks(), own_marks());
    std::fegetenv(&floats_);
    step_ = Step::kSignals;
  }
  // Returns whether the duty is the caller's: it was not taken on, or nothing of it was done yet.
  bool take_back() {
    const std::lock_guard lock(mutex_);
    if (step_ != Step::kSignals && step_ != Step::kNone) return false;
    step_ = Step::kNone;
    return true;
  }
  // Returns once a duty is done that cannot be taken back.
  Status end(HostIdle& idle) {
    idle.resume();
    while (!ends()) {
      const int late = late_client();
      idle.watch({.peer = late, .announcer = late});
      if (const Code code = idle.pause(); code != Code::kOk) return failed(code, Phase::kGather, late);
    }
    const std::lock_guard lock(mutex_);
    step_ = Step::kNone;
    if (in_background_ && duty_.lists) std::copy_n(own_marks(), num_marks(), duty_.forwards);
    return status_;
  }
  void stop() override {
    const std::lock_guard lock(mutex_);
    step_ = Step::kNone, duty_ = {};
  }
  int go_on() override {
    const std::lock_guard lock(mutex_);
    // Once `stop` was called, the engine and the segments may be gone.
    if (step_ == Step::kNone || load_relaxed(world_.poison(world_.rank)) != 0) return kNever;
    while (take_step()) {
    }
    if (step_ == Step::kSignals) return tuning::kLookAtNeighboursMs;
    return step_ == Step::kSums ? 0 : kNever;
  }

  // Adds up this node's partials of clients' tokens and sends the sums home, with scalars if `scalars`. Every lane
  // calls it; `sum` is this lane's scratch row.
  template <class Coop, class Rows>
  void send_sums(const Coop& coop, int window, const int32_t* forwards, const Rows& rows, bool scalars, char* sum) {
    moe_rt::send_sums<RuntimeDims>(
        coop, world_, window, forwards, rows, scalars, sum, [&](int64_t i) { return own_row(i); },
        [&](int to, int64_t offset, const char* row, int64_t bytes) { network().put(to, offset, row, bytes); });
  }
  // Sends home each of this node's rows for clients' tokens, if rows return by entry. Every lane calls it.
  template <class Coop>
  void send_entries(const Coop& coop, int window, const int32_t* forwards, int64_t bytes) {
    moe_rt::send_entries(
        coop, world_, window, forwards, bytes,
        [&](int to, int64_t offset, const char* row, int64_t size) { network().put(to, offset, row, size); });
  }

 private:
  // Next step: what is awaited, or done. kLast passes on.
  enum class Step { kNone, kSignals, kCounts, kLists, kRows, kSums, kLast, kEnd };

  int64_t staged(int source) const {
    return world_.layout.staged.lists + world_.nodes.client_index[source] * world_.layout.staged.bytes;
  }
  int64_t num_tokens() const { return int64_t(tables_.clients().size()) * world_.shape.num_max_tokens; }
  int64_t num_marks() const { return num_tokens() * world_.shape.forward_ints(); }
  int32_t* own_marks() const { return reinterpret_cast<int32_t*>(marks_.start()); }
  int32_t* forwards() const { return in_background_ ? own_marks() : duty_.forwards; }
  char* own_row(int64_t i) const { return sums_.start() + i * world_.shape.row_bytes(); }

  // Takes steps until something is awaited. True once the duty is done.
  bool ends() {
    while (go_on() == 0) {
    }
    const std::lock_guard lock(mutex_);
    return step_ == Step::kEnd;
  }
  // Returns a client whose data is awaited, or any.
  int late_client() const {
    const auto& all = tables_.clients();
    const auto late = std::find_if(all.begin(), all.end(), [&](int s) { return !network().flushed(s); });
    return late != all.end() ? *late : all.empty() ? world_.rank : all.front();
  }

  // Takes the next step of the duty. False if it must wait, or if the next one should.
  bool take_step() {
    switch (step_) {
      case Step::kSignals:
        if (!all_have_announced()) return false;
        step_ = !all_agree(own_) ? Step::kLast : duty_.send ? Step::kSums : ask_first();
        return true;
      case Step::kCounts:
      case Step::kLists:
      case Step::kRows:
        if (!all_is_here()) return false;
        if (step_ != Step::kEnd) step_ = duty_.wide ? next<double>() : next<float>();
        return true;
      case Step::kSums:
        return send_some();
      case Step::kLast:
        if (in_background_) pass_on(own_);
        step_ = Step::kEnd;
        return false;
      default:
        return false;
    }
  }

  bool all_have_announced() const {
    const World& w = world_;
    const Kind kind = kind_of(op_of(own_));
    for (int r = 0; r < w.shape.num_ranks; ++r) {
      if (announces_directly(w, kind, r) && !reached(load_acquire(w.mailbox(w.rank, kind, r).signal), own_.seq))
        return false;
    }
    return true;
  }

  // True if all requests to clients have ended; then a lost client ends the duty.
  bool all_is_here() {
    const auto& all = tables_.clients();
    if (!std::all_of(all.begin(), all.end(), [&](int s) { return network().flushed(s); })) return false;
    const auto lost = std::find_if(all.begin(), all.end(), [&](int s) { return network().lost(s); });
    if (lost != all.end()) status_ = failed(Code::kPeerDead, Phase::kGather, *lost), step_ = Step::kEnd;
    return true;
  }

  // Asks for the clients' lists for this node or, in an op that reuses a plan, for the rows.
  Step ask_first() {
    if (!duty_.lists) return ask_for_rows();
    const World& w = world_;
    const Layout::Window& o = w.layout.window[duty_.window];
    const bool few = lists_in_one_trip(w);
    for (const int s : tables_.clients()) {
      network().get(s, o.counts, lists_[s], (few ? o.tokens : o.pulls) - o.counts);
      network().flush(s);
    }
    return few ? Step::kLists : Step::kCounts;
  }
  // Asks for what comes after this step. It marks what is needed like mark_tokens.
  template <class Weight>
  Step next() {
    const World& w = world_;
    const std::vector<int32_t>& clients = tables_.clients();
    if (step_ == Step::kRows) return Step::kLast;
    if (step_ == Step::kCounts) {
      for (const int s : clients) {
        const auto lists = RouteLists<Weight>::view(w, s, duty_.window);
        for (const int r : tables_.neighbours()) get_lists(w, duty_.window, s, lists, r);
        network().flush(s);
      }
      return Step::kLists;
    }
    for (size_t i = 0; i < clients.size(); ++i) {
      int32_t* const marks = forwards() + int64_t(i) * w.shape.num_max_tokens * w.shape.forward_ints();
      if (mark_tokens<Weight>(Solo{}, w, clients[i], duty_.window, marks)) continue;
      status_ = failed(Code::kCorruptPeer, Phase::kGather, clients[i]);
      return Step::kEnd;
    }
    return ask_for_rows();
  }
  // Asks for each row that this node needs, once.
  Step ask_for_rows() {
    const World& w = world_;
    const auto to = [&](int s) { return w.at<char>(w.rank, staged(s) + w.layout.staged.rows); };
    RowGetter rows(w, network(), duty_.window, duty_.row_bytes, to);
    for_wanted(Solo{}, w, forwards(), [&](int64_t, int source, int32_t token) { rows.get(source, token); });
    rows.end();
    for (const int s : tables_.clients()) network().flush(s);
    return Step::kRows;
  }

  // Sends home what belongs to a few tokens, with the caller's rounding. False if there are more.
  bool send_some() {
    const int64_t end = min_of(sent_ + tuning::kTokensAtOnce, num_tokens());
    std::fenv_t floats;
    std::fegetenv(&floats);
    std::fesetenv(&floats_);
    duty_.send(Part({sent_, end, 1}), own_marks(), own_row(num_tokens()));
    std::fesetenv(&floats);
    sent_ = end;
    if (end == num_tokens()) step_ = Step::kLast;
    return step_ == Step::kLast;
  }

  const World& world_;
  const NodeTables& tables_;
  std::vector<char*> lists_;  // [R]; nullptr for ranks of this node
  LazyMemory sums_;           // [clients][T] rows, and a scratch row
  LazyMemory marks_;          // as forwards in a plan, in the background
  // Threads take turns at the steps of the duty. Otherwise one could pass on an op that the other has ended: the signal
  // would replace a later one.
  std::mutex mutex_;
  Step step_ = Step::kNone;
  Duty duty_;
  Header own_{};
  bool in_background_ = false;
  int64_t sent_ = 0;  // tokens that sums were sent for
  Status status_;
  std::fenv_t floats_{};  // the caller's rounding and denormal modes
};

}  // namespace moe_rt
