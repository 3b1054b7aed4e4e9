// A network between ranks: what is put arrives late and in any order, unless its sender waits or puts a fence between.
//
// Remote places are named by the own address of the same place in symmetric memory. The card of a rank is no lane: of
// what lanes have written it sees what a fence at system scope has shown it, and what it writes is known to whoever has
// called quiet since, and to whom that tells. So the puts of a warp have clocks, one for rows and one for signals. What a get
// has brought is known to who waited for it once a fence at system scope has settled it, and not by the end of a launch.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "clocks.h"

namespace ptx {

struct Lane;
struct Record;

// One allocation of every rank, of the same size.
struct Symmetric {
  std::vector<uint64_t> begins;
  std::vector<uint32_t> streams;  // of the ranks
  uint64_t bytes;
};

// What has been handed to the network. It stays known until somebody's quiet.
struct Put {
  uint32_t stream;  // whose it is
  Moment moment;    // when it was handed over
  uint32_t clock;   // uid
  uint16_t number;
  bool is_signal;  // rows may not lean on a fence: whoever puts them waits for them
  uint64_t to;
  std::vector<char> data;
  uint64_t flag = 0, value = 0;  // what is set after the data, and to what
  Clock tells = {};              // what whoever acquires the flag learns
  bool arrived = false;

  Moment name() const { return {clock, number, number, 0, 0}; }
};

class Network {
 public:
  bool slow = false;  // whoever waits for its puts does so for long: peers look many times after each
  bool empty() const { return under_way_ == 0; }
  void arrive(uint64_t random);
  const Put* under_way_to(uint64_t begin, uint64_t bytes) const;
  void join(const std::vector<uint64_t>& begins, uint32_t rank, uint32_t stream, uint64_t bytes);

  // As NVSHMEM's functions of these names; the lane does it for all who have come.
  void get(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe);
  void put(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe);
  void put_word(Lane& lane, uint64_t to, uint64_t word, uint32_t bytes, bool is_signal, uint32_t pe);
  void put_signal(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint64_t flag, uint64_t value, uint32_t pe);
  uint64_t replace(Lane& lane, uint64_t place, uint64_t expected, uint64_t value, uint32_t pe);
  void quiet(Lane& lane);
  void fence(Lane& lane);

 private:
  const Symmetric& own(Lane& lane, uint64_t address, uint64_t bytes) const;
  uint64_t there(Lane& lane, uint64_t here, uint64_t bytes, uint32_t pe) const;
  Put& hand_over(Lane& lane, uint64_t to, const void* data, uint64_t bytes, bool is_signal);
  void written(Lane& lane, const Moment& moment, uint64_t to, uint32_t bytes, uint32_t how) const;
  void arrive(Put& put);

  enum Kind : uint32_t { kRows, kSignals, kGets };
  struct Numbered {
    uint32_t clock = 0;
    uint16_t next = 0;
  };
  Moment next_of(Lane& lane, Kind kind);
  std::vector<Symmetric> allocations_;
  std::vector<std::unique_ptr<Put>> puts_;
  std::map<std::array<uint32_t, 4>, Numbered> clocks_;  // by stream, block, warp and kind
  size_t under_way_ = 0;
};

}  // namespace ptx
