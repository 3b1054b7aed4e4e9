// A network between ranks: puts arrive late and in any order, unless their sender waits or issues a fence between them.
//
// A remote address is given as the caller's address of the same place in symmetric memory. The card of a rank is not a
// lane: it sees writes of lanes only after a fence at system scope, and its own writes are known to lanes that called
// quiet afterwards, and to lanes that learn of it from them. The puts of a warp therefore have clocks, one for rows and
// one for signals. Data of a get is known to the lane that waited once a fence at system scope has settled it, and not
// by the end of a launch.
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

// One allocation of equal size on every rank.
struct Symmetric {
  std::vector<uint64_t> begins;
  std::vector<uint32_t> streams;  // the ranks' streams
  uint64_t bytes;
};

// A put that was handed to the network. It is remembered until a quiet.
struct Put {
  uint32_t stream;  // stream of its sender
  Moment moment;    // time of the hand-over
  uint32_t clock;   // uid
  uint16_t number;
  bool is_signal;  // a fence orders signals only; senders of rows wait for them
  uint64_t to;
  std::vector<char> data;
  uint64_t flag = 0, value = 0;  // word to set after the data, and its value
  Clock tells = {};              // knowledge that an acquire of the flag learns
  bool arrived = false;

  Moment name() const { return {clock, number, number, 0, 0}; }
};

class Network {
 public:
  bool slow = false;  // makes waits for puts long, so that peers check many times after each
  bool empty() const { return under_way_ == 0; }
  void arrive(uint64_t random);
  const Put* under_way_to(uint64_t begin, uint64_t bytes) const;
  void join(const std::vector<uint64_t>& begins, uint32_t rank, uint32_t stream, uint64_t bytes);

  // NVSHMEM's functions of these names, called by one lane for all that have arrived.
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
