// What a reader finds in one rank's segment. Its rank may hang, be dead, or have written nonsense over it: nothing
// read there is an index or a size before it was checked.
#pragma once

#include <string>
#include <vector>

#include "../protocol/core/layout.h"

namespace moe_rt {

struct SegmentReport {
  SegmentHeader header;
  uint64_t poison;
  std::vector<uint64_t> announced[kNumKinds];  // [R] what each rank has announced to this one
  std::vector<bool> closed_to;                 // [R] to this one
  std::vector<Member> members;                 // [R]
  std::vector<int32_t> announcers[kNumKinds];  // [R] who tells this rank of each: itself, or a forwarder
  std::vector<int32_t> served;                 // far ranks for which this one is a forwarder
  std::vector<OpRecord> op_records;            // the last kNumOpRecords at most, in order
  int num_torn = 0;                            // slots that changed at every look
  std::string last_words;                      // of its rank: any bytes
};

// Reads the segment in `num_bytes` bytes that start on a line; they may be mapped read-only, and may change meanwhile.
// Throws std::invalid_argument where they cannot be a segment.
SegmentReport read_segment(const char* segment, int64_t num_bytes);

}  // namespace moe_rt
