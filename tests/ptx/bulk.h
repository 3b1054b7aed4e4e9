// Bulk copies between global and shared memory, which go on by themselves, and the barriers that count their bytes.
//
// A copy's reads and writes happen at any time between its start and the wait that ends it, in pieces and in any order.
// For races all of them are made when the copy starts, by nobody's lane: copies have clocks of their own, one for the
// copies into shared memory that a lane starts, and one each for what its other copies read and write. Whoever has
// waited for a copy knows of it; a barrier of lanes does not wait for copies.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "clocks.h"

namespace ptx {

struct Lane;
struct Block;

// An mbarrier. Its phase ends when all have arrived and all bytes that were told to come are there.
struct Mbarrier {
  uint32_t expected, pending;
  Moment made;
  int64_t bytes = 0;  // still to come
  uint32_t phase = 0;
  bool shown = false;              // to copies, by a fence
  uint32_t filled = 0;             // the phase, counted from one, in which a copy ended last
  uint32_t seen = 0;               // how many phases somebody has seen the end of
  Clock arriving = {}, done = {};  // of this phase's arrivals, and of all before
};

// The copies that one lane has started. Those into shared memory are numbered apart from those out of it.
struct Started {
  static constexpr uint16_t kMost = kWholeWarp;
  uint32_t in = 0, out_reads = 0, out_writes = 0;  // uids in moments
  uint16_t num_in = 0, num_out = 0, num_read = 0;  // of those out of it, which are known to have read
  std::vector<uint16_t> groups;                    // how many were started before each commit
};

// A part of a copy that is under way.
struct Piece {
  Lane* lane;
  Block* block;
  uint32_t copies;  // uid
  uint16_t number;
  int site;
  char* to;
  const char* from;
  uint32_t bytes;
  bool out;
  uint64_t barrier;                // of one that goes in
  std::shared_ptr<uint32_t> left;  // pieces of its copy that have not arrived
  std::vector<char> read = {};     // of one that goes out: what it is to write
};

class Flight {
 public:
  bool empty() const { return pieces_.empty(); }
  void start(Piece copy);        // in parts
  void arrive(uint64_t random);  // one part, or half of its way
  void arrive_all(const Block& block);
  // The first that is under way of a lane's copies out of shared memory before `until`, or that has yet to read.
  const Piece* out_before(const Lane& lane, uint16_t until, bool read) const;
  const Piece* into(const Block& block) const;

 private:
  bool step(Piece& piece);  // whether it has arrived
  std::vector<Piece> pieces_;
};

// At the end of a lane: all that it has started must have been waited for, as far as shared memory is concerned.
void leave_copies(Lane& lane);

}  // namespace ptx
