// Detection of peers that share a cache with this rank, by the time to read a line that a peer has just written: 10 to
// 20 ns with a shared cache and 100 or more without (docs/log.md). The system's description of caches is not used: the
// cores of a virtual machine may be anywhere, and move at any time.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "../protocol/core/plan.h"
#include "../protocol/core/tuning.h"

namespace moe_rt {

class CacheLocality {
 public:
  // A peer counts as near until one of its lines takes longer than `near_ns`. `num_remote` ranks share no memory with this
  // rank and are never near.
  CacheLocality(int num_ranks, int num_remote, int rank, double near_ns)
      : line_latency_ns_(num_ranks), near_ns_(near_ns), num_remote_(num_remote), peer_(rank) {
    for (int i = 0; i < 16; ++i) clock_ns_ = std::min(clock_ns_, since(Clock::now()));
  }

  // Times reads of one peer's list, of lines written for this rank only, another peer at each call. Requires that all
  // peers have announced a dispatch. False if no such line exists.
  bool look(const World& w, int window) {
    const int num_ranks = w.shape.num_ranks;
    peer_ = (peer_ + 1) % num_ranks;
    if (peer_ == w.rank) peer_ = (peer_ + 1) % num_ranks;
    if (peer_ == w.rank || !w.base[peer_]) return false;  // no peer, or its memory is not mapped
    const auto lists = RouteLists<float>::view(w, peer_, window);
    const int64_t first = lists.pull_offs[w.rank], end = lists.pull_offs[w.rank + 1];
    // These values come from the source and are not validated yet.
    if (first < 0 || end <= first || end > int64_t{w.shape.num_max_tokens} * w.shape.num_visits()) return false;
    const double ns = time_line(lists.pulls.start + first, end - first);
    double& known = line_latency_ns_[peer_];
    known = known > 0 ? std::min(ns, tuning::kLatencyRise * known) : ns;
    return true;
  }

  // Ranks that share this rank's cache, itself included.
  int num_near() const {
    const auto near = [&](double ns) { return ns <= near_ns_; };
    return static_cast<int>(std::count_if(line_latency_ns_.begin(), line_latency_ns_.end(), near)) - num_remote_;
  }
  // [R] latency of each peer's lines in ns, or 0 if unknown.
  const std::vector<double>& line_latency_ns() const { return line_latency_ns_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kPullsOfLine = 64 / sizeof(Pull);
  static constexpr double kShortest = 10;

  static double since(Clock::time_point start) {
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
  }

  // Median of three reads, in an order that no prefetcher predicts and not two from one pair of lines; or the only
  // read.
  double time_line(const Pull* pulls, int64_t num_pulls) const {
    constexpr int kPlaces[] = {1, 5, 3};
    const int64_t eighth = num_pulls / kPullsOfLine / 8 * kPullsOfLine;
    const int num_reads = eighth > 0 ? 3 : 1;
    double ns[3];
    for (int i = 0; i < num_reads; ++i) {
      const auto start = Clock::now();
      static_cast<void>(*static_cast<const volatile int32_t*>(&pulls[eighth * kPlaces[i]].token));
      ns[i] = since(start) - clock_ns_;
    }
    std::sort(ns, ns + num_reads);
    return std::max(ns[num_reads / 2], kShortest);
  }

  std::vector<double> line_latency_ns_;
  double near_ns_, clock_ns_ = 1e9;
  int num_remote_, peer_;
};

}  // namespace moe_rt
