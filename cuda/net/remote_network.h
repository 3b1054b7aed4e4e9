// Network steps of an engine in every op, flat or in two levels: announcing, and waiting until requests are complete.
//
// A network may deliver requests in any order, except that a post arrives after all earlier puts. Posts are flushed
// before the op ends, so that no signal overtakes an earlier one.
#pragma once

#include <string>
#include <vector>

#include "../cpu/recording.h"
#include "../cpu/waiting.h"
#include "../protocol/core/plan.h"
#include "network.h"

namespace moe_rt {

// Gets the entries [first, end) of a peer's list, if that is a range of a list of `size`. The range comes from the
// peer.
template <class Net, class T>
void get_entries(Net& network, int peer, int64_t there, T* here, int64_t first, int64_t end, int64_t size) {
  if (first < 0 || end > size || first >= end) return;
  network.get(peer, there + first * int64_t{sizeof(T)}, here + first, (end - first) * int64_t{sizeof(T)});
}

class RemoteNetwork : public Background {
 public:
  // Ranks whose `base` is nullptr are unmapped.
  RemoteNetwork(const std::vector<char*>& base, Network& network) : network_(network) {
    for (size_t r = 0; r < base.size(); ++r) {
      if (!base[r]) ranks_.push_back(int(r));
    }
  }
  RemoteNetwork(const RemoteNetwork&) = delete;
  RemoteNetwork& operator=(const RemoteNetwork&) = delete;

  Network& network() const { return network_; }
  const std::vector<int>& ranks() const { return ranks_; }

  // A header for an unmapped rank's mailbox of `source`: this rank's own header, or one that it passes on.
  struct Posting {
    int peer, source;
    Header header;
  };

  // SYNC POINT signal over a network, writer side. Pairs with wait_signal. Lost peers are skipped: the wait decides what
  // a loss means.
  void announce(const World& w, const std::vector<Posting>& postings) {
    for (const Posting& p : postings) {
      network_.post(p.peer, mailbox(w, p), p.header);
      network_.flush(p.peer);
    }
  }

  // Returns once all requests to these ranks are complete; PeerDead if one of them is lost.
  Status settle(const std::vector<int>& ranks, Phase phase, HostIdle& idle) {
    for (const int r : ranks) network_.flush(r);
    for (const int r : ranks) {
      idle.watch({.peer = r, .announcer = r});
      while (!network_.flushed(r)) {
        if (const Code code = idle.pause(); code != Code::kOk) return failed(code, phase, r);
      }
      if (network_.lost(r)) return failed(Code::kPeerDead, phase, r);
    }
    return {};
  }

  // Returns why a peer left, if it can still be read, or nothing. The peer writes it before it sends the poison word or
  // `closed`.
  std::string last_words(const World& w, int peer) {
    network_.get(peer, w.layout.last_words, &words_, sizeof(words_));
    network_.flush(peer);
    for (const auto end = HostIdle::Clock::now() + kWordsWithin; HostIdle::Clock::now() < end; network_.drive()) {
      if (network_.flushed(peer)) return network_.lost(peer) ? "" : read_last_words(words_);
      sched_yield();
    }
    return {};
  }

  int go_on() override { return kNever; }
  // Forgets what goes on in the background. Afterwards nothing but a request that is pending refers to the op.
  virtual void stop() {}

  // Sends the first cause of a failure to all unmapped ranks: see Engine::poison.
  void poison(const World& w, uint64_t word) {
    for (const int r : ranks_) {
      network_.put_last(r, w.layout.poison, word);
      network_.flush(r);
    }
  }

 protected:
  static Status failed(Code code, Phase phase, int peer) {
    return {.code = code, .phase = phase, .peer = code == Code::kInterrupted ? -1 : peer};
  }

  // Gets the entries of a source's lists for `rank` into `here`, if their bounds are plausible.
  template <class Weight>
  void get_lists(const World& w, int window, int source, const RouteLists<Weight>& here, int rank) {
    const Layout::Window& o = w.layout.window[window];
    const int64_t tokens = w.shape.num_max_tokens;
    const int64_t pull = here.pull_offs[rank], pulls_end = here.pull_offs[rank + 1];
    const int64_t copy = here.copy_offs[rank], copies_end = here.copy_offs[rank + 1];
    get_entries(network_, source, o.pulls, here.pulls.start, pull, pulls_end, tokens * w.shape.num_visits());
    get_entries(network_, source, o.copies, here.copies.start, copy, copies_end, tokens * w.shape.num_topk);
    get_entries(network_, source, o.weights, here.weights.start, copy, copies_end, tokens * w.shape.num_topk);
  }

 private:
  static int64_t mailbox(const World& w, const Posting& p) {
    const int kind = static_cast<int>(kind_of(op_of(p.header)));
    return w.layout.mailboxes + (int64_t{kind} * w.shape.num_ranks + p.source) * int64_t{sizeof(Mailbox)};
  }
  Network& network_;
  std::vector<int> ranks_;
  LastWords words_{};  // last words of the peer read last
  static constexpr std::chrono::milliseconds kWordsWithin{500};
};

// Gets token rows of unmapped sources, runs of neighbouring tokens in one request. `to(source)` is the address of the
// first token's row.
template <class Net, class To>
class RowGetter {
 public:
  RowGetter(const World& w, Net& network, int window, int64_t row_bytes, To to)
      : w_(w), network_(network), window_(window), row_bytes_(row_bytes), to_(to) {}
  ~RowGetter() { end(); }
  RowGetter(const RowGetter&) = delete;
  RowGetter& operator=(const RowGetter&) = delete;
  // Tokens out of range are skipped: gather_token reports them.
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
    network_.get(peer_, offset, to_(peer_) + first_ * stride, (end_ - first_ - 1) * stride + row_bytes_);
    peer_ = -1;
  }

 private:
  const World& w_;
  Net& network_;
  int window_, peer_ = -1;
  int64_t row_bytes_, first_ = 0, end_ = 0;
  To to_;
};

}  // namespace moe_rt
