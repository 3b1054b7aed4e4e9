// Vector clocks over launches, blocks, warps and lanes: the accesses that a lane knows happened before.
//
// Most facts are about whole launches (of a stream, in order) and whole blocks (up to a barrier), and a clock stores
// them as such. For warps and single lanes it stores only what they did since their block's last barrier. It stores
// nothing about streams it has not synchronised with, so a process may have any number of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace ptx {

// The author and time of an access: the barriers of its block and its warp, and the lane's releases before it. Block 0
// means none. The copies that a lane has started are blocks themselves, see bulk.h.
struct Moment {
  uint32_t block = 0;
  uint16_t lane = 0, barriers = 0, syncs = 0, releases = 0;
  bool operator==(const Moment&) const = default;
};

inline constexpr uint16_t kWholeBlock = 0xffff, kWholeWarp = 0xff00;

// The ways to access memory. Bulk copies and a network see writes of lanes only after a fence: one for the copies of
// each space, and one for the network.
enum Proxy : uint8_t { kLanes, kCopiesOfShared, kCopiesOfGlobal, kNetwork, kNumProxies };

inline constexpr uint32_t kNobody = ~uint32_t{0};

// The launch that a block belongs to.
struct BlockName {
  uint32_t stream, launch;  // index of the launch in its stream
};

class Clock {
 public:
  bool knows(const Moment& m, const std::vector<BlockName>& names, Proxy proxy = kLanes) const {
    if (is_over(names[m.block])) return true;
    const std::vector<Known>& known = known_[proxy];
    for (auto k = first_of(known, m.block); k != known.end() && k->block == m.block; ++k) {
      if (k->until > until(k->lane, m)) return true;
    }
    return false;
  }

  void learn_launch(uint32_t stream, uint32_t launch) { learn_launches(stream, launch + 1); }
  void learn_block(uint32_t block, uint16_t barriers) { learn(kLanes, {block, kWholeBlock, barriers}); }
  void learn_warp(uint32_t block, uint32_t warp, uint16_t syncs) {
    learn(kLanes, {block, uint16_t(kWholeWarp + warp), syncs});
  }
  void learn_lane(uint32_t block, uint16_t lane, uint16_t releases) { learn(kLanes, {block, lane, releases}); }

  // Learn one numbered copy. A gapless prefix is stored as one fact.
  void learn_copy(Proxy proxy, uint32_t copies, uint16_t number) {
    std::vector<Known>& known = known_[proxy];
    const auto done = std::find_if(known.begin(), known.end(),
                                   [&](const Known& k) { return k.block == copies && k.lane == kWholeBlock; });
    uint16_t until = done == known.end() ? 0 : done->until;
    if (number > until) return learn(proxy, {copies, number, 1});
    until = std::max<uint16_t>(until, number + 1);
    const auto is_next = [&](const Known& k) { return k.block == copies && k.lane == until; };
    while (std::any_of(known.begin(), known.end(), is_next)) ++until;
    std::erase_if(known, [&](const Known& k) { return k.block == copies && k.lane < until; });
    learn(proxy, {copies, kWholeBlock, until});
  }
  void learn_copies(uint32_t copies, uint16_t until) { learn(kLanes, {copies, kWholeBlock, until}); }

  // Return the clock of everything that a proxy has been shown.
  Clock as_seen_by(Proxy proxy) const {
    Clock seen;
    seen.launches_ = launches_;
    seen.known_[kLanes] = seen.known_[proxy] = known_[proxy];
    return seen;
  }

  // Make everything that `other` knows visible to a proxy.
  void show(const Clock& other, Proxy proxy) {
    for (const Known& k : other.known_[kLanes]) learn(proxy, k);
  }

  void join(const Clock& other, const std::vector<BlockName>& names) {
    bool grew = false;
    for (const Launches& l : other.launches_) grew |= learn_launches(l.stream, l.number);
    for (int proxy = 0; proxy < kNumProxies; ++proxy) {
      const bool more = !covers(known_[proxy], other.known_[proxy], names);
      if (more) merge(known_[proxy], other.known_[proxy]);
      if (!more && !grew) continue;
      std::erase_if(known_[proxy], [&](const Known& k) { return is_over(names[k.block]); });
    }
  }

  // Number of stored facts.
  size_t size() const {
    size_t facts = launches_.size();
    for (const auto& known : known_) facts += known.size();
    return facts;
  }

 private:
  struct Launches {
    uint32_t stream, number;  // launches below `number` are complete
  };
  struct Known {
    uint32_t block;
    uint16_t lane, until;  // everything before this barrier or release
    bool before(const Known& k) const { return block != k.block ? block < k.block : lane < k.lane; }
  };

  // Return the counter of `m` that a fact about `lane` bounds, or the maximum if the fact does not cover `m`.
  static uint16_t until(uint16_t lane, const Moment& m) {
    if (lane == kWholeBlock) return m.barriers;
    if (lane >= kWholeWarp) return lane - kWholeWarp == m.lane / 32 ? m.syncs : 0xffff;
    return lane == m.lane ? m.releases : 0xffff;
  }
  static std::vector<Known>::const_iterator first_of(const std::vector<Known>& known, uint32_t block) {
    return std::lower_bound(known.begin(), known.end(), block,
                            [](const Known& k, uint32_t wanted) { return k.block < wanted; });
  }

  bool is_over(const BlockName& name) const {
    for (const Launches& l : launches_) {
      if (l.stream == name.stream) return l.number > name.launch;
    }
    return false;
  }
  // True if this fact is new.
  bool learn_launches(uint32_t stream, uint32_t number) {
    for (Launches& l : launches_) {
      if (l.stream == stream) return l.number < number && (l.number = number, true);
    }
    launches_.push_back({stream, number});
    return true;
  }

  void learn(Proxy proxy, const Known& fact) {
    std::vector<Known>& known = known_[proxy];
    const auto place = std::lower_bound(known.begin(), known.end(), fact, [](auto& a, auto& b) { return a.before(b); });
    if (place != known.end() && !fact.before(*place)) {
      place->until = std::max(place->until, fact.until);
    } else {
      known.insert(place, fact);
    }
  }

  // True if `known`, one of this clock's lists, implies all of `facts`.
  bool covers(const std::vector<Known>& known, const std::vector<Known>& facts,
              const std::vector<BlockName>& names) const {
    auto k = known.begin();
    for (const Known& fact : facts) {
      while (k != known.end() && k->before(fact)) ++k;
      const bool is_there = k != known.end() && !fact.before(*k) && k->until >= fact.until;
      if (!is_there && !is_over(names[fact.block])) return false;
    }
    return true;
  }
  static void merge(std::vector<Known>& known, const std::vector<Known>& facts) {
    std::vector<Known> merged;
    merged.reserve(known.size() + facts.size());
    auto k = known.begin();
    for (const Known& fact : facts) {
      while (k != known.end() && k->before(fact)) merged.push_back(*k++);
      merged.push_back(fact);
      if (k == known.end() || fact.before(*k)) continue;
      merged.back().until = std::max(fact.until, k->until);
      ++k;
    }
    merged.insert(merged.end(), k, known.end());
    known = std::move(merged);
  }

  std::vector<Launches> launches_;
  std::vector<Known> known_[kNumProxies];  // by block, then lane
};

}  // namespace ptx
