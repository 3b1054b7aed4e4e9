// Peers of a CPU rank whose segments are not mapped: what is fetched of them, what is put there, and in which order.
//
// The protocol stays, as on a GPU (device/rdma.h): what a rank needs is pulled once it is announced, a partial row is
// summed here and put, and a signal is put last. What is fetched lies here in private memory, lists and token rows as
// in the source's window, so that roles find them there, and no peer can change what was judged. All rows are asked for
// at once: a row for which a lane waited would cost a round trip each.
//
// Nothing but flushes orders anything: a network may deliver in any order what lies between two of them. Rows are flushed
// before the op is posted, and that before the op ends, so that of two signals none overtakes the other.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <vector>

#include "../protocol/core/plan.h"
#include "network.h"
#include "recording.h"
#include "waiting.h"

namespace moe_rt {

class FarPeers {
 public:
  // Those whose `base` is nullptr. Throws std::system_error where there is no address space for what they send; pages
  // are taken when a row comes.
  FarPeers(const Shape& shape, const Layout& layout, const std::vector<char*>& base, Network& network)
      : network_(network), mirrors_(base.size()), rows_(base.size()), scalars_(base.size()) {
    for (size_t r = 0; r < base.size(); ++r) {
      if (!base[r]) ranks_.push_back(int(r));
    }
    int64_t list_bytes = 0;
    for (const Layout::Window& o : layout.window) list_bytes = std::max(list_bytes, o.tokens - o.counts);
    list_bytes = round_up(list_bytes, kPage);
    const int64_t row_bytes = round_up(shape.num_max_tokens * shape.row_bytes(), kPage);
    const int64_t scalar_bytes = round_up(int64_t{shape.num_max_tokens} * shape.num_topk * shape.acc_bytes, kPage);
    bytes_ = int64_t(ranks_.size()) * (list_bytes + row_bytes + scalar_bytes);
    void* const mapped =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    memory_ = static_cast<char*>(mapped);
    char* at = memory_;
    for (const int r : ranks_) {
      mirrors_[r] = at, rows_[r] = at + list_bytes, scalars_[r] = rows_[r] + row_bytes;
      at = scalars_[r] + scalar_bytes;
    }
  }
  ~FarPeers() { munmap(memory_, bytes_); }
  FarPeers(const FarPeers&) = delete;
  FarPeers& operator=(const FarPeers&) = delete;

  Network& network() const { return network_; }
  const std::vector<int>& ranks() const { return ranks_; }
  char* const* mirrors() const { return mirrors_.data(); }  // World::mirror

  // Where the row, or scalar, at `offset` of the peer's window is kept here: by its token, since each token has one row
  // here at a time, whatever its slot.
  char* row(const World& w, int peer, int64_t offset, int64_t region) const {
    return rows_[peer] + (offset - region) % (w.shape.num_max_tokens * w.shape.row_bytes());
  }
  char* scalar(int peer, int64_t offset, int64_t region) const { return scalars_[peer] + (offset - region); }

  // SYNC POINT signal over a network, writer side: pairs with wait_signal. Everything that this rank has put for a peer
  // is there before its op is posted. Who is lost is left out: what that means is for the wait to say.
  Status announce(const World& w, const Header& header, HostIdle& idle) {
    seq_ = header.seq;
    const int kind = static_cast<int>(kind_of(op_of(header)));
    const int64_t mailbox =
        w.layout.mailboxes + (int64_t{kind} * w.shape.num_ranks + w.rank) * int64_t{sizeof(Mailbox)};
    std::vector<int> waiting = ranks_;
    for (const int r : waiting) network_.flush(r);
    while (!waiting.empty()) {
      std::erase_if(waiting, [&](int r) {
        if (!network_.flushed(r)) return false;
        network_.post(r, mailbox, header);
        network_.flush(r);
        return true;
      });
      if (waiting.empty()) break;
      idle.watch(waiting[0], -1);
      if (const Code code = idle.pause(header.seq); code != Code::kOk) return failed(code, Phase::kPublish, waiting[0]);
    }
    return {};
  }

  // What far sources list for this rank, and the rows that they list: before index_blocks, which judges the lists.
  // Of a list that cannot be true nothing more is fetched.
  template <class Weight>
  Status fetch(const World& w, int window, int64_t row_bytes, HostIdle& idle) {
    const Layout::Window& o = w.layout.window[window];
    for (const int r : ranks_) network_.get(r, o.counts, mirrors_[r], o.pulls - o.counts);
    if (const Status s = settle(Phase::kGather, idle); !s.ok()) return s;
    const int64_t tokens = w.shape.num_max_tokens;
    for (const int r : ranks_) {
      const auto lists = RouteLists<Weight>::view(w, r, window);
      const int64_t pull = lists.pull_offs[w.rank], pulls_end = lists.pull_offs[w.rank + 1];
      const int64_t copy = lists.copy_offs[w.rank], copies_end = lists.copy_offs[w.rank + 1];
      get_entries(r, o.pulls, lists.pulls, pull, pulls_end, tokens * w.shape.num_slots());
      get_entries(r, o.copies, lists.copies, copy, copies_end, tokens * w.shape.num_topk);
      get_entries(r, o.weights, lists.weights, copy, copies_end, tokens * w.shape.num_topk);
    }
    if (const Status s = settle(Phase::kGather, idle); !s.ok()) return s;
    for (const int r : ranks_) {
      const auto lists = RouteLists<Weight>::view(w, r, window);
      const int64_t pull = lists.pull_offs[w.rank], pulls_end = lists.pull_offs[w.rank + 1];
      if (pull < 0 || pulls_end > tokens * w.shape.num_slots()) continue;
      RowGetter rows(*this, w, window, row_bytes);
      for (int64_t i = pull; i < pulls_end; ++i) rows.get(r, lists.pulls[i].token);
    }
    return settle(Phase::kGather, idle);
  }

  // The rows of a plan that far sources own.
  Status fetch(const World& w, int window, const RecvPlan& plan, int64_t row_bytes, HostIdle& idle) {
    RowGetter rows(*this, w, window, row_bytes);
    for (int32_t i = 0; i < plan.head->num_pulled; ++i) {
      if (!w.base[plan.pulled[i].source]) rows.get(plan.pulled[i].source, plan.pulled[i].token);
    }
    rows.end();
    return settle(Phase::kGather, idle);
  }

  // Returns once everything that was asked of far peers is done; PeerDead where one is lost.
  Status settle(Phase phase, HostIdle& idle) {
    for (const int r : ranks_) network_.flush(r);
    for (const int r : ranks_) {
      idle.watch(r, -1);
      while (!network_.flushed(r)) {
        if (const Code code = idle.pause(seq_); code != Code::kOk) return failed(code, phase, r);
      }
      if (network_.lost(r)) return failed(Code::kPeerDead, phase, r);
    }
    return {};
  }

  // Why a peer left, if it can still be asked, or nothing. It was said before the poison word was sent, or `closed`.
  std::string last_words(const World& w, int peer) {
    network_.get(peer, w.layout.last_words, &words_, sizeof(words_));
    network_.flush(peer);
    for (const auto end = HostIdle::Clock::now() + kWordsWithin; HostIdle::Clock::now() < end; network_.drive()) {
      if (network_.flushed(peer)) return network_.lost(peer) ? "" : read_last_words(words_);
      sched_yield();
    }
    return {};
  }

  // The first cause of a failure, to all: see Engine::poison.
  void poison(const World& w, uint64_t word) {
    for (const int r : ranks_) {
      network_.put_last(r, w.layout.poison, word);
      network_.flush(r);
    }
  }

 private:
  // Gets rows, those of neighbouring tokens together.
  class RowGetter {
   public:
    RowGetter(FarPeers& far, const World& w, int window, int64_t row_bytes)
        : far_(far), w_(w), window_(window), row_bytes_(row_bytes) {}
    ~RowGetter() { end(); }
    RowGetter(const RowGetter&) = delete;
    RowGetter& operator=(const RowGetter&) = delete;
    // Of a token that there is not, nothing: gather_token tells.
    void get(int peer, int32_t token) {
      if (!below(token, w_.shape.num_max_tokens)) return;
      if (peer == peer_ && token == end_) {
        ++end_;
        return;
      }
      end();
      peer_ = peer, first_ = token, end_ = token + 1;
    }
    void end() {
      if (peer_ < 0) return;
      const int64_t offset = w_.token_row(window_, first_), stride = w_.shape.row_bytes();
      far_.network_.get(peer_, offset, far_.rows_[peer_] + first_ * stride, (end_ - first_ - 1) * stride + row_bytes_);
      peer_ = -1;
    }

   private:
    FarPeers& far_;
    const World& w_;
    int window_, peer_ = -1;
    int64_t row_bytes_, first_ = 0, end_ = 0;
  };

  // The entries [first, end) of a list, if that is a range of a list of `size`.
  template <class T>
  void get_entries(int peer, int64_t there, T* here, int64_t first, int64_t end, int64_t size) {
    if (first < 0 || end > size || first >= end) return;
    network_.get(peer, there + first * int64_t{sizeof(T)}, here + first, (end - first) * int64_t{sizeof(T)});
  }

  static Status failed(Code code, Phase phase, int peer) {
    return {.code = code, .phase = phase, .peer = code == Code::kInterrupted ? -1 : peer};
  }

  Network& network_;
  std::vector<int> ranks_;
  std::vector<char*> mirrors_, rows_, scalars_;  // [R]; nullptr of peers that are mapped
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
  uint64_t seq_ = 0;   // of the running op
  LastWords words_{};  // of the peer that was asked last
  static constexpr std::chrono::milliseconds kWordsWithin{500};
};

// How a role reaches peers of which some are far (protocol/core/link.h). A partial row is put as soon as it is summed.
struct FarLink {
  const FarPeers& far;
  int window;

  const char* source_row(const World& w, int peer, int64_t offset, int64_t) const {
    return w.base[peer] ? w.at<const char>(peer, offset) : far.row(w, peer, offset, w.layout.window[window].tokens);
  }
  char* target_row(const World& w, int peer, int64_t offset) const {
    return w.base[peer] ? w.at<char>(peer, offset) : far.row(w, peer, offset, w.layout.window[window].partials);
  }
  void deliver(const World& w, int peer, int64_t offset, int64_t bytes) const {
    if (w.base[peer]) return;
    streaming_store_fence();  // another thread may be the one that sends it
    far.network().put(peer, offset, target_row(w, peer, offset), bytes);
  }
  template <class T>
  void put(const World& w, int peer, int64_t offset, T value) const {
    if (w.base[peer]) {
      *w.at<T>(peer, offset) = value;
      return;
    }
    auto* const here = reinterpret_cast<T*>(far.scalar(peer, offset, w.layout.window[window].scalars));
    *here = value;
    far.network().put(peer, offset, here, sizeof(T));
  }
};

}  // namespace moe_rt
