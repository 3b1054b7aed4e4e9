// What a lane knows to have happened before: vector clocks over launches, blocks and lanes.
//
// Most of what is known is known of whole launches (of a stream, in order) and whole blocks (up to a barrier), so a
// clock holds those, and single lanes only where one has released something since its block's last barrier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ptx {

// Who made an access, and when: the block's barriers and the lane's releases before it. Block 0 is nobody.
struct Moment {
  uint32_t block = 0;
  uint16_t lane = 0, barriers = 0, releases = 0;
};

inline constexpr uint16_t kWholeBlock = 0xffff;

// Which launch a block belongs to.
struct BlockName {
  uint32_t stream, launch;  // the stream's launch of this number
};

class Clock {
 public:
  bool knows(const Moment& m, const BlockName& name) const {
    if (name.stream < launches_.size() && launches_[name.stream] > name.launch) return true;
    for (const Known& k : known_) {
      if (k.block != m.block) continue;
      if (k.lane == kWholeBlock ? k.until > m.barriers : k.lane == m.lane && k.until > m.releases) return true;
    }
    return false;
  }

  void learn_launch(uint32_t stream, uint32_t launch) {
    if (launches_.size() <= stream) launches_.resize(stream + 1);
    launches_[stream] = std::max(launches_[stream], launch + 1);
  }
  void learn_block(uint32_t block, uint16_t barriers) { learn({block, kWholeBlock, barriers}); }
  void learn_lane(uint32_t block, uint16_t lane, uint16_t releases) { learn({block, lane, releases}); }

  void join(const Clock& other, const std::vector<BlockName>& names) {
    if (launches_.size() < other.launches_.size()) launches_.resize(other.launches_.size());
    for (size_t i = 0; i < other.launches_.size(); ++i) launches_[i] = std::max(launches_[i], other.launches_[i]);
    for (const Known& k : other.known_) learn(k);
    std::erase_if(known_, [&](const Known& k) {
      const BlockName& name = names[k.block];
      return name.stream < launches_.size() && launches_[name.stream] > name.launch;
    });
  }

 private:
  struct Known {
    uint32_t block;
    uint16_t lane, until;  // everything before this barrier, or release
  };
  void learn(const Known& fact) {
    for (Known& k : known_) {
      if (k.block == fact.block && k.lane == fact.lane) {
        k.until = std::max(k.until, fact.until);
        return;
      }
    }
    known_.push_back(fact);
  }

  std::vector<uint32_t> launches_;  // of each stream, how many are known to be over
  std::vector<Known> known_;
};

}  // namespace ptx
