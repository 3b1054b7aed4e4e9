// Contents of one rank's segment, for a reader. The rank may hang, be dead, or have overwritten the segment: no value
// read there is used as an index or a size before it was checked.
#pragma once

#include <string>
#include <vector>

#include "../protocol/core/layout.h"

namespace moe_rt {

struct SegmentReport {
  SegmentHeader header;
  uint64_t poison;
  std::vector<uint64_t> announced[kNumKinds];  // [R] number of ops that each rank has announced to this one
  std::vector<bool> closed_to;                 // [R] true if the rank has closed towards this one
  std::vector<Member> members;                 // [R]
  std::vector<int32_t> announcers[kNumKinds];  // [R] announcer of each rank: itself or a proxy
  std::vector<int32_t> clients;                // clients whose proxy this rank is
  std::vector<OpRecord> op_records;            // at most the last kNumOpRecords, in order
  int num_torn = 0;                            // slots that changed at every read
  std::string last_words;                      // last words of the rank: any bytes
};

// Reads the segment in `num_bytes` bytes that start on a line; they may be mapped read-only, and may change meanwhile.
// Throws std::invalid_argument if they cannot be a segment.
SegmentReport read_segment(const char* segment, int64_t num_bytes);

}  // namespace moe_rt
