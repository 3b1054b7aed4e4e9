// Which peers share a cache with this rank: told by how long a line takes to read that a peer has just written, 10 to
// 20 ns if they do and 100 or more if not (docs/log.md). What the system says of caches is not asked: the cores of a
// virtual machine may be anywhere, and a minute later elsewhere.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "../protocol/core/plan.h"

namespace moe_rt {

constexpr double kNearNs = 60;  // between the two, as far as we know

class CacheLocality {
 public:
  // A peer is near until a line of its takes longer than `near_ns`.
  // `num_far` have no memory in common with this rank, and never look near.
  CacheLocality(int num_ranks, int num_far, int rank, double near_ns)
      : line_latency_ns_(num_ranks), near_ns_(near_ns), num_far_(num_far), peer_(rank) {
    for (int i = 0; i < 16; ++i) clock_ns_ = std::min(clock_ns_, since(Clock::now()));
  }

  // Once all peers have announced a dispatch: times reads of one peer's list, of lines for this rank alone, another
  // peer's at each call. False where there are none.
  bool look(const World& w, int window) {
    const int num_ranks = w.shape.num_ranks;
    peer_ = (peer_ + 1) % num_ranks;
    if (peer_ == w.rank) peer_ = (peer_ + 1) % num_ranks;
    if (peer_ == w.rank || !w.base[peer_]) return false;  // there is no peer, or nothing of it is read here
    const auto lists = RouteLists<float>::view(w, peer_, window);
    const int64_t first = lists.pull_offs[w.rank], end = lists.pull_offs[w.rank + 1];
    // The source's word, which nobody has judged yet.
    if (first < 0 || end <= first || end > int64_t{w.shape.num_max_tokens} * w.shape.num_visits()) return false;
    const double ns = time_line(lists.pulls.start + first, end - first);
    double& known = line_latency_ns_[peer_];
    known = known > 0 ? std::min(ns, kRise * known) : ns;
    return true;
  }

  // Ranks that share this rank's cache, itself included.
  int num_near() const {
    const auto near = [&](double ns) { return ns <= near_ns_; };
    return static_cast<int>(std::count_if(line_latency_ns_.begin(), line_latency_ns_.end(), near)) - num_far_;
  }
  // [R] what a line of each peer takes, as far as is known; 0 where nothing is.
  const std::vector<double>& line_latency_ns() const { return line_latency_ns_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kPullsOfLine = 64 / sizeof(Pull);
  // A line that has left its writer's cache for memory takes long, too: what is believed of a peer rises no faster.
  static constexpr double kRise = 1.5, kShortest = 10;

  static double since(Clock::time_point start) {
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
  }

  // The median of three, in no order that a prefetcher would know and no two of a pair of lines; or the only one.
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
  int num_far_, peer_;
};

}  // namespace moe_rt
