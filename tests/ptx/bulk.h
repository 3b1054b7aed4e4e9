// Bulk copies between global and shared memory, which run asynchronously, and the barriers that count their bytes.
//
// A copy's reads and writes happen at any time between its start and the wait that ends it, in pieces and in any order.
// The race check makes all of them when the copy starts, on clocks that belong to no lane: one clock for the copies
// into shared memory that a lane starts, and one each for the reads and the writes of its other copies. A lane knows of
// a copy once it has waited for it; a barrier of lanes does not wait for copies.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "clocks.h"

namespace ptx {

struct Lane;
struct Block;

// An mbarrier. Its phase completes when all arrivals and all expected bytes are in.
struct Mbarrier {
  uint32_t expected, pending;
  Moment made;
  int64_t bytes = 0;  // bytes pending
  uint32_t phase = 0;
  bool shown = false;              // visible to copies, by a fence
  uint32_t filled = 0;             // phase, counted from one, in which a copy ended last
  uint32_t seen = 0;               // number of phases whose end some lane has seen
  Clock arriving = {}, done = {};  // this phase's arrivals; all earlier ones
};

// The copies that one lane has started. Copies into shared memory and out of it are numbered separately.
struct Started {
  static constexpr uint16_t kMost = kWholeWarp;
  uint32_t in = 0, out_reads = 0, out_writes = 0;  // uids in moments
  uint16_t num_in = 0, num_out = 0, num_read = 0;  // num_read: copies out that are known to have read their source
  std::vector<uint16_t> groups;                    // copies started before each commit
};

// A part of a copy in flight.
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
  uint64_t barrier;                // copies in only
  std::shared_ptr<uint32_t> left;  // pieces of its copy that have not arrived
  std::vector<char> read = {};     // copies out only: the bytes to write
};

class Flight {
 public:
  bool empty() const { return pieces_.empty(); }
  void start(Piece copy);        // splits the copy into pieces
  void arrive(uint64_t random);  // completes one piece, or half of its steps
  void arrive_all(const Block& block);
  // Return the first of a lane's copies out of shared memory before `until` that is in flight, or has yet to read.
  const Piece* out_before(const Lane& lane, uint16_t until, bool read) const;
  const Piece* into(const Block& block) const;

 private:
  bool step(Piece& piece);  // true if the piece has arrived
  std::vector<Piece> pieces_;
};

// Check, at the end of a lane, that it has waited for every copy it started, as far as shared memory is concerned.
void leave_copies(Lane& lane);

}  // namespace ptx
