// What a lane knows to have happened before: vector clocks over launches, blocks, warps and lanes.
//
// Most of what is known is known of whole launches (of a stream, in order) and whole blocks (up to a barrier), so a
// clock holds those; of warps and single lanes only what they did since their block's last barrier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ptx {

// Who made an access, and when: the barriers of its block and its warp and the lane's releases before it. Block 0 is
// nobody. Copies that a lane has started are blocks of their own, see bulk.h.
struct Moment {
  uint32_t block = 0;
  uint16_t lane = 0, barriers = 0, syncs = 0, releases = 0;
};

inline constexpr uint16_t kWholeBlock = 0xffff, kWholeWarp = 0xff00;

// By what ways memory is accessed. Bulk copies, and a network, see what lanes have written only behind a fence: one for
// the copies of each space, and one for the network.
enum Proxy : uint8_t { kLanes, kCopiesOfShared, kCopiesOfGlobal, kNetwork, kNumProxies };

inline constexpr uint32_t kNobody = ~uint32_t{0};

// Which launch a block belongs to.
struct BlockName {
  uint32_t stream, launch;  // the stream's launch of this number
};

class Clock {
 public:
  bool knows(const Moment& m, const BlockName& name, Proxy proxy = kLanes) const {
    if (name.stream < launches_.size() && launches_[name.stream] > name.launch) return true;
    for (const Known& k : known_[proxy]) {
      if (k.block == m.block && k.until > until(k.lane, m)) return true;
    }
    return false;
  }

  void learn_launch(uint32_t stream, uint32_t launch) {
    if (launches_.size() <= stream) launches_.resize(stream + 1);
    launches_[stream] = std::max(launches_[stream], launch + 1);
  }
  void learn_block(uint32_t block, uint16_t barriers) { learn(kLanes, {block, kWholeBlock, barriers}); }
  void learn_warp(uint32_t block, uint32_t warp, uint16_t syncs) {
    learn(kLanes, {block, uint16_t(kWholeWarp + warp), syncs});
  }
  void learn_lane(uint32_t block, uint16_t lane, uint16_t releases) { learn(kLanes, {block, lane, releases}); }

  // Of numbered copies, this one; those that came before without a gap are one fact.
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

  // What a proxy has been shown, as what is known.
  Clock as_seen_by(Proxy proxy) const {
    Clock seen;
    seen.launches_ = launches_;
    seen.known_[kLanes] = seen.known_[proxy] = known_[proxy];
    return seen;
  }

  // A proxy sees all that `other` knows.
  void show(const Clock& other, Proxy proxy) {
    for (const Known& k : other.known_[kLanes]) learn(proxy, k);
  }

  void join(const Clock& other, const std::vector<BlockName>& names) {
    if (launches_.size() < other.launches_.size()) launches_.resize(other.launches_.size());
    for (size_t i = 0; i < other.launches_.size(); ++i) launches_[i] = std::max(launches_[i], other.launches_[i]);
    for (int proxy = 0; proxy < kNumProxies; ++proxy) {
      for (const Known& k : other.known_[proxy]) learn(Proxy(proxy), k);
      std::erase_if(known_[proxy], [&](const Known& k) {
        const BlockName& name = names[k.block];
        return name.stream < launches_.size() && launches_[name.stream] > name.launch;
      });
    }
  }

 private:
  struct Known {
    uint32_t block;
    uint16_t lane, until;  // everything before this barrier, or release
  };
  // What counts for a fact about `lane`; a moment that it does not speak of is never before its end.
  static uint16_t until(uint16_t lane, const Moment& m) {
    if (lane == kWholeBlock) return m.barriers;
    if (lane >= kWholeWarp) return lane - kWholeWarp == m.lane / 32 ? m.syncs : 0xffff;
    return lane == m.lane ? m.releases : 0xffff;
  }
  void learn(Proxy proxy, const Known& fact) {
    for (Known& k : known_[proxy]) {
      if (k.block == fact.block && k.lane == fact.lane) {
        k.until = std::max(k.until, fact.until);
        return;
      }
    }
    known_[proxy].push_back(fact);
  }

  std::vector<uint32_t> launches_;  // of each stream, how many are known to be over
  std::vector<Known> known_[kNumProxies];
};

}  // namespace ptx
