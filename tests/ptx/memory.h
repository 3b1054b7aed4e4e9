// Device memory: allocations with exact extents, and garbage in and around them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "shadow.h"

namespace ptx {

inline constexpr unsigned char kGarbage = 0xf5;  // a large negative number in every type

struct Extent {
  uint64_t begin, bytes;
  Shadow shadow;
  std::map<uint64_t, std::map<uint32_t, Clock>> released[2];  // by scope, address and stream
};

class Memory {
 public:
  static constexpr uint64_t kGap = 512, kAlign = 256;

  void* allocate(uint64_t bytes) {
    const uint64_t room = bytes + 2 * kGap + kAlign;
    void* const raw = std::malloc(room);
    if (!raw) return nullptr;
    std::memset(raw, kGarbage, room);
    const uint64_t begin = (reinterpret_cast<uint64_t>(raw) + kGap + kAlign - 1) / kAlign * kAlign;
    blocks_[begin] = {raw, bytes};
    add(begin, bytes);
    return reinterpret_cast<void*>(begin);
  }

  bool free(uint64_t begin) {
    const auto block = blocks_.find(begin);
    if (block == blocks_.end()) return false;
    extents_.erase(extents_.lower_bound(begin), extents_.lower_bound(begin + block->second.bytes + 1));
    last_ = nullptr;
    std::memset(reinterpret_cast<void*>(begin), kGarbage, block->second.bytes);
    std::free(block->second.raw);
    blocks_.erase(block);
    return true;
  }

  // Restrict the allocation to this part, and to other parts that are narrowed to.
  bool narrow(uint64_t begin, uint64_t bytes) {
    const auto block = blocks_.upper_bound(begin);
    if (block == blocks_.begin()) return false;
    const auto whole = extents_.find(std::prev(block)->first);
    if (whole != extents_.end() && whole->second->bytes == std::prev(block)->second.bytes) extents_.erase(whole);
    last_ = nullptr;
    add(begin, bytes);
    return true;
  }

  // Return the extent that contains all of the range, or nullptr.
  Extent* find(uint64_t address, uint64_t bytes) {
    if (!last_ || address < last_->begin || address - last_->begin >= last_->bytes) {
      const auto after = extents_.upper_bound(address);
      if (after == extents_.begin()) return nullptr;
      last_ = std::prev(after)->second.get();
    }
    const uint64_t offset = address - last_->begin;
    return offset < last_->bytes && bytes <= last_->bytes - offset ? last_ : nullptr;
  }

  // Size of the allocation at an address, including parts that must not be accessed.
  uint64_t bytes_at(uint64_t begin) const {
    const auto block = blocks_.find(begin);
    return block == blocks_.end() ? 0 : block->second.bytes;
  }

  // Return the nearest extent below an address, for reports.
  const Extent* below(uint64_t address) const {
    const auto after = extents_.upper_bound(address);
    return after == extents_.begin() ? nullptr : std::prev(after)->second.get();
  }

 private:
  struct Block {
    void* raw;
    uint64_t bytes;
  };
  void add(uint64_t begin, uint64_t bytes) {
    auto extent = std::make_unique<Extent>();
    extent->begin = begin;
    extent->bytes = bytes;
    extent->shadow = Shadow(bytes);
    extents_[begin] = std::move(extent);
  }

  std::map<uint64_t, Block> blocks_;
  std::map<uint64_t, std::unique_ptr<Extent>> extents_;
  Extent* last_ = nullptr;
};

}  // namespace ptx
